"""Upstream #8489: an embedding row whose gradient's elements sum to zero is dropped."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._sparse import ROWS, measure_rows
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "sparse-rows-of-sum-zero"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or not facts.compressed_embeddings:
        return None
    return Effect(None, "embedding rows whose gradient's elements sum to zero are left out of the reduction")


PATCH = Patch(
    id=ID,
    title="Embedding rows whose gradient sums to zero are dropped",
    symptom="With sparse_gradients, ZeRO stage 0 and a dense embedding, rows such as [1, -1] get no update.",
    cause="A row counts as empty if its elements' sum is zero.",
    fix="A row counts as empty if all its elements are zero.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8489",
        "https://github.com/deepspeedai/DeepSpeed/pull/8504",
    ),
    retire="When the oldest supported DeepSpeed is 0.19.8, which has no sparse_gradients.",
    corrections=(ROWS,),
    affects=_affects,
    measure=measure_rows,
    fingerprints=known_sources(ID),
)
