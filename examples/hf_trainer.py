r"""Transformers' Trainer with its own sequence parallelism, without a line about ds-gradfix.

    DS_GRADFIX=1 accelerate launch --num_processes 2 \
        --use_deepspeed --deepspeed_config_file hf_trainer.json hf_trainer.py
    DS_GRADFIX=1 torchrun --nproc_per_node 2 hf_trainer.py --deepspeed hf_trainer.json
    DS_GRADFIX=1 deepspeed --num_gpus 2 hf_trainer.py --deepspeed hf_trainer.json

The ranks share each sequence, and the Trainer's loss is the mean over all of it. For such a loss DeepSpeed's ZeRO-1 and
ZeRO-2 gradients are as many times too large as there are ranks to a sequence. Rank 0 prints the grad_norm that the
Trainer logs beside the norm that a single process gets from the whole sequence with the same weights.
"""

import argparse
import os
import tempfile
import warnings

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, LENGTH, VOCABULARY = 3, 32, 64


def new_model(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            attn_implementation=attention,
        )
    )


class Beside(TrainerCallback):
    """Prints each logged grad_norm beside the one of a single process."""

    def __init__(self, sample: dict[str, torch.Tensor]) -> None:
        # Sequence parallelism takes the place of the attention that the Trainer's model uses, for all models.
        self.sample, self.alone, self.norm = sample, new_model("eager"), 0.0

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step:  # by now DeepSpeed holds the weights
            held = dict(model.named_parameters())
            self.alone.load_state_dict({name: safe_get_full_fp32_param(held[name]) for name in held})
        self.alone.zero_grad()
        self.alone(**{name: value[None] for name, value in self.sample.items()}).loss.backward()
        self.norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.alone.parameters()))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs and state.is_world_process_zero:
            print(
                f"step {state.global_step}  loss {logs['loss']:.4f}  grad_norm {logs['grad_norm']:.4f}"
                f"  is {logs['grad_norm'] / self.norm:.2f} x the single-process norm",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", help="a DeepSpeed configuration; accelerate launch may give it instead")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls collectives that newer torch has renamed
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:
        # Optional kernels for collectives between CPU ranks: they take a C++ compiler, and a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()  # elsewhere Accelerate does it

    ranks = int(os.environ["WORLD_SIZE"])
    tokens = torch.arange(0, 5 * LENGTH, 5) % VOCABULARY
    sample = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}
    shards = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=new_model(),
            train_dataset=[sample] * ranks * STEPS,
            callbacks=[Beside(sample)],
            args=TrainingArguments(
                output_dir=directory,
                use_cpu=on_cpu,
                deepspeed=args.deepspeed,
                parallelism_config=ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=shards),
                per_device_train_batch_size=1,
                max_steps=STEPS,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
