"""Upstream #7724: ``backward(scale_wrt_gas=False)`` is divided all the same."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import BACKWARD_AT_ROOT, HOOK_OBEYS, measure_nothing
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "accumulation-scale-ignored"


def _affects(facts: Facts) -> Effect | None:
    steps = facts.gradient_accumulation_steps
    if facts.pipeline or steps == 1:
        return None
    return Effect(None, f"gradients of backward(scale_wrt_gas=False) come out {steps}x too small: divided twice")


PATCH = Patch(
    id=ID,
    title="backward(scale_wrt_gas=False) is divided by gradient_accumulation_steps all the same",
    symptom="With Transformers' Trainer or Accelerate, which divide by the micro-batches themselves, gradient and norm"
    " are too small by gradient_accumulation_steps.",
    cause="Hooks on the outputs of engine.forward divide every gradient, and are not told what backward() was asked"
    " for.",
    fix="A loss is divided where backward() begins, if it is to be, and the hooks leave its gradient alone.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7724",),
    retire="When the oldest supported DeepSpeed is 0.18.4.",
    corrections=(BACKWARD_AT_ROOT, HOOK_OBEYS),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(ID),
)
