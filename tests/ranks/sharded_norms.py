"""One rank: sharded norms of random tensors in random placements, without DeepSpeed.

Prints, as one line of JSON, for every seed and kind of norm: the norm in float64 of the logical tensors, what
``sharded_norm`` gave here, the clip coefficient, and how often each group was reduced over.

The ranks are a grid of pipeline stages, data-parallel and tensor-parallel ranks; experts divide the data-parallel ones
into expert-parallel groups, which own different experts, and the replicas of each expert.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_gradfix.reduction import NormPart, chunk_size, clip_coefficient, sharded_norm, torch_all_reduce

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEEDS = 40
KINDS_OF_NORM = [(2.0, torch.float32), *((norm_type, torch.float64) for norm_type in (1.0, 2.0, 3.0, math.inf))]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Grid:
    """Where this rank stands, and the groups along each axis that it belongs to."""

    def __init__(self, stages: int, tensor: int, experts: int) -> None:
        data = RANKS // (stages * tensor)
        ranks = torch.arange(RANKS).view(stages, data // experts, experts, tensor)
        self.sizes = {"pipe": stages, "replicas": data // experts, "expert": experts, "tensor": tensor, "data": data}
        self.groups: dict[str, Any] = {}
        for axis, name in enumerate(("pipe", "replicas", "expert", "tensor")):
            self._make(name, ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]))
        self._make("data", ranks.permute(0, 3, 1, 2).reshape(-1, data))
        self.at = {name: dist.get_rank(group) for name, group in self.groups.items()}

    def _make(self, name: str, rows: Tensor) -> None:
        for row in rows.tolist():
            group = dist.new_group(row)
            if RANK in row:
                self.groups[name] = group


@cache
def grid(stages: int, tensor: int, experts: int) -> Grid:
    return Grid(stages, tensor, experts)


def grids() -> list[Grid]:
    sizes = range(1, RANKS + 1)
    fitting = [size for size in itertools.product(sizes, sizes, sizes) if RANKS % math.prod(size) == 0]
    return [grid(*size) for size in fitting]


def own_slice(tensors: list[Tensor], ranks: int, rank: int) -> Tensor:
    """A rank's slice of a flat buffer whose padding holds what must not count; a view."""
    numel = sum(tensor.numel() for tensor in tensors)
    size = chunk_size(numel, ranks)
    padding = torch.full((size * ranks - numel,), 9e3, dtype=tensors[0].dtype)
    own = torch.cat([*map(torch.flatten, tensors), padding])[rank * size : (rank + 1) * size]
    return own[: max(0, min(size, numel - rank * size))]


