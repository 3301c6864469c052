"""Upstream #7837: bf16 without ZeRO, 0.17.6 to 0.18.5: gradients that stay, and a loss scale (fixed upstream)."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0
from ds_gradfix.patches._bf16 import CLASS, CLEARED, MODULE, UNSCALED, accumulates_in_fp32, measure_scale
from ds_gradfix.registry import Effect, Measurement, Patch, Target, known_sources

ID = "bf16-zero0-state"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype != "bf16" or facts.pipeline_stages > 1 or accumulates_in_fp32(facts):
        return None
    return Effect(
        None,
        "bf16 gradients without ZeRO are kept from step to step, and the optimizer has a loss scale that the norm (from"
        " 0.18.3 on the update too) carries",
    )


def _measure(engine: Any) -> list[Measurement]:
    """That gradients are cleared shows in the first step only, which is the user's."""
    return [measure_scale(engine), *_zero0.measure(engine)]


PATCH = Patch(
    id=ID,
    title="bf16 without ZeRO keeps the gradients of earlier steps, and a loss scale",
    symptom="In 0.17.6 to 0.18.5 bf16 without ZeRO trains on the sum of all earlier gradients and reports a norm that"
    " is 65536 times too large; from 0.18.3 on the weights do not move.",
    cause="Such a job came to the fp16 optimizer, with fp16's dynamic loss scale. What clears gradients behind a step"
    " leaves bf16 without ZeRO out, as the optimizer it had before cleared its own; from 0.18.3 on the loss is not"
    " scaled any more, while gradients are still divided.",
    fix="The optimizer gets a static loss scale of one, and its gradients are cleared behind each step: as from 0.18.6"
    " on.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
    ),
    retire="When the oldest supported DeepSpeed is 0.18.6.",
    corrections=(UNSCALED, CLEARED),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
    needs=(Target(MODULE, f"{CLASS}.is_sanity_checks_enabled"),),  # came with 0.17.6, as the defect did
)
