"""What rank scripts share that train the oracle's model and compare every step with the float64 reference."""

from __future__ import annotations

import gc
import hashlib
import os
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_gradfix.errors import GradfixError
from ds_gradfix.verify import Case, _rank
from ds_gradfix.verify import model as oracle
from ds_gradfix.verify.config import precision, prepared
from ds_gradfix.verify.reference import train

RANKS = int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")


def engine_for(one: Case, net: Any = None, **how: Any) -> Any:
    net = oracle.Stack(one.model).float() if net is None else net
    optimizer = oracle.optimizer(one, net.parameters())
    config = {**prepared(one), **how.pop("keys", {})}
    try:
        return deepspeed.initialize(model=net, optimizer=optimizer, config=config, **how)[0]
    except GradfixError:
        engines = [found for found in gc.get_objects() if issubclass(type(found), DeepSpeedEngine)]
        for refused in engines:
            if vars(refused).get("optimizer"):
                end(refused)
        raise


def compared(one: Case, engine: Any) -> dict[str, Any]:
    inputs = getattr(torch, precision(one).master)
    steps = [_rank._step(one, engine, step, CPU, inputs) for step in range(one.steps)]
    found: dict[str, Any] = {"ratios": [], "errors": [], "norms": [], "updates": []}
    for got, right in zip(steps, train(one, RANKS), strict=True):
        for name, gradient in right.gradients.items():
            ours = got["gradients"][name].double()
            found["ratios"].append(float((ours * gradient).sum() / gradient.square().sum()))
            found["errors"].append(float((ours - gradient).norm() / gradient.norm()))
        if got["norm"] is not None:
            found["norms"].append(got["norm"] / right.norm)
        moved = [got["parameters"][name].double() - right.before[name] for name in right.after]
        wanted = [right.after[name] - right.before[name] for name in right.after]
        found["updates"].append(float(torch.cat([(a - b).flatten() for a, b in zip(moved, wanted)]).norm()
                                      / torch.cat([b.flatten() for b in wanted]).norm()))  # fmt: skip
    # What this rank itself computes with: its gathered weights, not what it owns of the masters.
    found["weights"] = hashlib.sha256(b"".join(p.float().numpy().tobytes() for p in whole(engine).values())).hexdigest()
    return found


def whole(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    return found


def trained(one: Case, **how: Any) -> dict[str, Any]:
    engine = engine_for(one, **how)
    try:
        return compared(one, engine)
    finally:
        end(engine)


def end(engine: Any) -> None:
    """Something may keep it alive, and ds-gradfix coming on late must not take it for one that still trains."""
    engine.destroy()
    engine.optimizer = None
