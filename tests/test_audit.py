"""The audit of the first step: right jobs are found right, wrong ones wrong by as much as they are. Real ranks.

What is right is also computed in float64 without DeepSpeed, and compared with what the weights have lost.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

Runs = dict[str, dict[str, list[Any]]]

STAGES = range(4)
RIGHT = [
    *(f"zero{stage}{kind}" for stage in STAGES for kind in ("", " clipped", " bf16", " fp16", " sum")),
    *(f"offload{stage}" for stage in (1, 2, 3)),
    *("bf16 in fp32", "zero0 no_sync", "zero1 no_sync", "zero2 by loss", "zero0 boundary", "zero3 boundary", "late"),
    *("by variable", "zero3 shards", "zero3 predivide", "zero3 bucket", "zero2 mean", "sparse", "large"),
    *("experts", "experts bf16", "experts zero2"),
]
WRONG = {
    "zero3 shards, no patch": {"ZeRO-3 reduction": 0.5},
    "zero3 predivide, no patch": {"ZeRO-3 reduction": 0.5},
    "zero3 bucket, no patch": {"ZeRO-3 reduction of parameters larger than reduce_bucket_size": 0.5},
    "zero2 mean, no patch": {"ZeRO-2 reduction": 2.0},
    "zero0 fp16, no patch": {"ZeRO-0 reduction": 1 / 256, "norm": 256.0},
    "sparse, no patch": {"ZeRO-0 reduction of sparse rows": 4.0},
    "experts bf16, no patch": {"norm": 0.8023},
    "experts, no patch": {
        "clipping, ZeRO-0 reduction": 1.1075,
        "clipping, ZeRO-0 reduction of experts ep_size_2": 1.1075,
    },
    "zero1 boundary": {"ZeRO-1 reduction": 0.82411},
    "zero2 boundary": {"ZeRO-2 reduction": 0.82411},
}


@pytest.fixture(scope="module")
def two() -> Runs:
    return played("audit.py")


@pytest.fixture(scope="module")
def four() -> Runs:
    return played("audit.py", ranks=4)


def ranks_of(runs: Runs, name: str) -> list[Any]:
    return runs[name]["corrected"]


def check_right(rank: dict[str, Any], name: str) -> None:
    assert (rank["error"], rank["reason"], rank["wrong"], rank["traces"]) == (None, None, {}, []), rank
    tolerance = 0.01 if "16" in name else 1e-5
    reductions = [ratio for what, ratio in rank["ratios"].items() if "reduction" in what]
    assert reductions and reductions == pytest.approx([1.0] * len(reductions), rel=tolerance)
    assert max(error for error in rank["errors"].values() if error is not None) < 0.3, "of what rounding explains"
    assert rank["ratios"]["norm"] in (None, pytest.approx(1.0, rel=1e-4))
    assert (rank["ratios"]["norm"] is None) == ("norm is not audited" in "".join(rank["said"])) or not rank["said"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_job_is_found_right(two: Runs, name: str) -> None:
    for rank in ranks_of(two, name):
        check_right(rank, name)
        assert rank["update"] is None or rank["update"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", ["pipeline", "pipeline zero1", "experts", "experts zero2", "zero3 shards"])
def test_a_right_job_of_four_ranks_is_found_right(four: Runs, name: str) -> None:
    for rank in ranks_of(four, name):
        check_right(rank, name)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_job_is_found_wrong_by_as_much_as_it_is(two: Runs, name: str) -> None:
    for rank in ranks_of(two, name):
        assert rank["error"] is None and rank["traces"] == []
        assert set(rank["wrong"]) == set(WRONG[name])
        for what, ratio in WRONG[name].items():
            assert rank["ratios"][what] == pytest.approx(ratio, rel=1e-3)
            assert f"{rank['ratios'][what]:.6g} times the right" in rank["wrong"][what]


def test_four_ranks_with_shards_are_wrong_by_the_shards(four: Runs) -> None:
    for rank in ranks_of(four, "zero3 shards, no patch"):
        assert rank["ratios"]["ZeRO-3 reduction"] == pytest.approx(0.5, rel=1e-5) and rank["wrong"]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_the_last_backward_overwrites_is_missing_in_the_weights_too(two: Runs, stage: int) -> None:
    """A defect that no patch corrects: of two backward passes in a step's last micro-batch the first is lost."""
    for rank in ranks_of(two, f"zero{stage} boundary"):
        assert rank["update"] == pytest.approx(rank["ratios"][f"ZeRO-{stage} reduction"], rel=1e-5)


