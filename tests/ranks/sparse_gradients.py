"""One rank: embeddings whose gradients are reduced row by row, under ZeRO stage 0, and what each row loses in a step.

A scenario gives ``got`` and ``right``, the update of the whole table; right is the mean of the ranks' own gradients,
computed here in float64 without DeepSpeed.
"""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, WIDTH = 8, 2


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=sparse)

    def forward(self, rank: int, of_sum_zero: bool) -> Tensor:
        """Linear in the table: a looked-up row's gradient is its weight, which can be made to sum to zero."""
        tokens = torch.tensor([[0, 1, 1, 5], [1, 2, 3, 5]][rank % 2])
        weights = 1.0 + rank + torch.arange(4.0)[:, None] * torch.tensor([1.0, 3.0])
        if of_sum_zero:
            weights[0] = weights[3] = torch.tensor([1.0, -1.0]) * (1 + rank)
        return (self.rows(tokens) * weights.to(self.rows.weight.dtype)).sum()


def looked_up(sparse: bool = False, of_sum_zero: bool = True, **more: Any) -> dict[str, Any]:
    net = Table(sparse)
    exact = Table(False).double()
    for rank in range(RANKS):
        (exact(rank, of_sum_zero) / RANKS).backward()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "steps_per_print": 1_000_000, **more}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    before = engine.module.rows.weight.detach().double().clone()
    engine.backward(engine(RANK, of_sum_zero))
    engine.step()
    after = engine.module.rows.weight.detach().double()
    engine.destroy()
    gradient = exact.rows.weight.grad
    assert gradient is not None
    return {"got": (before - after).tolist(), "right": gradient.tolist()}


COMPRESSED = {"sparse_gradients": True}
PREDIVIDED = {"gradient_predivide_factor": 4.0}
SCENARIOS = {
    "compressed": lambda: looked_up(**COMPRESSED),
    "compressed, no row of sum zero": lambda: looked_up(of_sum_zero=False, **COMPRESSED),
    "compressed, pre-divided": lambda: looked_up(of_sum_zero=False, **COMPRESSED, **PREDIVIDED),
    "sparse": lambda: looked_up(sparse=True),
    "sparse, pre-divided": lambda: looked_up(sparse=True, **PREDIVIDED),
    "sparse, pre-divided by the ranks": lambda: looked_up(sparse=True, gradient_predivide_factor=2.0),
    "sparse, prescaled": lambda: looked_up(sparse=True, prescale_gradients=True, **PREDIVIDED),
    "dense, pre-divided": lambda: looked_up(**PREDIVIDED),
    "sparse, sum": lambda: looked_up(sparse=True, gradient_allreduce_op="sum"),
}


if __name__ == "__main__":
    from scenario import play

    play(SCENARIOS)
