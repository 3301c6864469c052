"""ZeRO-2 with a CPU optimizer adds a gradient of the step before to a parameter's first gradient of this one."""

from __future__ import annotations

from ds_gradfix.facts import Facts
from ds_gradfix.patches._accumulation import OFFLOAD, measure_offload
from ds_gradfix.registry import Effect, Patch, known_sources

ID = "zero2-offload-stale-gradient"


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 2 or not facts.offload_optimizer or facts.gradient_accumulation_steps == 1:
        return None
    return Effect(None, "a parameter that a step's first micro-batch does not use gets an old gradient besides")


PATCH = Patch(
    id=ID,
    title="ZeRO-2 with a CPU optimizer adds an earlier step's gradient where the first micro-batch has none",
    symptom="With offload_optimizer on the CPU and gradient accumulation, parameters that a step's first micro-batch"
    " does not use (an expert, a branch, a modality) are updated with gradients of earlier steps as well.",
    cause="What is accumulated on the CPU is never cleared. The first micro-batch writes over it, every further one"
    " adds to it, also where the first had no gradient to write.",
    fix="A parameter's first gradient of a step, in whichever micro-batch it comes, writes over what is there.",
    upstream=(),
    retire="When the oldest supported DeepSpeed has an upstream fix; none has it up to 0.19.8.",
    corrections=(OFFLOAD,),
    affects=_affects,
    measure=measure_offload,
    fingerprints=known_sources(ID),
)
