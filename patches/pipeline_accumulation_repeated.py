"""Upstream #8152: every stage of a pipeline divides by the number of micro-batches again."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import FORWARD, measure_nothing
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "pipeline-accumulation-repeated"


def _affects(facts: Facts) -> Effect | None:
    steps = facts.gradient_accumulation_steps
    if not facts.pipeline or facts.pipeline_stages == 1 or steps == 1:
        return None
    return Effect(None, f"gradients come out {steps}x too small for every pipeline stage that lies behind them")


PATCH = Patch(
    id=ID,
    title="Every stage of a pipeline divides its gradients by gradient_accumulation_steps again",
    symptom="With a PipelineModule of two or more stages the early ones barely train: a gradient is too small"
    " by gradient_accumulation_steps for each stage between it and the loss.",
    cause="The hooks that divide are on the outputs of every stage, and the gradient that a stage gets from the next"
    " one is divided already.",
    fix="Only the last stage's outputs have them.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8152",
        "https://github.com/deepspeedai/DeepSpeed/pull/8154",
    ),
    retire="When the oldest supported DeepSpeed is 0.19.3.",
    corrections=(FORWARD,),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(ID),
)
