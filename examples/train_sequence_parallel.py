"""A small language model trained with ZeRO-3 on sequences that are split over two ranks (DeepSpeed-Ulysses).

    torchrun --nproc_per_node 2 train_sequence_parallel.py
    deepspeed --num_gpus 2 train_sequence_parallel.py

Each rank holds one slice of every sequence and back-propagates that slice's share of the loss, as Megatron-DeepSpeed
does, so the gradient of the whole sequence is the sum over the slices. Each also computes that gradient by itself, from
the whole sequence, and rank 0 prints how large the gradient that DeepSpeed hands to the optimizer is in comparison: it
should be 1.00 at every step.
"""

import argparse
import os
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

SEQUENCE_PARALLEL_SIZE = 2
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 32, 4, 2


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [batch, sequence, heads, width], for a subset of the heads and the whole sequence."""
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2).contiguous()


class Block(nn.Module):
    def __init__(self, sequence_group=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.attention = None
        if sequence_group is not None:
            self.attention = DistributedAttention(attend, sequence_group, scatter_idx=2, gather_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).unbind(2)
        attended = attend(q, k, v) if self.attention is None else self.attention(q, k, v, 0)
        x = x + self.out(attended.reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Predicts the next token; with a sequence group, from one slice of the sequence and that slice's positions."""

    def __init__(self, sequence_group=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(sequence_group) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """The loss of these tokens, as their share of the mean over the whole sequence."""
        hidden = self.blocks(self.tokens(tokens) + self.positions(positions))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten(), reduction="sum") / LENGTH


def next_sequence(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence, the same on all ranks: tokens, positions and the tokens to predict."""
    start = torch.randint(VOCABULARY, (1,), generator=generator)
    sequence = (start + 5 * torch.arange(LENGTH + 1)).remainder(VOCABULARY).unsqueeze(0)
    return sequence[:, :-1], torch.arange(LENGTH).unsqueeze(0), sequence[:, 1:]


def relative_size(model: nn.Module, reference: nn.Module, whole: tuple[Tensor, ...]) -> float:
    """DeepSpeed's gradient, as a multiple of the one that a single process computes with the same weights."""
    measured = {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}
    reference.load_state_dict(
        {name: safe_get_full_fp32_param(parameter) for name, parameter in model.named_parameters()}
    )
    reference.zero_grad()
    reference(*whole).backward()
    pairs = [(measured[name].flatten(), parameter.grad.flatten()) for name, parameter in reference.named_parameters()]
    return float(sum(ours @ theirs for ours, theirs in pairs) / sum(theirs @ theirs for _, theirs in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_suffix(".json")))
    args = parser.parse_args()

    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls collectives that newer torch has renamed
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Optional kernels for collectives between CPU ranks: they take a C++ compiler, and a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(args.local_rank)
    device = accelerator.current_device_name()
    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(SEQUENCE_PARALLEL_SIZE)

    torch.manual_seed(0)
    model = Model(parallel_state_sp.get_sequence_parallel_group())
    reference = Model().to(device)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config, mpu=parallel_state_sp
    )

    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        whole = tuple(tensor.to(device) for tensor in next_sequence(generator))
        rank = parallel_state_sp.get_sequence_parallel_rank()
        loss = engine(*(tensor.chunk(SEQUENCE_PARALLEL_SIZE, dim=1)[rank] for tensor in whole))
        engine.backward(loss)
        ratio = relative_size(engine.module, reference, whole)
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total, group=parallel_state_sp.get_sequence_parallel_group())
        if deepspeed.comm.get_rank() == 0:
            print(
                f"step {step}  loss {total.item():.4f}  gradient is {ratio:.2f} x the single-process gradient",
                flush=True,
            )
        engine.step()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
