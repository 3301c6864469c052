"""Follow a new DeepSpeed release: what changed in what we correct, what it measures, and its place in the catalogue.

    python tools/drift.py [RELEASE] [--add]

RELEASE is the newest on the package index if it is not given. It is fetched, and the difference of every target from
the nearest known release is printed. Then the core set runs on it, and each patch gets the verdict that was measured.
--add writes the release into docs/matrix.json, docs/matrix.md and patches/fingerprints.json; where a defect is gone,
its last defective release goes into tools/defective_in.json first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import catalogue as tool
import matrix
import releases
from packaging.version import Version

from ds_gradfix.registry import Functions, Patch, Target, Verdict, catalogue, discover, read_functions
from ds_gradfix.source import Function, diff, fingerprint


def nearest(release: str) -> str:
    """The newest known release that is older."""
    known = {one for entry in catalogue() for one in entry["releases"]}
    return max((one for one in known if Version(one) < Version(release)), key=Version)


def changes(release: str, before: str) -> dict[Target, str]:
    """Every target that is not what it was: its difference, or what has become of it."""
    old, found = functions_of(before), {}
    for target, function in functions_of(release).items():
        earlier = old[target]
        if isinstance(function, str):
            found[target] = function
        elif function is None:
            if earlier is not None:
                found[target] = f"gone since {before}: if it moved, its patch must follow"
        elif not isinstance(earlier, Function):
            found[target] = f"new since {before}"
        elif fingerprint(function.node) != fingerprint(earlier.node):
            found[target] = diff(earlier, function)
    return found


def functions_of(release: str) -> Functions:
    targets = {target for patch in discover(plugins=False) for target in (*patch.targets, *patch.needs)}
    return read_functions(releases.as_installed(release), targets)


def measured(patch: Patch, rows: Sequence[matrix.Row]) -> Verdict | None:
    """What the core set says of a patch's defect: None where nothing of it ran, or only beside another's that bites."""
    own = [row for row in rows if row.affected and row.ran and patch.id in row.patches]
    alone = [row for row in own if len(row.patches) == 1]
    if any(not row.stock_right for row in alone):
        return Verdict.DEFECTIVE
    if all(row.stock_right for row in own):
        return Verdict.FIXED if own else None
    return None


def expected(patch: Patch, release: str) -> Verdict:
    """What the catalogue says of it."""
    acts = patch.id in matrix.corrects(release)
    return Verdict.DEFECTIVE if acts else Verdict.FIXED


def end(bounds: dict[str, dict[str, object]], patch_id: str, last: str) -> None:
    """Put down the last release that has a defect."""
    entry = bounds.setdefault(patch_id, {"defective": {"*": [None, None]}})
    functions = entry["defective"]
    assert isinstance(functions, dict)
    entry["defective"] = {name: [first, until or last] for name, (first, until) in functions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?")
    parser.add_argument("--add", action="store_true")
    given = parser.parse_args()
    release = given.release or max(releases.published(), key=Version)
    before = nearest(release)
    for target, change in changes(release, before).items():
        print(f"== {target}\n{change}\n")
    rows = matrix.run(release)
    bounds = tool.bounds()
    for patch in discover(plugins=False):
        verdict, earlier = measured(patch, rows), expected(patch, before)
        print(f"{patch.id}: {verdict.value if verdict else 'not measured'}; {before}: {earlier.value}")
        if (verdict, earlier) == (Verdict.FIXED, Verdict.DEFECTIVE):
            end(bounds, patch.id, before)
        elif (verdict, earlier) == (Verdict.DEFECTIVE, Verdict.FIXED):
            print("  it is back, or its patch does not act on the new source: see to tools/defective_in.json by hand")
    if given.add:
        results = matrix.read()
        matrix.add(results, release, rows)
        matrix.write(results)
        tool.BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n", encoding="utf-8")
        tool.write()
        matrix.PAGE.write_text(matrix.page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
