"""Embedding gradients that are reduced row by row, on real ranks, against float64.

Compressed ones, which only older releases have, are in tests/test_matrix.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

Table = list[list[float]]


@pytest.fixture(scope="module")
def installed() -> dict[str, dict[str, list[Any]]]:
    return played(
        "sparse_gradients.py",
        "sparse",
        "sparse, pre-divided",
        "sparse, pre-divided by the ranks",
        "sparse, prescaled",
        "dense, pre-divided",
        "sparse, sum",
    )


def updates(outcome: dict[str, Any]) -> tuple[Table, Table]:
    assert "error" not in outcome, outcome["error"]
    return outcome["got"], outcome["right"]


def times(factor: float, table: Table) -> Table:
    return [[pytest.approx(factor * value, rel=1e-6) for value in row] for row in table]


@pytest.mark.parametrize(("scenario", "factor"), [("sparse, pre-divided", 4), ("sparse, pre-divided by the ranks", 2)])
def test_sparse_gradients_are_divided_once(installed: Any, scenario: str, factor: int) -> None:
    for stock, corrected in zip(installed[scenario]["stock"], installed[scenario]["corrected"], strict=True):
        got, right = updates(stock)
        assert got == times(factor, right)
        got, right = updates(corrected)
        assert got == times(1, right)


def test_what_is_right_is_left_as_it_is(installed: Any) -> None:
    for name in ("sparse", "sparse, prescaled", "dense, pre-divided", "sparse, sum"):
        modes = installed[name]
        assert [updates(rank)[0] for rank in modes["stock"]] == [updates(rank)[0] for rank in modes["corrected"]]
