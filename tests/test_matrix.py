"""The release matrix: what is stored holds together, and releases of every kind still measure as they are stored."""

from __future__ import annotations

import catalogue as tool
import drift
import matrix
import pytest
import releases
from packaging.version import Version

from ds_gradfix.registry import Target, Verdict, catalogue, discover

RESULTS = matrix.read()


@pytest.fixture
def index() -> None:
    """Skips the test where no release can be had, and says so."""
    try:
        releases.all_folders()
    except releases.Unavailable as error:
        pytest.skip(f"not every DeepSpeed release can be had here: {error}")


@pytest.mark.parametrize("release", matrix.representatives())
@pytest.mark.usefixtures("index")
def test_a_release_measures_as_it_is_stored(release: str) -> None:
    rows = matrix.run(release, ["main"])
    assert list(matrix.contradictions(release, rows)) == []
    stored = {row.name: row for row in matrix.rows_of(RESULTS, release)}
    for row in rows:
        same = stored[row.name]
        assert (row.ran, row.stock_right, row.corrected_right, row.same_bits) == (
            same.ran, same.stock_right, same.corrected_right, same.same_bits
        ), row  # fmt: skip
        assert row.run == same.run, row
        ended = same.stock is None  # with an error
        assert row.stock is None if ended else row.stock == pytest.approx(same.stock, rel=2e-2, nan_ok=True), row


@pytest.mark.usefixtures("index")
def test_every_known_release_that_runs_is_stored_and_nothing_is_wrong_once_corrected() -> None:
    known = {release for entry in catalogue() for release in entry["releases"]}
    assert set(RESULTS["releases"]) == {one for one in known if Version(one) >= matrix.OLDEST_THAT_RUNS}
    for release in RESULTS["releases"]:
        assert list(matrix.contradictions(release, matrix.rows_of(RESULTS, release))) == []


def test_every_patch_was_measured_where_its_defect_bites_and_beside_it() -> None:
    rows = [row for release in RESULTS["releases"] for row in matrix.rows_of(RESULTS, release) if row.ran]
    for patch in discover():
        assert any(patch.id in row.patches and row.affected and not row.stock_right for row in rows), patch.id
    assert {row.name for row in rows if not row.affected and row.same_bits}


def test_the_page_is_written_from_what_is_stored() -> None:
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(RESULTS)


def test_the_catalogue_says_what_earned_each_verdict() -> None:
    bare = [{key: value for key, value in entry.items() if key != "earned"} for entry in catalogue()]
    assert tool.earned(bare) == list(catalogue())
    assert {name for entry in catalogue() for name in entry["verdicts"]} == {patch.id for patch in discover()}


# ------------------------------------------------------------------------------------------ drift


@pytest.mark.usefixtures("index")
def test_a_new_release_is_compared_with_the_nearest() -> None:
    """As if 0.19.8 had just come out."""
    found = drift.changes("0.19.8", "0.19.7")
    step = Target("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.step")
    assert {line[0] for line in found[step].splitlines()[3:] if line} >= {"+", "-"}
    assert Target("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients") not in found
    folding = Target("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer.forward")
    assert drift.changes("0.19.2", "0.19.1")[folding] == "new since 0.19.1"


@pytest.mark.usefixtures("index")
def test_the_verdicts_that_it_measures_are_the_catalogue_s() -> None:
    """Of every patch whose defect a later release mended."""
    for release, patch_id, verdict in (
        ("0.19.5", "sum-reduction", Verdict.DEFECTIVE),
        ("0.19.6", "sum-reduction", Verdict.FIXED),
        ("0.18.2", "zero2-accumulation", Verdict.DEFECTIVE),
        ("0.18.4", "zero2-accumulation", Verdict.FIXED),
        ("0.19.7", "nonfinite-norm", Verdict.DEFECTIVE),
        ("0.19.8", "nonfinite-norm", Verdict.FIXED),
    ):
        (patch,) = (one for one in discover() if one.id == patch_id)
        assert drift.measured(patch, matrix.rows_of(RESULTS, release)) is verdict
        assert drift.expected(patch, release) is verdict


def test_a_defect_that_is_gone_ends_with_the_release_before() -> None:
    bounds = {"a": {"defective": {"*": [None, None], "f": ["0.18.3", "0.18.9"]}}}
    drift.end(bounds, "a", "0.19.8")
    drift.end(bounds, "b", "0.19.8")
    assert bounds["a"]["defective"] == {"*": [None, "0.19.8"], "f": ["0.18.3", "0.18.9"]}
    assert bounds["b"]["defective"] == {"*": [None, "0.19.8"]}
