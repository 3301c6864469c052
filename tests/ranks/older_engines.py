"""Turns ds-gradfix on when the ranks hold engines already, not all of them the same, and says what became of them.

    older_engines.py SCENARIO...        one JSON line for each on every rank
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from engines import attempt, attempted, config, engine, ratio, refused, tell

import ds_gradfix
from ds_gradfix import activation, agreement, older
from ds_gradfix.verify import _compat

RANK = int(os.environ["RANK"])


class Said(logging.Handler):
    """What ds-gradfix logs on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def enabled(**settings: Any) -> dict[str, Any]:
    """Turn it on: how long that takes, what is logged, what is raised."""
    said = Said()
    logging.getLogger("ds_gradfix").addHandler(said)
    started = time.monotonic()
    outcome = attempted(lambda: ds_gradfix.enable(**settings))
    logging.getLogger("ds_gradfix").removeHandler(said)
    return {"outcome": outcome, "log": "\n".join(said.lines), "seconds": time.monotonic() - started}


def alone(scenario: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Leaves neither an engine nor ds-gradfix to the next scenario."""

    def play() -> dict[str, Any]:
        agreement.TIMEOUT, agreement.GRACE = timedelta(seconds=20), timedelta(seconds=5)
        try:
            return scenario()
        finally:
            ds_gradfix.disable()
            for left in older.look(deepspeed.DeepSpeedEngine):  # its own hooks hold on to it
                left.destroy()
            _compat.forget_last_engine()
            gc.collect()

    return play


def shared() -> dict[str, Any]:
    """Two engines that every rank has."""
    first, second = engine(config()), engine(config(gradient_clipping=1.0))
    ratio(second)  # has taken a step, which tells it from the first
    return {**enabled(), "ratios": [ratio(first), ratio(second)]}


def on_one_rank() -> dict[str, Any]:
    """Rank 1 has let go of an engine that rank 0 keeps."""
    kept, other = engine(config()), engine(config())
    ratio(kept)
    if RANK == 1:
        other.destroy()
    return {**enabled(), "ratios": [ratio(kept)]}


def none_on_the_first() -> dict[str, Any]:
    """Rank 0 has no engine at all."""
    made = engine(config())
    if RANK == 0:
        made.destroy()
    return enabled()


def alike(**settings: Any) -> dict[str, Any]:
    """Two engines that only a rank itself can tell apart."""
    pair = [engine(config()), engine(config())]
    started = time.monotonic()
    found = enabled(**settings)
    return {**found, "ratios": list(map(ratio, pair)), "seconds": time.monotonic() - started}


def destroyed() -> dict[str, Any]:
    """Engines that were destroyed and are still held, beside one that trains."""
    gone = [engine(config(zero_optimization={"stage": stage})) for stage in (1, 2, 3)]
    for one in gone:
        one.destroy()
    made = engine(config())
    said = enabled()
    held = [activation.ATTRIBUTE in vars(one) for one in (*gone, made)]
    return {**said, "corrected": held, "ratios": [ratio(made)]}


def refused_on_one_rank() -> dict[str, Any]:
    """The section of rank 1 names a patch that is not there, which is seen when the engine is made already."""
    ds_gradfix.enable()
    started = time.monotonic()
    outcome = refused(exclude=["nonesuch"]) if RANK == 1 else attempt(config())
    return {"outcome": outcome, "seconds": time.monotonic() - started}


def refused_late() -> dict[str, Any]:
    """The same of an engine that is older."""
    made = engine(config(ds_gradfix={"exclude": ["nonesuch"]} if RANK == 1 else {}))
    return {**enabled(), "kept": made is not None}


def unreadable_on_one_rank() -> dict[str, Any]:
    made = engine(config())
    if RANK == 1:
        del made._config.prescale_gradients
    return enabled()


def unreadable() -> dict[str, Any]:
    made = engine(config())
    del made._config.prescale_gradients
    return {**enabled(), "corrected": activation.ATTRIBUTE in vars(made)}


def pipelines(steps: int) -> dict[str, Any]:
    """The last stage still holds the engine of an earlier pipeline, which has taken so many steps."""
    from deepspeed.pipe import PipelineModule

    pair = []
    for taken in (steps, 0):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
        module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        asked = config(train_micro_batch_size_per_gpu=2, zero_optimization={"stage": 0})
        pair.append(deepspeed.initialize(model=module, optimizer=optimizer, config=asked)[0])
        for _ in range(taken):
            pair[-1].train_batch(data_iter=iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    old, current = pair
    pair.clear()
    if RANK == 0:
        del old
        gc.collect()
    said = enabled()
    return {**said, "corrected": activation.ATTRIBUTE in vars(current)}


def killed(rank: int) -> dict[str, Any]:
    """A rank is killed while it measures."""
    ds_gradfix.enable()
    patch = activation._state.plan.entry("zero3-scatter-scale").patch
    agreement.TIMEOUT, agreement.GRACE = timedelta(seconds=6), timedelta(seconds=2)
    if rank == RANK:
        object.__setattr__(patch, "measure", lambda engine: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    return {"outcome": attempt(config()), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    importlib.import_module("deepspeed.runtime.pipe.engine")
    tell(
        {
            "shared": alone(shared),
            "on one rank": alone(on_one_rank),
            "none on the first": alone(none_on_the_first),
            "alike": alone(alike),
            "alike, audited": alone(lambda: alike(audit=True, self_check="off")),
            "destroyed": alone(destroyed),
            "refused on one rank": alone(refused_on_one_rank),
            "refused late": alone(refused_late),
            "unreadable on one rank": alone(unreadable_on_one_rank),
            "unreadable": alone(unreadable),
            "pipelines": alone(lambda: pipelines(1)),
            "pipelines alike": alone(lambda: pipelines(0)),
            "rank 1 killed": lambda: killed(1),
            "rank 0 killed": lambda: killed(0),
        }
    )
