"""Contrastive learning over embeddings gathered from all ranks, which wants summed gradients.

    DS_GRADFIX=1 torchrun --nproc_per_node 2 contrastive_sum.py [--op sum|mean] [--stage 0..3]

Every rank embeds its own pairs, gathers all embeddings, and computes InfoNCE over the whole batch with gradients only
through its own embeddings. The gradient of the whole batch's loss is the sum over the ranks; averaged, it is world-size
times too small. Each rank also computes it by itself, from all pairs in one process, and rank 0 prints how large the
gradient that DeepSpeed hands to the optimizer is in comparison: 1.00 with sum, 0.50 with mean on two ranks.
"""

import argparse
import os
import warnings

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

PAIRS, WIDTH, EMBEDDING, TEMPERATURE = 6, 12, 8, 0.2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, EMBEDDING))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=-1)


def pairs(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's pairs, two views of each sample: [PAIRS, WIDTH] each."""
    generator = torch.Generator().manual_seed(rank)
    anchor = torch.randn(PAIRS, WIDTH, generator=generator)
    return anchor, anchor + 0.3 * torch.randn(PAIRS, WIDTH, generator=generator)


def info_nce(anchors: Tensor, positives: Tensor) -> Tensor:
    """Mean over all pairs of -log softmax of the right partner among all partners."""
    return F.cross_entropy(anchors @ positives.T / TEMPERATURE, torch.arange(len(anchors), device=anchors.device))


def gathered(mine: Tensor) -> Tensor:
    """All ranks' embeddings, of which only one's own carry a gradient. [world_size * PAIRS, EMBEDDING]."""
    everyone = [torch.empty_like(mine) for _ in range(deepspeed.comm.get_world_size())]
    deepspeed.comm.all_gather(everyone, mine.detach())
    everyone[deepspeed.comm.get_rank()] = mine
    return torch.cat(everyone)


def single_process_gradient(world_size: int) -> Tensor:
    """Of the whole batch's loss, without DeepSpeed."""
    encoder = new_encoder()
    views = [torch.cat(view) for view in zip(*(pairs(rank) for rank in range(world_size)), strict=True)]
    info_nce(*(encoder(view) for view in views)).backward()
    return torch.cat([param.grad.flatten() for param in encoder.parameters()])


def new_encoder() -> Encoder:
    torch.manual_seed(3)
    return Encoder()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=("sum", "mean"), default="sum")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
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
    encoder = new_encoder()
    engine, *_ = deepspeed.initialize(
        model=encoder,
        optimizer=torch.optim.SGD(encoder.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": PAIRS,
            "gradient_allreduce_op": args.op,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": args.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    both = torch.stack(pairs(int(os.environ["RANK"]))).to(engine.device)
    embedded = engine(both.flatten(0, 1)).unflatten(0, (2, PAIRS))
    loss = info_nce(*(gathered(view) for view in embedded))
    engine.backward(loss)
    gradient = torch.cat([safe_get_full_grad(param).flatten().cpu() for param in engine.module.parameters()])
    expected = single_process_gradient(deepspeed.comm.get_world_size())
    ratio = float(gradient @ expected / (expected @ expected))
    apart = float((gradient / ratio - expected).norm() / expected.norm())
    if int(os.environ["RANK"]) == 0:
        print(f"{args.op}, ZeRO-{args.stage}: the gradient is {ratio:.4f} x the whole batch's, else off by {apart:.1e}")


if __name__ == "__main__":
    main()
