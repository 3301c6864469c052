"""Gradients that never cross the shards of a sequence: which ranks share them, and which of those a group reaches."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.registry import Measurement, Replace, Target


def _dist() -> Any:
    return sys.modules["deepspeed.comm"]


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks, ordered; two groups of the same ranks are the same for a reduction."""
    return tuple(sorted(sys.modules["torch.distributed"].get_process_group_ranks(group)))


def measure_reach(reached: Any, wanted: Any, what: str) -> Measurement:
    """What share of the ranks that contribute to a gradient a group sums over, put to the test on the group itself."""
    import torch

    dist = _dist()
    rank = dist.get_rank()
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    probe = torch.zeros(dist.get_world_size(), device=device)
    probe[rank] = 1.0
    dist.all_reduce(probe, group=reached)
    share = float(probe[list(ranks_of(wanted))].mean())
    return Measurement(what, share, abs(1.0 - share), 0.0)


# ------------------------------------------------------------------- shards that come from a device mesh

GROUPS = "deepspeed.utils.groups"


def _every_rank() -> Any:
    """The group over both dimensions of a (data-parallel, sequence-parallel) mesh, which is every rank; None where
    there is no such mesh. It is DeepSpeed's own copy of the world's group, made once, by all ranks alike."""
    groups = sys.modules[GROUPS]
    mesh = groups.mesh_device
    if mesh is None or "sequence_parallel" not in (mesh.mesh_dim_names or ()):
        return None
    if hasattr(groups.mpu, "get_sequence_data_parallel_group") or mesh.size() != _dist().get_world_size():
        return None
    return groups._clone_world_group()


def _group(engagement: Any, original: Any) -> Any:
    group = _every_rank()
    return original() if group is None else group


def _world_size(engagement: Any, original: Any) -> int:
    group = _every_rank()
    return int(original() if group is None else _dist().get_world_size(group=group))


def _rank(engagement: Any, original: Any) -> int:
    group = _every_rank()
    return int(original() if group is None else _dist().get_rank(group=group))


MESH = (
    Replace(Target(GROUPS, "_get_sequence_data_parallel_group"), _group, early=True),
    Replace(Target(GROUPS, "_get_sequence_data_parallel_world_size"), _world_size, early=True),
    Replace(Target(GROUPS, "_get_sequence_data_parallel_rank"), _rank, early=True),
)


def reduced_over(engine: Any) -> Any:
    """The group that dense gradients are reduced over under ZeRO 0 to 2."""
    return getattr(engine.optimizer, "dp_process_group", None) or engine.seq_data_parallel_group
