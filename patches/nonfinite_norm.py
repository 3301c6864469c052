"""Upstream #5242, #8614: a non-finite norm becomes a finite one, and the step is taken with it."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._bf16 import steps_in_bf16_optimizer
from ds_gradfix.patches._step import BF16_STEP, NONFINITE, ZERO3_STEP, ZERO12_STEP
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.dtype == "fp16":
        return None  # looks at every element, in every release
    if steps_in_bf16_optimizer(facts):
        return Effect(None, "a gradient of zeros, or one that is not finite, ends the job or flips the update's sign")
    if facts.zero_stage == 0 or facts.own_step:
        return None
    return Effect(None, "a gradient that is not finite is reported as a norm of 1 or NaN, and goes into the weights")


def _measure(engine: Any) -> list[Measurement]:
    """What is corrected is whether a step goes on, and a step can't be taken back."""
    return []


PATCH = Patch(
    id=NONFINITE,
    title="Non-finite gradients in bf16 and fp32 are taken for a norm of 1",
    symptom='Under ZeRO 1, 2 and 3 a bf16 or fp32 job that meets an inf or NaN logs "grad_norm: 1.0" (NaN up to 0.16.5)'
    " from then on, and its weights are NaN. With bf16, fp32 accumulation and ZeRO-1 it stops at an assertion, which"
    " a gradient of zeros fails too; under python -O the update's sign is flipped instead.",
    cause="The norm of a group of parameters says by -1 that it is not finite, and is then squared and added to the"
    " others'; nothing looks at the elements, except where bf16.check_grad_overflow is on.",
    fix="As in 0.19.8: the norm is taken before it is decided whether the step goes on, and one that is not finite"
    ' skips the step on every rank and is reported as inf. "check_grad_overflow": false is honoured under ZeRO 1 and 2,'
    " as there: the step is taken, and the norm is inf.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/5242",
        "https://github.com/deepspeedai/DeepSpeed/issues/5347",
        "https://github.com/deepspeedai/DeepSpeed/pull/8035",
        "https://github.com/deepspeedai/DeepSpeed/pull/8614",
    ),
    retire="When the oldest supported DeepSpeed is 0.19.8.",
    corrections=(ZERO12_STEP, ZERO3_STEP, BF16_STEP),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(NONFINITE),
)
