"""Upstream #8823: ZeRO-1/2 leaves most folded experts out of the clipping norm."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._zero12_norm import CLASS, MODULE, NORM, measure_norm
from ds_gradfix.registry import Effect, Patch, Target, known_sources

ID = "folded-expert-norm"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage not in (1, 2) or not facts.folded_experts:
        return None
    return Effect(
        None,
        f"of {facts.model_parallel_size} tensor-parallel peers only the first one's routed experts count in the"
        " gradient norm, so that clipping leaves the gradients too large",
    )


PATCH = Patch(
    id=ID,
    title="Clipping norm of experts folded over tensor-parallel ranks, under ZeRO-1 and ZeRO-2",
    symptom="With AutoEP and AutoTP together and ZeRO-1 or ZeRO-2 the reported gradient norm is too small and"
    " gradients are clipped too little; the gradients themselves are right, and so is ZeRO-3.",
    cause="A parameter that is not tensor-parallel is counted on tensor-parallel rank 0 only, as a copy on the others;"
    " folded experts are different ones on each rank. What is left is then averaged.",
    fix="A group of folded experts is summed over its expert-data-parallel and its expert-parallel group, and not"
    " averaged; all other groups go through DeepSpeed's own functions. A norm that is not finite stays so.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8823",),
    retire="When the oldest supported DeepSpeed has #8823; no release up to 0.19.8 does.",
    corrections=(NORM,),
    affects=_affects,
    measure=measure_norm,
    fingerprints=known_sources(ID),
    needs=(Target(MODULE, f"{CLASS}.configure_autoep_folding_tp_gradient_reduction"),),
)
