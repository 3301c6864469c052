"""ZeRO-1/2 copy a reduced bucket of experts back on the wrong rank, up to 0.19.7 (fixed upstream)."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero12 import COPY, measure_copy
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero12-expert-copy"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage not in (1, 2) or not facts.experts or facts.expert_parallel_size == 1:
        return None
    if not facts.reduce_scatter or facts.multi_rank_buckets:
        return None
    return Effect(
        None,
        f"ZeRO-{facts.zero_stage} gradients of routed experts that do not lie side by side in a bucket are reduced to"
        " one rank and kept by another",
    )


PATCH = Patch(
    id=ID,
    title="ZeRO-1/2 copy a reduced bucket of experts back on the wrong rank",
    symptom="Up to 0.19.7, with expert parallelism and use_multi_rank_bucket_allreduce off, ranks step on their"
    " own gradients of some routed experts under ZeRO-2 instead of the reduced ones.",
    cause="The destination of the reduction is a rank of the group of an expert's replicas, and is compared with the"
    " own rank in the data-parallel group.",
    fix="The own rank is taken in the group that is reduced over, as from 0.19.8 on.",
    upstream=(),
    retire="When the oldest supported DeepSpeed is 0.19.8.",
    corrections=(COPY,),
    affects=_affects,
    measure=measure_copy,
    fingerprints=known_sources(ID),
)
