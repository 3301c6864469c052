"""One rank: Lightning's Trainer with its DeepSpeedStrategy, as a user would write it.

    train_with_lightning.py FILE

One step of plain SGD with a learning rate of 1, so that what a parameter moved by is its gradient. Writes, on rank 0,
its ratio to the gradient of a single process in float64, how far it is from being a multiple of that, and the ratio of
the norms to FILE. Knows nothing of ds-gradfix.

Lightning refuses DeepSpeed without a CUDA device. Where there is none that refusal is lifted, and nothing else changed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as strategies
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

RANKS, ON_CPU = int(os.environ["WORLD_SIZE"]), os.environ["DS_ACCELERATOR"] == "cpu"
SAMPLES, WIDTH = 3, 8
"""Each rank's."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_end(self) -> None:
        self.norm = float(self.trainer.model.get_global_grad_norm())
        self.after = [safe_get_full_fp32_param(parameter).cpu() for parameter in self.parameters()]


def data() -> TensorDataset:
    x = torch.randn(RANKS * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def compared(net: Net) -> dict[str, float]:
    right = Net().double()
    right.training_step([tensor.double() for tensor in data().tensors], 0).backward()
    before = torch.cat([parameter.detach().flatten() for parameter in right.parameters()])
    gradient = torch.cat([parameter.grad.flatten() for parameter in right.parameters()])
    moved = before - torch.cat([after.double().flatten() for after in net.after])
    ratio = float(moved @ gradient / (gradient @ gradient))
    off = float((moved - ratio * gradient).norm() / gradient.norm())
    return {"gradient": ratio, "off": off, "norm": net.norm / float(gradient.norm())}


def lift_refusal(module: Any) -> None:
    """Let Lightning's module of the strategy take CPUs for devices of its own, which have no index."""
    module.CUDAAccelerator, module._validate_device_index_selection = CPUAccelerator, lambda devices: None
    module.DeepSpeedStrategy.root_device = torch.device("cpu", 0)


def main(file: Path) -> None:
    if ON_CPU:
        lift_refusal(strategies)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for a minute
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_predivide_factor": RANKS,
        "zero_optimization": {"stage": 3, "reduce_scatter": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    trainer = Trainer(
        accelerator="cpu" if ON_CPU else "cuda",
        devices=RANKS,
        strategy=DeepSpeedStrategy(config=config),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net, DataLoader(data(), batch_size=SAMPLES))
    if trainer.is_global_zero:
        file.write_text(json.dumps(compared(net)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
