"""One rank: set-ups in which stock DeepSpeed never reduces a gradient across the shards of a sequence.

Each scenario trains the oracle's model and returns how far gradients, norms and weights are from the float64 reference.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from against_reference import CPU, RANKS, end, engine_for, trained, whole
from scenario import play

from ds_gradfix.verify import Case, _mpu, _rank
from ds_gradfix.verify import model as oracle
from ds_gradfix.verify.config import prepared

SHARDS = 2
_units: dict[bool, Any] = {}


def unit(data_over_all_ranks: bool = False) -> Any:
    """A Megatron-style mpu; its groups are made once."""
    if data_over_all_ranks not in _units:
        _units[data_over_all_ranks] = _mpu._Unit(SHARDS, data_over_all_ranks=data_over_all_ranks)
    return _units[data_over_all_ranks]


def case(stage: int, zero: dict[str, Any] | None = None, convention: str = "sum", steps: int = 3, **more: Any) -> Case:
    section = {"sequence_parallel_reduction": convention, **more.pop("ds_gradfix", {})}
    options = {"stage": stage, "reduce_bucket_size": 500, **(zero or {})}
    config = {"zero_optimization": options, "gradient_accumulation_steps": 2, "ds_gradfix": section, **more}
    return Case(config, steps=steps, sequence_parallel=SHARDS, convention=convention, optimizer="adamw")


def own_zero_init(group: Any, convention: str) -> dict[str, Any]:
    """The client partitions its model itself, over a group of its own choice."""
    one = case(3, convention=convention)
    config = prepared(one)
    with deepspeed.zero.Init(data_parallel_group=group, config_dict_or_path=config, mpu=unit()):
        net = oracle.Stack(one.model)
    source = oracle.Stack(one.model)
    for parameter, value in zip(net.parameters(), source.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value.data)
    return trained(one, net=net, mpu=unit())


def resumed() -> dict[str, Any]:
    """Trained without a break, and with one: the weights must be the same, to the bit."""
    one = case(3)
    folder = str(Path(os.environ["RENDEZVOUS"].removeprefix("file://")).parent / "checkpoint")
    steps = range(4)
    engine = engine_for(one, mpu=unit())
    for step in steps[:2]:
        _rank._step(one, engine, step, CPU, torch.float32)
    engine.save_checkpoint(folder, tag="two")
    for step in steps[2:]:
        _rank._step(one, engine, step, CPU, torch.float32)
    straight = whole(engine)
    end(engine)
    engine = engine_for(one, mpu=unit())
    path, _ = engine.load_checkpoint(folder, tag="two")
    for step in steps[2:]:
        _rank._step(one, engine, step, CPU, torch.float32)
    again = whole(engine)
    end(engine)
    return {"loaded": path is not None, "same": all(torch.equal(straight[name], again[name]) for name in straight)}


def meshed(stage: int, by_key: bool = False, **more: Any) -> dict[str, Any]:
    """Shards by a device mesh, given as an argument or by two keys of the configuration."""
    keys = {"data_parallel_size": RANKS // SHARDS, "sequence_parallel_size": SHARDS}
    how: dict[str, Any] = {"keys": keys} if by_key else {"mesh_param": tuple(keys.values())}
    try:
        return trained(case(stage, **more), **how)
    finally:
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        groups.mesh_device = None


SCENARIOS = {
    "ZeRO-3": lambda: trained(case(3), mpu=unit()),
    "ZeRO-3, mean over shards": lambda: trained(case(3, convention="mean"), mpu=unit()),
    "ZeRO-3, all-reduce": lambda: trained(case(3, {"reduce_scatter": False}), mpu=unit()),
    "ZeRO-3, clipped": lambda: trained(case(3, gradient_clipping=0.05), mpu=unit()),
    "ZeRO-3, offloaded": lambda: trained(case(3, {"offload_optimizer": {"device": "cpu"}}), mpu=unit()),
    "ZeRO-3, resumed": resumed,
    "ZeRO-3, patch excluded": lambda: trained(
        case(3, ds_gradfix={"exclude": ["zero3-shards-never-reduced"]}), mpu=unit()
    ),
    "ZeRO-3, patch excluded, mean over shards": lambda: trained(
        case(3, convention="mean", ds_gradfix={"exclude": ["zero3-shards-never-reduced"]}), mpu=unit()
    ),
    "own zero.Init, data-parallel": lambda: own_zero_init(unit().get_data_parallel_group(), "mean"),
    "own zero.Init, all": lambda: own_zero_init(unit().get_sequence_data_parallel_group(), "mean"),
    "data-parallel over all": lambda: trained(case(3, convention="mean"), mpu=unit(True)),
    "ZeRO-2, mpu": lambda: trained(case(2), mpu=unit()),
    **{f"mesh, ZeRO-{stage}": partial(meshed, stage) for stage in range(4)},
    "mesh, mean over shards": lambda: meshed(2, convention="mean"),
    "mesh by keys, ZeRO-1": lambda: meshed(1, by_key=True),
    "mesh by keys, ZeRO-3": lambda: meshed(3, by_key=True),
    "mesh, patch excluded": lambda: meshed(1, ds_gradfix={"exclude": ["mesh-shards-never-reduced"]}),
}

if __name__ == "__main__":
    play(SCENARIOS)
