"""Upstream #7967: ZeRO-2 with a CPU optimizer keeps the first and the last micro-batch only."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import OFFLOAD, measure_offload
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero2-offload-accumulation"


def _affects(facts: Facts) -> Effect | None:
    # ZeRO-1 comes here with the whole step's gradient, and must not find an earlier one.
    if facts.zero_stage != 2 or not facts.offload_optimizer or facts.gradient_accumulation_steps < 3:
        return None
    steps = facts.gradient_accumulation_steps
    return Effect(None, f"of {steps} micro-batches ZeRO-2 with a CPU optimizer keeps the first and the last only")


PATCH = Patch(
    id=ID,
    title="ZeRO-2 with a CPU optimizer and three or more micro-batches keeps the first and the last only",
    symptom="With offload_optimizer on the CPU and gradient_accumulation_steps of 3 or more, ZeRO-2's gradient norm is"
    " below ZeRO-3's, and its loss falls more slowly.",
    cause="Each micro-batch's gradient is added to what is kept on the CPU, but the sum is not copied back there: only"
    " the first gradient ever is.",
    fix="The sum is copied back on every micro-batch.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7967",),
    retire="When the oldest supported DeepSpeed is 0.19.0.",
    corrections=(OFFLOAD,),
    affects=_affects,
    measure=measure_offload,
    fingerprints=known_sources(ID),
)
