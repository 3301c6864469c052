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
EXPERT_SCALE = "zero12-expert-scale"


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
    def average(cls, optimizer: Any, tensor: Any, group: Any) -> None:
        """The same for the default path: a routed expert is averaged over the whole data-parallel group as well,
        wherever it is reduced."""
        if EXPERT_SCALE not in optimizer._ds_gradfix.left_out:
            group = optimizer.dp_process_group
        cls.divide(optimizer, tensor, sys.modules["deepspeed.comm"].get_world_size(group=group))

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
)

AVERAGE_TENSOR = Rewrite(
    Target(MODULE, f"{CLASS}.average_tensor"),
    (
        Rule(
            "$tensor.div_(dist.get_world_size(group=$group) / float(self.sequence_parallel_size))",
            "_ds_gradfix.average(self, $tensor, $group)",
            times=(1, 2),  # up to 0.15.3 a bucket with experts is divided parameter by parameter
        ),
    ),
    _Zero12,
)
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


# ------------------------------------------------------------------------------------- experts


class _Copy:
    """What the rewritten copy behind a reduction to one rank calls where DeepSpeed asks for its own rank."""

    @staticmethod
    def rank(group: Any) -> int:
        return int(sys.modules["deepspeed.comm"].get_rank(group=group))


COPY = Rewrite(
    Target(MODULE, f"{CLASS}.allreduce_and_copy"),
    (Rule("dist.get_rank(group=self.dp_process_group)", "_ds_gradfix.rank(process_group)"),),
    _Copy,
)


def measure_copy(engine: Any) -> list[Measurement]:
    """Known gradients reduced to each rank of each group of an expert's replicas in turn, as that rank sees them."""
    optimizer = engine.optimizer
    dist = sys.modules["deepspeed.comm"]
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    found = []
    for group in optimizer.expert_dp_process_group.values():
        size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
        numel = 2 * size + 1
        for dtype in list(getattr(optimizer, "ipg_buckets", [optimizer.communication_data_type])):
            argument = (dtype,) if hasattr(optimizer, "ipg_buckets") else ()
            for owner in range(size):
                probe = reduction.probe_gradient(numel, size, rank).to(device=device, dtype=optimizer.dtype)
                optimizer.allreduce_and_copy([probe], *argument, rank=owner, divide=False, process_group=group)
                sys.modules["deepspeed.accelerator"].get_accelerator().synchronize()
                if owner == rank:
                    ratio, error = reduction.compare(probe.double().cpu(), reduction.probe_sum(numel))
                    tolerance = reduction.probe_tolerance(dtype, optimizer.dtype)
                    found.append(Measurement("ZeRO-1/2 reduction of experts to one rank", ratio, error, tolerance))
    return found


def measure_expert_average(engine: Any) -> list[Measurement]:
    """What the default path makes of an expert's gradient. Up to 0.15.3 the bucket is attributes of the optimizer."""
    optimizer = engine.optimizer
    experts = [
        (index, param)
        for index, group in enumerate(optimizer.bit16_groups)
        for param in group
        if not getattr(param, "allreduce", True)
    ]
    if not experts or optimizer.use_grad_accum_attribute:  # the latter divides a copy: nothing to see
        return []
    dist = sys.modules["deepspeed.comm"]
    index, param = experts[0]
    number = optimizer.get_param_id(param)
    group = optimizer.expert_dp_process_group[param.group_name]
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    probe = reduction.probe_gradient(param.numel(), size, rank).to(param)
    kept = optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params, param.grad
    param.grad = probe.view_as(param)
    optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params = [(index, param, number)], True
    try:
        optimizer.average_tensor(probe)
        sys.modules["deepspeed.accelerator"].get_accelerator().synchronize()
    finally:
        optimizer.params_in_ipg_bucket, optimizer.ipg_bucket_has_moe_params, param.grad = kept
    everyone = dist.get_world_size(group=optimizer.dp_process_group)
    right = scale_of(optimizer, everyone, optimizer.sequence_parallel_size) * reduction.probe_sum(param.numel())
    owners = optimizer.param_to_partition_ids[index][number]
    partitions = sorted((int(optimizer.grad_start_offset[index][p][number]), p) for p in owners)
    ends = [start for start, _ in partitions[1:]] + [param.numel()]
    tolerance = reduction.probe_tolerance(optimizer.communication_data_type, optimizer.dtype)
    return [
        Measurement(
            "ZeRO-1/2 default reduction of experts",
            *reduction.compare(probe[start:end].double().cpu(), right[start:end]),
            tolerance,
        )
        for (start, owner), end in zip(partitions, ends, strict=True)
        if owner == rank
    ]
