"""One rank: Transformers' GLM4-MoE, tiny and with random weights, its experts folded over tensor-parallel ranks by
AutoEP and AutoTP, against the same model whole, in float64, without DeepSpeed. Started by
tests/test_folded_expert_norm.py; see scenario.py.

What a parameter loses in a step of SGD, over the rate, is its clipped gradient; where the clip is above the norm it is
the gradient. CHECKPOINT in the environment is a directory for what one launch saves and another resumes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from typing import Any

import deepspeed
import torch
from scenario import forget_groups, play
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

import ds_gradfix

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TENSOR_PARALLEL = 2
REPLICAS = RANKS // TENSOR_PARALLEL
RATE = 1000.0
"""So large that the weights' own rounding does not show in what they lose."""


def whole(idle: bool) -> Glm4MoeForCausalLM:
    """Experts make a third of the squared norm. ``idle``: the first half of them gets no token."""
    torch.manual_seed(0)
    shape = Glm4MoeConfig(
        vocab_size=32,
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
    )
    shape._experts_implementation = "eager"
    model = Glm4MoeForCausalLM(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            if "embed" in name:
                parameter.mul_(8)
            if idle and name.endswith("mlp.gate.weight"):  # of each opposite pair one scores above one half
                parameter[:4], parameter[5], parameter[7] = 0, -parameter[4], -parameter[6]
    return model


def tokens(step: int, accumulation: int) -> Tensor:
    """One micro-batch for each replica and accumulation step: [accumulation, replicas, 1, length]."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(32, (accumulation, REPLICAS, 1, 12), generator=draw)


@cache
def reference(accumulation: int, idle: bool) -> tuple[dict[str, Tensor], float]:
    """The mean's gradients, and their norm."""
    model = whole(idle).double()
    for row in tokens(0, accumulation).reshape(-1, 1, 12):
        (model(input_ids=row, labels=row).loss / (accumulation * REPLICAS)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return gradients, float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def engine_of(stage: int, clip: float, ep: int, accumulation: int = 1, idle: bool = False, **zero: Any) -> Any:
    forget_groups()
    optimizer = zero.pop("optimizer", {"type": "SGD", "params": {"lr": RATE}})
    engine, *_ = deepspeed.initialize(
        model=whole(idle),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "steps_per_print": 1000,
            "zero_allow_untested_optimizer": True,
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
            # GLM4-MoE's blocks are DeepSeek-V3's.
            "expert_parallel": {
                "enabled": True,
                "autoep_size": ep,
                "preset_model": "deepseek_v3",
                "use_grouped_mm": False,
            },
            "tensor_parallel": {
                "autotp_size": TENSOR_PARALLEL,
                "partition_config": {
                    "use_default_specs": False,
                    "layer_specs": [
                        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
                        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
                    ],
                },
            },
        },
    )
    return engine


def train(engine: Any, step: int) -> None:
    for micro_batch in tokens(step, engine.gradient_accumulation_steps()):
        row = micro_batch[RANK // TENSOR_PARALLEL]
        engine.backward(engine(input_ids=row, labels=row).loss)
        engine.step()


def ended(engine: Any) -> None:
    engine.destroy()
    gc.collect()  # ds_gradfix, coming on late, must find it gone on all ranks alike
    forget_groups()


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def logical(own: dict[str, Tensor], ep: int) -> dict[str, Tensor]:
    """The whole model's parameters out of all ranks' pieces, in float64; copies must be the same."""
    held: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
    torch.distributed.all_gather_object(held, own)
    found: dict[str, Tensor] = {}
    for name in own:
        pieces = [one[name].double() for one in held]
        size, dim = 1, 0
        if ".mlp.experts." in name:
            size = ep
        elif ".self_attn." in name:
            size, dim = TENSOR_PARALLEL, int("o_proj" in name)
        for first in range(size, RANKS, size):
            assert all(map(torch.equal, pieces[:size], pieces[first : first + size])), f"{name} differs between copies"
        found[name.replace(".router.gate.", ".gate.")] = torch.cat(pieces[:size], dim)
    for name in [name for name in found if name.endswith(".w1")]:
        layer = name.removesuffix(".w1")
        found[f"{layer}.gate_up_proj"] = torch.cat([found.pop(name), found.pop(f"{layer}.w3")], dim=1)
        found[f"{layer}.down_proj"] = found.pop(f"{layer}.w2")
    return found


def clipped(stage: int, factor: float, ep: int = 2, accumulation: int = 1, idle: bool = False, **zero: Any) -> Any:
    """One step with a clip of ``factor`` times the norm: ratios to the reference of the norm, and of every update."""
    gradients, norm = reference(accumulation, idle)
    engine = engine_of(stage, factor * norm, ep, accumulation, idle, **zero)
    before = weights(engine)
    train(engine, 0)
    found: dict[str, Any] = {
        "clip": factor,
        "norm": float(engine.get_global_grad_norm()) / norm,
        "in force": sorted(getattr(getattr(engine, "_ds_gradfix", None), "effects", ())),
    }
    if stage < 3:
        lost = logical({name: (before[name] - after) / RATE for name, after in weights(engine).items()}, ep)
        assert lost.keys() == gradients.keys()
        scale = min(1.0, factor * norm / (norm + 1e-6))
        ratios, errors = {}, {}
        for name, gradient in gradients.items():
            right = scale * gradient
            ratios[name] = float((lost[name] * right).sum() / right.square().sum())
            errors[name] = float((lost[name] - ratios[name] * right).abs().max() / right.abs().max())
        found |= {"updates": ratios, "errors": errors}
    ended(engine)
    return found


def run(steps: range, load: bool = False, save: bool = False) -> Any:
    """Steps of Adam, all clipped, and every parameter after them."""
    if not ds_gradfix.status()["enabled"]:
        return None
    found = {}
    for stage in (1, 2):
        directory = os.path.join(os.environ["CHECKPOINT"], str(stage))
        engine = engine_of(stage, 0.5, 2, optimizer={"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}})
        if load:
            engine.load_checkpoint(directory)
        norms = []
        for step in steps:
            train(engine, step)
            norms.append(float(engine.get_global_grad_norm()).hex())
        if save:
            engine.save_checkpoint(directory)
        own = logical(weights(engine), 2)
        found[stage] = {"norms": norms, "weights": {name: bits(held) for name, held in own.items()}}
        ended(engine)
    return found


def each(cases: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Together, since turning ds_gradfix on takes a while."""
    return {name: case() for name, case in cases.items()}


def bits(tensor: Tensor) -> str:
    return sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


SMALL = {"reduce_bucket_size": 100, "allgather_bucket_size": 100}
OVERLAP = {"overlap_comm": True}
CASES: dict[str, Callable[[], Any]]
if RANKS == 2:
    CASES = {
        "1, clipped": partial(clipped, 1, 0.5),
        "1, not clipped, small buckets, overlap, accumulation": partial(clipped, 1, 2, 2, 4, **SMALL, **OVERLAP),
        "1, clipped, idle": partial(clipped, 1, 0.5, idle=True, **OVERLAP),
        "2, clipped, small buckets, overlap, accumulation": partial(clipped, 2, 0.5, 2, 4, **SMALL, **OVERLAP),
        "2, not clipped, accumulation": partial(clipped, 2, 2, 2, 4),
        "2, clipped, idle": partial(clipped, 2, 0.5, idle=True, **SMALL),
        "3, clipped": partial(clipped, 3, 0.5),
    }
else:
    CASES = {
        "1, EP4": partial(clipped, 1, 0.5, 4, 4, **SMALL, **OVERLAP),
        "2, EP4, idle": partial(clipped, 2, 0.5, 4, idle=True),
        "2, EP2": partial(clipped, 2, 2, 2, 4, **SMALL),
        "3, EP4": partial(clipped, 3, 0.5, 4),
    }

# Before 0.19.6 DeepSpeed divides by the accumulation steps twice where a model returns its loss among other things.
OLD = {f"{stage}": partial(clipped, stage, 2) for stage in (1, 2)}
TRAININGS = {
    "in one go": partial(run, range(4)),
    "saved": partial(run, range(2), save=True),
    "resumed": partial(run, range(2, 4), load=True),
}

if __name__ == "__main__":
    together = {"clipped": CASES, "without accumulation": OLD}
    play({**{name: partial(each, cases) for name, cases in together.items()}, **TRAININGS})
