"""What a DeepSpeed engine says about itself. Gradients and parameters are read by collectives: all ranks call these."""

from __future__ import annotations

from typing import Any

import torch


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Full reduced gradients of the trainable parameters, unscaled, float32 on the CPU; zeros where there is none.

    Between the last `backward` and `step` only.
    """
    from deepspeed.utils import safe_get_full_grad

    scale = _loss_scale(engine)
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        # BF16_Optimizer keeps the reduced gradient here; before 0.19.8 DeepSpeed's getter returns the rank's own.
        gradient = getattr(parameter, "_hp_grad", None)
        if gradient is None:
            gradient = safe_get_full_grad(parameter)
        if gradient is None:
            gradient = torch.zeros(_shape(parameter))
        found[name] = gradient.detach().float().cpu().clone().reshape(_shape(parameter)) / scale
    return found


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Full parameters, the fp32 masters where there are any, float32 on the CPU."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    masters = _unfused_masters(engine)
    found = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if full is None:
            full = masters.get(id(parameter))
        if full is None and hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                full = parameter.detach().clone()
        if full is None:
            full = parameter
        found[name] = full.detach().float().cpu().clone().reshape(_shape(parameter))
    return found


def norm(engine: Any) -> float | None:
    """The global gradient norm of the last step as the engine reports it; None where it reports none."""
    value = engine.get_global_grad_norm()
    return None if value is None else float(value)


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _loss_scale(engine: Any) -> float:
    if not engine.fp16_enabled():
        return 1.0
    return float(engine.optimizer.cur_scale if hasattr(engine.optimizer, "cur_scale") else engine.optimizer.loss_scale)


def _unfused_masters(engine: Any) -> dict[int, torch.Tensor]:
    """Half-precision ZeRO-0 keeps fp32 copies beside the parameters, out of reach of DeepSpeed's own getters."""
    if engine.zero_optimization_stage() > 0:
        return {}
    halves = getattr(engine.optimizer, "fp16_groups", [])
    singles = getattr(engine.optimizer, "fp32_groups", [])
    return {id(half): single for half_group, group in zip(halves, singles) for half, single in zip(half_group, group)}
