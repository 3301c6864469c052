"""One rank: two routed experts, one on each rank, in fp16 or bf16 without ZeRO, and the norm that a step reports."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from loss_scale import FlatSgd
from scenario import forget_groups, play
from torch import Tensor, nn

RANK = int(os.environ["RANK"])
WIDTH, ROWS, CLIP = 4, 8, 0.25


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.routed = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, ep_size=2, k=1, capacity_factor=2.0, use_rts=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.routed(self.inner(inputs))[0]
        return outputs.float().square().mean()


# Up to 0.19.7 the norm of experts is made with what on a GPU is torch.tensor; a CPU's takes no number.
type(get_accelerator()).FloatTensor = property(lambda self: partial(torch.tensor, dtype=torch.float32))


def step(dtype: str, fused: bool = False) -> dict[str, float]:
    """The reported norm over that of the reduced gradients, and the update over what clipping by it makes of them."""
    forget_groups()
    generator = torch.Generator().manual_seed(3)
    net = Routed()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    half = {"initial_scale_power": 7} if dtype == "fp16" else {}
    engine = deepspeed.initialize(
        model=net,
        optimizer=FlatSgd(groups) if fused else torch.optim.SGD(groups, lr=1.0),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": CLIP, dtype: {"enabled": True, **half}},
    )[0]
    scale = 128.0 if dtype == "fp16" else 1.0
    kind = torch.float16 if dtype == "fp16" else torch.bfloat16
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1 + RANK))
    engine.backward(engine(inputs.to(kind)))
    gradients = {name: p.grad.double() / scale for name, p in engine.module.named_parameters() if p.grad is not None}
    experts = [".experts." in name for name in gradients]
    squares = [gradient.square().sum() for gradient in gradients.values()]
    dense = sum(square for square, expert in zip(squares, experts, strict=True) if not expert)
    routed = torch.as_tensor(sum(square for square, expert in zip(squares, experts, strict=True) if expert))
    torch.distributed.all_reduce(routed)
    norm = float((dense + routed).sqrt())
    optimizer = engine.optimizer
    masters = {p: m for ps, ms in zip(optimizer.fp16_groups, _masters(optimizer), strict=True) for p, m in zip(ps, ms)}
    before = {name: masters[p].double().clone() for name, p in engine.module.named_parameters() if p in masters}
    engine.step()
    name = next(name for name in gradients if ".experts." in name)
    update = before[name] - masters[dict(engine.module.named_parameters())[name]].double()
    right = gradients[name] * min(1.0, CLIP / norm)
    return {
        "norm": float(engine.get_global_grad_norm() or 0.0) / norm,
        "update": float((update * right).sum() / right.square().sum()),
        "dense": float(torch.as_tensor(dense).sqrt()) / norm,
    }


def _masters(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "fp32_groups"):
        return list(optimizer.fp32_groups)
    return [
        [piece.view_as(p) for piece, p in zip(flat.data.split([p.numel() for p in group]), group, strict=True)]
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
    ]


if __name__ == "__main__":
    play(
        {
            "fp16": partial(step, "fp16"),
            "bf16": partial(step, "bf16"),
            "fused fp16": partial(step, "fp16", fused=True),
            "fused bf16": partial(step, "bf16", fused=True),
        }
    )
