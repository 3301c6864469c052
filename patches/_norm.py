"""Which rank holds what of a model's gradients, and the norm over all of it: where gradients are reduced but not
partitioned (ZeRO stage 0)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ds_gradfix.reduction import NormPart, sharded_norm

if TYPE_CHECKING:
    from torch import Tensor


def elements_of(gradient: Tensor) -> Tensor:
    """The dense tensor that holds a gradient's elements: of a sparse one its values, each row once."""
    return gradient.coalesce()._values() if gradient.is_sparse else gradient


def gradient_of(param: Any) -> Tensor | None:
    return None if param.grad is None else elements_of(param.grad)


def is_expert(param: Any) -> bool:
    """As DeepSpeed marks routed experts: those of its own layers and those that AutoEP makes."""
    return not getattr(param, "allreduce", True)


def is_sharded(param: Any) -> bool:
    """As Megatron and AutoTP mark what tensor-parallel peers hold different elements of."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def parts_of(
    params: Iterable[Any], mpu: Any, replicas: Any, held: Callable[[Any], Tensor | None] = gradient_of
) -> list[NormPart]:
    """What this rank puts into the norm over a model's parameters, for every distinct element to count once.

    ``replicas`` is the group over which the gradients of all but experts are reduced; its ranks must list the same
    parameters. ``held(param)`` is a dense tensor of the elements, None for none. Replicas share the work, so that all
    of them get the same number even if two copies should differ in a bit.
    """
    dense: list[Any] = []
    experts: dict[str, list[Any]] = {}
    for param in params:
        if not getattr(param, "ds_pipe_replicated", False):  # a tied weight counts on the first stage that has it
            (experts.setdefault(param.group_name, []) if is_expert(param) else dense).append(param)
    groups = sys.modules["deepspeed.utils.groups"]
    parts = [_part(dense, held, mpu, [replicas])]
    for name in sorted(experts):
        axes = [groups._get_expert_data_parallel_group(name), groups._get_expert_parallel_group(name)]
        parts.append(_part(experts[name], held, mpu, axes))
    return parts


def _part(params: Sequence[Any], held: Callable[[Any], Tensor | None], mpu: Any, axes: Sequence[Any]) -> NormPart:
    """``axes`` are the group of the copies and those of ranks that hold others."""
    copies, *_ = axes
    tensor, pipe = tensor_parallel_group(mpu), pipeline_group(mpu)
    # The ranks that an mpu calls tensor-parallel may be in the other groups already: experts that are not sliced, and
    # sequence shards by another name.
    if _size(tensor) * _size(pipe) * math.prod(map(_size, axes)) > _size(_dist().group.WORLD):
        tensor = None
    first = tensor is None or _dist().get_rank(tensor) == 0
    own = params[_dist().get_rank(copies) :: _size(copies)]
    tensors = [held(param) for param in own if first or is_sharded(param)]
    groups = [group for group in (*axes, tensor, pipe) if group is not None]
    return NormPart([each for each in tensors if each is not None], groups)


def holders_of(param: Any, mpu: Any) -> int:
    """The number of ranks of this pipeline stage that hold the same elements of a parameter."""
    groups, alone = sys.modules["deepspeed.utils.groups"], 1
    if is_expert(param):
        alone *= _size(groups._get_expert_parallel_group(param.group_name))
    if is_sharded(param):
        alone *= _size(tensor_parallel_group(mpu))
    return _size(_dist().group.WORLD) // (_size(pipeline_group(mpu)) * alone)


def global_norm(parts: Sequence[NormPart]) -> Tensor:
    """On the accelerator, by its own process groups, in the dtype that DeepSpeed takes for norms."""
    import torch

    accelerator = sys.modules["deepspeed.accelerator"].get_accelerator()
    doubles = getattr(accelerator, "is_fp64_supported", lambda: accelerator.device_name() != "mps")()
    dtype = torch.float64 if doubles else torch.float32
    return sharded_norm(parts, accelerator.current_device_name(), dtype, all_reduce=_all_reduce)


def _all_reduce(tensor: Tensor, group: Any, op: str) -> None:
    """DeepSpeed's own, so that its log of collectives counts this one as it does those of its norms."""
    comm = sys.modules["deepspeed.comm"]
    comm.all_reduce(tensor, op=comm.ReduceOp.SUM if op == "sum" else comm.ReduceOp.MAX, group=group)


def tensor_parallel_group(mpu: Any) -> Any:
    """None without tensor parallelism. A unit that knows pipelines may call all ranks of one model model-parallel."""
    return _first(mpu, "get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")


def pipeline_group(mpu: Any) -> Any:
    """None without pipeline parallelism."""
    return _first(mpu, "get_pipeline_model_parallel_group", "get_pipe_parallel_group")


def _first(mpu: Any, *getters: str) -> Any:
    return next((getattr(mpu, name)() for name in getters if hasattr(mpu, name)), None)


def _size(group: Any) -> int:
    return 1 if group is None else int(_dist().get_world_size(group))


def _dist() -> Any:
    return sys.modules["torch.distributed"]
