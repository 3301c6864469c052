"""One of four ranks: experts spread over two ranks each, under ZeRO-1/2, against gradients taken without DeepSpeed.

Two replicas of each expert, each of which sees the tokens of two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from experts_over_shards import EXPERTS, WIDTH, Plain
from scenario import forget_groups, play
from torch import Tensor, nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, LAYERS = 16, 3
"""Three layers: then a partition holds slices of two experts' gradients that do not lie side by side in a bucket."""


class Routed(nn.Module):
    """In each layer two experts of which each row goes to one; they are DeepSpeed's or :class:`Plain`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.routed = nn.ModuleList(make() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for dense, routed in zip(self.dense, self.routed, strict=True):
            hidden = hidden + routed(dense(hidden))[0]
        outputs: Tensor = self.out(hidden)
        return outputs.square().mean()


def value_of(name: str) -> Tensor:
    """A parameter's first value, by its name in the plain model, without which rank holds which expert."""
    shapes = {name: parameter.shape for name, parameter in Routed(Plain).named_parameters()}
    seed = sorted(shapes).index(name)
    return torch.randn(shapes[name], generator=torch.Generator().manual_seed(seed)) / 2


def plain_name(name: str) -> str:
    if "deepspeed_experts" in name:
        return f"{name.split('.deepspeed_moe')[0]}.experts.{RANK % EXPERTS}.weight"
    return name.replace("deepspeed_moe.gate.wg", "gate")


def inputs(rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + rank)) * (1 + rank)


def mean_of_all() -> dict[str, Tensor]:
    plain = Routed(Plain).double()
    for name, parameter in plain.named_parameters():
        parameter.data = value_of(name).double()
    for rank in range(RANKS):
        (plain(inputs(rank).double()) / RANKS).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def trained(stage: int, **zero: Any) -> dict[str, tuple[float, float]]:
    """By parameter of the plain model: what a step of rate 1 took off it, as a multiple of the mean, and the rest."""
    forget_groups()

    def make() -> nn.Module:
        expert = nn.Linear(WIDTH, WIDTH, bias=False)
        layer: nn.Module = MoE(WIDTH, expert, EXPERTS, ep_size=2, k=1, capacity_factor=float(EXPERTS), use_rts=False)
        return layer

    net = Routed(make)
    for name, parameter in net.named_parameters():
        parameter.data = value_of(plain_name(name))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(groups, lr=1.0), config=config)
    engine.backward(engine(inputs(RANK)))
    engine.step()
    wanted, found = mean_of_all(), {}
    for name, parameter in engine.module.named_parameters():
        name = plain_name(name)
        taken, right = (value_of(name) - parameter.detach()).double(), wanted[name]
        ratio = float((taken * right).sum() / right.square().sum())
        found[name] = ratio, float((taken - ratio * right).norm() / right.norm())
    engine.destroy()
    engine.optimizer = None
    return found


SCENARIOS = {
    **{f"ZeRO-{stage}": partial(trained, stage) for stage in (1, 2)},
    **{f"ZeRO-{stage}, one rank at a time": partial(trained, stage, use_multi_rank_bucket_allreduce=False)
       for stage in (1, 2)},
}  # fmt: skip

if __name__ == "__main__":
    play(SCENARIOS)
