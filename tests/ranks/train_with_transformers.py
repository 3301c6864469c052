"""One rank: Transformers' own Trainer on one sequence that is split over two ranks, as a user would write it.

    train_with_transformers.py OUTPUT STAGE

One step of plain SGD with a learning rate of 1, so that what a parameter moved by is the gradient that the optimizer was
given. Writes, on rank 0, the ratio of each parameter's gradient to the one that a single process computes from the whole
sequence, as JSON, to OUTPUT. Knows nothing of ds-gradfix.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 16
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
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(shape)


def main(output: Path, stage: int) -> None:
    tokens = torch.randint(32, (LENGTH,), generator=torch.Generator().manual_seed(1))
    sample = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}
    arguments = TrainingArguments(
        output_dir=str(output.parent),
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
            sp_size=int(os.environ["WORLD_SIZE"]),
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
            "zero_optimization": {"stage": stage},
        },
    )
    net = model()
    whole = copy.deepcopy(net)
    loss = whole(input_ids=tokens[None], labels=tokens[None]).loss
    loss.backward()

    trainer = Trainer(model=net, args=arguments, train_dataset=[sample] * int(os.environ["WORLD_SIZE"]))
    trainer.train()
    reference = dict(whole.named_parameters())
    ratios = {}
    for name, parameter in trainer.model.named_parameters():
        moved = reference[name].detach() - safe_get_full_fp32_param(parameter).reshape(reference[name].shape)
        gradient = reference[name].grad
        ratio = float((moved * gradient).sum() / gradient.square().sum())
        off = float((moved - ratio * gradient).norm() / gradient.norm())
        ratios[name] = [ratio, off]
    if trainer.accelerator.is_main_process:
        output.write_text(json.dumps(ratios))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
