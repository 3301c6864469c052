"""Upstream #8692: ZeRO-3's scattered reduction forgets the sequence-parallel size."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero3 import SCATTER, SCATTER_SCALE, measure_scatter
from ds_gradfix.registry import Effect, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 3 or facts.sequence_parallel_size == 1:
        return None
    if facts.reduction_op != "mean" or facts.convention != "sum":
        return None
    shards = facts.sequence_parallel_size
    every = facts.reduce_scatter or not facts.contiguous_gradients
    if every:
        return Effect(1 / shards, f"ZeRO-3 gradients come out {shards}x too small")
    if facts.largest_parameter is None or facts.largest_parameter > facts.reduce_bucket_size:
        return Effect(
            1 / shards,
            f"ZeRO-3 gradients of parameters with more than {facts.reduce_bucket_size:,} elements"
            f" (reduce_bucket_size) come out {shards}x too small, those of the others right",
        )
    return None


PATCH = Patch(
    id=SCATTER_SCALE,
    title="ZeRO-3's scattered reduction averages over sequence shards",
    symptom="With sequence parallelism of S, ZeRO-3 gradients, norm and update are S times smaller than those of"
    " ZeRO 0-2; or, in one model, only those of parameters larger than reduce_bucket_size.",
    cause="__avg_scatter_grads divides by the whole partition group. Every other reduction divides by the number of"
    " data-parallel replicas, and sums over sequence shards.",
    fix="The reduced partition is scaled once, by sequence_parallel_size / group size.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/8692",),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(SCATTER,),
    affects=_affects,
    measure=measure_scatter,
    fingerprints=known_sources(SCATTER_SCALE),
)
