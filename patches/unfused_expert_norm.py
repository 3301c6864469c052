"""Upstream #8613: without ZeRO the gradients of experts are left out of the clip norm."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import EXPERTS, UNFUSED_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype == "fp32" or not facts.experts or facts.fused_half:
        return None
    return Effect(None, "without ZeRO the gradients of experts are left out of the norm")


def _measure(engine: Any) -> list[Measurement]:
    """The norm is taken by a step only, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=EXPERTS,
    title="fp16 and bf16 without ZeRO leave experts out of the clip norm",
    symptom="With routed experts, ZeRO-0, fp16 or bf16 and an optimizer other than FusedAdam, the norm is too"
    " small and clipping too weak.",
    cause="FP16_UnfusedOptimizer sorts the gradients into those of experts and the others, and takes the norm"
    " of the others only.",
    fix="The norm is taken over every distinct gradient element: each expert once, wherever it lives.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8613",),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(UNFUSED_STEP,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(EXPERTS),
)
