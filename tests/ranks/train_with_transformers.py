"""One rank: Transformers' own Trainer on one sequence that is split over two ranks, as a user would write it.

    train_with_transformers.py DIRECTORY

Reads DIRECTORY/configs.json, a list of DeepSpeed configurations, and trains with each: one step of plain SGD with a
learning rate of 1, so that what a parameter moved by is the gradient that the optimizer was given. Writes, on rank 0,
the ratio of each parameter's gradient to the one that a single process computes from the whole sequence, and how far it
is from being a multiple of it, to DIRECTORY/ratios.json. Knows nothing of ds-gradfix.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH = 16
TOKENS = torch.randint(32, (LENGTH,), generator=torch.Generator().manual_seed(1))
ATTENTION = ALL_ATTENTION_FUNCTIONS["sdpa"]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for a minute


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(shape)


def train(directory: Path, config: dict[str, Any], right: LlamaForCausalLM) -> dict[str, tuple[float, float]]:
    """Train from `right`'s weights, and compare with its gradients."""
    sample = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(LENGTH)}
    ranks = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=1,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        parallelism_config=ParallelismConfig(
            sp_size=ranks,
            sp_backend="deepspeed",
            sp_handler=DeepSpeedSequenceParallelConfig(
                sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
            ),
        ),
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    net = model()
    trainer = Trainer(model=net, args=arguments, train_dataset=[sample] * ranks)
    trainer.train()
    after = {name: safe_get_full_fp32_param(parameter) for name, parameter in net.named_parameters()}
    forget()
    return {name: compared(parameter, after[name]) for name, parameter in right.named_parameters()}


def forget() -> None:
    """A process can have one parallelism config, one sequence-parallel group and one Ulysses attention."""
    AcceleratorState._reset_state()
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ATTENTION


def compared(before: torch.nn.Parameter, after: torch.Tensor) -> tuple[float, float]:
    assert before.grad is not None
    gradient, moved = before.grad, before.detach() - after.detach().view_as(before)
    ratio = float((moved * gradient).sum() / gradient.square().sum())
    return ratio, float((moved - ratio * gradient).norm() / gradient.norm())


def main(directory: Path) -> None:
    right = model()
    right(input_ids=TOKENS[None], labels=TOKENS[None]).loss.backward()
    ratios = [train(directory, config, right) for config in json.loads((directory / "configs.json").read_text())]
    if os.environ["RANK"] == "0":
        (directory / "ratios.json").write_text(json.dumps(ratios))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
