"""The optimizers' steps: when a loss scale may grow, which norm is reported, what a non-finite norm does.

One corrected body for each optimizer. Several patches are reasons to engage it, and each sees to its own defect only: a
step is DeepSpeed's own code, called between two things that are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_gradfix.patches import _norm
from ds_gradfix.registry import Replace, Rewrite, Target
from ds_gradfix.source import Rule

ZERO12 = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
ZERO3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
FUSED = "deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"

GROWTH = "fp16-growth-step"
LOSS_SCALE = "fp16-zero0-loss-scale"
NORM_SCALE = "fp16-zero0-norm-scale"
EXPERTS = "unfused-expert-norm"
EXPERT_WEIGHTS = "fused-expert-norm"
NO_STEP = "fused-fp16-step"
NONFINITE = "nonfinite-norm"


@contextmanager
def _instead(holder: Any, **attributes: Any) -> Iterator[None]:
    """Let an object have other attributes for a while, in front of its class's."""
    kept = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    vars(holder).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(holder).pop(name, None)
        vars(holder).update(kept)


# ------------------------------------------------------------------------------ the loss scale


@contextmanager
def _growth_afterwards(optimizer: Any, wanted: bool) -> Iterator[None]:
    """Let a growth of the loss scale wait until the gradients that carry the old one have been divided by it.

    Where they overflowed the scale shrinks at once, as ever: nothing is divided in such a step.
    """
    if not wanted:
        yield
        return
    update = optimizer._update_scale
    waiting = []

    def later(overflow: bool = False) -> None:
        if overflow:
            update(overflow)
        else:
            waiting.append(overflow)

    try:
        with _instead(optimizer, _update_scale=later):
            yield
    finally:
        if waiting:
            before = optimizer.loss_scale
            update(False)
            # LoCo keeps errors of compression at the scale of the gradients that they will be added to.
            rescale_errors = getattr(optimizer, "_loco_err_buf_update", None)
            if rescale_errors is not None:
                rescale_errors(False, optimizer.loss_scale / before)


def _cur_scale(optimizer: Any) -> float:
    """What the step of an fp16 optimizer without ZeRO divides by."""
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)


@contextmanager
def _experts_counted(optimizer: Any, wanted: bool) -> Iterator[None]:
    """Let gradients be clipped by the norm of all of them, and that be the one reported."""
    if not wanted:
        yield
        return
    unscale = optimizer.unscale_and_clip_grads

    def by_whole_norm(*args: Any, **kwargs: Any) -> Any:
        *gradients, _ = args
        norm = _norm_of_all(optimizer)
        # FP16_Optimizer has unscaled what it reports by now, FP16_UnfusedOptimizer never does: see _unfused_step.
        optimizer._global_grad_norm = norm / _cur_scale(optimizer) if gradients else norm
        return unscale(*gradients, norm, **kwargs)

    with _instead(optimizer, unscale_and_clip_grads=by_whole_norm):
        yield


def _norm_of_all(optimizer: Any) -> float:
    """Of gradients that still carry the loss scale. FP16_Optimizer keeps those of a group in one flat tensor."""
    params = [param for group in optimizer.fp16_groups for param in group]
    held = _norm.gradient_of
    if hasattr(optimizer, "fp32_groups_flat"):
        pieces: dict[int, Any] = {}
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            pieces.update(zip(map(id, group), flat.grad.split([param.numel() for param in group]), strict=True))
        held = lambda param: pieces[id(param)]  # noqa: E731
    replicas = optimizer.overflow_checker.deepspeed.seq_data_parallel_group
    return float(_norm.global_norm(_norm.parts_of(params, optimizer.mpu, replicas, held)))


def _overflowed(optimizer: Any) -> bool:
    params = [param for group in optimizer.fp16_groups for param in group if param.grad is not None]
    return bool(optimizer.overflow_checker.has_overflow(params))


