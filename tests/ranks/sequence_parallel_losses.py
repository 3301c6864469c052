"""One rank: three ways to write a loss over a sequence that is split over ranks, each on every case's DeepSpeed.

    sequence_parallel_losses.py CASES.json

Two ranks share each sequence, by real Ulysses attention. Prints, as one line of JSON, a list: for each case, loss and
parameter, the ratio of the gradient that the optimizer gets to the single-process gradient of the mean over all tokens
of all sequences, and how far it is from being a multiple of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed._functional_collectives
import torch.distributed.nn.functional
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import ds_gradfix
from ds_gradfix.errors import SettingsError
from ds_gradfix.verify import _compat, _mpu

SHARDS = 2
LENGTH, WIDTH, HEADS, CLASSES = 16, 8, 4, 12
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [batch, sequence, heads, width]."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()


class Net(nn.Module):
    """One attention layer and a classifier: [batch, sequence, WIDTH] -> the loss of each token, [batch, sequence]."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.attention: Any = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1) if group else None
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        batch, length, _ = inputs.shape
        query, key, value = self.qkv(inputs).view(batch, length, 3, HEADS, WIDTH // HEADS).unbind(2)
        attended = self.attention(query, key, value, 0) if self.attention else attend(query, key, value)
        hidden = inputs + self.out(attended.reshape(batch, length, WIDTH))
        losses = F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(batch, length)


def sequences(count: int) -> tuple[Tensor, Tensor]:
    """`count` sequences, one for each data-parallel replica, of unlike sizes, so that no two gradients are the same."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, LENGTH, WIDTH, generator=generator) * (1 + torch.arange(count)).view(-1, 1, 1)
    return inputs, torch.randint(CLASSES, (count, LENGTH), generator=generator)


class _GatherTokens(torch.autograd.Function):
    """All shards' token losses, [sequence]; backward keeps this rank's own slice (Megatron-DeepSpeed's loss)."""

    @staticmethod
    def forward(context: Any, losses: Tensor, group: Any) -> Tensor:
        context.place, context.size = torch.distributed.get_rank(group), losses.numel()
        shards = [torch.empty_like(losses) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(shards, losses.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(0, context.place * context.size, context.size), None


LOSSES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "gathered tokens": lambda losses, group: _GatherTokens.apply(losses.flatten(), group).mean(),
    "own shard": lambda losses, group: losses.mean(),
    "gathered shards": lambda losses, group: gathered(losses.mean(), group).mean(),
}


def gathered(loss: Tensor, group: Any) -> Any:
    """A differentiable all-gather: backward sums what all ranks want of this rank's loss."""
    functional: Any = torch.distributed.nn.functional
    if torch.distributed.get_world_size(group) == RANKS:
        return torch.stack(functional.all_gather(loss, group=group))
    # The backward of the above takes a group's ranks for global ones, except over NCCL.
    return torch.distributed._functional_collectives.all_gather_tensor_autograd(loss.view(1), 0, group)


def train(case: dict[str, Any], right: dict[str, Tensor]) -> dict[str, Any]:
    """Every loss through one engine. Its learning rate is zero, so that all of them see the same weights."""
    _compat.forget_last_engine()
    mpu = _mpu.for_size(SHARDS, stage=case["config"]["zero_optimization"]["stage"])
    group = mpu.get_sequence_parallel_group()
    net = Net(group)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False, **case["config"]},
        mpu=mpu,
    )  # fmt: skip
    replica, place = divmod(RANK, SHARDS)
    own = [tensor[replica : replica + 1].chunk(SHARDS, dim=1)[place] for tensor in sequences(RANKS // SHARDS)]
    found: dict[str, Any] = {"report": ds_gradfix.report(engine) if case["on"] else None, "losses": {}}
    for name, loss in LOSSES.items():
        engine.backward(loss(engine(*own), group))
        gradients = {key: safe_get_full_grad(parameter) for key, parameter in engine.module.named_parameters()}
        found["losses"][name] = {key: compared(gradient, right[key]) for key, gradient in gradients.items()}
        engine.step()
    found["sizes"] = {key: gradient.numel() for key, gradient in right.items()}
    engine.destroy()
    del engine, net
    gc.collect()
    return found


def compared(gradient: Tensor, right: Tensor) -> tuple[float, float]:
    gradient = gradient.double().view_as(right)
    ratio = float((gradient * right).sum() / right.square().sum())
    return ratio, float((gradient - ratio * right).norm() / right.norm())


def single_process(replicas: int) -> dict[str, Tensor]:
    net = Net().double()
    inputs, targets = sequences(replicas)
    net(inputs.double(), targets).mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def main(cases: Path) -> None:
    _compat.prepare(deepspeed.__version__, on_cpu=True)
    torch.distributed.init_process_group(
        "gloo", init_method=os.environ["RENDEZVOUS"], rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    deepspeed.init_distributed()
    gc.freeze()  # what has been imported is never garbage: every collection would search it again
    right = single_process(RANKS // SHARDS)
    outcomes = []
    for case in json.loads(cases.read_text()):
        if case["on"]:
            ds_gradfix.enable(**case.get("arguments", {}))
        os.environ.update(case.get("variables", {}))
        try:
            outcomes.append(train(case, right))
        except SettingsError as error:
            outcomes.append({"refused": str(error)})
        for name in case.get("variables", {}):
            del os.environ[name]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
