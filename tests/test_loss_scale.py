"""fp16: the loss scale of every optimizer's step, real DeepSpeed on real ranks, stock and corrected.

The jobs are in tests/ranks/loss_scale.py. What is right is computed here, in float64, from the ranks' numbers.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from launching import played

OLD = "0.17.6"
"""The first of three that take no step with FusedAdam; other older ones are in tests/test_matrix.py."""
SIZE, RANKS, STEPS, OVERFLOW, WINDOW = 6, 2, 8, 5, 2
DYNAMIC = ("ZeRO-0", "ZeRO-2", "ZeRO-3", "fused", "legacy")
CLIPPED = ("ZeRO-3 clipped", "fused clipped")
STATIC = ("ZeRO-2 static", "ZeRO-3 static")
MORE = ("ZeRO-0 accumulated", "ZeRO-3 resumed", "scaled")
OLD_ONES = ("fused",)


@cache
def outcomes(release: str | None) -> dict[str, dict[str, list[Any]]]:
    names = OLD_ONES if release else (*DYNAMIC, *CLIPPED, *STATIC, *MORE)
    return played("loss_scale.py", *names, release=release)


def run(name: str, mode: str, release: str | None = None) -> list[dict[str, Any]]:
    first, second = outcomes(release)[name][mode]
    assert "error" not in first, first
    # Every rank has the same weights; up to 0.17.6 a skipped step leaves the norm as it was.
    assert first == second
    return list(first)


def gradient(step: int, gas: int) -> list[float]:
    """The mean over ranks and micro-batches."""
    whole = [
        [((3 * step + 5 * micro + 7 * rank + index) % 16 + 1) / 4 for index in range(SIZE)]
        for rank in range(RANKS)
        for micro in range(gas)
    ]
    return [math.fsum(column) / len(whole) for column in zip(*whole, strict=True)]


def grows(step: int) -> bool:
    """Of the steps before the overflow: whether the scale that a step leaves behind is twice the one before."""
    return step >= 2 and step % WINDOW == 0


SCALES = (256, 256, 512, 512, 1024, 512, 512, 512)
"""Behind each step, of a dynamic scale that starts at 256: two growths and an overflow."""


def ratios(name: str, mode: str, clip: float = math.inf, release: str | None = None) -> list[tuple[float, float]]:
    """Of each step that was taken, its update and its reported norm over the right ones."""
    found = []
    for step, said in enumerate(run(name, mode, release)):
        assert said["skipped"] == (step == OVERFLOW)
        if step == OVERFLOW:
            assert not any(said["update"])
            continue
        right = gradient(step, 2 if "accumulated" in name else 1)
        norm = math.sqrt(math.fsum(each**2 for each in right))
        update = math.sqrt(math.fsum(each**2 for each in said["update"]))
        found.append((update / (norm * min(1.0, clip / norm)), said["norm"] / norm))
    return found


def almost(ratio: float) -> Any:
    return pytest.approx(ratio, rel=2e-3)  # weights are fp16, and a clipped update is not exact there


@pytest.mark.parametrize("name", [*DYNAMIC, *CLIPPED, *STATIC, *MORE[:-1]])
def test_corrected_updates_and_norms_are_the_gradients(name: str) -> None:
    clip = 2.0 if "clipped" in name else math.inf
    for update, norm in ratios(name, "corrected", clip):
        assert update == almost(1.0) and norm == almost(1.0)


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_loss_scale_goes_its_way(name: str) -> None:
    assert [said["scale"] for said in run(name, "stock")] == list(SCALES)
    assert [said["scale"] for said in run(name, "corrected")] == list(SCALES)


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3", "ZeRO-3 resumed"])
def test_stock_halves_a_step_in_which_the_scale_grows(name: str) -> None:
    for step, (update, norm) in zip((0, 1, 2, 3, 4, 6, 7), ratios(name, "stock"), strict=True):
        half = grows(step) and step < OVERFLOW
        assert update == (0.5 if half else 1.0)
        assert norm == almost(0.5 if half and "ZeRO-3" in name else 1.0)


@pytest.mark.parametrize("name", ["ZeRO-0", "fused", "legacy", "ZeRO-0 accumulated"])
def test_stock_without_zero_does_not_scale_the_loss(name: str) -> None:
    """It divides by the scale that a step leaves behind."""
    scales = [scale for step, scale in enumerate(SCALES) if step != OVERFLOW]
    for (update, norm), scale in zip(ratios(name, "stock"), scales, strict=True):
        assert update == almost(1 / scale)
        # The norm that is not unscaled hides that there is nothing to unscale.
        assert norm == almost(1.0 if "ZeRO-0" in name else 1 / scale)


def test_the_engine_scales_a_loss_and_returns_it_as_it_was() -> None:
    for rank in range(RANKS):
        stock, corrected = (outcomes(None)["scaled"][mode][rank] for mode in ("stock", "corrected"))
        assert stock == [3.0, 3.0]
        assert corrected == [3.0 * 256, 3.0]


@pytest.mark.parametrize("name", STATIC)
def test_a_static_scale_is_stock_bit_for_bit(name: str) -> None:
    assert run(name, "stock") == run(name, "corrected")


# ------------------------------------------------------------------------------ an older release


def test_fp16_with_fused_adam_takes_steps() -> None:
    assert not any(any(said["update"]) or said["norm"] for said in run("fused", "stock", OLD))
    assert all(pair == (1.0, almost(1.0)) for pair in ratios("fused", "corrected", release=OLD))
    assert [said["scale"] for said in run("fused", "corrected", OLD)] == list(SCALES)
