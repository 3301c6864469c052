"""Every DeepSpeed release from 0.14.0 on, from its sources: fetched, unpacked, read, never imported."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import catalogue as tool
import matrix
import pytest
import releases
from packaging.version import Version

from ds_gradfix.registry import Known, Rewrite, Verdict, catalogue, discover, look_up, read_functions
from ds_gradfix.source import Function, fingerprint, rewrite


@cache
def folders() -> dict[str, Path]:
    """Every release's folder. Skips the test where none can be had, and says so."""
    try:
        found = releases.all_folders()
    except releases.Unavailable as error:
        pytest.skip(f"not every DeepSpeed release can be had here: {error}")
    if not found:
        pytest.skip("no DeepSpeed release is here, and the package index can't be reached")
    return found


def known() -> set[str]:
    return {release for entry in catalogue() for release in entry["releases"]}


def test_every_patch_finds_what_it_corrects_or_says_that_it_is_absent() -> None:
    """And the catalogue says what its command would write."""
    written = {(e["target"], e["fingerprint"], name): e["verdicts"] for e in catalogue() for name in e["releases"]}
    for release in folders():
        if release not in known():
            continue  # the newest one is the next test's business
        for entry in matrix.plan_of(release).entries:
            where = (release, entry.patch.id, entry.reason)
            assert entry.verdict is not Verdict.UNRECOGNISED, where
            assert entry.act == (entry.verdict is Verdict.DEFECTIVE), where
            for finding in entry.findings:
                if finding.function is not None:
                    verdicts = written[str(finding.target), finding.fingerprint, release]
                    expected = tool.verdict(entry.patch.id, finding.target.qualname, release)
                    assert verdicts[entry.patch.id] == finding.verdict == expected, where
            for correction, finding in entry.corrections():
                if isinstance(correction, Rewrite):
                    rewrite(finding.source(), correction.rules)


def test_a_file_that_is_a_releases_own_has_the_fingerprints_that_are_read_in_it() -> None:
    targets = {target for patch in discover(plugins=False) for target in (*patch.targets, *patch.needs)}
    for release in folders():
        if release in known():
            installed = releases.as_installed(release)
            read = read_functions(installed, targets)
            for target, found in look_up(installed, targets).items():
                if installed.module_file(target.module):
                    function = read[target]
                    mark = fingerprint(function.node) if isinstance(function, Function) else None
                    assert (found.fingerprint if isinstance(found, Known) else found) == mark, (release, target)


def test_the_newest_release_is_in_the_catalogue() -> None:
    try:
        newest = max(releases.published(), key=Version)
    except releases.Unavailable as error:
        pytest.skip(f"what the newest DeepSpeed is can't be seen from here: {error}")
    assert newest in known(), f"DeepSpeed {newest} is out: see `python tools/drift.py`"
