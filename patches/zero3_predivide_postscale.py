"""Upstream #8668: ZeRO-3 does not multiply back a gradient_predivide_factor equal to the group size."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero3 import CONTIGUOUS, PREDIVIDE_POSTSCALE, SCATTER, measure_both
from ds_gradfix.registry import Effect, Patch, known_sources


def _affects(facts: Facts) -> Effect | None:
    factor = facts.predivide_factor
    if facts.zero_stage != 3 or facts.reduction_op != "mean" or facts.prescale_gradients or factor == 1.0:
        return None
    # With reduce_scatter DeepSpeed refuses any factor but 1 under ZeRO-3.
    if facts.reduce_scatter or factor not in facts.all_group_sizes:
        return None
    return Effect(
        1 / factor,
        f"ZeRO-3 gradients come out {factor:g}x too small, because gradient_predivide_factor is the group size",
    )


PATCH = Patch(
    id=PREDIVIDE_POSTSCALE,
    title="ZeRO-3 skips the multiplication that undoes a pre-division by the group size",
    symptom="With gradient_predivide_factor equal to the number of ranks, ZeRO-3 gradients, norm and update are that"
    " many times too small.",
    cause="Both reductions divide by the factor before the collective and multiply it back behind it, except when the"
    " factor equals the group size; but the division by the group size happened besides.",
    fix="The factor is divided before the reduction and multiplied back behind it, whatever it is, in one pre- and one"
    " post-scale.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/8668",),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(SCATTER, CONTIGUOUS),
    affects=_affects,
    measure=measure_both,
    fingerprints=known_sources(PREDIVIDE_POSTSCALE),
)
