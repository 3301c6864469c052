"""What a mean does over sequence shards, for three ways to write the loss: real Ulysses attention, real DeepSpeed, real
ranks, against the single-process gradient of the mean over all tokens.

The table that makes the setting necessary is stock's own; with it, every loss has a convention under which every
parameter is right on every ZeRO stage and path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ds_gradfix.verify import Case, measure

SCRIPT = Path(__file__).parent / "ranks" / "sequence_parallel_losses.py"
SHARDS = 2
LOSSES = ("gathered tokens", "own shard", "gathered shards")
SUMMED, AVERAGED = (1.0, 2.0, 2.0), (0.5, 1.0, 1.0)
"""The three losses' gradients, in units of the right one, where shards are summed and where they are averaged."""

BUCKET = 100
"""Elements: of the model's parameters the largest one does not fit."""
APART = {"reduce_scatter": False, "contiguous_gradients": False}
PATHS: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    *({"stage": stage, **path} for stage in (1, 2) for path in ({}, {"reduce_scatter": False}, APART)),
    {"stage": 3},
    {"stage": 3, "reduce_scatter": False},
    {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": BUCKET},
    {"stage": 3, **APART},
)


def launched(cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Rank 0's outcome of every case, from one launch."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "cases.json").write_text(json.dumps(cases))
        base = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key}
        base |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
                 "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # fmt: skip
        logs = [(directory / f"{rank}.log").open("w+") for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, name],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            failed = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for log in logs:
            log.seek(0)
        assert not any(failed), "\n".join(log.read()[-3000:] for log in logs)
        return [json.loads((directory / f"{index}.0.json").read_text()) for index in range(len(cases))]


@cache
def outcomes(ranks: int) -> dict[tuple[str, int], dict[str, Any]]:
    """By convention (or "stock") and path."""
    keys = [(convention, path) for convention in ("stock", "sum", "mean") for path in range(len(PATHS))]
    cases = []
    for convention, path in keys:
        section = {} if convention == "stock" else {"ds_gradfix": {"sequence_parallel_reduction": convention}}
        config = {"zero_optimization": PATHS[path], **section}
        cases.append({"shards": SHARDS, "on": convention != "stock", "config": config})
    return dict(zip(keys, launched(cases, ranks), strict=True))


def ratios(outcome: dict[str, Any], parameter: str) -> tuple[float, ...]:
    for loss in LOSSES:
        assert outcome["losses"][loss][parameter][1] < 1e-5, (loss, parameter)  # a multiple of the right gradient
    return tuple(outcome["losses"][loss][parameter][0] for loss in LOSSES)


def stock_averages(path: dict[str, Any], elements: int) -> bool:
    if path["stage"] != 3:
        return False
    return path.get("reduce_scatter", True) or path == {"stage": 3, **APART} or elements > path.get(
        "reduce_bucket_size", 1_000_000
    )  # fmt: skip


both_worlds = pytest.mark.parametrize("ranks", [2, 4], ids=["S=2", "S=2 x dp=2"])


@both_worlds
def test_stock_gives_the_table(ranks: int) -> None:
    for index, path in enumerate(PATHS):
        outcome = outcomes(ranks)["stock", index]
        for parameter, elements in outcome["sizes"].items():
            expected = AVERAGED if stock_averages(path, elements) else SUMMED
            assert ratios(outcome, parameter) == pytest.approx(expected, rel=1e-5), (path, parameter)


@both_worlds
@pytest.mark.parametrize("convention, expected", [("sum", SUMMED), ("mean", AVERAGED)])
def test_a_convention_is_the_same_on_every_stage_and_path(ranks: int, convention: str, expected: Any) -> None:
    for index, path in enumerate(PATHS):
        outcome = outcomes(ranks)[convention, index]
        for parameter in outcome["sizes"]:
            assert ratios(outcome, parameter) == pytest.approx(expected, rel=1e-5), (path, parameter)
        report = outcome["report"]
        assert report["convention"] == convention
        assert report["because"] == "set by sequence_parallel_reduction"
        assert report["divisor"] == (ranks // SHARDS if convention == "sum" else ranks)
        assert report["left_out"] == {}


@both_worlds
def test_the_right_convention_makes_every_loss_right_everywhere(ranks: int) -> None:
    right = {"gathered tokens": "sum", "own shard": "mean", "gathered shards": "mean"}
    for loss, convention in right.items():
        for index, path in enumerate(PATHS):
            found = outcomes(ranks)[convention, index]["losses"][loss]
            assert [ratio for ratio, _ in found.values()] == pytest.approx([1.0] * len(found), rel=1e-5), (loss, path)


def test_a_mixed_bucket_is_really_mixed() -> None:
    sizes = outcomes(2)["stock", 0]["sizes"].values()
    assert min(sizes) < BUCKET < max(sizes)
