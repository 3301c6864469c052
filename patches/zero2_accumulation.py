"""Upstream #7718: ZeRO-2 keeps the gradient of the last micro-batch only."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import EPILOGUE, measure_nothing
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero2-accumulation"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 2 or facts.offload_optimizer:
        return None
    if facts.gradient_accumulation_steps > 1:
        return Effect(None, "of each step's micro-batches ZeRO-2 keeps the gradient of the last one only")
    return Effect(None, "if backward() runs several times before a step, ZeRO-2 keeps the last gradient only or raises")


PATCH = Patch(
    id=ID,
    title="ZeRO-2 with gradient accumulation keeps the last micro-batch only",
    symptom="With gradient_accumulation_steps above 1, ZeRO-2's gradient norm is about that many times too small and"
    " its loss curve differs from ZeRO-1's: all micro-batches of a step but the last have no effect.",
    cause="At the end of each backward the optimizer looks into the wrong table, that of the finished gradients, to see"
    " whether it is accumulating already, and starts anew every time.",
    fix="It looks into the table of the gradients being accumulated. A backward that follows the last micro-batch is"
    " added to what waits for the step, as before 0.17.6.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        "https://github.com/deepspeedai/DeepSpeed/pull/7665",
    ),
    retire="When the oldest supported DeepSpeed is 0.18.3.",
    corrections=(EPILOGUE,),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(ID),
)
