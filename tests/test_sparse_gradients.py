"""Embedding gradients that are reduced row by row, on real ranks, against float64."""

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


@pytest.fixture(scope="module")
def older() -> dict[str, dict[str, list[Any]]]:
    names = "compressed", "compressed, no row of sum zero", "compressed, pre-divided"
    return played("sparse_gradients.py", *names, release="0.17.6")


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


def test_compressed_embeddings_are_divided_once(older: Any) -> None:
    runs = older["compressed, pre-divided"]
    for stock, corrected in zip(runs["stock"], runs["corrected"], strict=True):
        got, right = updates(stock)
        assert got == times(4, right)
        got, right = updates(corrected)
        assert got == times(1, right)


def test_a_row_whose_gradient_sums_to_zero_is_reduced(older: Any) -> None:
    for stock, corrected in zip(older["compressed"]["stock"], older["compressed"]["corrected"], strict=True):
        got, right = updates(stock)
        assert right[0] == [0.5, -0.5] and got[0] == [0.0, 0.0]
        got, right = updates(corrected)
        assert got == times(1, right)


def test_what_is_right_is_left_as_it_is(installed: Any, older: Any) -> None:
    right = "sparse", "sparse, prescaled", "dense, pre-divided", "sparse, sum"
    for runs in (*(installed[name] for name in right), older["compressed, no row of sum zero"]):
        assert [updates(rank)[0] for rank in runs["stock"]] == [updates(rank)[0] for rank in runs["corrected"]]