class Case:
    """One random placement: the same logical tensors on every rank, and the parts that this rank holds of them."""

    def __init__(
        self, seed: int, where: Grid, norm_type: float, poison: float | None = None, scale: float = 1.0
    ) -> None:
        self.random, self.where, self.norm_type = random.Random(seed), where, norm_type
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.logical: list[Tensor] = []
        self.parts: list[NormPart] = []
        self.poisoned = None if poison is None else (self.random.randrange(6), poison)
        for kind in self.random.sample(KINDS, len(KINDS)):
            kind(self)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.random.choice(DTYPES)
        scale = self.scale if dtype.itemsize >= 4 else min(self.scale, 100.0)
        made = (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).to(dtype)
        if self.poisoned is not None and self.poisoned[0] <= len(self.logical) and made.numel():
            made.view(-1)[self.random.randrange(made.numel())] = self.poisoned[1]
            self.poisoned = None
        self.logical.append(made)
        return made

    def add(self, tensors: list[Tensor], *axes: str, stage: int | None, counts: bool = True, known: bool = True) -> Any:
        """A part over these axes, of one stage, unknown to the others or not; or of all, of which the first counts."""
        mine = stage is None or self.where.at["pipe"] == stage
        if not mine and not known:
            return
        groups = [self.where.groups[axis] for axis in (*axes, "pipe")]
        counts = counts and (mine if stage is not None else self.where.at["pipe"] == 0)
        self.parts.append(NormPart(tensors if mine else [], groups, counts))

    def stages(self) -> Iterator[int]:
        return iter(range(self.where.sizes["pipe"]))

    def dense(self) -> None:
        for stage in self.stages():
            tensors = [self.draw(self.random.randrange(9), 3) for _ in range(self.random.randrange(4))]
            if self.random.random() < 0.5:
                self.add(tensors, stage=stage)
            else:
                self.add(tensors, "tensor", stage=stage, counts=self.where.at["tensor"] == 0)

    def tied(self) -> None:
        self.add([self.draw(5, dtype=torch.float32)], stage=None)

    def partitioned(self) -> None:
        dtype = self.random.choice(DTYPES)
        for stage in self.stages():
            tensors = [self.draw(self.random.randrange(1, 7), dtype=dtype) for _ in range(3)]
            own = own_slice(tensors, self.where.sizes["data"], self.where.at["data"])
            self.add([own], "data", stage=stage)

    def tensor_parallel(self) -> None:
        for stage in self.stages():
            whole = self.draw(4 * self.where.sizes["tensor"], 2)
            self.add([whole.chunk(self.where.sizes["tensor"])[self.where.at["tensor"]]], "tensor", stage=stage)

    def experts(self) -> None:
        """On one stage only, and sometimes the other stages know nothing of them."""
        stage = self.random.randrange(self.where.sizes["pipe"])
        known, flat = self.random.random() < 0.5, self.random.random() < 0.5
        dtype = self.random.choice(DTYPES)
        for owner in range(self.where.sizes["expert"]):
            for _ in range(self.random.randrange(3)):
                expert = self.draw(self.random.randrange(1, 5), 3, dtype=dtype)
                if owner == self.where.at["expert"]:
                    self.held.append(expert)
        if flat:
            held = [own_slice(self.held, self.where.sizes["replicas"], self.where.at["replicas"])] if self.held else []
            self.add(held, "replicas", "expert", stage=stage, known=known)
        else:
            self.add(self.held, "expert", stage=stage, known=known)

    def offloaded(self) -> None:
        """Norms that were taken before, of each data-parallel rank's own elements."""
        for stage in self.stages():
            wholes = [self.draw(6) for _ in range(self.where.sizes["data"])]
            self.add([wholes[self.where.at["data"]].double().norm(self.norm_type)], "data", stage=stage)

    def nothing(self) -> None:
        self.add([], "tensor", "data", stage=None)
        self.add([torch.empty(0), torch.empty(0, 4, dtype=torch.bfloat16)], "data", stage=None)

    @property
    def held(self) -> list[Tensor]:
        return self.__dict__.setdefault("own_experts", [])  # type: ignore[no-any-return]

    def right(self) -> float:
        return float(torch.cat([t.double().flatten() for t in self.logical]).norm(self.norm_type))


KINDS = [Case.dense, Case.tied, Case.partitioned, Case.tensor_parallel, Case.experts, Case.offloaded, Case.nothing]


def measured(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    reduced: list[list[int]] = []

    def counting(tensor: Tensor, group: Any, op: str) -> None:
        assert tensor.dim() == 1 and tensor.dtype == dtype
        reduced.append(dist.get_process_group_ranks(group))
        torch_all_reduce(tensor, group, op)

    norm = sharded_norm(case.parts, "cpu", dtype, case.norm_type, counting)
    assert norm.dtype == torch.float32 and norm.dim() == 0
    groups = {tuple(dist.get_process_group_ranks(group)) for part in case.parts for group in part.groups}
    return {
        "norm": float(norm).hex(),
        "coefficient": float(clip_coefficient(norm, 0.5)).hex(),
        "right": case.right().hex(),
        "once": sorted(map(tuple, reduced)) == sorted(ranks for ranks in groups if len(ranks) > 1),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", os.environ["RENDEZVOUS"], timedelta(seconds=60), world_size=RANKS, rank=RANK
    )
    places = grids()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(SEEDS):
        where = places[seed % len(places)]
        for norm_type, dtype in KINDS_OF_NORM:
            case = Case(seed, where, norm_type)
            found.setdefault(f"{norm_type} {dtype}", []).append(measured(case, dtype))
        for norm_type, poison in itertools.product((2.0, math.inf), (math.nan, math.inf, -math.inf)):
            case = Case(seed, where, norm_type, poison)
            found.setdefault(f"{norm_type} poisoned", []).append(measured(case, torch.float64))
        large = Case(seed, where, 2.0, scale=1e30)
        for dtype in (torch.float64, torch.float32):
            found.setdefault(f"large {dtype}", []).append(measured(large, dtype))
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
