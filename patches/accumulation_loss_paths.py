"""Upstream #8224: the accumulation divisor depends on how a loss comes from the outputs of engine.forward."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import BACKWARD_AT_ROOT, HOOK_OBEYS, measure_nothing
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "accumulation-loss-paths"


def _affects(facts: Facts) -> Effect | None:
    steps = facts.gradient_accumulation_steps
    if steps == 1:
        return None
    return Effect(
        None,
        f"the gradient of a loss term that goes around engine.forward comes out {steps}x too large, and that of an"
        f" output which is fed back in {steps}x too small for each further pass",
    )


PATCH = Patch(
    id=ID,
    title="Loss terms around engine.forward are not divided by gradient_accumulation_steps",
    symptom="With gradient accumulation, a regulariser on parameters or a loss from engine.module(...) weighs"
    " gradient_accumulation_steps times too much; a model whose output is fed back in learns too little from the first"
    " pass.",
    cause="The division is done by hooks on the outputs of engine.forward: not at all for a path that meets none,"
    " several times for one that meets several.",
    fix="backward() divides the loss itself, once for all paths, and the hooks leave its gradient alone. A backward()"
    " of a tensor, without the engine, stays as it is.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8224",
        "https://github.com/deepspeedai/DeepSpeed/pull/8245",
    ),
    retire="When the oldest supported DeepSpeed is 0.19.6.",
    corrections=(BACKWARD_AT_ROOT, HOOK_OBEYS),
    affects=_affects,
    measure=measure_nothing,
    fingerprints=known_sources(ID),
)
