"""No report found upstream: fp16 with FusedAdam and without ZeRO takes no step at all."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import FUSED_STEP, NO_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype != "fp16" or not facts.fused_half:
        return None
    return Effect(0.0, "with FusedAdam and without ZeRO fp16 weights are never updated")


def _measure(engine: Any) -> list[Measurement]:
    """What is missing is the step, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=NO_STEP,
    title="fp16 with FusedAdam and without ZeRO never updates the weights",
    symptom="In 0.17.6, 0.18.0 and 0.18.1 an fp16 job with FusedAdam and ZeRO-0 keeps its first weights, and reports a"
    " norm of 0. There is no message.",
    cause="FP16_Optimizer.step returns after it has seen to the loss scale, whether the gradients overflowed or not.",
    fix="A step without overflow goes on; the loss scale is seen to behind it.",
    upstream=(),
    retire="When the oldest supported DeepSpeed is 0.18.2.",
    corrections=(FUSED_STEP,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(NO_STEP),
)
