"""``sequence_parallel_reduction: "mean"``: the other convention, for losses that yield S times a shard's part."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0, _zero3, _zero12
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources

ID = "sequence-parallel-mean"


def _affects(facts: Facts) -> Effect | None:
    shards = facts.sequence_parallel_size
    if shards == 1 or facts.reduction_op != "mean" or facts.convention != "mean":
        return None
    if facts.zero_stage == 3 and (facts.reduce_scatter or not facts.contiguous_gradients):
        return None  # ZeRO-3's scattered reduction averages over shards as it is
    where = "of parameters that fit reduce_bucket_size " if facts.zero_stage == 3 else ""
    return Effect(
        shards, f"ZeRO-{facts.zero_stage} gradients {where}come out {shards}x too large for a loss that wants the mean"
    )


def _measure(engine: Any) -> list[Measurement]:
    stage = engine._ds_gradfix.facts.zero_stage
    if stage == 3:
        return _zero3.measure_contiguous(engine)
    if stage in (1, 2) and hasattr(engine.optimizer, "gradient_reduction_w_predivide"):
        return _zero12.measure(engine)
    return _zero0.measure(engine)


PATCH = Patch(
    id=ID,
    title="A mean over sequence shards as well, on every ZeRO stage",
    symptom="With sequence parallelism of S and a loss that is the mean of the rank's own shard, or combined over"
    " shards by a differentiable all-gather, ZeRO 0-2 gradients are S times too large; ZeRO-3's are right.",
    cause="DeepSpeed sums over sequence shards in ZeRO 0-2 and in ZeRO-3's contiguous reduction, whatever the loss"
    " yields.",
    fix='Where the convention is "mean", every reduction divides by the whole group.',
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/5248",),
    retire="When DeepSpeed has one convention on every stage, and a setting for the other.",
    corrections=(
        _zero0.NON_EXPERT,
        _zero0.EXPERT,
        _zero12.AVERAGE_TENSOR,
        _zero12.BUCKET,
        _zero12.PREDIVIDE,
        _zero3.CONTIGUOUS,
    ),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
