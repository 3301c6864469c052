"""Routed experts spread over ranks, under ZeRO-1/2: how much of a gradient each rank steps on."""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

RANKS = 4


def experts(by_rank: list[Any]) -> list[tuple[float, float]]:
    """Of every rank's expert: the ratio to the right update, and how far it is from being a multiple of it."""
    assert all("error" not in one for one in by_rank), by_rank
    return [tuple(one[name]) for one in by_rank for name in one if "experts" in name]


def dense(by_rank: list[Any]) -> list[float]:
    return [one[name][0] for one in by_rank for name in one if "experts" not in name]


def all_right(found: list[tuple[float, float]]) -> bool:
    return all(abs(ratio - 1) < 1e-5 and rest < 1e-5 for ratio, rest in found)


def test_experts_are_averaged_over_every_rank() -> None:
    found = played("experts_apart.py", "ZeRO-1", "ZeRO-2, one rank at a time", ranks=RANKS, release="0.15.3")
    for name, modes in found.items():
        if name == "ZeRO-1":
            assert {round(ratio, 5) for ratio, _ in experts(modes["stock"])} == {2.0}, name
        assert not all_right(experts(modes["stock"])), name
        assert all_right(experts(modes["corrected"])), name
        for mode in ("stock", "corrected"):
            assert dense(modes[mode]) == pytest.approx([1.0] * len(dense(modes[mode])), rel=1e-5), name


def test_what_was_reduced_to_a_rank_is_kept_there() -> None:
    one, all_at_once = "ZeRO-2, one rank at a time", "ZeRO-2"
    found = played("experts_apart.py", one, all_at_once, ranks=RANKS, release="0.19.7")
    assert not all_right(experts(found[one]["stock"]))
    assert all_right(experts(found[one]["corrected"]))
    assert found[all_at_once]["stock"] == found[all_at_once]["corrected"]
    assert all_right(experts(found[all_at_once]["stock"]))
