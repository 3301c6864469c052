"""Upstream #8588: fp16 without ZeRO reports the norm of gradients that still carry the loss scale."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import NORM_SCALE, UNFUSED_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype != "fp16" or facts.fused_half:
        return None
    return Effect(None, "without ZeRO the reported norm of fp16 gradients is not divided by the loss scale")


def _measure(engine: Any) -> list[Measurement]:
    """The norm is taken by a step only, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=NORM_SCALE,
    title="fp16 without ZeRO reports the norm of scaled gradients",
    symptom="With fp16, ZeRO-0 and an optimizer other than FusedAdam, get_global_grad_norm() is larger than the norm by"
    " the loss scale. From 0.18.3 on this is hidden by gradients that were never scaled: see fp16-zero0-loss-scale.",
    cause="FP16_UnfusedOptimizer keeps the norm that it clips by, which is taken before the gradients are unscaled.",
    fix="The reported norm is divided by the scale that the step's gradients carried; clipping is as it was.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8588",),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(UNFUSED_STEP,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(NORM_SCALE),
)
