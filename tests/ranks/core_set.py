"""One rank: the core set, for every patch configurations in which its defect bites and some beside it in which not.

A scenario is named `PATCH + PATCH: configuration`, after the patches whose defect it shows, or `PATCH beside:
configuration` where the defect does not bite. It gives ``ratio`` (measured over right, the one furthest from 1 of
gradients, norms and updates), ``error`` (the largest relative deviation), ``right``, a ``digest`` of all that was
measured, and on stock which of all patches' targets have ``run``. What is right is computed in float64, without
DeepSpeed. See tools/matrix.py.

    core_set.py PART [TEXT ...]     PART is main, four (on four ranks), transformers (with it installed), or unaided
                                    (without the oracle's own workaround for 0.18.7 to 0.18.9); TEXT chooses the
                                    scenarios whose names have it
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import accumulation
import deepspeed
import experts_apart
import flat_parameters
import fp32_clipping
import half_experts
import loss_scale
import nonfinite
import sparse_gradients
import torch
import uncrossed_shards
from against_reference import trained
from scenario import on_stock, play

from ds_gradfix.registry import Target, discover
from ds_gradfix.verify import Case, _mpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FP32, HALF = 1e-4, 2e-2
"""Relative rounding that is right, by the dtype in which weights are kept or gradients travel."""
Outcome = dict[str, Any]


def size_of(number: float) -> float:
    """What is not a number is larger than any."""
    return float("inf") if math.isnan(number) else abs(number)


def outcome(ratios: Iterable[float], errors: Iterable[float], digest: Any, tolerance: float = FP32) -> Outcome:
    ratio, error = max(ratios, key=lambda one: size_of(one - 1)), max(errors, key=size_of)
    bits = hashlib.sha256(json.dumps(digest).encode()).hexdigest()
    return {"ratio": ratio, "error": error, "right": error <= tolerance, "digest": bits}


def measured(got: Mapping[str, Any], right: Mapping[str, Any], tolerance: float = FP32) -> Outcome:
    """Numbers, lists of them or lists of lists, by name."""
    ratios, errors = [], []
    for name, wanted in right.items():
        is_, be = (torch.as_tensor(one, dtype=torch.float64).flatten() for one in (got[name], wanted))
        size = float(be.norm())
        ratios.append(float(is_ @ be) / size**2 if size else 1.0 + float(is_.norm()))
        errors.append(float((is_ - be).norm()) / (size or 1.0))
    return outcome(ratios, errors, got, tolerance)


def from_ratios(ratios: Mapping[str, float], tolerance: float = FP32) -> Outcome:
    return outcome(ratios.values(), [abs(ratio - 1) for ratio in ratios.values()], ratios, tolerance)


# ------------------------------------------------------------------------------- by kind of job


def compared(found: Mapping[str, Any], tolerance: float) -> Outcome:
    """From tests/ranks/against_reference.py."""
    errors = [*found["errors"], *found["updates"], *(abs(ratio - 1) for ratio in found["norms"])]
    return outcome([*found["ratios"], *found["norms"]], errors, [found["weights"], found["ratios"]], tolerance)


def oracle(
    stage: int,
    zero: Mapping[str, Any] | None = None,
    shards: int = 1,
    convention: str = "sum",
    optimizer: str = "sgd",
    steps: int = 1,
    **config: Any,
) -> Outcome:
    options = {"stage": stage, **(zero or {})}
    section = {"ds_gradfix": {"sequence_parallel_reduction": convention}} if convention == "mean" else {}
    case = Case(
        {"zero_optimization": options, **section, **config},
        steps=steps,
        sequence_parallel=shards,
        convention=convention,
        optimizer=optimizer,
    )
    half = "bf16" in config or "fp16" in config
    return compared(trained(case, mpu=_mpu.for_size(shards, stage=stage)), HALF if half else FP32)


def uncrossed(name: str) -> Outcome:
    return compared(uncrossed_shards.SCENARIOS[name](), FP32)


def flat(name: str) -> Outcome:
    return compared(flat_parameters.SCENARIOS[name](), FP32)


def accumulated(name: str) -> Outcome:
    found = accumulation.destroying(accumulation.SCENARIOS[name])()
    return outcome([found["ratio"]], [found["error"]], found["updates"], HALF if "bf16" in name else FP32)


def scaled(stage: int, **how: Any) -> Outcome:
    """fp16 with gradients that are known: tests/ranks/loss_scale.py."""
    engine = loss_scale.job(stage, **how)
    # An overflow that ZeRO-1's ranks do not share, as in 0.17.1 to 0.17.6, hangs them.
    overflow_at = -1 if stage == 1 else 5
    steps = loss_scale.train(engine, overflow_at=overflow_at)
    engine.destroy()
    got, right = {}, {}
    for step, said in enumerate(steps):
        mean = torch.stack([loss_scale.numbers(step, 0, rank) for rank in range(RANKS)]).double().mean(0)
        got[f"update {step}"], right[f"update {step}"] = said["update"], mean * (step != overflow_at)
        if step != overflow_at:
            got[f"norm {step}"], right[f"norm {step}"] = said["norm"] or 0.0, mean.norm()
    return measured(got, right, HALF / 10)


def flags() -> Outcome:
    flag, skipped, weights = loss_scale.flags()
    return measured({"flag": flag, "skipped": skipped, "weights": weights}, {"flag": 1, "skipped": 1, "weights": [0.0]})


def met(*how: Any, kinds: tuple[str, ...] = ("good", "inf", "good"), **more: Any) -> Outcome:
    """A job that meets a gradient which is not finite, and skips the step: tests/ranks/nonfinite.py."""
    steps = nonfinite.trained(*how, kinds=kinds, together=True, **more)
    mean = torch.stack([nonfinite.numbers("good", rank) for rank in range(RANKS)]).double().mean(0)
    norm = float(mean.norm())
    clipped = mean * min(1.0, 2.0 / norm)
    got, right = {}, {}
    for step, (kind, said) in enumerate(zip(kinds, steps, strict=True)):
        got[f"update {step}"] = said["update"]
        right[f"update {step}"] = clipped * (kind == "good")
        got[f"inverse norm {step}"] = 1 / said["norm"] if said["norm"] else 0.0
        right[f"inverse norm {step}"] = 1 / norm if kind == "good" else 0.0
    return measured(got, right, HALF)


def looked_up(name: str) -> Outcome:
    found = sparse_gradients.SCENARIOS[name]()
    factor = RANKS if "sum" in name.split(", ")[1:] else 1
    rows = [[factor * value for value in row] for row in found["right"]]
    return measured({"rows": found["got"]}, {"rows": rows})


def clipped(scenario: Callable[[], Any], apart: bool) -> Outcome:
    """What clipping left of each gradient and what it should have left. ``apart``: each rank has its own gradients."""
    found = scenario()
    squares = torch.tensor(sum(found["squares"].values()), dtype=torch.float64)
    if apart:
        torch.distributed.all_reduce(squares)
    norm = float(squares.sqrt())
    right = min(1.0, fp32_clipping.CLIP / (norm + 1e-6))
    coefficients = {f"{name} {end}": c / right for name, pair in found["ratios"].items() for end, c in enumerate(pair)}
    if not coefficients:  # a rank whose gradients are all zero
        coefficients = {"none": 1.0}
    if found["norm"] is not None:
        coefficients["norm"] = float.fromhex(found["norm"]) / norm
    return {**from_ratios(coefficients), "digest": found["bits"]}


def half_routed(dtype: str, fused: bool = False) -> Outcome:
    found = half_experts.step(dtype, fused)
    return from_ratios({name: found[name] for name in ("norm", "update")}, HALF / 10)


def routed_apart(stage: int, **zero: Any) -> Outcome:
    found = experts_apart.trained(stage, **zero)
    errors = [max(abs(ratio - 1), rest) for ratio, rest in found.values()]
    return outcome([ratio for ratio, _ in found.values()], errors, found)


def folded(stage: int, native_alone: bool = False) -> Outcome:
    """3 and 4 on native experts, 12 on a folded one of the second rank; all clipped to a norm of 1."""
    import folded_experts as given

    numbers = None if native_alone else given.FOLDED
    found = given.step(partial(given.engine_of, stage, numbers))
    norm = 5.0 if native_alone else 13.0
    lost = {"native": given.NATIVE, **({} if native_alone else {"folded": given.FOLDED})}
    right = {name: [one / norm for one in of] for name, of in lost.items()}
    return measured({**found["lost"], "norm": found["norm"]}, {**right, "norm": norm})


def folded_model(stage: int) -> Outcome:
    import folded_glm4_moe

    found = folded_glm4_moe.clipped(stage, 2)
    ratios = {**found["updates"], "norm": found["norm"]}
    errors = [*found["errors"].values(), *(abs(ratio - 1) for ratio in ratios.values())]
    return outcome(ratios.values(), errors, found["updates"])


# ---------------------------------------------------------------------------------------- the set

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_SUM: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
STATIC: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 128.0}}
SUM: dict[str, Any] = {"gradient_allreduce_op": "sum"}
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ALL_REDUCE: dict[str, Any] = {"reduce_scatter": False}
TWO, FOUR = {"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 4.0}
STEPS: dict[str, Any] = {"optimizer": "adamw", "steps": 3, "gradient_accumulation_steps": 2}
ZERO0_FP16 = "fp16-zero0-loss-scale + fp16-zero0-norm-scale"

SCENARIOS: dict[str, Callable[[], Outcome]] = {
    **{f"beside: ZeRO-{stage}": partial(oracle, stage, **STEPS) for stage in (0, 1, 3)},
    **{f"beside: ZeRO-{stage}, bf16": partial(oracle, stage, **STEPS, **BF16) for stage in (1, 3)},
    "zero2-accumulation: ZeRO-2": partial(oracle, 2, **STEPS),
    "zero2-accumulation: ZeRO-2, bf16": partial(oracle, 2, **STEPS, **BF16),
    **{f"beside: ZeRO-{stage}, offload": partial(oracle, stage, OFFLOAD, **STEPS) for stage in (1, 2, 3)},
    # sums
    **{f"sum-reduction: ZeRO-{stage}": partial(oracle, stage, **STEPS, **SUM) for stage in (0, 1, 2)},
    "sum-reduction: ZeRO-2, pre-divided": partial(oracle, 2, ALL_REDUCE, **SUM, **FOUR),
    "sum-reduction: ZeRO-2, bf16": partial(oracle, 2, **SUM, **BF16),
    "sum-reduction beside: ZeRO-2, all ranks share a sequence": partial(oracle, 2, shards=2, **SUM),
    "sum-reduction: sparse": partial(looked_up, "sparse, sum"),
    "zero3-sum-reduction: ZeRO-3": partial(oracle, 3, **STEPS, **SUM),
    "zero3-sum-reduction: ZeRO-3, all-reduce": partial(oracle, 3, ALL_REDUCE, **SUM),
    "zero3-sum-reduction: ZeRO-3, sequence parallel": partial(oracle, 3, shards=2, **SUM),
    "zero3-sum-reduction: ZeRO-3, bf16, offload": partial(oracle, 3, OFFLOAD, **SUM, **BF16),
    # sequence parallelism and pre-division
    "zero3-scatter-scale: ZeRO-3, sequence parallel": partial(oracle, 3, shards=2, **STEPS),
    "zero3-scatter-scale: ZeRO-3, sequence parallel, offload": partial(oracle, 3, OFFLOAD, 2),
    "zero3-scatter-scale beside: ZeRO-3, one large bucket, all-reduce": partial(oracle, 3, ALL_REDUCE, 2),
    "zero3-predivide-postscale: ZeRO-3": partial(oracle, 3, ALL_REDUCE, **TWO),
    "zero3-predivide-postscale beside: ZeRO-3, by another factor": partial(oracle, 3, ALL_REDUCE, **FOUR),
    **{f"zero12-predivide-postscale: ZeRO-{s}": partial(oracle, s, ALL_REDUCE, 2, **TWO) for s in (1, 2)},
    "zero12-predivide-postscale beside: ZeRO-2, by another factor": partial(oracle, 2, ALL_REDUCE, 2, **FOUR),
    **{f"sequence-parallel-mean: ZeRO-{stage}": partial(oracle, stage, None, 2, "mean") for stage in (0, 1, 2)},
    **{f"sequence-parallel-mean beside: ZeRO-{s}, sum over shards": partial(oracle, s, None, 2) for s in (0, 1, 2)},
    "mesh-shards-never-reduced: ZeRO-1": partial(uncrossed, "mesh, ZeRO-1"),
    "mesh-shards-never-reduced: ZeRO-2": partial(uncrossed, "mesh, ZeRO-2"),
    "zero2-accumulation: ZeRO-2, an mpu": partial(uncrossed, "ZeRO-2, mpu"),
    "zero3-shards-never-reduced: ZeRO-3": partial(uncrossed, "ZeRO-3"),
    "zero3-shards-never-reduced beside: ZeRO-3, partitions over all": partial(uncrossed, "data-parallel over all"),
    # accumulation
    **{f"accumulation-loss-paths: {n}": partial(accumulated, n)
       for n in ("zero1 regularised x4", "zero0 around x2", "zero3 fed back x2")},
    "accumulation-loss-paths beside: zero1 x4": partial(accumulated, "zero1 x4"),
    **{f"accumulation-scale-ignored: {n}": partial(accumulated, n) for n in ("zero0 caller x4", "zero3 caller x4")},
    **{f"no-sync-accumulation: {n}": partial(accumulated, n) for n in ("zero0 no_sync x4", "zero1 no_sync x4")},
    "no-sync-accumulation beside: zero1 boundary x3": partial(accumulated, "zero1 boundary x3"),
    "pipeline-accumulation-undivided: pipeline 1 x4": partial(accumulated, "pipeline 1 x4"),
    "pipeline-accumulation-undivided + pipeline-accumulation-repeated: pipeline 2 x4, ZeRO-1":
        partial(accumulated, "pipeline 2 x4, ZeRO-1"),
    "pipeline-accumulation-undivided + pipeline-accumulation-repeated beside: pipeline 2 x1, ZeRO-1":
        partial(accumulated, "pipeline 2 x1, ZeRO-1"),
    "zero2-accumulation: zero2 x4": partial(accumulated, "zero2 x4"),
    "zero2-accumulation: zero2 boundary x3": partial(accumulated, "zero2 boundary x3"),
    "zero2-accumulation beside: zero2 x1": partial(accumulated, "zero2 x1"),
    "zero2-offload-accumulation: offload2 x4": partial(accumulated, "offload2 x4"),
    "zero2-offload-accumulation beside: offload2 x2": partial(accumulated, "offload2 x2"),
    "zero2-offload-boundary + zero2-offload-accumulation: offload2 boundary x3":
        partial(accumulated, "offload2 boundary x3"),
    "zero2-offload-stale-gradient + zero2-offload-accumulation: offload2 used late x3":
        partial(accumulated, "offload2 used late x3"),
    # half precision
    **{f"fp16-growth-step: ZeRO-{stage}": partial(scaled, stage) for stage in (1, 2, 3)},
    f"fp16-growth-step + {ZERO0_FP16}: ZeRO-0": partial(scaled, 0),
    "fp16-growth-step + fp16-zero0-loss-scale + fused-fp16-step: FusedAdam": partial(scaled, 0, fused=True),
    f"{ZERO0_FP16}: ZeRO-0, static": partial(scaled, 0, loss_scale=128.0),
    "fp16-zero0-loss-scale + fused-fp16-step: FusedAdam, static": partial(scaled, 0, fused=True, loss_scale=128.0),
    **{f"fp16-growth-step beside: ZeRO-{s}, static": partial(scaled, s, loss_scale=128.0) for s in (1, 2, 3)},
    "zero1-overflow-flag: ZeRO-1": flags,
    f"zero0-early-step + {ZERO0_FP16}: AdamW": partial(oracle, 0, optimizer="adamw", steps=2, **STATIC),
    "bf16-zero0-state: SGD": partial(oracle, 0, steps=3, **BF16),
    "zero0-early-step + bf16-zero0-state: AdamW, bf16": partial(oracle, 0, optimizer="adamw", steps=2, **BF16),
    "bf16-optimizer-choice + bf16-boundary-gradient: ZeRO-1": partial(oracle, 1, steps=3, **FP32_SUM),
    "bf16-optimizer-choice + bf16-boundary-gradient: ZeRO-1 x4":
        partial(oracle, 1, steps=2, gradient_accumulation_steps=4, **FP32_SUM),
    "nonfinite-norm: ZeRO-1, fp32": partial(met, 1, "fp32", 2.0),
    "nonfinite-norm: ZeRO-2, bf16": partial(met, 2, "bf16", 2.0),
    "nonfinite-norm: ZeRO-3, bf16": partial(met, 3, "bf16", 2.0),
    **{f"nonfinite-norm beside: ZeRO-{s}, all finite": partial(met, s, "fp32", 2.0, kinds=("good",) * 2)
       for s in (1, 2, 3)},
    # sparse rows, experts, clipping
    "sparse-predivide: sparse": partial(looked_up, "sparse, pre-divided"),
    "sparse-predivide beside: sparse": partial(looked_up, "sparse"),
    "sparse-predivide beside: dense": partial(looked_up, "dense, pre-divided"),
    "sparse-rows-of-sum-zero: compressed": partial(looked_up, "compressed"),
    "sparse-rows-of-sum-zero beside: compressed": partial(looked_up, "compressed, no row of sum zero"),
    "sparse-predivide: compressed": partial(looked_up, "compressed, pre-divided"),
    "fp32-clip-norm: experts": partial(clipped, fp32_clipping.published, True),
    "fp32-clip-norm: sparse": partial(clipped, partial(fp32_clipping.sparse, 1.0), False),
    "fp32-clip-norm beside: dense": partial(clipped, fp32_clipping.dense, False),
    f"unfused-expert-norm + {ZERO0_FP16}: fp16": partial(half_routed, "fp16"),
    "unfused-expert-norm + bf16-zero0-state: bf16": partial(half_routed, "bf16"),
    "fused-expert-norm + fp16-zero0-loss-scale + fused-fp16-step: fp16": partial(half_routed, "fp16", fused=True),
    "fused-expert-norm + bf16-zero0-state: bf16": partial(half_routed, "bf16", fused=True),
    **{f"folded-expert-norm: ZeRO-{stage}": partial(folded, stage) for stage in (1, 2)},
    "folded-expert-norm beside: ZeRO-2, native": partial(folded, 2, native_alone=True),
}  # fmt: skip
TRANSFORMERS: dict[str, Callable[[], Outcome]] = {
    f"folded-input-gradient + folded-expert-norm: ZeRO-{stage}": partial(folded_model, stage) for stage in (1, 2)
}
ONE_AT_A_TIME = {"use_multi_rank_bucket_allreduce": False}
FOUR_RANKS: dict[str, Callable[[], Outcome]] = {
    "zero12-expert-scale: ZeRO-1": partial(routed_apart, 1),
    "zero12-expert-scale + zero12-expert-copy: ZeRO-2, one rank at a time": partial(routed_apart, 2, **ONE_AT_A_TIME),
}
UNAIDED: dict[str, Callable[[], Outcome]] = {
    "zero12-flatten-detach: ZeRO-1": partial(flat, "ZeRO-1"),
    "zero12-flatten-detach + zero2-accumulation: ZeRO-2": partial(flat, "ZeRO-2"),
}


def _files(target: Target) -> tuple[Path, ...]:
    file = Path(deepspeed.__file__).parent.parent.joinpath(*target.module.split("."))
    return file.with_suffix(".py"), file / "__init__.py"


PLACES = {
    (target.qualname, str(path)): str(target)
    for patch in discover()
    for target in patch.targets
    for path in _files(target)
}
"""By name and file, as its code has them."""


def watched(scenario: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """On stock, with the targets that have run: what was not run has not been measured."""
    ran: set[str] = set()

    def see(frame: Any, event: str, argument: Any) -> None:
        place = frame.f_code.co_qualname, frame.f_code.co_filename
        if place in PLACES:
            ran.add(PLACES[place])

    def run() -> Outcome:
        if not on_stock():
            return scenario()
        sys.settrace(see)
        try:
            found = scenario()
        finally:
            sys.settrace(None)
        return {**found, "run": sorted(ran)}

    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"main": SCENARIOS, "four": FOUR_RANKS, "unaided": UNAIDED, "transformers": TRANSFORMERS}
    part, texts = sys.argv[1], sys.argv[2:]
    chosen = {name: watched(run) for name, run in parts[part].items() if any(text in name for text in texts or [""])}
    sys.argv[1:] = chosen
    play(chosen, detach=part != "unaided")
