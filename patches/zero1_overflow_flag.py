"""Upstream #7568: under ZeRO-1 each rank decides by itself whether a step overflowed."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Target, known_sources

ID = "zero1-overflow-flag"


def _affects(facts: Facts) -> Effect | None:
    looks = facts.dtype == "fp16" or facts.dtype == "bf16" and facts.check_grad_overflow
    if facts.zero_stage != 1 or facts.group_size == 1 or not looks:
        return None
    return Effect(None, "under ZeRO-1 a rank whose own gradients overflow skips the step alone")


def _has_overflow(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(optimizer, True)


def _measure(engine: Any) -> list[Measurement]:
    """An overflow on one rank, which all must hear of."""
    import torch

    optimizer = engine.optimizer
    if not hasattr(optimizer, "averaged_gradients") or optimizer.cpu_offload:
        return []  # BF16_Optimizer has no flag; with offload it is raised while gradients arrive
    first = sys.modules["deepspeed.comm"].get_rank(group=optimizer.dp_process_group) == 0
    probe = torch.full((1,), float("inf" if first else "1"), dtype=optimizer.dtype, device=_device())
    kept = optimizer.averaged_gradients
    optimizer.averaged_gradients = {index: [probe] for index in range(len(optimizer.bit16_groups))}
    try:
        heard = float(optimizer.has_overflow(optimizer.partition_gradients))
    finally:
        optimizer.averaged_gradients = kept
    return [Measurement("overflow flag of ZeRO-1", heard, 1.0 - heard, 0.0)]


def _device() -> Any:
    return sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()


PATCH = Patch(
    id=ID,
    title="ZeRO-1 ranks do not share their overflow flags",
    symptom="An fp16 job with ZeRO-1 hangs, or its ranks' weights and loss scales drift apart, after an overflow.",
    cause="The flag is reduced over the data-parallel ranks only where gradients are partitioned, though each rank"
    " looks at its own part of the gradients under ZeRO-1 too.",
    fix="The flag is reduced over the data-parallel ranks, as under ZeRO-2.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7568",
        "https://github.com/deepspeedai/DeepSpeed/pull/7580",
    ),
    retire="When the oldest supported DeepSpeed is 0.18.0.",
    corrections=(
        Replace(
            Target("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.has_overflow"), _has_overflow
        ),
    ),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
