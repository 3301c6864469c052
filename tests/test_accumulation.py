"""Gradient accumulation: every micro-batch counts, once, whatever way its loss takes. Real ranks, against float64.

0.17.6 and 0.18.3 stand for the releases before and after DeepSpeed moved the division to the outputs of forward.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

Runs = dict[str, dict[str, list[Any]]]

# What stock gives: the ratio of the update to the right one, over all layers.
WRONG_BEFORE = {
    "zero2 x3": 0.66184,
    "zero2 boundary x3": 0.66184,
    "offload2 x3": 0.65047,
    "offload2 x3 bf16": 0.65214,
    "offload2 boundary x3": 0.66184,
    "offload2 used late x2": 0.92136,
    "zero1 no_sync x4": 2.7142,
    "pipeline 2 x4": 4.0,
    "pipeline 1 x4": 4.0,
}
RIGHT_BEFORE = "zero0 x2", "zero1 x2", "zero2 x1", "zero3 x2", "offload2 x2", "pipeline 2 x1"
WRONG_AFTER = {
    "zero0 caller x4": 0.25,
    "zero3 caller x4": 0.25,
    "zero0 regularised x4": 3.7002,
    "zero0 around x2": 2.0,
    "zero1 fed back x2": 0.95942,
    "zero1 fed back x2 by caller": 0.49892,
}
PIPELINE = "pipeline 2 x3, ZeRO-1"
RIGHT_AFTER = "zero0 x1", "zero1 x1", "zero2 x1", "zero3 x1"


@pytest.fixture(scope="module")
def before() -> Runs:
    return played("accumulation.py", *WRONG_BEFORE, *RIGHT_BEFORE, "zero2 one after another x3", release="0.17.6")


@pytest.fixture(scope="module")
def after() -> Runs:
    return played("accumulation.py", *WRONG_AFTER, *RIGHT_AFTER, PIPELINE, release="0.18.3")


@pytest.fixture(scope="module")
def installed() -> Runs:
    return played("accumulation.py", "offload2 used late x3", "offload2 x3", "zero2 used late x2")


def corrected(runs: Runs, scenario: str, stock: float) -> None:
    tolerance = 2e-2 if "bf16" in scenario else 1e-5
    for rank in runs[scenario]["stock"]:
        assert rank["ratio"] == pytest.approx(stock, rel=1e-3)
    for rank in runs[scenario]["corrected"]:
        assert rank["ratio"] == pytest.approx(1, rel=tolerance) and rank["error"] < tolerance


def left_alone(runs: Runs, scenario: str) -> None:
    for stock, rank in zip(runs[scenario]["stock"], runs[scenario]["corrected"], strict=True):
        assert stock["error"] < 1e-5 and rank["updates"] == stock["updates"]


@pytest.mark.parametrize("scenario", WRONG_BEFORE)
def test_before_the_watershed(before: Runs, scenario: str) -> None:
    corrected(before, scenario, WRONG_BEFORE[scenario])


@pytest.mark.parametrize("scenario", WRONG_AFTER)
def test_after_the_watershed(after: Runs, scenario: str) -> None:
    corrected(after, scenario, WRONG_AFTER[scenario])


def test_what_is_right_is_left_as_it_is(before: Runs, after: Runs, installed: Runs) -> None:
    for runs, names in ((before, RIGHT_BEFORE), (after, RIGHT_AFTER), (installed, ("zero2 used late x2",))):
        for name in names:
            left_alone(runs, name)
    for rank in installed["offload2 x3"]["corrected"]:
        assert rank["error"] < 1e-5


def test_a_backward_behind_the_boundary_is_added_where_stock_stops(before: Runs) -> None:
    for stock, rank in zip(*before["zero2 one after another x3"].values(), strict=True):
        assert "error" in stock and "ratio" not in stock
        assert rank["error"] < 1e-5


def test_a_gradient_of_an_earlier_step_does_not_come_back(installed: Runs) -> None:
    corrected(installed, "offload2 used late x3", 1.3758)


def test_every_stage_of_a_pipeline_is_divided_once(after: Runs) -> None:
    for mode, first, last in (("stock", 1 / 3, 1), ("corrected", 1, 1)):
        ratios = [rank["layers"] for rank in after[PIPELINE][mode]]
        assert ratios == [{"0": pytest.approx(first, rel=1e-4)}, {"2": pytest.approx(last, rel=1e-4)}]
