"""One rank: routed experts under ZeRO-0, all ranks sharing every sequence.

Prints, as one line of JSON, for each convention and for stock the gradient of every parameter as a multiple of the mean
of the ranks' own, and how far it is from being one. A rank's own gradient comes from a model without DeepSpeed.

The mpu is Megatron-DeepSpeed's kind: DeepSpeed's own calls the ranks of a sequence model-parallel, and its experts take
those for ranks that hold the same tokens.
"""

from __future__ import annotations

import gc
import json
import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import ds_gradfix
from ds_gradfix.verify import _compat, _mpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, ROWS, EXPERTS = 4, 8, 2


class Routed(nn.Module):
    """Two experts of which each row goes to one; every rank holds both."""

    def __init__(self, routed: nn.Module) -> None:
        super().__init__()
        self.inner, self.routed, self.out = nn.Linear(WIDTH, WIDTH), routed, nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.routed(self.inner(inputs))[0])
        return outputs.square().mean()


class Plain(nn.Module):
    """What `deepspeed.moe.layer.MoE` computes while no expert is full."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        share, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
        every = torch.stack([expert(hidden) for expert in self.experts])
        return (share[:, None] * every[chosen, torch.arange(len(chosen))],)


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def inputs(rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1 + rank)) * (1 + rank)


def mean_of_own() -> list[Tensor]:
    """Over all ranks, in the order of the parameters."""
    plain = seeded(Routed(Plain())).double()
    for rank in range(RANKS):
        (plain(inputs(rank).double()) / RANKS).backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


def train(unit: Any, section: dict[str, Any]) -> list[tuple[float, float]]:
    _compat.forget_last_engine()
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH, bias=False), EXPERTS, k=1, capacity_factor=float(EXPERTS), use_rts=False)
    net = seeded(Routed(moe))
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, **section},
        mpu=unit,
    )
    engine.backward(engine(inputs(RANK)))
    found = []
    for parameter, right in zip(engine.module.parameters(), mean_of_own(), strict=True):
        gradient = parameter.grad.double()
        ratio = float((gradient * right).sum() / right.square().sum())
        found.append((ratio, float((gradient - ratio * right).norm() / right.norm())))
    engine.destroy()
    del engine, net, moe
    gc.collect()  # or ds_gradfix, coming on late, could find the engine on one rank and not on the other
    return found


def main() -> None:
    _compat.prepare(deepspeed.__version__, on_cpu=True)
    torch.distributed.init_process_group(
        "gloo", os.environ["RENDEZVOUS"], timedelta(seconds=60), world_size=RANKS, rank=RANK
    )
    deepspeed.init_distributed()
    unit = _mpu._Unit(RANKS, data_over_all_ranks=False)
    found: dict[str, Any] = {}
    for convention in ("stock", "sum", "mean"):
        section = {} if convention == "stock" else {"ds_gradfix": {"sequence_parallel_reduction": convention}}
        if section:
            ds_gradfix.enable()
        found[convention] = train(unit, section)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
