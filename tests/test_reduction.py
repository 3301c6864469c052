"""The arithmetic of the invariants, over real process groups, against float64."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from ds_gradfix.agreement import exchange
from ds_gradfix.reduction import (
    chunk_size,
    compare,
    flatten_for_scatter,
    gradient_scale,
    probe_gradient,
    probe_sum,
    reduce_scatter_coalesced,
    scale_,
    scaled_to,
    split_scale,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# ------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 7, 8, 12, 64, 1000])
def test_the_scale_is_the_invariant_s(group_size: int) -> None:
    assert gradient_scale("mean", group_size, 1) == 1 / group_size
    assert gradient_scale("sum", group_size, 1) == 1.0
    for shards in (size for size in range(1, group_size + 1) if group_size % size == 0):
        replicas = group_size // shards
        # The average over replicas of the sum over shards, when every rank's gradient is 1.
        assert gradient_scale("mean", group_size, shards) * group_size == pytest.approx(shards, rel=1e-15)
        assert gradient_scale("mean", group_size, shards) == pytest.approx(1 / replicas, rel=1e-15)
        assert gradient_scale("sum", group_size, shards) == 1.0


@pytest.mark.parametrize("op", ["", "avg", "MEAN", "Sum", None, 1])
def test_an_unknown_op_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match=f"reduction op {op!r}"):
        gradient_scale(op, 2, 1)


SPLITS = [
    (group_size, shards, predivide, prescale)
    for group_size, predivide, prescale in itertools.product(
        (1, 2, 3, 4, 5, 8, 16, 32, 96), (1, 2, 3, 0.5, "group size"), (False, True)
    )
    for shards in {1, 2, 3, group_size}
    if group_size % shards == 0
]


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_split_is_the_whole_scale_wherever_it_is_applied(op: str, dtype: torch.dtype) -> None:
    for group_size, shards, predivide, prescale in SPLITS:
        factor = float(group_size) if predivide == "group size" else float(predivide)
        scale = 1.0 if op == "sum" else shards / group_size
        pre, post = split_scale(gradient_scale(op, group_size, shards), group_size, dtype, factor, prescale)
        case = (group_size, shards, factor, prescale, pre, post)
        assert pre * post == pytest.approx(scale, rel=1e-15), case
        assert pre > 0 and post > 0, case
        if scale == 1.0:
            assert (pre, post) == (1.0, 1.0), f"a plain sum multiplies nothing: {case}"
        elif prescale:
            assert (pre, post) == (scale, 1.0), f"the user asked for all of it before: {case}"
        elif factor != 1.0:
            assert pre == 1 / factor, f"the user asked for this much before: {case}"
        elif dtype != torch.float16:
            assert (pre, post) == (1.0, scale), f"nothing before where the range is wide: {case}"


@pytest.mark.parametrize("group_size", [2, 3, 4, 5, 6, 8, 16, 32, 64, 100, 512])
def test_half_precision_divides_about_a_square_root_first(group_size: int) -> None:
    """A power of two within a factor of sqrt(2) of the root, exact to multiply with, and never nothing at all: the sum
    of two gradients of 40000 overflows where their mean doesn't."""
    pre, _ = split_scale(1 / group_size, group_size, torch.float16)
    assert math.log2(pre).is_integer()
    assert 1 / math.sqrt(2) - 1e-9 <= pre * math.sqrt(group_size) <= math.sqrt(2) + 1e-9
    assert pre < 1.0


@pytest.mark.parametrize("power", range(1, 11))
def test_half_precision_divides_as_fsdp2_does(power: int) -> None:
    """The docstring's claim; the loop is that of torch's ``_get_gradient_divide_factors``."""
    group_size = 2**power
    theirs = 1
    while group_size % theirs == 0 and group_size / theirs > theirs:
        theirs *= 2
    assert split_scale(1 / group_size, group_size, torch.float16)[0] == 1 / theirs


