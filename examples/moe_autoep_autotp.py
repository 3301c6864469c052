"""A small GLM4-MoE whose experts are folded over tensor-parallel ranks: AutoEP and AutoTP together, with ZeRO-2.

    DS_GRADFIX=1 torchrun --nproc_per_node 2 moe_autoep_autotp.py
    DS_GRADFIX=1 deepspeed --num_gpus 2 moe_autoep_autotp.py

Tensor-parallel peers then own different experts, and DeepSpeed leaves some of those out of the norm that gradients are
clipped by. Rank 0 trains the whole model by itself as well, and prints both norms at each step: the ratio should be
1.0000, and stay it, since steps that are clipped by the same norm lead to the same weights.

In moe_autoep_autotp.json "preset_model" is deepseek_v3 because GLM4-MoE's blocks are DeepSeek-V3's; the
"partition_config" shards attention alone. "use_grouped_mm": false is for devices without that kernel.
"""

import argparse
import json
import os
import warnings
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

STEPS, LENGTH, VOCABULARY = 3, 12, 32
CONFIG = json.loads(Path(__file__).with_suffix(".json").read_text())


def new_model() -> Glm4MoeForCausalLM:
    torch.manual_seed(0)
    shape = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=4.0,
        initializer_range=0.25,
    )
    shape._experts_implementation = "eager"
    model = Glm4MoeForCausalLM(shape)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # else their own gradient outweighs that of a few small experts
    return model


def batch(step: int, replicas: int) -> Tensor:
    """Token ids of one sequence for each replica of the model: [replicas, LENGTH]."""
    return torch.randint(VOCABULARY, (replicas, LENGTH), generator=torch.Generator().manual_seed(step))


class Alone:
    """The same training in one process, without DeepSpeed."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=CONFIG["optimizer"]["params"]["lr"])

    def norm_of_step(self, rows: Tensor) -> float:
        self.optimizer.zero_grad()
        self.model(input_ids=rows, labels=rows).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG["gradient_clipping"])
        self.optimizer.step()
        return float(norm)


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
    deepspeed.init_distributed()

    alone = Alone()
    engine, *_ = deepspeed.initialize(model=new_model(), config=CONFIG)
    shards = CONFIG["tensor_parallel"]["autotp_size"]
    replicas, replica = deepspeed.comm.get_world_size() // shards, deepspeed.comm.get_rank() // shards
    for step in range(STEPS):
        rows = batch(step, replicas)
        mine = rows[replica : replica + 1].to(engine.device)
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        if deepspeed.comm.get_rank() == 0:
            norm, expected = float(engine.get_global_grad_norm()), alone.norm_of_step(rows)
            print(
                f"step {step}  loss {loss.item():.4f}  norm {norm:.4f} is {norm / expected:.4f} x the whole model's",
                flush=True,
            )
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
