"""The sharded norm against the loop over parameters of a live ZeRO-2 engine on stock, and against torch's norm."""

from __future__ import annotations

from typing import Any

import _jobs
import _ranks
import torch
from _figures import Row, figure, ratios
from torch import nn

import ds_gradfix
from ds_gradfix.reduction import NormPart, sharded_norm

ELEMENTS = 64
SLOWER, FASTER = 1.0, 1 / 3


def on_rank(quick: bool) -> list[Row]:
    ds_gradfix.enable(self_check="off")
    rows = []
    for tensors in (10, 1000) if quick else (10, 1000, 10_000):
        for groups in (1, 4) if quick else (1, 4, 16):
            if groups <= tensors:
                rows += norms(tensors, groups, 5 if quick else 31)
    return rows


def norms(tensors: int, groups: int, rounds: int) -> list[Row]:
    from deepspeed.runtime.zero.utils import get_norm_dtype

    device, dtype = _ranks.device(), get_norm_dtype()
    params = [nn.Parameter(torch.ones(ELEMENTS, device=device)) for _ in range(tensors)]
    engine = _jobs.engine(2, nn.ParameterList(params), groups=[params[index::groups] for index in range(groups)])
    optimizer = engine.optimizer
    held = [[torch.randn(ELEMENTS, device=device) for _ in own] for own in optimizer.params_in_partition]

    def stock() -> Any:
        own = optimizer.params_in_partition
        found = [optimizer.get_grad_norm_direct(*pair) for pair in zip(held, own, strict=True)]
        return torch.linalg.vector_norm(torch.stack(found))

    def ours() -> Any:
        parts = [NormPart(group, (optimizer.dp_process_group,)) for group in held]
        return sharded_norm(parts, device, dtype)

    def torchs() -> Any:
        return torch.nn.utils.get_total_norm([tensor for group in held for tensor in group])

    works = {"ours": ours, "stock": stock, "torch": torchs}
    if device != "cpu":
        everything = torch.cat([tensor for group in held for tensor in group])
        works["read"] = lambda: everything.sum()
    torch.testing.assert_close(ours().cpu(), stock().cpu().float(), rtol=1e-5, atol=0)
    times = _ranks.side_by_side(works, rounds)
    engine.destroy()
    case = f"{tensors} tensors, {groups} groups"
    limit = FASTER if tensors == 1000 else SLOWER
    rows = [
        figure(f"{case}, over stock's loop", ratios(times["ours"], times["stock"]), limit=limit),
        figure(f"{case}, over torch's, which is local", ratios(times["ours"], times["torch"])),
    ]
    if "read" in times:
        rows.append(figure(f"{case}, over reading the bytes", ratios(times["ours"], times["read"])))
    return rows
