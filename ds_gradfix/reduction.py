"""The arithmetic of the invariants: plain tensors and numbers, no DeepSpeed.

Invariant 1. With G the group over which a parameter's gradient is reduced, D = |G|, S the
sequence-parallel size and g_r rank r's gradient (already divided by the accumulation steps)::

    mean: (S / D) * sum_r g_r        sum: sum_r g_r

Everything about it follows from :func:`gradient_scale`, the one place that decides the divisor.

Invariants 2 and 3. The norm counts every distinct logical element once, wherever it lives, and is the same number on
every rank (:func:`sharded_norm`); every gradient is multiplied by min(1, clip / (norm + 1e-6))
(:func:`clip_coefficient`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def gradient_scale(op: str, group_size: int, sequence_parallel_size: int, convention: str = "sum") -> float:
    """The number that the sum of all ranks' gradients is multiplied with, for one reduction.

    ``op`` is ``"mean"`` or ``"sum"``; ``group_size`` is D. Under ``mean`` the average is taken over
    data-parallel replicas; ``convention`` says what happens over sequence shards: ``"sum"``, DeepSpeed's
    own (upstream #4530, #5555), or ``"mean"``, for losses whose backward already yields S times a
    shard's part (upstream #5248).
    """
    if op not in ("mean", "sum") or convention not in ("mean", "sum"):
        raise ValueError(f"reduction op {op!r} and convention {convention!r}: each is 'mean' or 'sum'")
    if op == "sum":
        return 1.0
    return (sequence_parallel_size if convention == "sum" else 1) / group_size


def split_scale(
    scale: float,
    group_size: int,
    dtype: torch.dtype,
    predivide_factor: float = 1.0,
    prescale: bool = False,
) -> tuple[float, float]:
    """Split ``scale`` into factors ``(pre, post)`` for before and after a reduction in ``dtype``.

    ``predivide_factor`` and ``prescale`` are the user's own wishes (``gradient_predivide_factor``,
    ``prescale_gradients``) and win. Otherwise fp32 and bf16 have the range to sum first, and the
    result of a reduce-scatter is D times smaller than its input, so all of the scale goes behind
    it. fp16 overflows at 65504 and loses small values below 6e-8: there a power of two near the
    square root of the group size, 2 at least, goes in front (as FSDP2 splits its division). A scale
    of one divides nothing anywhere, in any dtype: a sum stays a plain sum.
    """
    import torch

    if scale == 1.0:
        return 1.0, 1.0
    if prescale:
        return scale, 1.0
    if predivide_factor != 1.0:
        return 1.0 / predivide_factor, scale * predivide_factor
    if dtype == torch.float16:
        pre = 2.0 ** -math.floor(math.log2(group_size) / 2 + 0.5)
        return pre, scale / pre
    return 1.0, scale


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of one device and dtype each: what a fused operation takes."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor in place, fused over the list; a factor of one touches nothing."""
    import torch

    if factor != 1.0 and tensors:
        torch._foreach_mul_(list(tensors), factor)


