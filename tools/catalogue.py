"""Write patches/fingerprints.json, the source of every target in every release with its verdict; patches/files.json,
the hashes of the files they stand in, since one that is a release's own need not be read.

    python tools/catalogue.py

Releases come from the package index (see tools/releases.py); nothing of them is imported. Verdicts are by release, from
tools/defective_in.json. What earned each is from docs/matrix.json: the newest release with that source on which stock
ran it and showed what the verdict says, and the configuration; or "by reading".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matrix
import releases
from packaging.version import Version

from ds_gradfix.registry import Target, Verdict, discover, file_mark, read_functions
from ds_gradfix.source import Function, fingerprint

FILE = Path(__file__).resolve().parent.parent / "patches" / "fingerprints.json"
FILES = FILE.with_name("files.json")
READ = "by reading"
BOUNDS = Path(__file__).resolve().parent / "defective_in.json"
"""Of each patch the first and the last defective release, by function, "*" for all others; null is no end. A patch that
is not named there is needed by every release. Before the first a target does not have the defect yet."""


@cache
def bounds() -> dict[str, Any]:
    return dict(json.loads(BOUNDS.read_text(encoding="utf-8")))


def verdict(patch_id: str, qualname: str, release: str) -> Verdict:
    by_function = bounds().get(patch_id, {}).get("defective", {})
    function = qualname.rsplit(".", 1)[-1]
    found = by_function.get(function) or by_function.get("*") or (None, None)
    first, last = (Version(bound) if bound else None for bound in found)
    if first and Version(release) < first:
        return Verdict.ABSENT
    return Verdict.FIXED if last and Version(release) > last else Verdict.DEFECTIVE


def catalogue(names: Iterable[str]) -> list[dict[str, Any]]:
    """One entry for each distinct source of each target: its releases and its verdict for each patch. What a patch
    needs, and nobody corrects, has an entry without verdicts: it says which releases have it."""
    wanted: dict[Target, list[str]] = {}
    for patch in discover(plugins=False):
        for target in patch.targets:
            wanted.setdefault(target, []).append(patch.id)
        for target in patch.needs:
            wanted.setdefault(target, [])
    entries: dict[tuple[Target, str], dict[str, Any]] = {}
    for release in names:
        functions = read_functions(releases.as_installed(release), wanted)
        for target, function in functions.items():
            if not isinstance(function, Function):
                continue
            mark = fingerprint(function.node)
            verdicts = {patch_id: verdict(patch_id, target.qualname, release).value for patch_id in wanted[target]}
            new = {"target": str(target), "fingerprint": mark, "releases": [], "verdicts": verdicts}
            entry = entries.setdefault((target, mark), new)
            if entry["verdicts"] != verdicts:
                raise SystemExit(f"{target} {mark}: one source, two verdicts, at {release}")
            entry["releases"].append(release)
    return [entry for _, entry in sorted(entries.items(), key=lambda item: item[0][0])]


def earned(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries with what earned each verdict, as far as the matrix has been run."""
    results = matrix.read()
    by_release = {release: matrix.rows_of(results, release) for release in results["releases"]}
    return [{**entry, "earned": {p: _earned(entry, p, by_release) for p in entry["verdicts"]}} for entry in entries]


def _earned(entry: Mapping[str, Any], patch_id: str, by_release: Mapping[str, Sequence[matrix.Row]]) -> str:
    for release in reversed(entry["releases"]):
        for row in by_release.get(release, ()):
            if row.affected and row.ran and patch_id in row.patches and _shows(row, entry, patch_id):
                return f"{release}, {row.name}"
    return READ


def _shows(row: matrix.Row, entry: Mapping[str, Any], patch_id: str) -> bool:
    if entry["verdicts"][patch_id] == Verdict.DEFECTIVE.value:
        # An error of stock's that is gone is the defect, wherever it was raised.
        return not row.stock_right and row.corrected_right and (entry["target"] in row.run or bool(row.said[0]))
    return entry["target"] in row.run and (row.stock_right or len(row.patches) > 1)


def known_files(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each module with a target, the hashes of its file, each with the first release that has it."""
    modules = sorted({target.module for p in discover(plugins=False) for target in (*p.targets, *p.needs)})
    found: dict[str, dict[str, str]] = {module: {} for module in modules}
    for release in names:
        for module in modules:
            path = releases.as_installed(release).module_file(module)
            if path is not None:
                found[module].setdefault(file_mark(path), release)
    return found


def write() -> list[dict[str, Any]]:
    FILES.write_text(json.dumps(known_files(releases.all_folders()), indent=1) + "\n", encoding="utf-8")
    found = earned(catalogue(releases.all_folders()))
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    found = write()
    reading = sum(one == READ for entry in found for one in entry["earned"].values())
    verdicts = sum(len(entry["verdicts"]) for entry in found)
    print(f"{len(found)} sources of {len({entry['target'] for entry in found})} targets, {verdicts} verdicts, "
          f"{verdicts - reading} earned by a run")  # fmt: skip