# -------------------------------------------------------------------------------- in place


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_is_in_place_and_fused(dtype: torch.dtype) -> None:
    tensors = [torch.arange(1.0, n + 1, dtype=dtype) for n in (3, 1, 8)]
    before = [(t.data_ptr(), t.clone()) for t in tensors]
    with Record() as record:
        scale_(tensors, 0.5)
    assert record.names == ["_foreach_mul_"]
    for tensor, (pointer, old) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == pointer
        assert torch.equal(tensor, old * 0.5)


def test_scaling_by_one_or_nothing_touches_nothing() -> None:
    tensor = torch.ones(3)
    with Record() as record:
        scale_([tensor], 1.0)
        scale_([], 0.5)
    assert record.names == []


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_a_scaled_copy_is_rounded_once(source: torch.dtype, target: torch.dtype) -> None:
    """The product in the wider dtype: as good as float64 to one rounding of the narrower one."""
    values = torch.linspace(0.1, 3.0, 101, dtype=torch.float64).to(source)
    right = values.double() / 3
    pointer = values.data_ptr()
    got = scaled_to(values.clone(), 1 / 3, target)
    assert got.dtype == target
    bound = torch.finfo(target).eps if target == torch.float32 else max(torch.finfo(d).eps for d in (source, target))
    assert float(((got.double() - right) / right).abs().max()) <= bound
    if source == target:
        assert scaled_to(values, 1 / 3, target).data_ptr() == pointer


def test_a_wide_result_of_a_narrow_buffer_does_not_lose_small_values() -> None:
    """1e-7 in fp16 times 1/64 underflows there and doesn't in fp32."""
    small = torch.full((4,), 1e-7, dtype=torch.float16)
    got = scaled_to(small.clone(), 1 / 64, torch.float32)
    assert torch.equal(got, small.float() / 64)
    assert float(got[0]) > 0


# ------------------------------------------------------------------------------------ layout

LAYOUTS = [
    sizes
    for count in (1, 2, 3)
    for sizes in itertools.product((1, 2, 3, 4, 5, 6, 7, 12), repeat=count)
    if count < 3 or sum(sizes) % 4 == 0
]


def naive_layout(tensors: list[torch.Tensor], world_size: int) -> torch.Tensor:
    """Rank after rank, tensor after tensor, element after element; zero where a tensor has no more."""
    flat: list[float] = []
    for rank in range(world_size):
        for tensor in tensors:
            size = math.ceil(tensor.numel() / world_size)
            for position in range(rank * size, (rank + 1) * size):
                flat.append(float(tensor.flatten()[position]) if position < tensor.numel() else 0.0)
    return torch.tensor(flat, dtype=tensors[0].dtype)


