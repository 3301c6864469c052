"""A plain data-parallel training loop that says what ds-gradfix does for it.

    DS_GRADFIX=1 deepspeed --num_gpus 2 train_plain.py
    DS_GRADFIX=1 torchrun --nproc_per_node 2 train_plain.py

or with ds_gradfix.enable() in the script instead of the variable. train_plain.json divides gradients by 2 before they
are summed, for sums that can't overflow; under ZeRO-3 on two ranks DeepSpeed then leaves them divided. Every rank
prints what ds_gradfix.report says of its engine, and rank 0, at each step, how large the gradient is beside that of a
single process with everybody's samples: it should be 1.00.
"""

import argparse
import os
import socket
import warnings
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

import ds_gradfix

STEPS, SAMPLES, WIDTH = 3, 8, 16


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank trains on: [SAMPLES, WIDTH] and [SAMPLES, 1]."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.sin().sum(dim=1, keepdim=True)


def relative_size(engine: deepspeed.DeepSpeedEngine, step: int) -> float:
    """DeepSpeed's gradient as a multiple of the one that this process computes alone. All ranks call it together."""
    mine, alone = list(engine.module.parameters()), new_model()
    for parameter, held in zip(alone.parameters(), mine, strict=True):
        parameter.data.copy_(safe_get_full_fp32_param(held))
    gradient = torch.cat([safe_get_full_grad(held).flatten().cpu() for held in mine])
    x, y = (torch.cat(part) for part in zip(*(batch(step, rank) for rank in range(engine.world_size)), strict=True))
    nn.functional.mse_loss(alone(x), y).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
    return float(gradient @ expected / (expected @ expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls collectives that newer torch has renamed
    if get_accelerator().device_name() == "cpu":
        # Optional kernels for collectives between CPU ranks: they take a C++ compiler, and a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        get_accelerator().set_device(args.local_rank)

    engine, *_ = deepspeed.initialize(model=new_model(), config=str(Path(__file__).with_suffix(".json")))
    rank, report = engine.global_rank, ds_gradfix.report(engine)
    print(
        f"rank {rank} of {engine.world_size} on {socket.gethostname()}: reduced by {report['by']},"
        f" divided by {report['divisor']:g}; in force: {', '.join(report['patches']) or 'nothing'}",
        flush=True,
    )
    for step in range(STEPS):
        x, y = (part.to(engine.device) for part in batch(step, rank))
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        ratio = relative_size(engine, step)
        engine.step()
        if rank == 0:
            print(
                f"step {step}  loss {loss.item():.4f}  norm {float(engine.get_global_grad_norm()):.4f}"
                f"  gradient is {ratio:.2f} x the single-process gradient",
                flush=True,
            )
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
