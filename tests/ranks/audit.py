"""One rank: jobs whose first step is audited, with patches in force or left out, and what the audit says of each.

A scenario gives ``ratios`` and ``errors`` (of every finding, by what it is of), ``wrong`` (the findings that are),
``reason`` where the audit could say nothing, ``kept_bytes``, ``traces`` of it that are left in the engine, the lines
that were ``said`` while the job ran, the ``error`` that ended it, and of the weights how far they have ``moved``, their
``bits``, and, for some jobs of one step without clipping, the ratio of the ``update`` to the right one, computed here
in float64 without DeepSpeed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import accumulation
import deepspeed
import torch
from accumulation import by_engine, network, settings, without_sync
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from half_experts import Routed
from scenario import forget_groups, on_stock, play
from sparse_gradients import Table
from torch import Tensor, nn

import ds_gradfix
from ds_gradfix.audit import attach
from ds_gradfix.engine import AUDIT
from ds_gradfix.errors import GradfixError
from ds_gradfix.verify import _mpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NO_PATCH = {"only": []}
RATE = 0.01
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
BF16 = {"bf16": {"enabled": True}}
Drive = Callable[[Any], None]


said: list[str] = []
"""Every line of an audit so far."""


def _hear() -> None:
    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "audit of the first step" in record.getMessage():
                said.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("ds_gradfix").addHandler(Hearing())


def engine_for(
    net: nn.Module, config: dict[str, Any], section: dict[str, Any], params: Any = None, mpu: Any = None
) -> Any:
    """The audit is on unless the section says otherwise."""
    optimizer = torch.optim.SGD(net.parameters() if params is None else params, lr=RATE)
    config = {**config, "ds_gradfix": {"audit": True, "self_check": "off", **section}}
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config, mpu=mpu)[0]


def audited(engine: Any, drive: Drive, right: Tensor | None = None) -> dict[str, Any]:
    before, error, start = weights(engine), None, len(said)
    try:
        drive(engine)
    except GradfixError as raised:
        error = str(raised)
    after = weights(engine)
    report = ds_gradfix.report(engine)["audit"] or {"reason": None, "findings": [], "kept_bytes": None}
    found = {
        "errors": {finding["what"]: finding["error"] for finding in report["findings"]},
        "ratios": {finding["what"]: finding["ratio"] for finding in report["findings"]},
        "wrong": {finding["what"]: finding["words"] for finding in report["findings"] if not finding["right"]},
        "reason": report["reason"],
        "kept_bytes": report["kept_bytes"],
        "traces": traces(engine),
        "said": said[start:],
        "error": error,
        "moved": float((after - before).abs().max()),
        "update": None if right is None else float((before - after).double() @ right / (right @ right) / RATE),
        "bits": hashlib.sha256(after.numpy().tobytes()).hexdigest(),
    }
    if engine.optimizer:
        engine.destroy()
        engine.optimizer = None  # ds-gradfix coming on late must not take it for one that still trains
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
    more_layers: int = 0,
    losses: int = 0,
    section: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A small network, or one of ``more_layers`` pairs of larger ones. ``losses`` is over how many of a rank the update
    shall be compared."""
    net = network()
    sizes = [accumulation.WIDTH, *[64, accumulation.WIDTH] * more_layers]
    net.extend(nn.Linear(*size) for size in zip(sizes, sizes[1:]))
    zero = more.pop("zero", {})
    config = settings(stage, micros if configured is None else configured, offload, **more)
    config["zero_optimization"].update(zero)
    mpu = _mpu.for_size(sequence_parallel, stage=stage)
    engine = engine_for(net, config, section or {}, mpu=mpu)

    right = None
    if losses:
        gradients = accumulation.expected(network(), accumulation.plain, losses, RANKS)
        right = torch.cat([gradient.flatten() for gradient in gradients.values()]) * losses / micros

    def driven(engine: Any) -> None:
        for _ in range(steps):
            drive(engine, accumulation.plain, micros)

    return audited(engine, driven, right)


def overflowing(engine: Any, loss: Any, micros: int) -> None:
    """A step that is skipped, since one rank's gradients are too large, then one that is not."""
    for micro in range(micros):
        engine.backward(loss(engine, RANK, micro).float() * (1e8 if RANK else 1.0))
        engine.step()
    assert engine.skipped_steps == 1
    by_engine(engine, loss, micros)


def twice_at_the_boundary(engine: Any, loss: Any, micros: int) -> None:
    for micro in range(micros):
        engine.backward(loss(engine, RANK, micro))
        if micro == micros - 1:
            engine.backward(loss(engine, RANK, micro + 1))
        engine.step()


