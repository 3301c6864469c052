"""One rank: jobs whose first step is audited, with patches in force or left out, and what the audit says of each.

A scenario gives ``ratios`` (of every finding, by what it is of), ``wrong`` (the findings that are), ``reason`` where the
audit could say nothing, ``kept_bytes``, ``traces`` of it that are left in the engine, the ``error`` that ended the job,
and the weights: ``moved`` since the start, and their ``bits``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import accumulation
import deepspeed
import torch
from accumulation import by_engine, network, one_after_another, settings, without_sync
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from half_experts import Routed
from scenario import forget_groups, on_stock, play
from sparse_gradients import Table
from torch import Tensor, nn

import ds_gradfix
from ds_gradfix import audit
from ds_gradfix.errors import GradfixError
from ds_gradfix.verify import _mpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NO_PATCH = {"only": []}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
BF16 = {"bf16": {"enabled": True}}
Drive = Callable[[Any], None]


def engine_for(
    net: nn.Module, config: dict[str, Any], section: dict[str, Any], params: Any = None, mpu: Any = None
) -> Any:
    """The audit is on unless the section says otherwise."""
    optimizer = torch.optim.SGD(net.parameters() if params is None else params, lr=0.01)
    config = {**config, "ds_gradfix": {"audit": True, "self_check": "off", **section}}
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config, mpu=mpu)[0]


def audited(engine: Any, drive: Drive) -> dict[str, Any]:
    before, error = weights(engine), None
    try:
        drive(engine)
    except GradfixError as raised:
        error = str(raised)
    after = weights(engine)
    report = ds_gradfix.report(engine)["audit"] or {"reason": None, "findings": [], "kept_bytes": None}
    found = {
        "ratios": {finding["what"]: finding["ratio"] for finding in report["findings"]},
        "wrong": {finding["what"]: finding["words"] for finding in report["findings"] if not finding["right"]},
        "reason": report["reason"],
        "kept_bytes": report["kept_bytes"],
        "traces": traces(engine),
        "error": error,
        "moved": float((after - before).abs().max()),
        "bits": hashlib.sha256(after.numpy().tobytes()).hexdigest(),
    }
    engine.optimizer and engine.destroy()
    return found


def weights(engine: Any) -> Tensor:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
        return torch.cat([param.detach().float().flatten().clone() for param in params])


def traces(engine: Any) -> list[str]:
    hooked = [name for name, param in engine.module.named_parameters() if param._backward_hooks]
    basic = [str(hook) for hook in getattr(engine.optimizer, "_optimizer_step_pre_hooks", ())]
    return [name for name in vars(engine) if name in ("backward", "_take_model_step")] + hooked + basic


def job(
    stage: int,
    micros: int = 1,
    drive: Callable[..., None] = by_engine,
    sequence_parallel: int = 1,
    offload: bool = False,
    configured: int | None = None,
    steps: int = 1,
    width: int = 1,
    section: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A small network; ``width`` adds that many layers of no consequence."""
    net = network()
    net.extend(nn.Linear(accumulation.WIDTH, accumulation.WIDTH) for _ in range(width - 1))
    zero = more.pop("zero", {})
    config = settings(stage, micros if configured is None else configured, offload, **more)
    config["zero_optimization"].update(zero)
    mpu = _mpu.for_size(sequence_parallel, stage=stage)
    engine = engine_for(net, config, section or {}, mpu=mpu)

    def driven(engine: Any) -> None:
        for _ in range(steps):
            drive(engine, accumulation.plain, micros)

    return audited(engine, driven)


SCENARIOS: dict[str, Callable[[], Any]] = {}
for _stage in range(4):
    SCENARIOS |= {
        f"zero{_stage}": partial(job, _stage, 2, gradient_clipping=0.1),
        f"zero{_stage} bf16": partial(job, _stage, 2, **BF16),
        f"zero{_stage} fp16": partial(job, _stage, 2, **FP16),
        f"zero{_stage} sum": partial(job, _stage, gradient_allreduce_op="sum"),
    }
SCENARIOS |= {
    "zero2 one after another": partial(job, 2, 3, one_after_another, configured=1, section=NO_PATCH),
    "zero2 one after another accumulated": partial(job, 2, 2, one_after_another, configured=1, section=NO_PATCH),
    "zero3 shards": partial(job, 3, sequence_parallel=2),
    "zero3 shards, no patch": partial(job, 3, sequence_parallel=2, section=NO_PATCH),
    "zero0 fp16, no patch": partial(job, 0, section=NO_PATCH, **FP16),
}

if __name__ == "__main__":
    play({name: lambda run=run: None if on_stock() else run() for name, run in SCENARIOS.items()})
