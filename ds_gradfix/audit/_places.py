"""Where each of DeepSpeed's optimizers has the gradient that it is about to use, just before a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_gradfix.facts import Facts, is_autoep_expert

if TYPE_CHECKING:
    from torch import Tensor

Fragment = tuple[int, "Tensor"]
"""Of one parameter's gradient: the flat index of the first element, and a tensor of the elements from there on, in any
shape; a sparse gradient is one fragment as it is."""


@dataclass(frozen=True)
class Places:
    """``held(param)`` are the fragments of a parameter's gradient that this rank's optimizer is about to use, still
    multiplied by the loss scale; none where other ranks have it. ``partitioned``: ranks have different ones.
    ``clipped_there``: clipping changes what ``held`` gives, before the engine steps the job's own optimizer."""

    held: Callable[[Any], Iterable[Fragment]]
    partitioned: bool
    clipped_there: bool = False


def places_of(engine: Any) -> Places | None:
    """None for an optimizer that is not known."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return Places(lambda param: _mapped(param, _zero12_partition(optimizer, param)), True)
    if kind == "BF16_Optimizer":
        return Places(lambda param: _mapped(param, _bf16_partition(optimizer, param)), True)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Places(lambda param: _zero3(optimizer, param), True)
    if kind in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return Places(_whole, False)
    if _is_plain(engine):
        return Places(_whole, False, clipped_there=engine.gradient_clipping() > 0)
    return None


def _is_plain(engine: Any) -> bool:
    """The engine steps the job's own optimizer on the parameters themselves: fp32 or autocast without ZeRO."""
    return engine.zero_optimization_stage() == 0 and engine.optimizer is getattr(engine, "basic_optimizer", None)


def why_not_audited(engine: Any, facts: Facts) -> str | None:
    """What makes this engine one whose gradients can't be followed, in words; None where they can."""
    optimizer = engine.optimizer
    if facts.own_step:
        return "ZenFlow and SuperOffload take their steps in code of their own"
    if getattr(engine, "is_deepcompile_enabled", bool)():
        return "DeepCompile reduces gradients inside the compiled graph"
    if places_of(engine) is None:
        return f"it is not known where {facts.wrapper} keeps its gradients"
    if facts.folded_experts:
        return "AutoEP and AutoTP together correct gradients on their way"
    if any(group.get("use_muon") for group in optimizer.param_groups):
        return "Muon puts its update in the gradient's place"
    if getattr(optimizer, "all2all_process_group", None) is not None:
        return "quantized gradients are off by more than their dtype explains"
    if getattr(optimizer, "swap_optimizer", False):
        return "the gradient is on NVMe"
    if not engine.enable_backward_allreduce:
        return f"{facts.basic_optimizer} reduces gradients by itself"
    return None


def loss_scale_of(engine: Any) -> float:
    """What the step divides gradients by."""
    scaler: Any = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if hasattr(scaler, "get_scale"):
        return float(scaler.get_scale())
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def _whole(param: Any) -> Iterator[Fragment]:
    if param.grad is not None:
        yield 0, param.grad


def _mapped(param: Any, partition: list[Tensor]) -> Iterator[Fragment]:
    """ZeRO-1/2's and BF16_Optimizer's parameters know which of their elements are where in this rank's partition."""
    mapping = param._hp_mapping
    if mapping is not None:
        place, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
        yield from _cut(partition, place.start, place.numel, start)


def _zero12_partition(optimizer: Any, param: Any) -> list[Tensor]:
    if param._hp_mapping is None:
        return []
    group = param._hp_mapping.param_group_index
    if optimizer.cpu_offload:
        gradient = optimizer.single_partition_of_fp32_groups[group].grad
        return [] if gradient is None else [gradient]
    return list(optimizer.averaged_gradients.get(group) or ())


def _bf16_partition(optimizer: Any, param: Any) -> list[Tensor]:
    if param._hp_mapping is None:
        return []
    return [optimizer.fp32_groups_gradient_flat_partition[param._hp_mapping.param_group_index]]


def _zero3(optimizer: Any, param: Any) -> Iterator[Fragment]:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(param)]
    if optimizer.offload_optimizer:
        gradient = optimizer.fp32_partitioned_groups_flat[group].grad
        partition = [] if gradient is None else [gradient]
    else:
        partition = list(optimizer.averaged_gradients.get(group) or ())
    ranks = getattr(param, "ds_process_group", optimizer.dp_process_group)
    start = sys.modules["torch.distributed"].get_rank(ranks) * size
    yield from _cut(partition, offset, min(size, param.ds_numel - start), start)


def _cut(tensors: Iterable[Tensor], place: int, size: int, start: int) -> Iterator[Fragment]:
    """``size`` elements from ``place`` on of the tensors laid end to end; the first of them has index ``start``."""
    before = 0
    for tensor in tensors:
        first, last = max(place, before), min(place + size, before + tensor.numel())
        if first < last:
            yield start + first - place, tensor.reshape(-1)[first - before : last - before]
        before += tensor.numel()


def is_audited(param: Any) -> bool:
    """AutoEP's experts lie over groups of their own."""
    return bool(param.requires_grad) and not is_autoep_expert(param)
