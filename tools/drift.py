"""Follow a new DeepSpeed release: what changed in what we correct, what it measures, and its place in the catalogue.

    python tools/drift.py [RELEASE] [--add]

RELEASE is the newest on the package index if it is not given. For every target of every patch its difference from the
nearest known release is printed. Then the core set runs on it, without ds-gradfix, and each patch gets the verdict that
was measured. ``--add`` writes the release into patches/fingerprints.json; where a patch's defect is gone, its last
defective release goes into patches/defective_in.json first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import catalogue as tool
import matrix
import releases
from packaging.version import Version

from ds_gradfix.installed import Installed
from ds_gradfix.registry import Patch, Target, Verdict, catalogue, discover, read_functions
from ds_gradfix.source import Function, diff, fingerprint


def functions_of(release: str, folder: Path) -> Mapping[Target, Function | str | None]:
    targets = {target for patch in discover() for target in (*patch.targets, *patch.needs)}
    return read_functions(Installed(release, folder / "deepspeed", torch=None, ds_gradfix=None), targets)


def nearest(release: str) -> str:
    """The newest known release that is not this one, and not newer."""
    known = {one for entry in catalogue() for one in entry["releases"]}
    return max((one for one in known if Version(one) < Version(release)), key=Version)


def changes(release: str, before: str) -> dict[Target, str]:
    """Every target that is not what it was: its difference, or what has become of it."""
    old = functions_of(before, releases.folder_of(before))
    found = {}
    for target, function in functions_of(release, releases.folder_of(release)).items():
        earlier = old[target]
        if isinstance(function, str):
            found[target] = function
        elif not isinstance(earlier, Function):
            if function is not None:
                found[target] = f"new in {release}"
        elif function is None:
            found[target] = f"gone from {release}"
        elif fingerprint(function.node) != fingerprint(earlier.node):
            found[target] = diff(earlier, function)
    return found


def measured(patch: Patch, rows: list[matrix.Measured]) -> Verdict | None:
    """What the core set says of a patch's defect: None where nothing of it ran."""
    own = [row for row in rows if row.patch == patch.id and row.affected and row.stock is not None]
    if not own:
        return None
    return Verdict.FIXED if all(row.stock_right for row in own) else Verdict.DEFECTIVE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?")
    parser.add_argument("--add", action="store_true")
    given = parser.parse_args()
    release = given.release or max(releases.published(), key=Version)
    before = nearest(release)
    for target, change in changes(release, before).items():
        print(f"== {target}, since {before}\n{change}\n")
    rows = matrix.run(release)
    bounds = tool.defective_in()
    for patch in discover():
        verdict = measured(patch, rows)
        expected = {tool.verdict(patch.id, target.qualname, before) for target in patch.targets}
        print(f"{patch.id}: {verdict.value if verdict else 'not measured'}; {before}: {', '.join(sorted(expected))}")
        if verdict is Verdict.FIXED and Verdict.DEFECTIVE in expected:
            own = bounds.setdefault(patch.id, {})
            for function in own or [""]:
                own[function] = [own.get(function, [None, None])[0], before]
    if given.add:
        tool.BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n", encoding="utf-8")
        tool.write()


if __name__ == "__main__":
    main()