def chunk_size(numel: int, world_size: int) -> int:
    """Elements in each rank's partition of a tensor; the last ones may be partly padding."""
    return -(-numel // world_size)


def flatten_for_scatter(tensors: Sequence[Tensor], world_size: int) -> Tensor:
    """One flat buffer in which rank r's partitions of all tensors lie side by side.

    Shape ``[world_size * sum(chunk_size)]``, the tensors' dtype. A single tensor that needs no
    padding is returned as a view of itself: nothing is copied.
    """
    import torch

    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        return tensors[0].view(-1)
    flat = [tensor.view(-1) for tensor in tensors]
    if hasattr(torch, "_chunk_cat") and all(tensor.numel() for tensor in flat):
        # FSDP2's copy-in: one kernel however many tensors and ranks there are, zeros as padding.
        return torch._chunk_cat(flat, dim=0, num_chunks=world_size).view(-1)
    pieces: list[Tensor] = []
    for rank in range(world_size):
        for tensor in flat:
            size = chunk_size(tensor.numel(), world_size)
            piece = tensor[rank * size : (rank + 1) * size]
            pieces.append(piece)
            if piece.numel() < size:
                pieces.append(tensor.new_zeros(size - piece.numel()))
    return torch.cat(pieces)


def scaled_to(tensor: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """``tensor * factor`` in ``dtype``; in place where the dtype stays.

    The product is taken in the wider of the two dtypes, so that only one rounding is in the
    narrower one.
    """
    if dtype.itemsize > tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    scale_([tensor], factor)
    return tensor.to(dtype)


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor],
    world_size: int,
    rank: int,
    pre: float,
    post: float,
    dtype: torch.dtype,
    reduce_scatter: Callable[[Tensor, Tensor], object],
) -> list[Tensor]:
    """Reduce-scatter many tensors in one collective: sum over ranks, times ``pre * post``.

    Returns this rank's partition of each tensor in ``dtype``, one-dimensional, without padding,
    as views of one buffer. ``reduce_scatter(output, input)`` runs the collective with SUM in the
    tensors' own dtype. The full buffer is passed over once, to lay it out, and once more only if
    ``pre`` is not one; ``post`` and the change of dtype touch this rank's 1/world_size of it.
    """
    buffer = flatten_for_scatter(tensors, world_size)
    scale_([buffer], pre)
    partition = buffer.chunk(world_size)[rank]
    reduce_scatter(partition, buffer)
    partition = scaled_to(partition, post, dtype)
    partitions = []
    offset = 0
    for tensor in tensors:
        size = chunk_size(tensor.numel(), world_size)
        own = max(0, min(size, tensor.numel() - rank * size))
        partitions.append(partition.narrow(0, offset, own))
        offset += size
    return partitions


# --------------------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class NormPart:
    """Some of the elements of one global norm, as one rank holds them.

    ``tensors`` are dense, of any shape, floating dtype and device, several if need be; a view says which elements of a
    buffer count. A norm that was taken before is a tensor of one element. ``groups`` are the process groups over which
    the part's ranks hold *different* elements: one for a partition, two for a partition of an expert (its replicas'
    group and the expert-parallel group); two must cross like the rows and columns of a grid. ``counts`` is False on a
    rank that holds copies of what another rank counts: it takes part in the collectives, with nothing.
    """

    tensors: Sequence[Tensor]
    groups: Sequence[Any] = ()
    counts: bool = True


AllReduce = Callable[["Tensor", Any, str], object]
"""``(tensor, group, op)``: reduce a one-dimensional tensor in place over a process group, op ``"sum"`` or ``"max"``."""


def torch_all_reduce(tensor: Tensor, group: Any, op: str) -> None:
    """:data:`AllReduce` by torch.distributed."""
    import torch.distributed as dist

    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)


def sharded_norm(
    parts: Sequence[NormPart],
    device: torch.device | str,
    dtype: torch.dtype,
    norm_type: float = 2.0,
    all_reduce: AllReduce = torch_all_reduce,
) -> Tensor:
    """The ``norm_type``-norm over every part on every rank: a tensor of no dimension, float32 on ``device``.

    Every rank of a group must call this with that group in the same order of parts, with no tensors where it holds
    none: it takes part in one all-reduce for each distinct group of more than one rank (packed: however many parts
    there are). A part whose groups only some of the ranks know may be missing on the others if every group that they
    share comes after those (experts on one pipeline stage: expert-parallel group first, then the pipeline's).

    Powers are summed and reduced on ``device`` in ``dtype`` (DeepSpeed's norm dtype is float64 where the device has it:
    float32 overflows where a norm is above 1.8e19). The host waits for nothing. Where any element is not finite, the
    norm is not finite either, on every rank. Replicas that hold the same bits get the same bits.
    """
    import torch

    if norm_type <= 0:
        raise ValueError(f"norm_type {norm_type!r}: a positive number, or infinity")
    largest = math.isinf(norm_type)
    members: dict[_Ranks, Any] = {}
    held: dict[tuple[_Ranks, ...], list[Tensor]] = {}
    for part in parts:
        own = {_ranks_of(group): group for group in part.groups}
        members.update(own)
        held.setdefault(tuple(own), []).extend(tensor for tensor in part.tensors if part.counts and tensor.numel())
    with torch.no_grad():
        # By the groups still to be reduced over; what has been through its last one waits under ().
        waiting = {over: [_power_sum(tensors, device, dtype, norm_type)] for over, tensors in held.items()}
        for ranks in _rounds(members, held):
            crossing = [over for over in waiting if ranks in over]
            sums = [_joined(waiting.pop(over), largest) for over in crossing]
            if len(ranks) > 1:
                packed = torch.stack(sums)
                if largest:  # a maximum over ranks may drop NaN, but not infinity
                    packed = packed.nan_to_num(nan=math.inf, posinf=math.inf)
                all_reduce(packed, members[ranks], "max" if largest else "sum")
                sums = list(packed.unbind())
            for over, power in zip(crossing, sums, strict=True):
                waiting.setdefault(tuple(one for one in over if one != ranks), []).append(power)
        if not waiting:
            return torch.zeros((), device=device)
        total = _joined(waiting[()], largest)
        return (total if largest else total.pow(1.0 / norm_type)).float()


