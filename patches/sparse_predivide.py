"""The reduction of sparse gradients multiplies by gradient_predivide_factor and never divided by it."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._sparse import DIVISOR, measure_divisor
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "sparse-predivide"


def _affects(facts: Facts) -> Effect | None:
    factor = facts.predivide_factor
    if facts.zero_stage != 0 or facts.reduction_op != "mean" or facts.prescale_gradients or factor == 1.0:
        return None
    if not (facts.sparse_gradients or facts.compressed_embeddings):
        return None
    return Effect(factor, f"sparse embedding gradients come out {factor:g}x too large: they were never pre-divided")


PATCH = Patch(
    id=ID,
    title="Sparse gradients are multiplied by gradient_predivide_factor without having been divided by it",
    symptom="With gradient_predivide_factor set, the gradient of an nn.Embedding(sparse=True), or of any embedding"
    " under sparse_gradients, is that many times too large; all other gradients are right.",
    cause="A dense gradient is divided by the factor in front of its all-reduce and multiplied back behind it. Sparse"
    " ones are gathered and not added up: only the multiplication was written for them.",
    fix="They are divided by the number of replicas, whatever the factor is: a gather has nothing to pre-divide for.",
    upstream=(),
    retire="When the oldest supported DeepSpeed has an upstream fix; none has it up to 0.19.8.",
    corrections=(DIVISOR,),
    affects=_affects,
    measure=measure_divisor,
    fingerprints=known_sources(ID),
)
