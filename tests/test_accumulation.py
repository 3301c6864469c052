"""Gradient accumulation: every micro-batch counts, once, whatever way its loss takes. Real ranks, against float64.

Older releases, most of which get it wrong, are in tests/test_matrix.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

Runs = dict[str, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def installed() -> Runs:
    return played("accumulation.py", "offload2 used late x3", "offload2 x3", "zero2 used late x2")


def test_what_is_right_is_left_as_it_is(installed: Runs) -> None:
    for stock, rank in zip(*installed["zero2 used late x2"].values(), strict=True):
        assert stock["error"] < 1e-5 and rank["updates"] == stock["updates"]
    for rank in installed["offload2 x3"]["corrected"]:
        assert rank["error"] < 1e-5


def test_a_gradient_of_an_earlier_step_does_not_come_back(installed: Runs) -> None:
    for rank in installed["offload2 used late x3"]["stock"]:
        assert rank["ratio"] == pytest.approx(1.3758, rel=1e-3)
    for rank in installed["offload2 used late x3"]["corrected"]:
        assert rank["ratio"] == pytest.approx(1, rel=1e-5) and rank["error"] < 1e-5


def test_a_backward_behind_the_boundary_is_added_where_stock_stops() -> None:
    found = played("accumulation.py", "zero2 one after another x3", "offload2 x3 bf16", release="0.17.6")
    for stock, rank in zip(*found["zero2 one after another x3"].values(), strict=True):
        assert "error" in stock and "ratio" not in stock
        assert rank["error"] < 1e-5
    for stock, rank in zip(*found["offload2 x3 bf16"].values(), strict=True):
        assert stock["ratio"] == pytest.approx(0.65214, rel=1e-3)
        assert rank["ratio"] == pytest.approx(1, rel=2e-2) and rank["error"] < 2e-2
