"""fp32 clipping at ZeRO stage 0, stock and corrected, against float64 norms of what the optimizers get unclipped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from launching import played

CLIP = 0.5
Ranks = list[dict[str, Any]]
Played = dict[str, dict[str, Ranks]]

TWO = ("published", "experts", "every expert everywhere", "pipeline", "tied", "sparse", "lost", "dense")
FOUR = ("experts", "slices of experts", "experts on tensor-parallel peers", "pipeline")


@pytest.fixture(scope="module")
def two() -> Played:
    return played("fp32_clipping.py", *TWO)


@pytest.fixture(scope="module")
def four() -> Played:
    return played("fp32_clipping.py", *FOUR, ranks=4)


def coefficient(norm: float) -> float:
    return min(1.0, CLIP / (norm + 1e-6))


def norm_of(ranks: Ranks, holders: dict[str, Iterable[int]]) -> float:
    """Over the parameters whose names contain a text, once for each of the ranks that hold different elements."""
    square, seen = 0.0, set()
    for text, on in holders.items():
        for rank in on:
            found = {name: value for name, value in ranks[rank]["squares"].items() if text in name}
            assert found, (text, rank)
            square += sum(found.values())
            seen.update((rank, name) for name in found)
    assert {name for _, name in seen} == {name for rank in ranks for name in rank["squares"]}
    return math.sqrt(square)


def own_norm(rank: dict[str, Any], *texts: str) -> float:
    """Of everything that one rank holds, or of what these texts name."""
    squares = rank["squares"].items()
    return math.sqrt(sum(value for name, value in squares if not texts or any(text in name for text in texts)))


def check(result: dict[str, Ranks], right: float, stock: float) -> None:
    """``stock`` is the norm that DeepSpeed clips by, ``right`` the norm: both bind, and they differ."""
    assert min(right, stock) > CLIP and abs(stock / right - 1) > 0.01
    for mode, norm in (("stock", stock), ("corrected", right)):
        for rank in result[mode]:
            assert rank["ratios"]
            for bounds in rank["ratios"].values():
                assert bounds == pytest.approx([coefficient(norm)] * 2, rel=2e-6), mode
            assert rank["left"], "no gradient is left over"
    check_report(result, right)


def check_report(result: dict[str, Ranks], right: float) -> None:
    for rank in result["stock"]:
        assert rank["norm"] is None and rank["in force"] == []
    for rank in result["corrected"]:
        assert rank["in force"] == ["fp32-clip-norm"]
        assert float.fromhex(rank["norm"]) == pytest.approx(right, rel=2e-7)
    assert len({rank["norm"] for rank in result["corrected"]}) == 1


EXPERTS, ROUTER, DENSE = "deepspeed_experts", "gate", "dense"


def test_the_published_example(two: Played) -> None:
    """sqrt(120), of which stock makes the mean of sqrt(20) and sqrt(100)."""
    result = two["published"]
    assert norm_of(result["stock"], {EXPERTS: (0, 1), ROUTER: (0,)}) == pytest.approx(math.sqrt(120))
    check(result, right=math.sqrt(120), stock=(math.sqrt(20) + math.sqrt(100)) / 2)


def test_experts_count_once_on_whichever_ranks_they_are(two: Played, four: Played) -> None:
    for result in (two["experts"], four["experts"]):
        ranks = result["stock"]
        right = norm_of(ranks, {EXPERTS: (0, 1), ROUTER: (0,), DENSE: (0,)})
        check(result, right, stock=sum(map(own_norm, ranks)) / len(ranks))


def test_experts_that_tensor_parallel_peers_slice(four: Played) -> None:
    """Ranks 0 and 1 are tensor-parallel peers, 0 and 2 own different experts. Stock drops rank 1's whole biases."""
    result = four["slices of experts"]
    ranks = result["stock"]
    experts = {"experts.0.weight": range(4), "experts.0.bias": (0, 2), ROUTER: (0,)}
    right = norm_of(ranks, experts | {"dense.weight": (0, 1), "dense.bias": (0,)})
    sliced = [own_norm(ranks[peer], "0.weight", "dense.weight") for peer in (1, 3)]
    check(result, right, stock=sum(map(math.hypot, map(own_norm, ranks[::2]), sliced)) / 2)


def test_experts_of_their_own_on_tensor_parallel_peers(four: Played) -> None:
    """Ranks 0 and 1 are tensor-parallel peers that own different experts. Stock drops those of rank 1."""
    result = four["experts on tensor-parallel peers"]
    ranks = result["stock"]
    right = norm_of(ranks, {EXPERTS: (0, 1), ROUTER: (0,), "dense.weight": (0, 1), "dense.bias": (0,)})
    check(result, right, stock=math.hypot(own_norm(ranks[0]), own_norm(ranks[1], "dense.weight")))


def test_every_pipeline_stage_counts(two: Played, four: Played) -> None:
    for result, stages in ((two["pipeline"], (0, 1)), (four["pipeline"], (0, 2))):
        ranks = result["stock"]
        right = norm_of(ranks, {"": stages})
        check(result, right, stock=own_norm(ranks[0]))


def test_a_weight_that_pipeline_stages_share_counts_once(two: Played) -> None:
    result = two["tied"]
    ranks = result["stock"]
    right = math.sqrt(own_norm(ranks[0]) ** 2 + own_norm(ranks[1], "1.", "2.") ** 2)
    assert own_norm(ranks[1], "tied") == pytest.approx(own_norm(ranks[0], "tied")) != 0
    check(result, right, stock=own_norm(ranks[0]))


def test_sparse_gradients_are_clipped(two: Played) -> None:
    result = two["sparse"]
    right = norm_of(result["stock"], {"": (0,)})
    assert right > CLIP
    for rank in result["corrected"]:
        for bounds in rank["ratios"].values():
            assert bounds == pytest.approx([coefficient(right)] * 2, rel=2e-6)
    for rank in result["stock"]:
        assert rank["ratios"].pop("rows.weight") == [1.0, 1.0], "as if there were no clipping"
        for bounds in rank["ratios"].values():
            assert bounds == pytest.approx([coefficient(right)] * 2, rel=2e-6)
    check_report(result, right)


def test_a_norm_that_is_not_finite_leaves_no_gradient_finite(two: Played) -> None:
    """Stock clips by zero, which hides what was finite and shows only what was not."""
    for rank in two["lost"]["corrected"]:
        assert not any(rank["finite"])
        assert not math.isfinite(float.fromhex(rank["norm"]))


@pytest.mark.parametrize("name", ["dense", "every expert everywhere"])
def test_where_stock_is_right_it_runs(two: Played, name: str) -> None:
    stock, corrected = two[name]["stock"], two[name]["corrected"]
    assert [rank["bits"] for rank in stock] == [rank["bits"] for rank in corrected]
    assert all(rank["ratios"] and rank["in force"] == [] and rank["norm"] is None for rank in corrected)