def test_strict_stops_all_ranks_before_a_wrong_update(two: Runs) -> None:
    said = {"strict": "0.5 times the right gradient", "strict norm": "1.10748 times the right coefficient"}
    for name, wrong in said.items():
        for rank in ranks_of(two, name):
            assert wrong in rank["error"] and "Stopped before the update" in rank["error"]
            assert rank["moved"] == 0 and rank["traces"] == []


def test_strict_stops_all_ranks_after_a_norm_that_shows_late(two: Runs) -> None:
    for rank in ranks_of(two, "strict late norm"):
        assert "0.802294 times the right one" in rank["error"] and "Stopped after the update" in rank["error"]
        assert rank["traces"] == []


def test_one_ranks_failure_is_heard_by_all(two: Runs) -> None:
    for rank in ranks_of(two, "failing"):
        assert "rank 1: AttributeError" in rank["error"] and rank["moved"] == 0 and rank["traces"] == []


@pytest.mark.parametrize(
    "name, reason", [("unknown", "where Another keeps"), ("without optimizer", "no optimizer"), ("muon", "Muon")]
)
def test_what_can_not_be_audited_is_said(two: Runs, name: str, reason: str) -> None:
    for number, rank in enumerate(ranks_of(two, name)):
        assert reason in rank["reason"] and rank["error"] is None and rank["traces"] == []
        assert len(rank["said"]) == (number == 0 and name != "without optimizer")  # which is said while it is made


def test_what_of_a_model_is_not_followed_is_said(two: Runs) -> None:
    first, second = ranks_of(two, "autoep")
    assert first["reason"] is None and first["wrong"] == {} and second["said"] == []
    reduction, norm, rest = first["said"]
    assert "ratio 1.000 (24 elements, 3 parameters)" in reduction
    assert "norm is not audited: AutoEP" in norm and "AutoEP's experts are not audited" in rest


def test_strict_refuses_what_can_not_be_audited(two: Runs) -> None:
    for rank in ranks_of(two, "unknown, strict"):
        assert "where Another keeps" in rank["error"] and rank["moved"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_the_same_bits_with_and_without_it(two: Runs, stage: int) -> None:
    for with_it, without in zip(ranks_of(two, f"zero{stage} clipped"), ranks_of(two, f"zero{stage} not audited")):
        assert with_it["bits"] == without["bits"] and without["ratios"] == {} and with_it["moved"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_it_waits_for_a_step_that_is_taken(two: Runs, stage: int) -> None:
    first, *_ = ranks_of(two, f"zero{stage} fp16")
    assert "waits for one that is taken" in first["said"][0] and "reduction ratio" in first["said"][1]


def test_rank_0_says_one_line_for_each_path(two: Runs) -> None:
    first, second = ranks_of(two, "zero3 shards")
    start = "INFO ds-gradfix: audit of the first step: "
    assert first["said"][0] == f"{start}ZeRO-3 reduction ratio 1.000 (40 elements, 4 parameters)"
    assert first["said"][1].startswith(f"{start}norm ratio 1.000") and len(first["said"]) == 2
    assert second["said"] == []
    first, _ = ranks_of(two, "zero3 shards, no patch")
    assert first["said"][0].startswith("WARNING ds-gradfix: audit of the first step: ZeRO-3 reduction gives 0.5 times")
    first, _ = ranks_of(two, "sparse")
    assert "(2 elements, 1 parameter)" in first["said"][0], "sums of columns: rows that no rank looks up say nothing"
    first, _ = ranks_of(two, "zero2 by loss")
    assert "did not see the loss" in first["said"][-1]


def test_what_is_kept_does_not_grow_with_model_or_micro_batches(two: Runs) -> None:
    for small, more, large in zip(*(ranks_of(two, name) for name in ("zero1", "zero1 no_sync", "large"))):
        assert 0 < small["kept_bytes"] == more["kept_bytes"] < large["kept_bytes"] <= 16 * 16 * 3 * 8


def test_turning_off_leaves_nothing_in_an_engine_that_is_audited(two: Runs) -> None:
    for rank in ranks_of(two, "turned off"):
        assert "backward" in rank["before"] and "0.weight" in rank["before"] and rank["after"] == []
