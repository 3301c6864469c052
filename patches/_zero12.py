"""The reductions of ZeRO-1 and ZeRO-2, with the divisor decided by invariant 1, and their measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Known gradients through each of the optimizer's reductions, in each dtype that it communicates in."""
    optimizer = engine.optimizer
    dist = sys.modules["deepspeed.comm"]
    group = optimizer.dp_process_group
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    numel = 2 * size + 1
    right = scale_of(optimizer, size, optimizer.sequence_parallel_size) * reduction.probe_sum(numel)
    paths = {"bucket reduction": _bucket_reduced, "reduction with pre-division": _reduced}
    if optimizer.reduce_scatter:
        paths["default reduction"] = _averaged
    found = []
    for dtype in list(getattr(optimizer, "ipg_buckets", [optimizer.communication_data_type])):
        for path, reduce in paths.items():
            probe = reduction.probe_gradient(numel, size, rank).to(device=device, dtype=optimizer.dtype)
            got = reduce(optimizer, probe, *([dtype] if hasattr(optimizer, "ipg_buckets") else []))
            measured = *reduction.compare(got.double().cpu(), right), reduction.probe_tolerance(dtype, optimizer.dtype)
            found.append(Measurement(f"ZeRO-1/2 {path} in {str(dtype).removeprefix('torch.')}", *measured))
    return found


def _bucket_reduced(optimizer: Any, probe: Any, *dtype: Any) -> Any:
    """Without contiguous gradients by way of the sorting in front of it, which before 0.19.8 drops every tensor of a
    CPU: a sum that is asked for there must stop the job."""
    if optimizer.contiguous_gradients:
        return optimizer.allreduce_bucket([probe], *dtype)
    optimizer.buffered_reduce_fallback(None, [probe], *dtype)
    return probe


def _reduced(optimizer: Any, probe: Any, *dtype: Any) -> Any:
    """From 0.19.8 on the reduced tensor is what is returned, before that it is always the argument."""
    returned = optimizer.gradient_reduction_w_predivide(probe, *dtype)
    return probe if returned is None else returned


def _averaged(optimizer: Any, probe: Any, *dtype: Any) -> Any:
    """The default path. It reduces the slices of the bucket's parameters into what keeps their gradients, and known
    numbers must not stay there: over an empty bucket it only divides, and the sum is taken here."""
    with _empty_bucket(optimizer, *dtype):
        optimizer.average_tensor(probe, *dtype)
    # With overlap_comm it has a stream of its own.
    sys.modules["deepspeed.accelerator"].get_accelerator().synchronize()
    sys.modules["deepspeed.comm"].all_reduce(probe, group=optimizer.dp_process_group)
    return probe


@contextmanager
def _empty_bucket(optimizer: Any, *dtype: Any) -> Iterator[None]:
    """Releases before 0.17.2 have one bucket, in attributes of the optimizer."""
    if dtype:
        buckets = optimizer.ipg_buckets
        kept = buckets[dtype[0]]
        buckets[dtype[0]] = type(kept)()
        try:
            yield
        finally:
            buckets[dtype[0]] = kept
    else:
        kept, experts = optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params
        optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params = [], False
        try:
            yield
        finally:
            optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params = kept, experts
