"""Upstream #7981: ZeRO-2 with a CPU optimizer keeps the last of several backward passes of a step only."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import BOUNDARY, OFFLOAD, measure_offload
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero2-offload-boundary"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 2 or not facts.offload_optimizer or facts.gradient_accumulation_steps > 1:
        return None
    return Effect(None, "with set_gradient_accumulation_boundary() ZeRO-2 keeps a step's last gradient only")


PATCH = Patch(
    id=ID,
    title="ZeRO-2 with a CPU optimizer and the caller's own accumulation keeps the last backward only",
    symptom="A loop that calls backward() several times for a step, with gradient_accumulation_steps of 1 and"
    " engine.set_gradient_accumulation_boundary(), learns from the last one only.",
    cause="Gradients are accumulated on the CPU only where gradient_accumulation_steps says that there are several.",
    fix="They are accumulated wherever a backward is not the only one of its step. A loop that does not call"
    " set_gradient_accumulation_boundary() still loses gradients: nothing tells the optimizer that more will follow.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7981",),
    retire="When the oldest supported DeepSpeed is 0.19.0.",
    corrections=(BOUNDARY, OFFLOAD),
    affects=_affects,
    measure=measure_offload,
    fingerprints=known_sources(ID),
)
