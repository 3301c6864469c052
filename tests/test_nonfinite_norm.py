"""bf16 and fp32: what a gradient that is not finite does, real DeepSpeed on real ranks, stock and corrected.

The jobs are in tests/ranks/nonfinite.py. The newest release is the example: it skips such a step on every rank, and
says that the norm is inf.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from launching import played

OLD = "0.19.2"
SIZE, RANKS, CLIP = 6, 2, 2.0
WHAT = ("good", "inf", "good", "nan", "zero", "huge", "good")
ZERO = ("ZeRO-1 fp32", "ZeRO-2 bf16", "ZeRO-3 bf16", "ZeRO-3 fp32")
MORE = ("ZeRO-2 bf16 unclipped", "ZeRO-2 fp32 offload", "ZeRO-3 fp32 offload")
FINITE = ("ZeRO-2 bf16 finite", "ZeRO-3 fp32 finite")
OTHERS = ("ZeRO-2 bf16 unchecked", "ZeRO-3 bf16 unchecked", "BF16_Optimizer", "BF16_Optimizer finite")
NEWEST = ("ZeRO-1 fp32", "ZeRO-2 bf16", "ZeRO-3 bf16", "BF16_Optimizer", *OTHERS[:2])


@cache
def outcomes(release: str | None) -> dict[str, dict[str, list[Any]]]:
    names = (*ZERO, *MORE, *FINITE, *OTHERS) if release else NEWEST
    return played("nonfinite.py", *names, release=release)


def run(name: str, mode: str, release: str | None = OLD) -> list[dict[str, Any]]:
    first, second = outcomes(release)[name][mode]
    assert "error" not in first, first
    assert repr(first) == repr(second)  # every rank has the same weights, and NaN is not equal to itself
    return list(first)


GOOD = [math.fsum(index + 1.0 + 3 * rank for rank in range(RANKS)) / RANKS for index in range(SIZE)]
NORM = math.sqrt(math.fsum(each**2 for each in GOOD))


def as_it_should_be(said: list[dict[str, Any]], clip: float) -> None:
    """Non-finite ones are skipped with a norm of inf, and leave no trace in the others."""
    kinds = WHAT if len(said) == len(WHAT) else tuple(kind for kind in WHAT if kind != "huge")
    for kind, step in zip(kinds, said, strict=True):
        taken = kind in ("good", "zero")
        assert step["skipped"] == (not taken), kind
        assert step["norm"] == pytest.approx(
            {"good": NORM, "zero": 0.0}.get(kind, math.inf), rel=4e-3
        ), kind
        factor = min(1.0, clip / (NORM + 1e-6)) if kind == "good" else 0.0
        # Weights are bf16: what they lose by rounding has their size, not the update's.
        assert step["update"] == pytest.approx([factor * each for each in GOOD], rel=2e-2, abs=2e-2), kind


@pytest.mark.parametrize("name", [*ZERO, *MORE, "BF16_Optimizer"])
def test_a_step_with_a_norm_that_is_not_finite_is_skipped(name: str) -> None:
    as_it_should_be(run(name, "corrected"), math.inf if "unclipped" in name else CLIP)


@pytest.mark.parametrize("name", NEWEST[:4])
def test_as_in_the_newest_release(name: str) -> None:
    for mode in ("stock", "corrected"):
        as_it_should_be(run(name, mode, None), CLIP)


@pytest.mark.parametrize("name", ZERO)
def test_stock_takes_it_for_a_norm_of_one(name: str) -> None:
    good, inf, *after = run(name, "stock")
    assert good["norm"] == pytest.approx(NORM, rel=4e-3)
    assert not inf["skipped"] and 1.0 <= inf["norm"] < math.inf
    assert any(math.isnan(each) or math.isinf(each) for each in inf["update"])
    assert not any(step["skipped"] for step in after)


def test_stock_ends_a_job_with_wide_accumulation() -> None:
    for rank in outcomes(OLD)["BF16_Optimizer"]["stock"]:
        assert "assert all_groups_norm > 0." in rank["error"]


def test_a_check_that_is_switched_off_stays_off_under_zero2_only() -> None:
    """As in the newest release, which reports the norm and spoils the weights that it was asked to spoil."""
    for release in (OLD, None):
        _, inf = run("ZeRO-2 bf16 unchecked", "corrected", release)
        assert not inf["skipped"] and inf["norm"] == math.inf and any(map(math.isnan, inf["update"]))
        _, inf = run("ZeRO-3 bf16 unchecked", "corrected", release)
        assert inf["skipped"] and inf["norm"] == math.inf and not any(inf["update"])


@pytest.mark.parametrize("name", [*FINITE, "BF16_Optimizer finite"])
def test_finite_gradients_are_stock_bit_for_bit(name: str) -> None:
    assert run(name, "stock") == run(name, "corrected")
