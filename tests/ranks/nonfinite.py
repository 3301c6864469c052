"""One rank: bf16 and fp32 jobs that meet gradients which are not finite, too large to be squared, or zero.

The loss of a micro-batch is the inner product of the weights and this rank's numbers, and SGD has a learning rate of
one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from loss_scale import SIZE, Inner, weights
from scenario import play
from torch import Tensor

RANK = int(os.environ["RANK"])
WHAT = ("good", "inf", "good", "nan", "zero", "huge", "good")
SQUARABLE = tuple(kind for kind in WHAT if kind != "huge")  # ZeRO-3 adds up squares in double precision


def numbers(kind: str, rank: int = RANK) -> Tensor:
    """Each rank's own. What is not finite is seen by one rank alone, in one element."""
    given = torch.arange(SIZE) + 1.0 + 3 * rank
    if kind in ("inf", "nan") and rank == 1:
        given[SIZE - 1] = float(kind)
    return {"zero": 0.0, "huge": 1e25}.get(kind, 1.0) * given


def job(
    stage: int, dtype: str, clip: float, gas: int = 1, offload: bool = False, together: bool = False, **more: Any
) -> Any:
    half = {"bf16": {"enabled": True, **more.pop("bf16", {})}} if dtype == "bf16" else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        },
        **half,
        **more,
    }
    net = Inner()
    # Two groups have two norms, of which one is not finite. DeepSpeed 0.17.6 to 0.18.2 stops at a group of which a rank
    # owns nothing.
    groups = [{"params": [net.first, net.second]}] if together else [{"params": [net.first]}, {"params": [net.second]}]
    return deepspeed.initialize(model=net, optimizer=torch.optim.SGD(groups, lr=1.0), config=config)[0]


def train(engine: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Each step's update, its norm, and whether it was skipped."""
    said = []
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for kind in kinds:
        before, skipped = weights(engine), engine.skipped_steps
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(numbers(kind if micro == 0 else "good").to(dtype)))
            engine.step()
        norm = engine.get_global_grad_norm()
        said.append(
            {
                "update": (before - weights(engine)).tolist(),
                "norm": None if norm is None else float(norm),
                "skipped": engine.skipped_steps - skipped,
            }
        )
    return said


def trained(*args: Any, kinds: Sequence[str] = WHAT, **kwargs: Any) -> list[dict[str, Any]]:
    engine = job(*args, **kwargs)
    said = train(engine, kinds)
    engine.destroy()
    return said


FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
GOOD = ("good",) * 3
UNCHECKED = {"bf16": {"check_grad_overflow": False}}
SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"ZeRO-{s} {dtype}": partial(trained, s, dtype, 2.0) for s in (1, 2) for dtype in ("bf16", "fp32")},
    **{f"ZeRO-3 {dtype}": partial(trained, 3, dtype, 2.0, kinds=SQUARABLE) for dtype in ("bf16", "fp32")},
    "ZeRO-2 bf16 unclipped": partial(trained, 2, "bf16", 0.0),
    "ZeRO-3 bf16 unclipped": partial(trained, 3, "bf16", 0.0, kinds=SQUARABLE),
    **{f"ZeRO-{s} fp32 offload": partial(trained, s, "fp32", 2.0, offload=True) for s in (2, 3)},
    "ZeRO-2 bf16 accumulated": partial(trained, 2, "bf16", 2.0, gas=2),
    "ZeRO-2 bf16 unchecked": partial(trained, 2, "bf16", 2.0, **UNCHECKED, kinds=("good", "inf")),
    "ZeRO-3 bf16 unchecked": partial(trained, 3, "bf16", 2.0, **UNCHECKED, kinds=("good", "inf")),
    "BF16_Optimizer": partial(trained, 1, "bf16", 2.0, **FP32_SUM),
    "BF16_Optimizer finite": partial(trained, 1, "bf16", 2.0, **FP32_SUM, kinds=GOOD),
    "BF16_Optimizer inf": partial(trained, 1, "bf16", 2.0, **FP32_SUM, kinds=("good", "inf")),
    **{f"ZeRO-{s} {d} finite": partial(trained, s, d, 2.0, kinds=GOOD) for s in (2, 3) for d in ("bf16", "fp32")},
}

if __name__ == "__main__":
    play(SCENARIOS)
