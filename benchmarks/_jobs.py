"""Engines to measure on, and how to take ds-gradfix out of their way and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import _ranks
import deepspeed
import torch
from torch import nn

from ds_gradfix.activation import _state
from ds_gradfix.verify import _compat, _mpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def engine(
    stage: int,
    model: nn.Module,
    shards: int = 1,
    dtype: str = "fp32",
    groups: Sequence[Sequence[Any]] = (),
    zero: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A DeepSpeed engine with SGD; ``groups`` are the optimizer's parameter groups, one of all if none is given."""
    _compat.forget_last_engine()
    chosen = [{"params": list(group)} for group in groups] or [{"params": list(model.parameters())}]
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(chosen, lr=1e-3),
        mpu=_mpu.for_size(shards, stage=stage),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "seq_parallel_communication_data_type": dtype,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
            **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
            **config,
        },
    )
    return made


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(_ranks.device())


def original(qualname: str) -> Any:
    """DeepSpeed's own function where a correction is in place."""
    (slot,) = (slot for slot in _state.slots.values() if slot.qualname == qualname)
    return slot.raw


@contextmanager
def slots_empty() -> Iterator[None]:
    """Stock functions in all places, as without ds-gradfix; what was there afterwards."""
    for slot in _state.slots.values():
        setattr(slot.owner, slot.name, slot.raw)
    try:
        yield
    finally:
        for slot in _state.slots.values():
            setattr(slot.owner, slot.name, slot.installed)
