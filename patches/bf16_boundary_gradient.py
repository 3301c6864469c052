"""Upstream #7985: BF16_Optimizer adds the last micro-batch behind the reduction, 0.18.3 to 0.18.9 (fixed upstream)."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0
from ds_gradfix.patches._bf16 import EPILOGUE, accumulates_in_fp32
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "bf16-boundary-gradient"


def _affects(facts: Facts) -> Effect | None:
    if not accumulates_in_fp32(facts) or facts.immediate_grad_update or facts.pipeline_stages > 1:
        return None
    return Effect(
        None,
        "the last micro-batch of a step is added to the fp32 gradients behind their reduction, so that each rank steps"
        " on another gradient",
    )


PATCH = Patch(
    id=ID,
    title="BF16_Optimizer reduces its gradients before the last micro-batch is in them",
    symptom='In 0.18.3 to 0.18.9 bf16 with "grad_accum_dtype": "fp32" under ZeRO-1 steps on different gradients on each'
    " rank: the last micro-batch's are the rank's own (without accumulation, all of them).",
    cause="At the end of a backward pass the all-reduce comes first, and what adds the bf16 gradients to the fp32 ones"
    " behind it.",
    fix="The gradients are added first and then reduced, as from 0.19.0 on.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7985",),
    retire="When the oldest supported DeepSpeed is 0.19.0.",
    corrections=(EPILOGUE,),
    affects=_affects,
    measure=_zero0.measure,  # the order itself shows in a backward pass only, which is the user's
    fingerprints=known_sources(ID),
)
