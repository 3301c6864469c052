"""Upstream #8393: fp16 without ZeRO, where nothing multiplies the loss by the loss scale."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches._step import LOSS_SCALE
from ds_gradfix.registry import Effect, Measurement, Patch, Steer, Target, known_sources

MODULE = "deepspeed.runtime.engine"
CLASS = "DeepSpeedEngine"


class LossScaler:
    """What the engine asks for a scaled loss: it has a place for torch's GradScaler, and fp16 without ZeRO has nobody
    there. The optimizer's step sees to the rest by itself."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def scale(self, loss: Any) -> Any:
        return loss.float() * self._optimizer.loss_scale

    def unscale_(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        pass


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage != 0 or facts.dtype != "fp16":
        return None
    return Effect(None, "without ZeRO the fp16 loss is never scaled, but gradients are divided by its scale")


def _measure(engine: Any) -> list[Measurement]:
    """A known loss through the engine's own scaling."""
    import torch

    loss = torch.full((), 3.0, requires_grad=True) * 1.0
    expected = engine._manual_backward_expected
    try:
        ratio = float(engine.scale(loss)) / (3.0 * float(engine.optimizer.loss_scale))
    finally:
        engine._manual_backward_expected = expected
    return [Measurement("engine's scaling of the loss", ratio, abs(ratio - 1.0), 1e-6)]


_SCALER = {"torch_autocast_z0_gradscaler": LossScaler}

PATCH = Patch(
    id=LOSS_SCALE,
    title="fp16 without ZeRO: the loss is never multiplied by the loss scale",
    symptom="From 0.18.3 on fp16 jobs with ZeRO-0 stall, without a message: updates are too small by the loss scale,"
    " 65536 times at its usual start.",
    cause="engine.backward and engine.scale scale the loss for ZeRO's optimizers only. The fp16 optimizers without ZeRO"
    " divide their gradients by the loss scale all the same.",
    fix="The engine finds a loss scaler where it looks for torch's. What engine.backward returns stays unscaled.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8393",),
    retire="When the oldest supported DeepSpeed has the upstream fix; none has it up to 0.19.8.",
    corrections=(
        Steer(Target(MODULE, f"{CLASS}.backward"), _SCALER),
        Steer(Target(MODULE, f"{CLASS}.scale"), _SCALER),
        Steer(Target(MODULE, f"{CLASS}._take_model_step"), {}),  # it asks the scaler too: its source must be known
    ),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(LOSS_SCALE),
    needs=(Target(MODULE, f"{CLASS}.scale"),),  # before it came in the optimizer scaled the loss, in its backward
)
