"""What ds-gradfix adds to making an engine, and to a step of one in which nothing is to be corrected."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import _jobs
import _ranks
import torch
from _figures import Row, figure, ratios

import ds_gradfix

INIT, STEP = "engine init", "step"
INIT_MS = 100.0
STEP_RATIO = 1.0


def on_rank(quick: bool) -> dict[str, list[Row]]:
    ds_gradfix.enable()
    return {INIT: inits(5 if quick else 21), STEP: steps(8 if quick else 80)}


def inits(rounds: int) -> list[Row]:
    jobs: dict[str, dict[str, Any]] = {
        "ZeRO-2, nothing to correct": {"stage": 2},
        "ZeRO-3, nothing to correct": {"stage": 3},
        "ZeRO-3, sequence parallel 2, corrected": {"stage": 3, "shards": 2},
    }
    rows = []
    for case, job in jobs.items():
        if job.get("shards", 1) > torch.distributed.get_world_size():
            continue

        def make(job: dict[str, Any] = job) -> None:
            made = _jobs.engine(model=_jobs.layers(4, 64), **job)
            made.destroy()
            del made

        def stock(make: Callable[[], None] = make) -> None:
            with _jobs.slots_empty():
                make()

        gc.disable()
        times = _ranks.side_by_side({"on": make, "off": stock}, rounds)
        gc.enable()
        gc.collect()
        added = [1000 * (on - off) for on, off in zip(times["on"], times["off"], strict=True)]
        rows.append(figure(case, added, "ms added", INIT_MS))
    return rows


def steps(rounds: int) -> list[Row]:
    rows = []
    for stage in range(4):
        for case, count, width, bucket in (("many small buckets", 24, 64, 5_000), ("few large buckets", 4, 512, 10**8)):
            zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
            engine = _jobs.engine(stage, _jobs.layers(count, width), zero=zero)
            inputs = torch.randn(4, width, device=_ranks.device())

            def step(engine: Any = engine, inputs: Any = inputs) -> None:
                for _ in range(3):
                    engine.backward(engine(inputs).square().mean())
                    engine.step()

            def stock(step: Callable[[], None] = step) -> None:
                with _jobs.slots_empty():
                    step()

            times = _ranks.side_by_side({"on": step, "off": stock}, rounds)
            rows.append(figure(f"ZeRO-{stage}, {case}", ratios(times["on"], times["off"]), limit=STEP_RATIO))
            engine.destroy()
    return rows
