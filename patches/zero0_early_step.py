"""Half precision without ZeRO: the optimizer has taken a step before the first one."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Target, known_sources

ID = "zero0-early-step"
WRAPPERS = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
TORCH = "torch.optim."


def _initialized(engagement: Any, original: Any, wrapper: Any) -> Any:
    """Making the optimizer's states by a step with gradients of zero. torch's optimizers make theirs when they step."""
    if type(wrapper.optimizer).__module__.startswith(TORCH):
        return None
    return original(wrapper)


INITIALIZED = tuple(
    Replace(Target(f"deepspeed.runtime.fp16.{module}", f"{name}.initialize_optimizer_states"), _initialized, early=True)
    for module, name in zip(("fused_optimizer", "unfused_optimizer"), WRAPPERS, strict=True)
)


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.wrapper not in WRAPPERS or not facts.basic_optimizer.startswith(TORCH):
        return None
    return Effect(
        None,
        "the optimizer takes a step with gradients of zero while the engine is made: Adam's bias correction is one step"
        " ahead (its first update 1.34x too small), and weight decay is applied once more",
    )


def _measure(engine: Any) -> list[Measurement]:
    """Not a gradient: whether the optimizer counts a step already."""
    states = engine.optimizer.optimizer.state.values()
    steps = max((float(state["step"]) for state in states if "step" in state), default=0.0)
    return [Measurement("state of the optimizer before its first step", 1.0 + steps, steps, 0.0)]


PATCH = Patch(
    id=ID,
    title="Half precision without ZeRO takes an optimizer step of its own before training",
    symptom="With fp16 or bf16 without ZeRO and a torch.optim Adam or AdamW, the first updates are too small (1.34x,"
    " then 1.17x, ...) and the weights have decayed once more than the job has stepped.",
    cause="The wrappers make the optimizer's states by a step with gradients of zero, which the optimizer counts.",
    fix="That step is left out for torch's optimizers, which make their states when they first step.",
    upstream=(),
    retire="When the oldest supported DeepSpeed does not step there; all do up to 0.19.8.",
    corrections=INITIALIZED,
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