@pytest.mark.parametrize("without_chunk_cat", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_layout_is_the_naive_one(
    world_size: int, without_chunk_cat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_chunk_cat:
        monkeypatch.delattr(torch, "_chunk_cat")
    for sizes in LAYOUTS:
        tensors = [torch.arange(1.0, n + 1) + 100 * i for i, n in enumerate(sizes)]
        assert torch.equal(flatten_for_scatter(tensors, world_size), naive_layout(tensors, world_size)), sizes


@pytest.mark.parametrize("without_chunk_cat", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_keeps_dtype_and_flattens_shapes(
    dtype: torch.dtype, without_chunk_cat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_chunk_cat:
        monkeypatch.delattr(torch, "_chunk_cat")
    tensors = [torch.arange(6.0).view(2, 3).to(dtype), torch.arange(5.0).to(dtype), torch.tensor(3.0, dtype=dtype)]
    got = flatten_for_scatter(tensors, 3)
    assert got.dtype == dtype
    assert torch.equal(got, naive_layout(tensors, 3))


@pytest.mark.parametrize("without_chunk_cat", [False, True])
def test_an_empty_gradient_among_others_takes_no_room(without_chunk_cat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in stock DeepSpeed, whose cat takes a parameter of zero elements."""
    if without_chunk_cat:
        monkeypatch.delattr(torch, "_chunk_cat")
    tensors = [torch.zeros(0), torch.arange(1.0, 4.0)]
    assert torch.equal(flatten_for_scatter(tensors, 2), torch.tensor([1.0, 2.0, 3.0, 0.0]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_tensor_without_padding_is_not_copied(world_size: int) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert flatten_for_scatter([tensor], world_size).data_ptr() == tensor.data_ptr()
    assert flatten_for_scatter([torch.arange(7.0)], world_size).numel() > 7


@pytest.mark.parametrize(
    ("numel", "world_size", "size"),
    [(6, 3, 2), (7, 3, 3), (1, 3, 1), (0, 3, 0), (2, 2, 1), (10**12 + 1, 2, 500000000001)],
)
def test_partition_sizes(numel: int, world_size: int, size: int) -> None:
    assert chunk_size(numel, world_size) == size


# ----------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("numel", [1, 5, 33])
def test_probes_add_up_to_their_sum_exactly_in_any_dtype(world_size: int, numel: int) -> None:
    parts = [probe_gradient(numel, world_size, rank) for rank in range(world_size)]
    assert torch.equal(torch.stack(parts).double().sum(0), probe_sum(numel))
    for dtype in DTYPES:
        total = torch.zeros(numel, dtype=dtype)
        for part in parts:
            total += part.to(dtype)
        assert torch.equal(total.double(), probe_sum(numel))
    if numel >= world_size:
        assert all(part.any() for part in parts), "every rank takes part"
        for left_out in range(world_size):
            rest = sum(part for rank, part in enumerate(parts) if rank != left_out)
            assert not torch.equal(torch.as_tensor(rest).double().expand(numel), probe_sum(numel))


def test_a_comparison_finds_ratio_and_worst_element() -> None:
    right = probe_sum(9)
    assert compare(right, right) == (1.0, 0.0)
    assert compare(0.5 * right, right) == (0.5, 0.5)
    off = right.clone()
    off[4] *= 1.25
    ratio, error = compare(off, right)
    assert error == pytest.approx(0.25)
    assert 1.0 < ratio < 1.25
    assert compare(right[:0], right[:0]) == (1.0, 0.0)
    for value in (float("nan"), float("inf")):
        off[4] = value
        assert not compare(off, right)[1] < 1e9


# ------------------------------------------------------------------------- over real groups


class Record(TorchDispatchMode):
    """The names of all operators that run, and those that read or write a tensor of some size."""

    def __init__(self, numel: int = 0) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        flat = [t for item in (*args, result) for t in (item if isinstance(item, list | tuple) else [item])]
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        views = func.is_view or name in ("detach", "alias", "_unsafe_view", "split", "chunk")
        if not views and (not self.numel or any(t.numel() >= self.numel for t in tensors)):
            self.names.append(name)
        held = {t.untyped_storage().data_ptr() for t in _tensors(args)}
        for tensor in _tensors([result]):
            storage = tensor.untyped_storage()
            if self.numel and storage.data_ptr() not in held and storage.nbytes() >= self.numel * tensor.itemsize:
                self.made.append(name)
        return result


def _tensors(items: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += _tensors(item)
    return found


# The world size divides some, not others, and some are smaller than it.
SIZES: tuple[tuple[int, ...], ...] = ((6,), (7,), (1,), (1, 1, 1), (12, 6), (64, 33, 1, 2, 10))
SCALES = ("mean", "shards", "sum", "predivide", "prescale")
# All scales where the result stays in the gradients' dtype, and the mean in others.
CASES = [
    (sizes, dtype, target, kind)
    for sizes, dtype, target, kind in itertools.product(SIZES, DTYPES, DTYPES, SCALES)
    if dtype == target or kind == "mean"
]


def gradients(sizes: tuple[int, ...], rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + sum(sizes))
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def split_of(kind: str, world_size: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """``pre``, ``post`` and, by invariant 1, the scale."""
    if kind == "sum":
        return (*split_scale(gradient_scale("sum", world_size, 1), world_size, dtype), 1.0)
    shards = world_size if kind == "shards" else 1
    factor = 3.0 if kind == "predivide" else 1.0
    pre, post = split_scale(gradient_scale("mean", world_size, shards), world_size, dtype, factor, kind == "prescale")
    return pre, post, shards / world_size


def plain_reduce_scatter(output: torch.Tensor, buffer: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(output, buffer)


def on_rank(rank: int, world_size: int, folder: str) -> None:
    """One process of a real gloo group: run everything, leave what was found in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    found: dict[Any, Any] = {}
    for sizes, dtype, target, kind in CASES:
        pre, post, _ = split_of(kind, world_size, dtype)
        found["partitions", sizes, dtype, target, kind] = reduce_scatter_coalesced(
            gradients(sizes, rank, dtype), world_size, rank, pre, post, target, plain_reduce_scatter
        )
    for sizes, dtype in itertools.product(SIZES, DTYPES):
        found["plain", sizes, dtype] = _plain_sum(gradients(sizes, rank, dtype), world_size)
    for sizes, dtype, kind in itertools.product(((12,), (64, 33, 1, 2, 10)), DTYPES, SCALES):
        found["passes", sizes, dtype, kind] = _passes(gradients(sizes, rank, dtype), world_size, rank, kind, dtype)
    large = [torch.full((6,), 40000.0, dtype=torch.float16)]
    pre, post, _ = split_of("mean", world_size, torch.float16)
    found["large"] = reduce_scatter_coalesced(large, world_size, rank, pre, post, torch.float16, plain_reduce_scatter)
    small = [torch.full((6,), 2e-7, dtype=torch.float16)]
    found["small"] = reduce_scatter_coalesced(small, world_size, rank, pre, post, torch.float32, plain_reduce_scatter)
    store = dist.distributed_c10d._get_default_store()
    found["agreement"] = exchange(store, "test/same", rank, world_size, "same").unanimous
    found["disagreement"] = exchange(store, "test/differ", rank, world_size, f"text {rank == 1}").said
    dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _plain_sum(tensors: list[torch.Tensor], world_size: int) -> torch.Tensor:
    """What the bare collective makes of the naive layout."""
    buffer = naive_layout(tensors, world_size)
    output = torch.empty(buffer.numel() // world_size, dtype=buffer.dtype)
    dist.reduce_scatter_tensor(output, buffer)
    return output


def _passes(tensors: list[torch.Tensor], world_size: int, rank: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Which operators touch the full buffer or make one like it, and whether the result lies in it."""
    full = sum(world_size * chunk_size(t.numel(), world_size) for t in tensors)
    seen: dict[str, Any] = {}

    def reduce_scatter(output: torch.Tensor, buffer: torch.Tensor) -> None:
        seen["buffer"] = buffer.untyped_storage().data_ptr()
        seen["in place"] = buffer.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
        seen["numel"] = buffer.numel()
        seen["output"] = output.data_ptr()
        with torch.utils._python_dispatch._disable_current_modes():
            plain_reduce_scatter(output, buffer)

    pre, post, _ = split_of(kind, world_size, dtype)
    with Record(full) as record:
        partitions = reduce_scatter_coalesced(tensors, world_size, rank, pre, post, dtype, reduce_scatter)
    return {
        "touching": record.names,
        "making": record.made,
        "numel": seen["numel"] == full,
        "in place": seen["in place"],
        "views": all(p.untyped_storage().data_ptr() == seen["buffer"] for p in partitions if p.numel()),
        "first": partitions[0].data_ptr() == seen["output"],
        "pre": pre,
    }


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank of a real group found."""
    world_size = int(request.param)
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(on_rank, (world_size, str(folder)), nprocs=world_size)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


Found = list[dict[Any, Any]]


def right_partitions(
    sizes: tuple[int, ...], world_size: int, dtype: torch.dtype, scale: float
) -> list[list[torch.Tensor]]:
    """By rank and tensor, in float64, from what the ranks put in."""
    totals = [
        torch.stack([gradients(sizes, rank, dtype)[i].double() for rank in range(world_size)]).sum(0)
        for i in range(len(sizes))
    ]
    partitions = []
    for rank in range(world_size):
        bounds = [(rank * math.ceil(n / world_size), (rank + 1) * math.ceil(n / world_size)) for n in sizes]
        partitions.append([scale * total[low:high] for total, (low, high) in zip(totals, bounds, strict=True)])
    return partitions


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partitions_are_the_invariant_s(ranks: Found, dtype: torch.dtype, kind: str) -> None:
    world_size = len(ranks)
    scale = split_of(kind, world_size, dtype)[2]
    for sizes, target in ((case[0], case[2]) for case in CASES if (case[1], case[3]) == (dtype, kind)):
        right = right_partitions(sizes, world_size, dtype, scale)
        # Rounding is relative to what was added up, not to a sum that may cancel.
        largest = scale * sum(max(float(t.abs().max()) for t in gradients(sizes, r, dtype)) for r in range(world_size))
        bound = 2 * (torch.finfo(dtype).eps + torch.finfo(target).eps) * largest
        for rank, found in enumerate(ranks):
            got = found["partitions", sizes, dtype, target, kind]
            assert [g.shape for g in got] == [r.shape for r in right[rank]], "one-dimensional, without padding"
            assert {g.dtype for g in got} == {target}
            for one, other in zip(got, right[rank], strict=True):
                assert torch.allclose(one.double(), other, rtol=0.0, atol=bound), (sizes, target, rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_the_bare_collective_s_bit_for_bit(ranks: Found, dtype: torch.dtype) -> None:
    for sizes in SIZES:
        for found in ranks:
            got, offset = found["partitions", sizes, dtype, dtype, "sum"], 0
            for partition, numel in zip(got, sizes, strict=True):
                plain = found["plain", sizes, dtype][offset : offset + partition.numel()]
                assert torch.equal(partition.view(torch.uint8), plain.view(torch.uint8)), sizes
                offset += chunk_size(numel, len(ranks))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_full_buffer_is_passed_over_no_more_than_needed(ranks: Found, dtype: torch.dtype, kind: str) -> None:
    """Once to lay it out, once more only to scale before; the rest is done where the data is smallest, in place."""
    for found in ranks:
        one, many = (found["passes", sizes, dtype, kind] for sizes in ((12,), (64, 33, 1, 2, 10)))
        scaling = ["_foreach_mul_"] if one["pre"] != 1.0 else []
        assert one["touching"] == scaling
        assert one["making"] == []
        assert one["in place"]
        assert many["touching"] == ["_chunk_cat", *scaling]
        assert many["making"] == ["_chunk_cat"]
        assert not many["in place"]
        for seen in (one, many):
            assert seen["numel"]
            assert seen["views"] and seen["first"], "the result lies in the buffer"


def test_half_precision_does_not_overflow_where_stock_does_not(ranks: Found) -> None:
    """The mean of 40000 on every rank is 40000; DeepSpeed, which divides first, finds it."""
    for found in ranks:
        (partition,) = found["large"]
        assert torch.allclose(partition.float(), torch.full_like(partition, 40000.0).float(), rtol=2e-3)


def test_half_precision_keeps_small_values(ranks: Found) -> None:
    for found in ranks:
        (partition,) = found["small"]
        assert torch.allclose(partition, torch.full_like(partition, 2e-7), rtol=0.5)


def test_ranks_agree_over_the_default_group_s_store(ranks: Found) -> None:
    others = tuple(rank for rank in range(len(ranks)) if rank != 1)
    for found in ranks:
        assert found["agreement"]
        assert found["disagreement"] == {"text False": others, "text True": (1,)}


def test_the_collective_gets_this_rank_s_part_of_the_buffer() -> None:
    """Whatever the collective leaves in ``output`` is the result; nothing else of the buffer is read."""
    seen: list[tuple[int, int]] = []

    def collective(output: torch.Tensor, buffer: torch.Tensor) -> None:
        seen.append((output.data_ptr() - buffer.data_ptr(), buffer.numel()))
        output.fill_(5.0)

    for rank, right in ((0, [[2.5, 2.5], [2.5, 2.5]]), (1, [[2.5, 2.5], [2.5]])):
        tensors = [torch.ones(4), torch.ones(3)]
        partitions = reduce_scatter_coalesced(tensors, 2, rank, 1.0, 0.5, torch.float32, collective)
        assert [p.tolist() for p in partitions] == right
    assert seen == [(0, 8), (4 * torch.float32.itemsize, 8)]
