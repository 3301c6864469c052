"""One rank: DeepSpeed's own engine features, each on stock and under ds-gradfix.

A scenario gives numbers and digests that must be the same to the bit. `right ...` are jobs in which nothing is to be
corrected. In `corrected ...`, ZeRO-3 with sequence parallelism of two, stock gradients are half of what they should be:
there stock gets the loss times two, which is exact in binary, so that the corrected job must give the bits of stock.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from scenario import on_stock, play
from torch import Tensor, nn

from ds_gradfix.verify import _mpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH = 8


class Job:
    """An engine with AdamW, and its data."""

    def __init__(self, stage: int, shards: int = 1, accumulation: int = 1, **config: Any) -> None:
        torch.manual_seed(5)
        self.weight = 2.0 if shards > 1 and on_stock() else 1.0
        self.step, self.shards = 0, shards
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            mpu=_mpu.for_size(shards, stage=stage),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": 1e6,  # its code runs, and hides no scale
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                **config,
            },
        )

    def loss(self, spoiled: bool = False) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * self.step + RANK)
        dtype = next(self.engine.module.parameters()).dtype
        inputs = torch.randn(4, WIDTH, generator=draw).to(dtype)
        loss: Tensor = self.engine(inputs).float().square().mean() * self.weight
        return loss * float("inf") if spoiled and RANK == 1 else loss

    def train(self, steps: int = 1, spoil: Iterable[int] = ()) -> list[Any]:
        said = []
        for _ in range(steps):
            for _ in range(self.engine.gradient_accumulation_steps()):
                self.engine.backward(self.loss(self.step in spoil))
                self.engine.step()
            norm = self.engine.get_global_grad_norm()
            said.append(None if norm is None else float(norm))
            self.step += 1
        return said

    def weights(self) -> str:
        return digest(safe_get_full_fp32_param(p) for p in self.engine.module.parameters())

    def moments(self) -> str:
        kinds = ("exp_avg", "exp_avg_sq")
        return digest(safe_get_full_optimizer_state(p, kind) for p in self.engine.module.parameters() for kind in kinds)


def digest(tensors: Iterable[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        found.update(tensor.detach().double().numpy().tobytes())
    return found.hexdigest()


def shared_folder() -> Path:
    """The same new folder on all ranks."""
    made = [tempfile.mkdtemp(dir=Path(os.environ["RENDEZVOUS"].removeprefix("file://")).parent) if RANK == 0 else None]
    torch.distributed.broadcast_object_list(made)
    assert made[0] is not None
    return Path(made[0])


def checkpoints(make: Callable[..., Job]) -> dict[str, Any]:
    """Save, go on; load into a new engine, go on there."""
    folder = shared_folder()
    first = make()
    norms = first.train(2)
    first.engine.save_checkpoint(str(folder))
    saved = first.weights()
    norms += first.train()
    gone_on = first.weights(), first.moments()
    first.engine.destroy()
    second = make()
    second.engine.load_checkpoint(str(folder))
    loaded, second.step = second.weights(), 2
    norms += second.train()
    assert (saved, gone_on) == (loaded, (second.weights(), second.moments()))
    second.engine.destroy()
    return {"norms": norms, "saved": saved, "gone on": gone_on}


def universal_checkpoints(make: Callable[..., Job]) -> dict[str, Any]:
    folder, universal = shared_folder(), shared_folder()
    first = make()
    norms = first.train(2)
    first.engine.save_checkpoint(str(folder), tag="two")
    saved = first.weights()
    first.engine.destroy()
    if RANK == 0:
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / "two"),
                output_folder=str(universal / "two"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
        (universal / "latest_universal").write_text("two")
        (universal / "latest").write_text("two")
    torch.distributed.barrier()
    second = make(checkpoint={"load_universal": True})
    second.engine.load_checkpoint(str(universal), tag="two")
    loaded, second.step = second.weights(), 2
    assert saved == loaded
    norms += second.train()
    weights = second.weights()
    second.engine.destroy()
    return {"norms": norms, "saved": saved, "gone on": weights}


def without_sync(make: Callable[..., Job]) -> dict[str, Any]:
    job = make()
    with job.engine.no_sync():
        for _ in range(2):
            job.engine.backward(job.loss())
    norms = job.train()
    weights = job.weights()
    job.engine.destroy()
    return {"norms": norms, "weights": weights}


def overflowing(make: Callable[..., Job]) -> dict[str, Any]:
    """One rank's gradient of the second step is not finite."""
    job = make(fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1})
    scales, skipped, weights = [], [], []
    for _ in range(4):
        job.train(spoil=[1])
        scales.append(float(job.engine.loss_scale()))
        skipped.append(int(job.engine.skipped_steps))
        weights.append(job.weights())
    assert skipped == [0, 1, 1, 1] and weights[0] == weights[1] != weights[2]
    job.engine.destroy()
    return {"scales": scales, "skipped": skipped, "weights": weights}


def full_gradients(make: Callable[..., Job]) -> dict[str, Any]:
    job = make()
    job.engine.backward(job.loss())
    gradients = digest(safe_get_full_grad(p) for p in job.engine.module.parameters())
    job.engine.step()
    first = next(job.engine.module.parameters())
    value = safe_get_full_fp32_param(first)
    assert value is not None
    safe_set_full_fp32_param(first, value + 1)
    job.step = 1
    norms = job.train()
    weights = job.weights(), job.moments()
    job.engine.destroy()
    return {"gradients": gradients, "norms": norms, "weights": weights}


def gathered(make: Callable[..., Job]) -> dict[str, Any]:
    """Read by all, changed by one."""
    job = make()
    norms = job.train()
    parameters = list(job.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        before = digest(parameters)
        if RANK == 0:
            with torch.no_grad():
                parameters[0].add_(1)
    with deepspeed.zero.GatheredParameters(parameters):
        after = digest(parameters)
    assert before != after
    norms += job.train()
    weights = job.weights()
    job.engine.destroy()
    return {"norms": norms, "before": before, "after": after, "weights": weights}


KINDS = {f"right zero{stage}": partial(Job, stage) for stage in (1, 2, 3)}
KINDS["corrected zero3"] = partial(Job, 3, shards=2)
FEATURES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "checkpoint": (checkpoints, tuple(KINDS)),
    "universal checkpoint": (universal_checkpoints, ("right zero1", "right zero3", "corrected zero3")),
    "no_sync": (without_sync, ("right zero1",)),
    "overflow": (overflowing, tuple(KINDS)),
    "full gradients": (full_gradients, tuple(KINDS)),
    "gathered parameters": (gathered, ("right zero3", "corrected zero3")),
}

if __name__ == "__main__":
    play({f"{kind}: {name}": partial(run, KINDS[kind]) for name, (run, kinds) in FEATURES.items() for kind in kinds})
