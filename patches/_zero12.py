"""The reductions of ZeRO-1 and ZeRO-2, with the divisor decided by invariant 1, and their measurement."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.registry import Measurement, Rewrite, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.zero.stage_1_and_2"
CLASS = "DeepSpeedZeroOptimizer"


def scale_of(holder: Any, group_size: int, shards: int) -> float:
    """The scale of a reduction over ``group_size`` ranks for an engaged engine or optimizer."""
    facts = holder._ds_gradfix.facts
    return reduction.gradient_scale(facts.reduction_op, group_size, shards, facts.convention)


class _Zero12:
    """What the rewritten reductions call where DeepSpeed divides."""

    @staticmethod
    def divide(optimizer: Any, tensor: Any, group_size: int) -> None:
        """Everything before the reduction: scale ``tensor`` in place."""
        reduction.scale_([tensor], scale_of(optimizer, group_size, optimizer.sequence_parallel_size))

    @classmethod
    def before(cls, optimizer: Any, tensor: Any, group_size: int) -> None:
        reduction.scale_([tensor], cls._factors(optimizer, group_size, tensor.dtype)[0])

    @classmethod
    def after(cls, optimizer: Any, tensor: Any, group_size: int) -> None:
        reduction.scale_([tensor], cls._factors(optimizer, group_size, tensor.dtype)[1])

    @staticmethod
    def _factors(optimizer: Any, group_size: int, dtype: Any) -> tuple[float, float]:
        scale = scale_of(optimizer, group_size, optimizer.sequence_parallel_size)
        return reduction.split_scale(scale, group_size, dtype, optimizer.gradient_predivide_factor)


_DIVIDE = Rule(
    "$tensor.div_(dist.get_world_size(group=$group) / float(self.sequence_parallel_size))",
    "_ds_gradfix.divide(self, $tensor, dist.get_world_size(group=$group))",
    times=(1, 2),  # up to 0.15.3 a bucket with experts is divided parameter by parameter
)

AVERAGE_TENSOR = Rewrite(Target(MODULE, f"{CLASS}.average_tensor"), (_DIVIDE,), _Zero12)
BUCKET = Rewrite(Target(MODULE, f"{CLASS}.allreduce_bucket"), (_DIVIDE,), _Zero12)
PREDIVIDE = Rewrite(
    Target(MODULE, f"{CLASS}.gradient_reduction_w_predivide"),
    (
        Rule(
            "if self.gradient_predivide_factor != 1.0:\n    $tensor.mul_(1. / self.gradient_predivide_factor)",
            "_ds_gradfix.before(self, $tensor, dp_world_size)",
        ),
        Rule(
            "if self.gradient_predivide_factor != dp_world_size:\n"
            "    $tensor.mul_(self.gradient_predivide_factor / (dp_world_size / float(self.sequence_parallel_size)))",
            "_ds_gradfix.after(self, $tensor, dp_world_size)",
        ),
        Rule(
            "$tensor.div_(dp_world_size / float(self.sequence_parallel_size))",
            "_ds_gradfix.divide(self, $tensor, dp_world_size)",
        ),
    ),
    _Zero12,
)


def measure(engine: Any) -> list[Measurement]:
    """Known gradients through the optimizer's two reductions that take plain tensors."""
    optimizer = engine.optimizer
    dist = sys.modules["deepspeed.comm"]
    group = optimizer.dp_process_group
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    numel = 2 * size + 1
    right = scale_of(optimizer, size, optimizer.sequence_parallel_size) * reduction.probe_sum(numel)
    buckets = getattr(optimizer, "ipg_buckets", None)
    found = []
    for dtype in list(buckets) if buckets else [optimizer.communication_data_type]:
        argument = (dtype,) if buckets else ()
        for path, reduce in (
            ("ZeRO-1/2 bucket reduction", lambda probe: optimizer.allreduce_bucket([probe], *argument)),
            ("ZeRO-1/2 reduction with pre-division", lambda probe: _reduced(optimizer, probe, *argument)),
        ):
            probe = reduction.probe_gradient(numel, size, rank).to(device=device, dtype=optimizer.dtype)
            ratio, error = reduction.compare(reduce(probe).double().cpu(), right)
            tolerance = reduction.probe_tolerance(dtype, optimizer.dtype)
            found.append(Measurement(f"{path} in {str(dtype).removeprefix('torch.')}", ratio, error, tolerance))
    return found


def _reduced(optimizer: Any, probe: Any, *argument: Any) -> Any:
    """From 0.19.8 on the reduced tensor is what is returned, before that it is always the argument."""
    returned = optimizer.gradient_reduction_w_predivide(probe, *argument)
    return probe if returned is None else returned
