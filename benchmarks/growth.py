"""How the cost of an engine's init grows with parameters and ranks: time added, collectives, and uses of the store."""

from __future__ import annotations

import collections
import json
import time
from datetime import timedelta
from typing import Any

import _jobs
import _ranks
import torch
from _figures import Row, counted, figure

import ds_gradfix
from ds_gradfix import activation, agreement

COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "reduce", "all_gather")
counts: collections.Counter[str] = collections.Counter()


def before_groups() -> None:
    """Count collectives; DeepSpeed keeps torch's functions when it makes its groups."""
    for name in COLLECTIVES:
        setattr(torch.distributed, name, counting(name, getattr(torch.distributed, name)))


def counting(name: str, function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        counts[name] += 1
        return function(*args, **options)

    return call


def on_rank(quick: bool) -> list[Row]:
    ds_gradfix.enable()
    ranks = torch.distributed.get_world_size()
    rows = []
    for number in (10, 100) if quick else (10, 100, 1000):
        rows += of_parameters(number, ranks, 3 if quick else 9)
    return rows


def of_parameters(number: int, ranks: int, rounds: int) -> list[Row]:
    added, collectives = [], 0.0
    proved: dict[str, float] = {}

    def timed(*args: Any) -> Any:
        before, start = counts.total(), time.perf_counter()
        found = prove(*args)
        proved["ms"], proved["collectives"] = 1000 * (time.perf_counter() - start), counts.total() - before
        return found

    prove, activation.prove = activation.prove, timed
    try:
        for _ in range(rounds):
            params = [torch.nn.Parameter(torch.ones(16, device=_ranks.device())) for _ in range(number)]
            made = _jobs.engine(2, torch.nn.ParameterList(params))
            made.destroy()
            added.append(proved["ms"])
            collectives = proved["collectives"]
    finally:
        activation.prove = prove
    case = f"{ranks} ranks, {number} parameters"
    return [figure(f"{case}: self-check", added, "ms"), counted(f"{case}: collectives", collectives, "")]


def store(quick: bool) -> list[Row]:
    """What rank 0 does for one comparison of many ranks, through a real store, the others' answers being there."""
    rows = []
    text = json.dumps({f"setting {number}": "value" for number in range(30)})
    for ranks in (8, 64) if quick else (8, 64, 512, 4096):
        kept = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
        took = []
        for number in range(3 if quick else 7):
            for rank in range(1, ranks):
                kept.set(f"{number}/{rank}", text)
            start = time.perf_counter()
            answer = agreement.exchange(kept, str(number), 0, ranks, text)
            took.append(1000 * (time.perf_counter() - start))
            assert answer.unanimous and len(answer.said[text]) == ranks
        rows.append(figure(f"{ranks} ranks compared, on rank 0", took, "ms"))
    return rows
