"""Corrected reductions against stock's wrong ones on the same buckets, and the scattered one against FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import _jobs
import _ranks
import torch
import torch.distributed as dist
from _figures import Row, figure, ratios
from torch import Tensor, nn

import ds_gradfix
from ds_gradfix.patches import _zero3

TENSORS = 8
SLOWER = 1.0


def on_rank(quick: bool) -> list[Row]:
    ds_gradfix.enable()
    rows = []
    for mib in (1, 16) if quick else (1, 16, 64, 256):
        for dtype in _jobs.DTYPES:
            rounds = 3 if quick else max(7, min(41, 400 // mib))
            rows += scattered(mib, dtype, rounds) + of_buffers(mib, dtype, rounds)
    return rows


def scattered(mib: int, dtype: str, rounds: int) -> list[Row]:
    """ZeRO-3's two reductions: the scattered one of a bucket of several tensors, and the one of a flat bucket."""
    engine = _jobs.engine(3, _jobs.layers(1, 8), dist.get_world_size(), dtype)
    optimizer, kind = engine.optimizer, _jobs.DTYPES[dtype]
    size = dist.get_world_size()
    params = gradients(optimizer, kind, mib)
    scatter = "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads"
    flat_scatter = "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_contiguous_grads"
    flat = torch.cat([param.grad.view(-1) for param in params])

    def corrected(name: str, *args: Any) -> Callable[[], object]:
        return lambda: getattr(optimizer, f"_DeepSpeedZeroOptimizer_Stage3{name}")(*args, kind)

    def stock(name: str, *args: Any) -> Callable[[], object]:
        return lambda: _jobs.original(name)(optimizer, *args, kind)

    with as_bucket(optimizer, kind, params):
        times = _ranks.side_by_side(
            {
                "corrected": corrected("__avg_scatter_grads", params),
                "stock": stock(scatter, params),
                "fsdp": lambda: fsdp_reduce_scatter([param.grad for param in params], size),
                "corrected flat": corrected("__avg_scatter_contiguous_grads", flat),
                "stock flat": stock(flat_scatter, flat),
            },
            rounds,
        )
    engine.destroy()
    where = f"{mib} MiB {dtype}"
    return [
        figure(f"ZeRO-3 scattered, {where}, over stock", ratios(times["corrected"], times["stock"]), limit=SLOWER),
        figure(f"ZeRO-3 scattered, {where}, over FSDP2", ratios(times["corrected"], times["fsdp"])),
        figure(f"ZeRO-3 flat, {where}, over stock", ratios(times["corrected flat"], times["stock flat"]), limit=SLOWER),
    ]


def of_buffers(mib: int, dtype: str, rounds: int) -> list[Row]:
    """ZeRO-1's and ZeRO-2's, of one buffer. The corrected convention is the mean over sequence shards."""
    section = {"sequence_parallel_reduction": "mean"}
    engine = _jobs.engine(2, _jobs.layers(1, 8), dist.get_world_size(), dtype, ds_gradfix=section)
    optimizer, kind = engine.optimizer, _jobs.DTYPES[dtype]
    rows = []
    for name in ("gradient_reduction_w_predivide", "allreduce_bucket"):
        buffer = torch.ones(mib * 2**20 // kind.itemsize, dtype=kind, device=_ranks.device())
        argument = [buffer] if name == "allreduce_bucket" else buffer

        def corrected(name: str = name, argument: Any = argument) -> None:
            getattr(optimizer, name)(argument, kind)

        def stock(name: str = name, argument: Any = argument) -> None:
            _jobs.original(f"DeepSpeedZeroOptimizer.{name}")(optimizer, argument, kind)

        times = _ranks.side_by_side({"corrected": corrected, "stock": stock}, rounds)
        both = ratios(times["corrected"], times["stock"])
        rows.append(figure(f"ZeRO-1/2 {name[:18]}, {mib} MiB {dtype}", both, limit=SLOWER))
    engine.destroy()
    return rows


def gradients(optimizer: Any, dtype: Any, mib: int) -> list[Any]:
    """Parameters of no model with gradients of this size together, placed as the optimizer's own are."""
    template = optimizer.fp16_groups[0][0]
    numel = mib * 2**20 // dtype.itemsize // TENSORS
    params = []
    for number in range(TENSORS):
        param: Any = nn.Parameter(torch.empty(0, dtype=dtype, device=_ranks.device()))
        for name in ("ds_process_group", "ds_zero_placement_family", "ds_zero_partition_group_name"):
            if hasattr(template, name):
                setattr(param, name, getattr(template, name))
        param.data = torch.zeros(numel, dtype=dtype, device=_ranks.device())
        param.grad = torch.full_like(param, 1 + number)
        param.partition_numel = lambda: -(-numel // dist.get_world_size())
        params.append(param)
    return params


@contextmanager
def as_bucket(optimizer: Any, dtype: Any, params: list[Any]) -> Iterator[None]:
    with _zero3._bucket_of(optimizer, dtype, params, _zero3._partition_group(optimizer, params)):
        yield


def fsdp_reduce_scatter(tensors: list[Tensor], size: int) -> Tensor:
    """FSDP2's mean of the same bytes, by its own copy-in and its own choice of factors."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    group: Any = dist.group.WORLD
    device = tensors[0].device.type
    # gloo has no average: the choice for devices whose collectives only sum.
    pre, post, op, _ = fsdp._get_gradient_divide_factors(
        group, None, tensors[0].dtype, device, force_sum_reduction_for_comms=device == "cpu"
    )
    buffer = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    fsdp.foreach_reduce_scatter_copy_in(tensors, buffer, size)
    fsdp._div_if_needed(buffer, pre)
    output = buffer.new_empty(buffer.numel() // size)
    dist.reduce_scatter_tensor(output, buffer, op=op)
    fsdp._div_if_needed(output, post)
    return output
