"""ZeRO-3's global gradient norm: its measurement."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.patches._known_norm import in_place, known_gradients
from ds_gradfix.patches._shards import ranks_of
from ds_gradfix.registry import Measurement


def measure_norm(engine: Any) -> list[Measurement]:
    """Known gradients in place of the optimizer's own through its norm: of every parameter one element on each rank."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "_get_norm_groups") or type(optimizer).__name__ == "MiCS_Optimizer":
        return []  # MiCS keeps whole copies in replica groups, and counts them in its own way
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]

    def copies(index: int, param: Any) -> tuple[int, bool]:
        # Those on tensor-parallel peers, and on the replicas of a smaller group of partitions: one group counts.
        group = getattr(param, "ds_process_group", None) or optimizer.dp_process_group
        return dist.get_rank(group=group), optimizer.model_parallel_rank == 0 and 0 in ranks_of(group)

    known, square = known_gradients(optimizer, optimizer.fp16_groups, copies)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    right = torch.tensor([float(square)], device=device)
    # Every element belongs to one rank alone, or is counted by one of the ranks that hold it.
    dist.all_reduce(right)
    with in_place(optimizer, optimizer.fp16_groups, known, optimizer.offload_optimizer):
        norms = optimizer._get_norm_groups()
    got = torch.stack([torch.as_tensor(norm).double().cpu().reshape(()) for norm in norms])
    got = got.norm() if (got >= 0).all() else got.sum() * float("nan")  # -1 marks a norm that is not finite
    measured = reduction.compare(got.reshape(1), right.double().cpu().sqrt())
    return [Measurement("ZeRO-3 gradient norm", *measured, 4 * reduction.probe_tolerance(torch.float32))]
