"""Clipping of fp32 training without ZeRO, where ranks hold different parts of the model, and of sparse gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _norm
from ds_gradfix.reduction import alike, clip_coefficient
from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Steer, Target, known_sources

ID = "fp32-clip-norm"


def _affects(facts: Facts) -> Effect | None:
    # A configuration that leaves clipping to DeepSpeed's default is taken for one that clips: from 0.19.3 on it does.
    if facts.zero_stage != 0 or facts.dtype != "fp32" or facts.gradient_clipping == 0.0:
        return None
    reasons = {
        "the clipping norm is a mean over ranks that own different experts": facts.expert_parallel_size > 1,
        "the clipping norm counts the first pipeline stage only": facts.pipeline_stages > 1,
        "sparse gradients are not clipped": facts.sparse_gradients,
    }
    words = [words for words, found in reasons.items() if found]
    return Effect(None, ", and ".join(words)) if words else None


def _clip(engagement: Any, original: Callable[..., Any], engine: Any) -> None:
    """In place of ``clip_fp32_gradients``. The norm of the step can be asked for afterwards, which in stock it can't.

    Stock multiplies by zero where the norm is infinite: a step that changes nothing, save that what was infinite turns
    into NaN. Here every gradient turns into NaN, as where the norm is NaN: a step that is lost says so at once. Under
    torch.autocast with a loss scale that step is skipped, as ever.
    """
    import torch

    params = list(engine.module.parameters())
    norm = _norm.global_norm(_norm.parts_of(params, engine.mpu, engine.seq_data_parallel_group))
    coefficient = clip_coefficient(norm, engine.gradient_clipping())
    gradients = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    with torch.no_grad():
        for held in alike(grad._values() if grad.is_sparse else grad for grad in gradients):
            torch._foreach_mul_(held, coefficient.to(held[0].device))
    engine._global_grad_norm = norm


CLIP = Replace(Target("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients"), _clip)
NORM = Steer(Target("deepspeed.runtime.utils", "clip_grad_norm_"), {})
"""Where the defect lies. Nothing is changed there: anybody may call it. Its source says whether it has the defect."""


def _measure(engine: Any) -> list[Measurement]:
    """One gradient of each kind that this rank has, of known size, through the engine's own clipping.

    What the norm of them all should be comes from the numbers of ranks that hold the same, and one sum over all ranks.
    """
    import torch

    dist, clip = sys.modules["torch.distributed"], float(engine.gradient_clipping())
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    chosen = _one_of_each_kind(engine)
    square = torch.zeros((), device=device)
    with _only_these_gradients(engine):
        for number, (param, sparse) in enumerate(chosen.values(), start=2):
            held = param[:1] if sparse else param
            held = torch.full_like(held, number * clip / held.numel() ** 0.5)
            row = torch.zeros(1, 1, dtype=torch.int64, device=held.device)
            param.grad = torch.sparse_coo_tensor(row, held, param.shape) if sparse else held
            square += number**2 / _norm.holders_of(param, engine.mpu)
        before = [_mean(param) for param, _ in chosen.values()]
        dist.all_reduce(square)
        right = clip / (clip * float(square) ** 0.5 + 1e-6)
        engine.clip_fp32_gradients()
        ratios = [_mean(param) / old / right for (param, _), old in zip(chosen.values(), before, strict=True)]
    return [
        Measurement(f"clipping of {kind}", ratio, abs(ratio - 1), 1e-5)
        for kind, ratio in zip(chosen, ratios, strict=True)
    ]


def _one_of_each_kind(engine: Any) -> dict[str, tuple[Any, bool]]:
    """The smallest parameter of each, and whether its gradients are sparse."""
    sparse = {id(module.weight) for module in engine.module.modules() if getattr(module, "sparse", False)}
    chosen: dict[str, tuple[Any, bool]] = {}
    for param in engine.module.parameters():
        if not (param.requires_grad and param.numel()) or getattr(param, "ds_pipe_replicated", False):
            continue
        sort = "sparse " if id(param) in sparse else "tensor-parallel " if _norm.is_sharded(param) else ""
        kind = f"{sort}gradients" + (f" of experts ({param.group_name})" if _norm.is_expert(param) else "")
        if kind not in chosen or param.numel() < chosen[kind][0].numel():
            chosen[kind] = param, id(param) in sparse
    return chosen


@contextmanager
def _only_these_gradients(engine: Any) -> Iterator[None]:
    """The engine without a gradient; what it has is put back."""
    params = list(engine.module.parameters())
    kept, norm = [param.grad for param in params], engine._global_grad_norm
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, gradient in zip(params, kept, strict=True):
            param.grad = gradient
        engine._global_grad_norm = norm


def _mean(param: Any) -> float:
    return float(_norm.elements_of(param.grad).double().mean())


PATCH = Patch(
    id=ID,
    title="fp32 clipping without ZeRO, where ranks hold different parts of the model",
    symptom="In fp32 at ZeRO stage 0 the clip coefficient depends on how experts are placed; in a pipeline gradients"
    " are clipped too weakly; sparse gradients (nn.Embedding(sparse=True)) are not clipped at all.",
    cause="clip_grad_norm_ averages the ranks' norms over the data-parallel group, although ranks own different"
    " experts; it takes pipeline stages for tensor-parallel copies of the first one; and it multiplies a copy of a"
    " sparse gradient.",
    fix="The norm counts every distinct gradient element once, in float64, with one all-reduce over each process group;"
    " every gradient, sparse or not, is multiplied by the same coefficient on the device. get_global_grad_norm()"
    " answers with that norm after the step. A norm that is not finite turns every gradient into NaN, where DeepSpeed"
    " zeroes most of them.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8475",
        "https://github.com/deepspeedai/DeepSpeed/issues/8469",
        "https://github.com/deepspeedai/DeepSpeed/pull/8476",
        "https://github.com/deepspeedai/DeepSpeed/pull/8478",
        "https://github.com/deepspeedai/DeepSpeed/pull/8691",
    ),
    retire="When the oldest supported DeepSpeed has the upstream fixes; none has them up to 0.19.8.",
    corrections=(CLIP, NORM),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
