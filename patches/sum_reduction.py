"""``gradient_allreduce_op: "sum"`` under ZeRO 0, 1 and 2, which is native from 0.19.6 on (upstream #8232)."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0, _zero12
from ds_gradfix.patches._sum import option
from ds_gradfix.registry import Effect, Measurement, Patch, known_sources

ID = "sum-reduction"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage == 3 or facts.reduction_op != "sum":
        return None
    return Effect(1 / facts.group_size, "gradient_allreduce_op is sum, and DeepSpeed averages all the same")


def _measure(engine: Any) -> list[Measurement]:
    if engine._ds_gradfix.facts.zero_stage in (1, 2) and hasattr(engine.optimizer, "gradient_reduction_w_predivide"):
        return _zero12.measure(engine)
    return _zero0.measure(engine)


PATCH = Patch(
    id=ID,
    title="Summed gradients under ZeRO 0, 1 and 2 in releases that ignore the key",
    symptom='"gradient_allreduce_op": "sum" is accepted without a word before 0.19.6, and gradients are averaged.',
    cause="The key does not exist there; the reductions divide by the number of data-parallel replicas.",
    fix="The engine's reduction is told not to average, by the switch that it always had; those of ZeRO-1/2 sum, and"
    " nothing is divided anywhere on the way.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8232",
        "https://github.com/deepspeedai/DeepSpeed/issues/7107",
    ),
    retire="When the oldest supported DeepSpeed is 0.19.6.",
    corrections=(_zero0.DENSE_SUM, _zero0.SPARSE_SUM, _zero12.AVERAGE_TENSOR, _zero12.BUCKET, _zero12.PREDIVIDE),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
    option=option((0, 1, 2)),
)