def _fused_step(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    legacy = optimizer.fused_adam_legacy
    experts = EXPERT_WEIGHTS in engagement.effects and not legacy
    if NO_STEP in engagement.effects and not legacy and not _overflowed(optimizer):
        # It leaves inside its question whether there is a loss scale to look after, which is then left to us.
        with _instead(optimizer, use_grad_scaling=False), _experts_counted(optimizer, experts):
            overflow = original(optimizer, *args, **kwargs)
        optimizer._update_scale(overflow)
        return overflow
    with _growth_afterwards(optimizer, GROWTH in engagement.effects), _experts_counted(optimizer, experts):
        return original(optimizer, *args, **kwargs)


def _unfused_step(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    scale, experts = _cur_scale(optimizer), EXPERTS in engagement.effects
    with _growth_afterwards(optimizer, GROWTH in engagement.effects), _experts_counted(optimizer, experts):
        overflow = original(optimizer, *args, **kwargs)
    # Where it overflowed the norm is another step's, and a gradient that was never scaled has the right one.
    if NORM_SCALE in engagement.effects and LOSS_SCALE not in engagement.left_out and not overflow:
        optimizer._global_grad_norm /= scale
    return overflow


FUSED_STEP = Replace(Target(FUSED[0], f"{FUSED[1]}.step"), _fused_step)
UNFUSED_STEP = Replace(Target(UNFUSED[0], f"{UNFUSED[1]}.step"), _unfused_step)


# ------------------------------------------------------------------------------ non-finite norms


def invalid(norm: Any) -> bool:
    """Whether a norm is not finite: DeepSpeed's functions say so by -1. A tensor or a number."""
    return not 0.0 <= float(norm) < math.inf


TakeNorm = Callable[[Any], tuple[Any, bool]]
"""From an optimizer, what its step is to use for the norm, and whether that is finite."""


@contextmanager
def _norm_first(optimizer: Any, wanted: bool, name: str, take: TakeNorm, skips: bool) -> Iterator[None]:
    """Take the norm before the step decides whether it goes on, and let a non-finite one stop it.

    ``name`` is the method that takes it. All ranks have the same norm, so all stop or none.
    """
    if not wanted:
        yield
        return
    update = optimizer._update_scale

    def judge(overflow: bool = False) -> None:
        if not overflow:
            norm, finite = take(optimizer)
            setattr(optimizer, name, lambda *args, **kwargs: norm)
            overflow = optimizer.overflow = skips and not finite
        if overflow:
            optimizer._global_grad_norm = math.inf
        update(overflow)

    optimizer.overflow = False  # where DeepSpeed does not look for an overflow, it does not forget one either
    with _instead(optimizer, _update_scale=judge, **{name: getattr(optimizer, name)}):
        yield


def _take_zero12(optimizer: Any) -> tuple[Any, bool]:
    import torch

    groups = []

    def heard(take: Callable[..., Any]) -> Callable[..., Any]:
        def listen(*args: Any, **kwargs: Any) -> Any:
            norm = take(*args, **kwargs)
            groups.append(norm)
            return norm

        return listen

    # The norms of single groups, before the -1 of one of them is squared and added up with the others.
    names = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")
    with _instead(optimizer, **{name: heard(getattr(optimizer, name)) for name in names}):
        norm = optimizer.scaled_global_norm()
    finite = not any(map(invalid, [norm, *groups]))
    return norm if finite else torch.full_like(norm, math.inf), finite


def _take_zero3(optimizer: Any) -> tuple[Any, bool]:
    norms = optimizer._get_norm_groups()
    return norms, not any(map(invalid, norms))


def _judges(engagement: Any, optimizer: Any) -> bool:
    """Not where no norm is wanted, and not where torch's GradScaler expects the overflow and must hear of it."""
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    return NONFINITE in engagement.effects and scaler is None and getattr(optimizer, "compute_grad_norm", True)


def _zero12_step(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    judges, skips = _judges(engagement, optimizer), engagement.facts.check_grad_overflow is not False
    with (
        _growth_afterwards(optimizer, GROWTH in engagement.effects),
        _norm_first(optimizer, judges, "scaled_global_norm", _take_zero12, skips),
    ):
        return original(optimizer, *args, **kwargs)


def _zero3_step(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with (
        _growth_afterwards(optimizer, GROWTH in engagement.effects),
        _norm_first(optimizer, _judges(engagement, optimizer), "_get_norm_groups", _take_zero3, True),
    ):
        return original(optimizer, *args, **kwargs)


ZERO12_STEP = Replace(Target(ZERO12[0], f"{ZERO12[1]}.step"), _zero12_step)
ZERO3_STEP = Replace(Target(ZERO3[0], f"{ZERO3[1]}.step"), _zero3_step)


class _Bf16:
    """What the rewritten step of BF16_Optimizer calls where DeepSpeed asserts that the norm is positive."""

    @staticmethod
    def skips(optimizer: Any, norm: Any) -> bool:
        optimizer.overflow = invalid(norm)
        if optimizer.overflow:
            optimizer._global_grad_norm = math.inf
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
        return bool(optimizer.overflow)


BF16_STEP = Rewrite(
    Target(BF16[0], f"{BF16[1]}.step"),
    (Rule("assert all_groups_norm > 0.", "if _ds_gradfix.skips(self, all_groups_norm):\n    return"),),
    _Bf16,
)