_Ranks = tuple[int, ...]


def _ranks_of(group: Any) -> _Ranks:
    """What makes two process groups the same for a reduction."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _rounds(members: Iterable[_Ranks], held: Iterable[tuple[_Ranks, ...]]) -> list[_Ranks]:
    """The groups in the order in which they are reduced over: as they come, but those that a part names earlier first.

    Ranks that lack a part whose first groups they don't know keep the order of the others.
    """
    order: dict[_Ranks, None] = {}
    seen = set()

    def place(ranks: _Ranks) -> None:
        if ranks not in seen:
            seen.add(ranks)
            for over in held:
                for before in over[: over.index(ranks)] if ranks in over else ():
                    place(before)
            order[ranks] = None

    for ranks in members:
        place(ranks)
    return list(order)


def _joined(powers: Sequence[Tensor], largest: bool) -> Tensor:
    import torch

    if len(powers) == 1:
        return powers[0]
    together = torch.stack(list(powers))
    return together.max() if largest else together.sum()


def _power_sum(tensors: Sequence[Tensor], device: torch.device | str, dtype: torch.dtype, norm_type: float) -> Tensor:
    """Sum of ``|element| ** norm_type`` (the maximum for inf), fused for all tensors of one device and dtype."""
    import torch

    largest = math.isinf(norm_type)
    powers = []
    for same in alike(tensors):
        norms = torch.stack(_norms(same, norm_type, torch.promote_types(same[0].dtype, dtype)))
        power = norms.max() if largest else norms.pow(norm_type).sum()
        # A copy to the host that nobody waits for could be read before it is there.
        powers.append(power.to(device, dtype, non_blocking=torch.device(device).type != "cpu"))
    return _joined(powers, largest) if powers else torch.zeros((), dtype=dtype, device=device)


def _norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    import torch

    try:
        return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    except TypeError:  # before torch 2.4 it knows no dtype, and half precision would be summed in itself
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]


def clip_coefficient(norm: Tensor, clip: float) -> Tensor:
    """``min(1, clip / (norm + 1e-6))`` on the norm's device; NaN, no finite number, where the norm is not finite."""
    import torch

    return torch.where(torch.isfinite(norm), (clip / (norm + 1e-6)).clamp(max=1.0), math.nan)


# ------------------------------------------------------------- known numbers for self-checks


def probe_gradient(numel: int, world_size: int, rank: int) -> Tensor:
    """One rank's part of a gradient whose sum over the ranks is :func:`probe_sum`. fp32, [numel].

    Two ranks contribute to each element, in turn, so that a sum over thousands of ranks is exact in
    any dtype and every rank is seen to take part.
    """
    import torch

    index = torch.arange(numel)
    first = (index % world_size == rank).float()
    second = ((index + 1) % world_size == rank).float()
    return (first + 2 * second) * (1 + index % 4)


def probe_sum(numel: int) -> Tensor:
    """What the ranks' probe gradients add up to: 3, 6, 9, 12, 3, ... float64, [numel]."""
    import torch

    return 3.0 * (1 + torch.arange(numel) % 4).double()


def compare(got: Tensor, right: Tensor) -> tuple[float, float]:
    """``(ratio, error)`` of a measurement: the least-squares ratio of ``got`` to ``right``, and the
    largest deviation of an element relative to its right value. Both float64, right without zeros;
    no elements (a rank that keeps only padding) compare as ``(1.0, 0.0)``."""
    if not right.numel():
        return 1.0, 0.0
    ratio = (got @ right) / (right @ right)
    return float(ratio), float(((got - right) / right).abs().max())


def probe_tolerance(*dtypes: torch.dtype) -> float:
    """The relative error of a probe that rounding in these dtypes explains."""
    import torch

    return 4 * max(torch.finfo(dtype).eps for dtype in dtypes)
