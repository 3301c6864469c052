"""Upstream #5259: without ZeRO the weights of experts are in the clip norm, instead of their gradients."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import EXPERT_WEIGHTS, FUSED_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype == "fp32" or not facts.experts or not facts.fused_half:
        return None
    return Effect(None, "without ZeRO the weights of experts are in the norm, instead of their gradients")


def _measure(engine: Any) -> list[Measurement]:
    """The norm is taken by a step only, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=EXPERT_WEIGHTS,
    title="FusedAdam without ZeRO takes the norm of experts' weights for that of their gradients",
    symptom="With routed experts, ZeRO-0, fp16 or bf16 and FusedAdam, the norm is that of something else,"
    " and clipping too strong or too weak.",
    cause="FP16_Optimizer hands the function that takes the experts' norm their weights, and that function reads no"
    " gradient of them.",
    fix="The norm is taken over every distinct gradient element: each expert once, wherever it lives.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/5259",),
    retire="When the oldest supported DeepSpeed is 0.19.8.",
    corrections=(FUSED_STEP,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(EXPERT_WEIGHTS),
)
