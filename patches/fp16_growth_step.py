"""Upstream #2686: the loss scale grows before the gradients that carry the old one are divided by it."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import FUSED_STEP, GROWTH, UNFUSED_STEP, ZERO3_STEP, ZERO12_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.dtype != "fp16" or not facts.dynamic_loss_scale or facts.own_step:
        return None
    return Effect(0.5, "in each step in which the fp16 loss scale grows, gradients come out half as large")


def _measure(engine: Any) -> list[Measurement]:
    """Nothing can be seen before a step in which the scale grows, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=GROWTH,
    title="fp16 gradients are halved in a step in which the loss scale grows",
    symptom="With a dynamic loss scale, once per loss_scale_window the update is half as large as it should be, under"
    " every ZeRO stage; ZeRO-3 and the fused fp16 optimizer report half the norm, and clip by it.",
    cause="A step counts itself as free of overflow, which may double the loss scale, before it divides its gradients;"
    " they were made with the old scale and are divided by the new one.",
    fix="The count is kept back until the step is done. The loss scale of every step is what it was.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/2686",
        "https://github.com/deepspeedai/DeepSpeed/pull/8588",
    ),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(ZERO12_STEP, ZERO3_STEP, FUSED_STEP, UNFUSED_STEP),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(GROWTH),
)
