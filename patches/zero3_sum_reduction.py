"""``gradient_allreduce_op: "sum"`` under ZeRO-3, which no release has (upstream #8232 refuses it)."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._sum import option
from ds_gradfix.patches._zero3 import CONTIGUOUS, SCATTER, measure_both
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero3-sum-reduction"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 3 or facts.reduction_op != "sum":
        return None
    return Effect(
        None, "gradient_allreduce_op is sum, and ZeRO-3 averages (or, from 0.19.6 on, refuses the configuration)"
    )


PATCH = Patch(
    id=ID,
    title="Summed gradients under ZeRO-3",
    symptom='"gradient_allreduce_op": "sum" is refused under ZeRO-3 from 0.19.6 on, and silently a mean before.',
    cause="The mode never reaches ZeRO-3's optimizer, and both its reductions divide by the group size.",
    fix="Both reductions sum, and nothing is divided anywhere on the way; DeepSpeed's refusal is not reached.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8232",
        "https://github.com/deepspeedai/DeepSpeed/issues/7107",
    ),
    retire="When the oldest supported DeepSpeed sums under ZeRO-3 by itself; none does up to 0.19.8.",
    corrections=(SCATTER, CONTIGUOUS),
    affects=_affects,
    measure=measure_both,
    fingerprints=known_sources(ID),
    option=option((3,)),
)
