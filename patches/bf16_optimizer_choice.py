"""Upstream #7788: bf16 with fp32 accumulation gets the wrong optimizer, 0.17.6 to 0.18.4 (fixed upstream)."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0
from ds_gradfix.patches._bf16 import AS_MEANT, steps_in_bf16_optimizer, measure_scale
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources

ID = "bf16-optimizer-choice"


def _affects(facts: Facts) -> Effect | None:
    if not steps_in_bf16_optimizer(facts):
        return None
    return Effect(
        None,
        "the bf16 job gets fp16's optimizer, with a loss scale and without fp32 accumulation (and ZeRO-1), instead of"
        " its own",
    )


def _measure(engine: Any) -> list[Measurement]:
    return [measure_scale(engine), *_zero0.measure(engine)]


PATCH = Patch(
    id=ID,
    title="bf16 with fp32 accumulation under ZeRO-1, or in a pipeline, gets fp16's optimizer",
    symptom='In 0.17.6 to 0.18.4 "grad_accum_dtype": "fp32" with bf16 under ZeRO-1 partitions nothing, accumulates in'
    " bf16 and reports a norm that is 65536 times too large; from 0.18.3 on the weights do not move.",
    cause="Two kinds of optimizer are told apart by constants of the same value, and the wrong one is asked first.",
    fix="Where the job is one for BF16_Optimizer, that is what it gets, as from 0.18.5 on.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7788",),
    retire="When the oldest supported DeepSpeed is 0.18.5.",
    corrections=(AS_MEANT,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
