"""One rank: Transformers' own Trainer, or a loop around Accelerate's Accelerator, as a user would write it.

    train_with_transformers.py DIRECTORY

Reads DIRECTORY/jobs.json, a list of Job's fields, and trains with each: one step of plain SGD with a learning rate of
1, so that what a parameter moved by is the clipped gradient. Writes, on rank 0, what `compared` gives for each job to
DIRECTORY/found.json. The reference is computed in float64 in one process, from the logits of the whole batch. Knows
nothing of ds-gradfix.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH, ACCUMULATION = 16, 2
RANKS, ON_CPU = int(os.environ["WORLD_SIZE"]), os.environ["DS_ACCELERATOR"] == "cpu"
ATTENTION = ALL_ATTENTION_FUNCTIONS["sdpa"]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for a minute


@dataclass(frozen=True)
class Job:
    """``by``: ``"trainer"`` or ``"accelerator"``; ``as_file``: the configuration is given as the name of a file.
    With ``sequence_parallel`` the ranks share one sequence, else each accumulates over sequences of its own."""

    config: dict[str, Any] = field(default_factory=dict)
    by: str = "trainer"
    as_file: bool = False
    sequence_parallel: bool = False
    clip: float = 0.0


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


def samples(job: Job) -> list[dict[str, Tensor]]:
    """What one step trains on; no two have the same number of tokens to predict."""
    found = []
    for index in range(1 if job.sequence_parallel else RANKS * ACCUMULATION):
        tokens = torch.randint(32, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: 4 + index] = -100
        found.append({"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH)})
    return found


def reference(job: Job) -> LlamaForCausalLM:
    """With the gradient that one process gets: the Trainer's mean is over all tokens, a loop's over its losses."""
    right = model().double()
    losses, counts = [], []
    for sample in samples(job):
        logits, targets = right(input_ids=sample["input_ids"][None]).logits[0, :-1], sample["labels"][1:]
        losses.append(F.cross_entropy(logits, targets, reduction="sum"))
        counts.append(int((targets != -100).sum()))
    if job.by == "trainer":
        loss = sum(losses) / sum(counts)
    else:
        loss = sum(one / count for one, count in zip(losses, counts, strict=True)) / len(losses)
    loss.backward()
    return right


def by_trainer(job: Job, config: Any, net: LlamaForCausalLM) -> float:
    """Train, and give the norm that the Trainer logs."""
    shards = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    arguments = TrainingArguments(
        output_dir=".",
        use_cpu=ON_CPU,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1 if job.sequence_parallel else ACCUMULATION,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=job.clip,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        parallelism_config=ParallelismConfig(sp_size=RANKS, sp_backend="deepspeed", sp_handler=shards)
        if job.sequence_parallel
        else None,
        deepspeed=config,
    )
    data = samples(job) * (RANKS if job.sequence_parallel else 1)
    trainer = Trainer(model=net, args=arguments, train_dataset=data)
    trainer.train()
    norm: float = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return norm


def by_accelerator(job: Job, config: Any, net: LlamaForCausalLM) -> float:
    """Train, and give the norm that Accelerate hands to the loop."""
    PartialState(cpu=ON_CPU)  # Accelerator(cpu=True) would turn the plugin off
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=ACCUMULATION),
    )
    data = DataLoader(samples(job), batch_size=1)  # type: ignore[arg-type]
    engine, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), data)
    for batch in data:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch).loss)
            if accelerator.sync_gradients:
                norm: float = accelerator.clip_grad_norm_(engine.parameters(), job.clip)
            optimizer.step()
            optimizer.zero_grad()
    return norm


def train(job: Job) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **job.config,
    }
    file = Path(f"config{os.environ['RANK']}.json")
    file.write_text(json.dumps(config))
    net = model()
    norm = (by_trainer if job.by == "trainer" else by_accelerator)(job, str(file) if job.as_file else config, net)
    after = {name: safe_get_full_fp32_param(parameter) for name, parameter in net.named_parameters()}
    forget()
    return compared(job, norm, after)


def forget() -> None:
    """A process can have one parallelism config, one sequence-parallel group and one Ulysses attention."""
    AcceleratorState._reset_state(reset_partial_state=True)
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    groups.mpu = None
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ATTENTION


def compared(job: Job, norm: float, after: dict[str, Tensor]) -> dict[str, Any]:
    """To the right ones: the ratio of the norm, and for each parameter that of what it moved by and how far that is
    from being a multiple."""
    right = {name: parameter for name, parameter in reference(job).named_parameters()}
    right_norm = float(torch.stack([parameter.grad.norm() for parameter in right.values()]).norm())
    coefficient = min(1.0, job.clip / (right_norm + 1e-6)) if job.clip else 1.0
    parameters = {}
    for name, parameter in right.items():
        gradient, moved = parameter.grad * coefficient, parameter.detach() - after[name].double().view_as(parameter)
        ratio = float((moved * gradient).sum() / gradient.square().sum())
        parameters[name] = ratio, float((moved - ratio * gradient).norm() / gradient.norm())
    return {"norm": norm / right_norm, "right norm": right_norm, "parameters": parameters}


def main(directory: Path) -> None:
    os.chdir(directory)
    deepspeed.init_distributed()  # on a CPU Accelerate leaves it to deepspeed.initialize, too late for sequence shards
    found = [train(Job(**fields)) for fields in json.loads(Path("jobs.json").read_text())]
    if os.environ["RANK"] == "0":
        Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
