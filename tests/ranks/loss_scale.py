"""One rank: fp16 jobs whose gradients are known, so that each step's update is the gradient that was taken.

The loss of a micro-batch is the inner product of the weights and this rank's numbers, SGD has a learning rate of one,
and all numbers are exact in fp16, scaled or not.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepspeed
import torch
from scenario import play
from torch import Tensor, nn

RANK = int(os.environ["RANK"])
SIZE = 6
FusedAdam: Any = importlib.import_module("deepspeed.runtime.engine").FusedAdam


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(SIZE - 2)), nn.Parameter(torch.zeros(2))

    def forward(self, numbers: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]) * numbers).sum()


class FlatSgd(FusedAdam):  # type: ignore[misc]
    """What DeepSpeed takes for FusedAdam, and so gives to FP16_Optimizer; but it is SGD, and runs on a CPU."""

    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": 1.0})

    def step(self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: Any = 1.0, **_: Any) -> None:  # noqa: E501
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if grads is None:
                    parameter.data -= parameter.grad
                else:
                    parameter.data -= grads[index][0].float() / scale
                    output_params[index][0].data.copy_(parameter.data)


def numbers(step: int, micro: int, rank: int = RANK) -> Tensor:
    """Of one micro-batch of a rank: multiples of 1/4 up to 4."""
    index = torch.arange(SIZE)
    return (((3 * step + 5 * micro + 7 * rank + index) % 16 + 1) / 4).half()


def job(stage: int, fused: bool = False, clip: float = 0.0, gas: int = 1, legacy: bool = False, **fp16: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} if stage else {},
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, **fp16},
    }
    if legacy:
        config["optimizer"] = {"type": "Adam", "legacy_fusion": True}
    net = Inner()
    optimizer = FlatSgd(net.parameters()) if fused or legacy else torch.optim.SGD(net.parameters(), lr=1.0)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def weights(engine: Any) -> Tensor:
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters()), enabled=engine.zero_optimization_stage() == 3):
        return torch.cat([parameter.detach().double().clone() for parameter in engine.module.parameters()])


def train(engine: Any, steps: int = 8, overflow_at: int = 5, first: int = 0) -> list[dict[str, Any]]:
    """Each step's update, its norm, whether it was skipped, and the loss scale behind it."""
    said = []
    for step in range(first, first + steps):
        before, skipped = weights(engine), engine.skipped_steps
        for micro in range(engine.gradient_accumulation_steps()):
            given = numbers(step, micro)
            if step == overflow_at and RANK == 1:
                given[SIZE - 1] = float("inf")
            engine.backward(engine(given))
            engine.step()
        norm = engine.get_global_grad_norm()
        said.append(
            {
                "update": (before - weights(engine)).tolist(),
                "norm": None if norm is None else float(norm),
                "skipped": engine.skipped_steps - skipped,
                "scale": float(engine.optimizer.loss_scale),
            }
        )
    return said


def resumed(stage: int) -> list[dict[str, Any]]:
    """Two steps, a checkpoint, and the rest in another engine."""
    engine = job(stage)
    said = train(engine, 2)
    with TemporaryDirectory() as own:
        folders: list[Any] = [own] * 2
        torch.distributed.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="here")
        engine.destroy()
        engine = job(stage)
        engine.load_checkpoint(folders[0], tag="here")
        torch.distributed.barrier()
        said += train(engine, 6, first=2)
        engine.destroy()
        assert Path(folders[0]).exists() or RANK
    return said


def trained(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    engine = job(*args, **kwargs)
    said = train(engine)
    engine.destroy()
    return said


def scaled() -> list[float]:
    """What engine.scale gives, and engine.backward returns, for a loss."""
    engine = job(0)
    loss = engine(numbers(0, 0)) + 3.0
    given = [float(engine.scale(loss))]
    engine._manual_backward_expected = False
    return [*given, float(engine.backward(loss))]


class Parted(Exception):
    """The ranks do not agree on an overflow: a step would hang, or part them."""


def flags() -> list[Any]:
    """Under ZeRO-1 only one rank's part of the gradients overflows: each rank's flag in a step, and what it does."""
    engine = job(1)
    given = numbers(0, 0)
    given[0] = float("inf")
    engine.backward(engine(given))
    optimizer, found = engine.optimizer, [None, None]
    check = optimizer.check_overflow

    def checked(*args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        torch.distributed.all_gather_object(found, bool(optimizer.overflow))
        if found[0] != found[1]:
            raise Parted

    optimizer.check_overflow = checked
    with suppress(Parted):
        engine.step()
    return [found[RANK], engine.skipped_steps, weights(engine).tolist()]


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"ZeRO-{stage}": partial(trained, stage) for stage in range(4)},
    "fused": partial(trained, 0, fused=True),
    "legacy": partial(trained, 0, legacy=True),
    **{f"ZeRO-{stage} clipped": partial(trained, stage, clip=2.0) for stage in range(4)},
    "fused clipped": partial(trained, 0, fused=True, clip=2.0),
    **{f"ZeRO-{stage} accumulated": partial(trained, stage, gas=2) for stage in (0, 2)},
    "fused accumulated": partial(trained, 0, fused=True, gas=2),
    **{f"ZeRO-{stage} static": partial(trained, stage, loss_scale=128.0) for stage in range(4)},
    "fused static": partial(trained, 0, fused=True, loss_scale=128.0),
    **{f"ZeRO-{stage} resumed": partial(resumed, stage) for stage in range(4)},
    "scaled": scaled,
    "flags": flags,
}

if __name__ == "__main__":
    play(SCENARIOS)
