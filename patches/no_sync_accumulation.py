"""Micro-batches inside ``engine.no_sync()`` are not divided by gradient_accumulation_steps."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import BACKWARD_DIVIDES, NO_SYNC, PROLOGUE_DIVIDES, measure_nothing
from ds_gradfix.registry import Effect, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    steps = facts.gradient_accumulation_steps
    if facts.zero_stage > 1 or facts.pipeline or steps == 1:
        return None  # ZeRO-2 and 3 refuse no_sync, and a pipeline has no use for it
    return Effect(None, f"the gradient of a micro-batch inside engine.no_sync() comes out {steps}x too large")


PATCH = Patch(
    id=NO_SYNC,
    title="Micro-batches inside engine.no_sync() are not divided by gradient_accumulation_steps",
    symptom="With no_sync(), which Accelerate's accumulate() enters by itself, all micro-batches but the one outside"
    " weigh gradient_accumulation_steps times too much, and so do gradient and norm.",
    cause="The division was made dependent on whether this backward() is to reduce gradients.",
    fix="The loss of a micro-batch inside no_sync() is divided as every other loss is.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/6675",),
    retire="When the oldest supported DeepSpeed is 0.18.3.",
    corrections=(BACKWARD_DIVIDES, PROLOGUE_DIVIDES),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(NO_SYNC),
)
