"""Training with summed gradients is training with averaged ones, if the backward loss is divided by the world size.

    DS_GRADFIX=1 torchrun --nproc_per_node 2 sum_equivalence.py [--figure losses.png]

For each optimizer and ZeRO stage a small linear stack is trained twice from the same weights on the same batches, with
"gradient_allreduce_op" "mean" and "sum". The run with sum divides only the loss that it back-propagates, not the one it
reports, so the optimizer gets the same input; rescaling the learning rate would not do for adaptive optimizers. Each
step compares the forward loss, the full gradients before the step and the full fp32 parameters after it, and rank 0
prints the largest differences. The figure (needs matplotlib) shows both loss curves of each pair.
"""

import argparse
import os
import warnings

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

STEPS, BATCH, WIDTH = 5, 8, 16
RUNS = [("AdamW", 0), ("AdamW", 1), ("AdamW", 2), ("AdamW", 3), ("Muon", 1), ("Muon", 2), ("Muon", 3)]


def stack() -> nn.Module:
    """The same weights on every rank and in every run."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def config(optimizer: str, stage: int, op: str) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage == 3 and optimizer == "Muon":
        zero["reduce_scatter"] = False  # DeepSpeed's Muon needs whole gradients
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_allreduce_op": op,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer == "Muon":
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}
    return settings


def train(optimizer: str, stage: int, op: str) -> list[dict]:
    """Each step's loss, full gradients and full parameters; gathering them is up to every rank."""
    model = stack()
    client = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer == "AdamW" else None
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if client is None else None,
        optimizer=client,
        config=config(optimizer, stage, op),
    )
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    seen = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(engine.device)
        loss = F.mse_loss(engine(inputs), inputs.flip(1))
        engine.backward(loss / world_size if op == "sum" else loss)
        gradients = [safe_get_full_grad(param).clone() for param in engine.module.parameters()]
        engine.step()
        parameters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        if stage == 0:
            parameters = list(engine.module.parameters())
        seen.append(
            {
                "loss": loss.detach().clone(),
                "gradient": torch.cat([gradient.flatten() for gradient in gradients]),
                "parameter": torch.cat([param.detach().flatten().clone() for param in parameters]),
            }
        )
    engine.destroy()
    return seen


def largest_difference(mean: list[dict], total: list[dict], what: str) -> float:
    return max(float((a[what] - b[what]).abs().max()) for a, b in zip(mean, total, strict=True))


def draw(curves: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(12, 5), sharex=True)
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (name, (mean, total)) in zip(axes.flat, curves.items(), strict=False):
        axis.plot(range(1, STEPS + 1), mean, color="#1f77b4", linewidth=4, alpha=0.4, label="mean")
        axis.plot(range(1, STEPS + 1), total, color="#d62728", linestyle="--", label="sum, loss / ranks")
        axis.set_title(name, fontsize=10)
    for axis in axes[:, 0]:
        axis.set_ylabel("loss")
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", metavar="FILE.png", help="draw the loss curves")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Optional kernels for collectives between CPU ranks: they take a C++ compiler, and a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(accelerator.communication_backend_name())
    first = int(os.environ["RANK"]) == 0
    curves = {}
    for optimizer, stage in RUNS:
        mean, total = (train(optimizer, stage, op) for op in ("mean", "sum"))
        name = f"{optimizer}, ZeRO-{stage}"
        curves[name] = ([float(s["loss"]) for s in mean], [float(s["loss"]) for s in total])
        if first:
            said = "  ".join(f"{what} {largest_difference(mean, total, what):.3g}" for what in mean[0])
            print(f"{name}: largest difference in {STEPS} steps: {said}", flush=True)
    if first and args.figure:
        draw(curves, args.figure)


if __name__ == "__main__":
    main()
