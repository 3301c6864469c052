"""Upstream #7773: a pipeline's loss is not divided by its number of micro-batches."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import (
    BACKWARD_DIVIDES,
    PIPELINE_UNDIVIDED,
    PROLOGUE_DIVIDES,
    measure_nothing,
)
from ds_gradfix.registry import Effect, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    steps = facts.gradient_accumulation_steps
    if not facts.pipeline or steps == 1:
        return None
    return Effect(steps, f"the pipeline's gradients come out {steps}x too large: no loss is divided by micro-batches")


PATCH = Patch(
    id=PIPELINE_UNDIVIDED,
    title="A pipeline's loss is not divided by gradient_accumulation_steps",
    symptom="With a PipelineModule the gradient and its norm grow with gradient_accumulation_steps.",
    cause="The division was made dependent on whether backward() is to reduce gradients, which a pipeline does"
    " elsewhere.",
    fix="A pipeline's loss is divided as every other loss is.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/7773",),
    retire="When the oldest supported DeepSpeed is 0.18.3.",
    corrections=(BACKWARD_DIVIDES, PROLOGUE_DIVIDES),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(PIPELINE_UNDIVIDED),
)
