"""Write patches/fingerprints.json: the source of every target in every release, with its verdict.

    python tools/catalogue.py SDISTS

SDISTS holds one folder for each release, named by its version, with the unpacked package in it. Nothing of it
is imported. Verdicts are by release, below: what a reader of the sources and the oracle found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packaging.version import Version

from ds_gradfix.registry import Verdict, discover
from ds_gradfix.source import find_functions, fingerprint

ROOT = Path(__file__).resolve().parent.parent

DEFECTIVE_IN: dict[tuple[str, str], tuple[str | None, str | None]] = {
    ("sum-reduction", ""): (None, "0.19.5"),
    # ZeRO 0 averaged over shards, and experts over the ranks that hold them.
    ("sequence-parallel-mean", "_reduce_non_expert_gradients"): ("0.14.3", None),
    ("sequence-parallel-mean", "_reduce_expert_gradients"): ("0.14.1", None),
}
"""The first and the last defective release, by patch, and by function where its targets differ; None is no end. A
patch that is not named here is needed by every release. Before the first a target does not have the defect yet."""


def verdict(patch_id: str, qualname: str, release: str) -> Verdict:
    function = qualname.rsplit(".", 1)[-1]
    bounds = DEFECTIVE_IN.get((patch_id, function), DEFECTIVE_IN.get((patch_id, ""), (None, None)))
    first, last = (Version(bound) if bound else None for bound in bounds)
    if first and Version(release) < first:
        return Verdict.ABSENT
    return Verdict.FIXED if last and Version(release) > last else Verdict.DEFECTIVE


def catalogue(sdists: Path) -> list[dict[str, object]]:
    """One entry for each distinct source of each target: its releases and its verdict for each patch."""
    releases = sorted((folder.name for folder in sdists.iterdir()), key=Version)
    targets: dict[tuple[str, str], list[str]] = {}
    for patch in discover():
        for target in patch.targets:
            targets.setdefault((target.module, target.qualname), []).append(patch.id)
    entries: dict[tuple[str, str], dict[str, object]] = {}
    for (module, qualname), patches in sorted(targets.items()):
        for release in releases:
            path = sdists.joinpath(release, *module.split(".")).with_suffix(".py")
            function = find_functions(path, [qualname])[qualname] if path.exists() else None
            if function is None:
                continue
            mark = fingerprint(function.node)
            verdicts = {patch_id: verdict(patch_id, qualname, release).value for patch_id in patches}
            entry = entries.setdefault(
                (f"{module}:{qualname}", mark),
                {"target": f"{module}:{qualname}", "fingerprint": mark, "releases": [], "verdicts": verdicts},
            )
            if entry["verdicts"] != verdicts:
                raise SystemExit(f"{module}:{qualname} {mark}: one source, two verdicts, at {release}")
            entry["releases"].append(release)  # type: ignore[attr-defined]
    return list(entries.values())


if __name__ == "__main__":
    found = catalogue(Path(sys.argv[1]))
    (ROOT / "patches" / "fingerprints.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} sources of {len({entry['target'] for entry in found})} targets")
