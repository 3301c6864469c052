"""The norm that counts every distinct element once, over real groups, against a float64 norm of the logical tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launching import launch

from ds_gradfix.reduction import NormPart, clip_coefficient, sharded_norm

Found = list[dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Found:
    """What each rank found, by kind of norm, for the same random placements."""
    ended = launch("sharded_norms.py", ranks=int(request.param))
    for rank in ended:
        assert rank.status == 0, rank.output[-3000:]
    return [json.loads(rank.output.splitlines()[-1]) for rank in ended]


def cases(ranks: Found, kind: str) -> Iterator[list[dict[str, Any]]]:
    yield from zip(*(rank[kind] for rank in ranks), strict=True)


def same_bits(found: list[dict[str, Any]]) -> float:
    (norm,) = {one["norm"] for one in found}
    (right,) = {one["right"] for one in found}
    assert right != (0.0).hex()
    return float.fromhex(norm)


@pytest.mark.parametrize("norm_type", ["1.0", "2.0", "3.0", "inf"])
def test_the_norm_is_that_of_the_logical_tensors_to_the_last_bit(ranks: Found, norm_type: str) -> None:
    for found in cases(ranks, f"{norm_type} torch.float64"):
        norm, right = same_bits(found), torch.tensor(float.fromhex(found[0]["right"])).float()
        # The last bit of float32, where the float64 value lies between two.
        near = {float(right), *(float(torch.nextafter(right, torch.tensor(to))) for to in (0.0, math.inf))}
        assert norm in near
        assert norm == pytest.approx(float.fromhex(found[0]["right"]), rel=2**-23)


def test_the_norm_in_float32_is_exact_to_its_rounding(ranks: Found) -> None:
    for found in cases(ranks, "2.0 torch.float32"):
        assert same_bits(found) == pytest.approx(float.fromhex(found[0]["right"]), rel=2e-6)


def test_one_collective_for_each_group_of_more_than_one_rank(ranks: Found) -> None:
    assert all(one["once"] for rank in ranks for kind in rank.values() for one in kind)


@pytest.mark.parametrize("norm_type", ["2.0", "inf"])
def test_a_number_that_is_not_finite_reaches_every_rank(ranks: Found, norm_type: str) -> None:
    for found in cases(ranks, f"{norm_type} poisoned"):
        for one in found:
            assert not math.isfinite(float.fromhex(one["norm"]))
            assert math.isnan(float.fromhex(one["coefficient"]))


def test_large_gradients_overflow_only_float32(ranks: Found) -> None:
    for found in cases(ranks, "large torch.float64"):
        assert same_bits(found) == pytest.approx(float.fromhex(found[0]["right"]), rel=2**-23)
    for found in cases(ranks, "large torch.float32"):
        assert same_bits(found) == math.inf
        assert math.isnan(float.fromhex(found[0]["coefficient"]))


def test_the_coefficient() -> None:
    def of(norm: float, clip: float) -> float:
        return float(clip_coefficient(torch.tensor(norm), clip))

    assert of(4.0, 1.0) == pytest.approx(1 / (4 + 1e-6), rel=1e-7)
    assert of(0.5, 1.0) == 1.0
    assert of(0.0, 1.0) == 1.0
    assert all(math.isnan(of(norm, 1.0)) for norm in (math.inf, math.nan))


def test_no_parts_and_no_tensors() -> None:
    assert sharded_norm([], "cpu", torch.float64).item() == 0.0
    assert sharded_norm([NormPart([])], "cpu", torch.float64).item() == 0.0
    assert sharded_norm([NormPart([torch.ones(4)], counts=False)], "cpu", torch.float64, math.inf).item() == 0.0


def test_a_norm_type_that_is_none() -> None:
    for norm_type in (0.0, -1.0, -math.inf):
        with pytest.raises(ValueError, match="norm_type"):
            sharded_norm([], "cpu", torch.float64, norm_type)


def test_no_graph_is_recorded() -> None:
    weight = torch.ones(4, requires_grad=True)
    assert not sharded_norm([NormPart([weight])], "cpu", torch.float64).requires_grad


def test_a_torch_whose_fused_norm_takes_no_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors, order=2: fused(tensors, order))
    part = NormPart([torch.full((1000,), 300.0, dtype=torch.float16), torch.full((5,), 1e30)])
    assert sharded_norm([part], "cpu", torch.float64).item() == pytest.approx(5**0.5 * 1e30, rel=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_on_a_gpu_the_host_waits_for_nothing(norm_type: float, dtype: torch.dtype) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mixed = [torch.randn(1000, device="cuda").to(kind) for kind in (torch.float32, torch.bfloat16, torch.float16)]
        on_host = torch.randn(50)
        alone = torch.distributed.group.WORLD
        parts = [NormPart([*mixed, mixed[0][5:5]], [alone]), NormPart([on_host]), NormPart(mixed[:1], counts=False)]
        sharded_norm(parts, "cuda", dtype, norm_type)  # the first launch may wait, for what it loads
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = sharded_norm(parts, "cuda", dtype, norm_type)
            coefficient = clip_coefficient(norm, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        right = torch.cat([t.double().cpu() for t in (*mixed, on_host)]).norm(norm_type)
        assert norm.is_cuda and coefficient.is_cuda
        assert norm.item() == pytest.approx(float(right), rel=2e-6)
        huge = NormPart([torch.full((1000,), 1e30, device="cuda")])
        assert math.isfinite(sharded_norm([huge], "cuda", torch.float64).item())
        assert not math.isfinite(sharded_norm([NormPart([mixed[0] * math.nan])], "cuda", dtype, norm_type).item())
        to_host = sharded_norm(parts, "cpu", dtype, norm_type)
        assert to_host.item() == pytest.approx(float(right), rel=2e-6)
    finally:
        torch.distributed.destroy_process_group()
