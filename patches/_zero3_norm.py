"""ZeRO-3's global gradient norm: its measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.registry import Measurement


def measure_norm(engine: Any) -> list[Measurement]:
    """Known gradients in place of the optimizer's own through its norm: of every parameter one element on each rank."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "_get_norm_groups") or type(optimizer).__name__ == "MiCS_Optimizer":
        return []  # MiCS keeps whole copies in replica groups, and counts them in its own way
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    known, square = _known(engine, device)
    right = torch.tensor([float(square)], device=device)
    # Every element belongs to one rank alone, or is counted by one of the ranks that hold it.
    dist.all_reduce(right)
    with _in_place(optimizer, known):
        norms = optimizer._get_norm_groups()
    got = torch.stack([torch.as_tensor(norm).double().cpu().reshape(()) for norm in norms])
    got = got.norm() if (got >= 0).all() else got.sum() * float("nan")  # -1 marks a norm that is not finite
    measured = reduction.compare(got.reshape(1), right.double().cpu().sqrt())
    return [Measurement("ZeRO-3 gradient norm", *measured, 4 * reduction.probe_tolerance(torch.float32))]


def _known(engine: Any, device: Any) -> tuple[list[list[Any]], int]:
    """For each sub-group its parameters' gradients on this rank, and the sum of the squares of those that this rank is
    the one to count."""
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]
    optimizer = engine.optimizer
    known, square = [], 0
    for index, params in enumerate(optimizer.fp16_groups):
        lacks_scale = getattr(optimizer, "_muon_update_lacks_loss_scale", None)
        scale = float(optimizer.loss_scale) if lacks_scale and lacks_scale(index) else 1.0
        gradients = []
        for place, param in enumerate(params):
            group = getattr(param, "ds_process_group", None) or optimizer.dp_process_group
            own = _sharded(param) or getattr(param, "ds_zero_placement_family", None) == "autoep_expert"
            # Copies on tensor-parallel peers, and on the replicas of a smaller group of partitions, have equal numbers.
            holder = dist.get_rank() if own else dist.get_rank(group=group)
            value = 1 + (holder + index + place) % 4
            if own or _first_copy(engine, group):
                square += value * value
            gradients.append(torch.full((1,), value / scale, device=device))
        known.append(gradients)
    return known, square


def _first_copy(engine: Any, group: Any) -> bool:
    """Whether no other rank counts what this one holds of a dense parameter: one group of partitions does."""
    ranks = sys.modules["torch.distributed"].get_process_group_ranks(group)
    return engine.optimizer.model_parallel_rank == 0 and 0 in ranks


def _sharded(param: Any) -> bool:
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


@contextmanager
def _in_place(optimizer: Any, known: list[list[Any]]) -> Iterator[None]:
    """The optimizer reads its gradients, or with offload their norms, from a dictionary: another one, for a while."""
    content: dict[Any, Any] = dict(enumerate(known))
    name = "averaged_gradients"
    if optimizer.offload_optimizer:
        name, content = "norm_for_param_grads", {
            optimizer.get_param_id(param): gradient.norm()
            for params, gradients in zip(optimizer.fp16_groups, known, strict=True)
            for param, gradient in zip(params, gradients, strict=True)
        }
    kept = getattr(optimizer, name)
    setattr(optimizer, name, content)
    try:
        yield
    finally:
        setattr(optimizer, name, kept)
