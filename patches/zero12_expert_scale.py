"""Upstream #6546: ZeRO-1/2 average an expert over the ranks that hold it, up to 0.15.3 (fixed upstream)."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero12 import AVERAGE_TENSOR, EXPERT_SCALE, measure_expert_average
from ds_gradfix.registry import Effect, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    size = facts.expert_parallel_size
    if facts.zero_stage not in (1, 2) or not facts.experts or size == 1:
        return None
    if facts.reduction_op != "mean" or not facts.reduce_scatter or not facts.contiguous_gradients:
        return None
    return Effect(size, f"ZeRO-{facts.zero_stage} gradients of routed experts come out {size}x too large")


PATCH = Patch(
    id=EXPERT_SCALE,
    title="ZeRO-1/2 average a routed expert over the ranks that hold it only",
    symptom="Up to 0.15.3, with expert parallelism of E, the gradients of routed experts under ZeRO-1/2 are E times too"
    " large, and so is their part in the norm.",
    cause="A bucket with experts divides each parameter by the group it is reduced over. An expert's group is E times"
    " smaller, while each replica has seen the tokens of E ranks.",
    fix="Every parameter is averaged over the whole data-parallel group, as from 0.15.4 on.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/6546",
        "https://github.com/deepspeedai/DeepSpeed/issues/6545",
        "https://github.com/deepspeedai/DeepSpeed/issues/5618",
    ),
    retire="When the oldest supported DeepSpeed is 0.15.4.",
    corrections=(AVERAGE_TENSOR,),
    affects=_affects,
    measure=measure_expert_average,
    fingerprints=known_sources(EXPERT_SCALE),
)
