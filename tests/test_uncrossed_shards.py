"""Gradients that stock DeepSpeed never reduces across sequence shards, stock and corrected, against the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from launching import played

ZERO3 = ("ZeRO-3", "ZeRO-3, mean over shards", "ZeRO-3, all-reduce", "ZeRO-3, clipped", "ZeRO-3, offloaded")
MESH = ("mesh, ZeRO-0", "mesh, ZeRO-1", "mesh, mean over shards", "mesh by keys, ZeRO-1")
LEFT = ("ZeRO-3, patch excluded", "ZeRO-3, patch excluded, mean over shards", "mesh, patch excluded")
REFUSED = "own zero.Init, data-parallel"
UNAFFECTED = ("own zero.Init, all", "data-parallel over all", "ZeRO-2, mpu")
RANKS = (2, 4)


@cache
def outcomes(ranks: int) -> dict[str, dict[str, list[Any]]]:
    few = ("ZeRO-3", "ZeRO-3, resumed", "mesh, ZeRO-0", "mesh, ZeRO-1")
    every = (*ZERO3, "ZeRO-3, resumed", *MESH, *UNAFFECTED, *LEFT, REFUSED)
    return played("uncrossed_shards.py", *(few if ranks > 2 else every), ranks=ranks)


def names(ranks: int, wanted: tuple[str, ...]) -> list[str]:
    return [name for name in wanted if name in outcomes(ranks)]


def right(by_rank: list[Any]) -> bool:
    """Every gradient, norm and update is the reference's, and all ranks have the same weights, to the bit."""
    assert all("error" not in one for one in by_rank), by_rank
    numbers = [
        max(one["errors"]) < 1e-4 and max(one["updates"]) < 1e-3 and all(abs(n - 1) < 1e-5 for n in one["norms"])
        for one in by_rank
    ]
    return all(numbers) and len({one["weights"] for one in by_rank}) == 1


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("wanted", [ZERO3, MESH], ids=["zero3", "mesh"])
def test_ranks_drift_apart_and_are_kept_together(ranks: int, wanted: tuple[str, ...]) -> None:
    for name in names(ranks, wanted):
        stock, corrected = outcomes(ranks)[name]["stock"], outcomes(ranks)[name]["corrected"]
        assert len({one["weights"] for one in stock}) > 1, name
        assert not right(stock), name
        assert right(corrected), (name, corrected)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_goes_on_where_it_stopped(ranks: int) -> None:
    for one in outcomes(ranks)["ZeRO-3, resumed"]["corrected"]:
        assert one == {"loaded": True, "same": True}


@pytest.mark.parametrize("name", UNAFFECTED)
def test_where_shards_are_crossed_stock_code_runs(name: str) -> None:
    stock, corrected = outcomes(2)[name]["stock"], outcomes(2)[name]["corrected"]
    assert right(stock), stock
    assert corrected == stock


def test_what_its_owner_has_partitioned_is_refused_with_the_way_out() -> None:
    stock, corrected = outcomes(2)[REFUSED]["stock"], outcomes(2)[REFUSED]["corrected"]
    assert len({one["weights"] for one in stock}) == 2
    for one in corrected:
        assert "SelfCheckError" in one["error"] and "zero.Init(data_parallel_group=" in one["error"], one


def test_what_is_left_out_is_left_as_it_is_and_told() -> None:
    found = outcomes(2)
    for name in LEFT[1:]:
        assert found[name]["corrected"] == found[name]["stock"], name
    # Another patch, in force for the same reduction, measures it.
    for one in found[LEFT[0]]["corrected"]:
        assert "SelfCheckError" in one["error"] and "zero3-scatter-scale" in one["error"], one
