"""Upstream #8687: ZeRO-1/2 forget the sequence-parallel size behind a pre-division by the group size."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero12 import PREDIVIDE, measure
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero12-predivide-postscale"


def _affects(facts: Facts) -> Effect | None:
    shards = facts.sequence_parallel_size
    if facts.zero_stage not in (1, 2) or facts.reduction_op != "mean" or facts.convention != "sum" or shards == 1:
        return None
    if facts.reduce_scatter or facts.prescale_gradients or facts.predivide_factor != facts.group_size:
        return None
    return Effect(
        1 / shards,
        f"ZeRO-{facts.zero_stage} gradients come out {shards}x too small, because gradient_predivide_factor is the"
        " group size",
    )


PATCH = Patch(
    id=ID,
    title="ZeRO-1/2 skip the multiplication behind a pre-division by the group size, and sequence shards with it",
    symptom="With sequence parallelism of S, reduce_scatter off and gradient_predivide_factor equal to the number of"
    " ranks, ZeRO-1/2 gradients, norm and update are S times too small; with any other factor they are right.",
    cause="Behind the all-reduce the gradient is multiplied by factor * S / group size, except when the factor equals"
    " the group size: right for one shard, and S times too small for S.",
    fix="The factor is divided before the reduction, and what is left of S / group size is multiplied behind it,"
    " whatever the factor is.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8687",
        "https://github.com/deepspeedai/DeepSpeed/issues/8668",
    ),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(PREDIVIDE,),
    affects=_affects,
    measure=measure,
    fingerprints=known_sources(ID),
)