def by_loss(engine: Any, loss: Any, micros: int) -> None:
    for micro in range(micros):
        loss(engine, RANK, micro).backward()
        engine.step()


def rows(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "steps_per_print": 1_000_000, **more}

    def driven(engine: Any) -> None:
        engine.backward(engine(RANK, False))
        engine.step()

    return audited(engine_for(Table(True), config, section), driven)


def experts(stage: int, section: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A layer with two routed experts, one on each of two ranks, or each on two of four."""
    forget_groups()
    torch.manual_seed(RANK % 2)
    net = Routed()
    groups: Any = {"params": list(net.parameters()), "name": "all"}
    config = settings(stage, 2, False, gradient_clipping=0.01, **more)
    params = split_params_into_different_moe_groups_for_optimizer(groups)
    engine = engine_for(net, config, section, params)

    def driven(engine: Any) -> None:
        for micro in range(2):
            draw = torch.Generator().manual_seed(7 * RANK + micro)
            inputs = torch.randn(8, 4, generator=draw).to(next(net.parameters()).dtype)
            engine.backward(engine(inputs))
            engine.step()

    return audited(engine, driven)


def pipeline(stage: int) -> dict[str, Any]:
    forget_groups()
    layers = [layer for _ in range(2) for layer in network()]
    module = PipelineModule(layers, num_stages=2, loss_fn=accumulation.mean_square)
    engine = engine_for(module, settings(stage, 4, False), {})
    replica = engine.grid.get_data_parallel_rank()
    return audited(engine, lambda engine: engine.train_batch(iter(accumulation.batch(replica, i) for i in range(4))))


def without_optimizer() -> dict[str, Any]:
    config = {**settings(0, 1, False), "ds_gradfix": {"audit": True, "self_check": "off"}}
    return audited(deepspeed.initialize(model=network(), config=config)[0], lambda engine: None)


def by_hand(change: Callable[[Any], None], strict: bool = False) -> dict[str, Any]:
    """An engine that is changed before the audit looks at it."""
    engine = engine_for(network(), settings(2, 1, False), {"audit": False})
    facts = engine._ds_gradfix.facts

    def driven(engine: Any) -> None:
        attach(engine, replace(facts, wrapper=type(engine.optimizer).__name__), strict, 1000 + strict)
        by_engine(engine, accumulation.plain, 1)

    change(engine)
    return audited(engine, driven)


def unknown(engine: Any) -> None:
    engine.optimizer.__class__ = type("Another", (type(engine.optimizer),), {})


def with_autoep(engine: Any) -> None:
    engine.module[0].weight.ds_zero_placement_family = "autoep_expert"


def with_muon(engine: Any) -> None:
    engine.optimizer.param_groups[0]["use_muon"] = True


def turned_off() -> dict[str, Any]:
    """In the middle of the step that is audited. Nothing can come after it: ds-gradfix is off."""
    engine = engine_for(network(), settings(2, 2, False), {})
    engine.backward(accumulation.plain(engine, RANK, 0))
    before = traces(engine)
    ds_gradfix.disable()
    return {"before": before, "after": [*traces(engine), *(name for name in vars(engine) if name == AUDIT)]}


def failing() -> dict[str, Any]:
    """On one rank only."""
    engine = engine_for(network(), settings(2, 1, False), STRICT)
    if RANK:
        vars(engine)[AUDIT]._places = None
    return audited(engine, lambda engine: by_engine(engine, accumulation.plain, 1))


def late() -> dict[str, Any]:
    """It comes on in the middle of a step."""
    engine = engine_for(network(), settings(2, 2, False), {"audit": False})

    def driven(engine: Any) -> None:
        engine.backward(accumulation.plain(engine, RANK, 0))
        engine.step()
        attach(engine, engine._ds_gradfix.facts, False, 2000, late=True)
        engine.backward(accumulation.plain(engine, RANK, 1))
        engine.step()
        assert not ds_gradfix.report(engine)["audit"]
        by_engine(engine, accumulation.plain, 2)

    return audited(engine, driven)


def by_variable() -> dict[str, Any]:
    os.environ["DS_GRADFIX_AUDIT"] = "1"
    try:
        return job(1, section={"audit": None})
    finally:
        del os.environ["DS_GRADFIX_AUDIT"]


STRICT = {**NO_PATCH, "strict": True}
SMALL_BUCKET = {"zero": {"reduce_scatter": False, "reduce_bucket_size": 10}}
UNSCATTERED = {"zero": {"reduce_scatter": False}, "gradient_predivide_factor": 2.0}
MEAN = {"sequence_parallel_reduction": "mean"}
EXCLUDED = {"exclude": ["sequence-parallel-mean"]}

TWO: dict[str, Callable[[], Any]] = {}
for _stage in range(4):
    TWO |= {
        f"zero{_stage}": partial(job, _stage, 2, losses=2),
        f"zero{_stage} clipped": partial(job, _stage, 2, gradient_clipping=0.1, steps=2),
        f"zero{_stage} bf16": partial(job, _stage, 3, **BF16),
        f"zero{_stage} fp16": partial(job, _stage, 3, drive=overflowing, **FP16),
        f"zero{_stage} sum": partial(job, _stage, gradient_allreduce_op="sum"),
        f"zero{_stage} not audited": partial(job, _stage, 2, gradient_clipping=0.1, steps=2, section={"audit": False}),
    }
TWO |= {f"offload{_stage}": partial(job, _stage, 3, offload=True, losses=3) for _stage in (1, 2, 3)}
TWO |= {
    "bf16 in fp32": partial(job, 1, 3, data_types={"grad_accum_dtype": "fp32"}, **BF16),
    "zero0 no_sync": partial(job, 0, 4, without_sync),
    "zero1 no_sync": partial(job, 1, 4, without_sync),
    "zero2 by loss": partial(job, 2, 4, by_loss),
    "zero2 boundary": partial(job, 2, 2, twice_at_the_boundary, losses=3, section=NO_PATCH),
    "zero1 boundary": partial(job, 1, 2, twice_at_the_boundary, losses=3, section=NO_PATCH),
    "zero3 boundary": partial(job, 3, 2, twice_at_the_boundary, losses=3, section=NO_PATCH),
    "zero0 boundary": partial(job, 0, 2, twice_at_the_boundary, losses=3, section=NO_PATCH),
    "failing": failing,
    "late": late,
    "by variable": by_variable,
    "zero3 shards": partial(job, 3, sequence_parallel=2),
    "zero3 shards, no patch": partial(job, 3, sequence_parallel=2, section=NO_PATCH),
    "zero3 predivide": partial(job, 3, **UNSCATTERED),
    "zero3 predivide, no patch": partial(job, 3, section=NO_PATCH, **UNSCATTERED),
    "zero3 bucket": partial(job, 3, sequence_parallel=2, **SMALL_BUCKET),
    "zero3 bucket, no patch": partial(job, 3, sequence_parallel=2, section=NO_PATCH, **SMALL_BUCKET),
    "zero2 mean": partial(job, 2, sequence_parallel=2, section=MEAN),
    "zero2 mean, no patch": partial(job, 2, sequence_parallel=2, section=MEAN | EXCLUDED),
    "zero0 fp16, no patch": partial(job, 0, section=NO_PATCH, **FP16),
    "strict": partial(job, 3, sequence_parallel=2, section=STRICT),
    "strict norm": partial(experts, 0, STRICT),
    "strict late norm": partial(experts, 0, STRICT, **BF16),
    "sparse": partial(rows, {}, gradient_predivide_factor=4.0),
    "sparse, no patch": partial(rows, NO_PATCH, gradient_predivide_factor=4.0),
    "experts": partial(experts, 0, {}),
    "experts, no patch": partial(experts, 0, NO_PATCH),
    "experts bf16": partial(experts, 0, {}, **BF16),
    "experts bf16, no patch": partial(experts, 0, NO_PATCH, **BF16),
    "experts zero2": partial(experts, 2, {}),
    "without optimizer": without_optimizer,
    "autoep": partial(by_hand, with_autoep),
    "muon": partial(by_hand, with_muon),
    "unknown": partial(by_hand, unknown),
    "unknown, strict": partial(by_hand, unknown, strict=True),
    "large": partial(job, 2, 8, more_layers=20),
    "turned off": turned_off,
}
FOUR: dict[str, Callable[[], Any]] = {
    "pipeline": partial(pipeline, 0),
    "pipeline zero1": partial(pipeline, 1),
    "experts": partial(experts, 0, {}),
    "experts zero2": partial(experts, 2, {}),
    "zero3 shards, no patch": partial(job, 3, sequence_parallel=2, section=NO_PATCH),
    "zero3 shards": partial(job, 3, sequence_parallel=2),
}
SCENARIOS = TWO if RANKS == 2 else FOUR

if __name__ == "__main__":
    _hear()
    play({name: lambda run=run: None if on_stock() else run() for name, run in SCENARIOS.items()})
