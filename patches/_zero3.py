"""ZeRO-3's two gradient reductions, computed by invariant 1, and how to measure them.

Several patches are reasons to engage these corrections. Once engaged, a correction follows the
invariant altogether, except that a defect whose patch was left out keeps its scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.facts import is_autoep_expert
from ds_gradfix.registry import Measurement, Replace, Rewrite, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.zero.stage3"
CLASS = "DeepSpeedZeroOptimizer_Stage3"
SCATTER_SCALE = "zero3-scatter-scale"
PREDIVIDE_POSTSCALE = "zero3-predivide-postscale"


def _dist() -> Any:
    return sys.modules["deepspeed.comm"]


def _partition_group(optimizer: Any, params: Sequence[Any]) -> Any:
    """Parameters of one bucket share a partition group. Up to 0.19.2 it is the optimizer's own."""
    ask = getattr(optimizer, "_get_param_partition_group", None)
    return ask(params[0]) if ask else optimizer.dp_process_group


def _averaging_size(optimizer: Any, params: Sequence[Any], partition_size: int) -> int:
    """A routed expert is averaged over the whole data-parallel group, wherever it is partitioned."""
    ask = getattr(optimizer, "_gradient_averaging_world_size", None)
    return int(ask(params, partition_size)) if ask else partition_size


def _scale(engagement: Any, optimizer: Any, averaging_size: int, shards: int) -> float:
    """The scale of a reduction by invariant 1, less what is left to a patch not in force."""
    facts = engagement.facts
    scale = reduction.gradient_scale(facts.reduction_op, averaging_size, shards, facts.convention)
    factor = optimizer.gradient_predivide_factor
    if PREDIVIDE_POSTSCALE in engagement.left_out and _skips_postscale(optimizer, averaging_size):
        scale /= factor
    return scale


def _skips_postscale(optimizer: Any, averaging_size: int) -> bool:
    factor = optimizer.gradient_predivide_factor
    return bool(optimizer.postscale_gradients and factor != 1.0 and factor == averaging_size)


def _split(optimizer: Any, scale: float, size: int, dtype: Any) -> tuple[float, float]:
    prescale = not optimizer.postscale_gradients
    return reduction.split_scale(scale, size, dtype, optimizer.gradient_predivide_factor, prescale)


def _scatter(engagement: Any, original: Any, optimizer: Any, params: Any, *dtype: Any) -> Any:
    """``__avg_scatter_grads``: reduce each parameter's full gradient, return this rank's partitions."""
    shards = 1 if SCATTER_SCALE in engagement.left_out else optimizer.sequence_parallel_size
    if optimizer.all2all_process_group is not None:
        # The quantized reduction averages over all ranks by itself, so the rest of the scale comes after.
        partitions = original(optimizer, params, *dtype)
        everyone = _dist().get_world_size(group=optimizer.dp_process_group)
        reduction.scale_(partitions, everyone * _scale(engagement, optimizer, everyone, shards))
        return partitions
    dist = _dist()
    group = _partition_group(optimizer, params)
    size = dist.get_world_size(group=group)
    averaging_size = _averaging_size(optimizer, params, size)
    comm_dtype = dtype[0] if dtype else optimizer.communication_data_type
    pre, post = _split(optimizer, _scale(engagement, optimizer, averaging_size, shards), size, comm_dtype)
    return reduction.reduce_scatter_coalesced(
        [param.grad.to(comm_dtype) for param in params],
        size,
        dist.get_rank(group=group),
        pre,
        post,
        getattr(optimizer, "gradient_accumulation_dtype", optimizer.dtype),
        lambda output, buffer: dist.reduce_scatter_fn(output, buffer, group=group, async_op=False),
    )


class _Contiguous:
    """What the rewritten ``__avg_scatter_contiguous_grads`` calls around its all-reduce."""

    @staticmethod
    def before_reduction(optimizer: Any, buffer: Any, averaging_size: int) -> float:
        """Scale the flat buffer in place; returns the factor for after the reduction."""
        scale = _scale(optimizer._ds_gradfix, optimizer, averaging_size, optimizer.sequence_parallel_size)
        if getattr(optimizer, "use_muon", False):
            # Up to 0.19.7 Muon's update is computed in the reduced buffer, before it is cut up.
            pre, post = scale, 1.0
        else:
            pre, post = _split(optimizer, scale, averaging_size, buffer.dtype)
        reduction.scale_([buffer], pre)
        return post

    @staticmethod
    def after_reduction(partitions: Any, post: float) -> Any:
        """Scale what this rank keeps, in place: 1/world_size of the buffer."""
        reduction.scale_(partitions, post)
        return partitions


SCATTER = Replace(Target(MODULE, f"{CLASS}.__avg_scatter_grads"), _scatter)
CONTIGUOUS = Rewrite(
    Target(MODULE, f"{CLASS}.__avg_scatter_contiguous_grads"),
    (
        Rule(
            "if self.postscale_gradients and self.gradient_predivide_factor != 1.0:\n"
            "    $buffer = $buffer.div_(self.gradient_predivide_factor)",
            "",
        ),
        Rule(
            "$buffer.div_($size / float(self.sequence_parallel_size))",
            "ds_gradfix_post = _ds_gradfix.before_reduction(self, $buffer, $size)",
        ),
        Rule(
            "if self.postscale_gradients and self.gradient_predivide_factor != $size:\n"
            "    $buffer = $buffer.mul(self.gradient_predivide_factor)",
            "",
        ),
        Rule("return $partitions", "return _ds_gradfix.after_reduction($partitions, ds_gradfix_post)"),
    ),
    _Contiguous,
)


# ------------------------------------------------------------------------------- measuring


def measure_both(engine: Any) -> list[Measurement]:
    """Both reductions of the engine."""
    return measure_scatter(engine) + measure_contiguous(engine)


def measure_scatter(engine: Any) -> list[Measurement]:
    """Put known gradients through the engine's ``__avg_scatter_grads``, for each partition group."""
    optimizer = engine.optimizer
    reduce = getattr(optimizer, f"_{CLASS}__avg_scatter_grads")
    found = []
    for template in _one_parameter_per_group(optimizer):
        for dtype in _comm_dtypes(optimizer):
            probes = _probes(optimizer, template)
            partitions = reduce(probes, *_dtype_argument(optimizer, dtype))
            found.append(_judge(optimizer, probes, partitions, dtype, "ZeRO-3 scattered reduction"))
    return found


def measure_contiguous(engine: Any) -> list[Measurement]:
    """The same for ``__avg_scatter_contiguous_grads``, with a bucket of its own in place of the engine's."""
    optimizer = engine.optimizer
    reduce = getattr(optimizer, f"_{CLASS}__avg_scatter_contiguous_grads")
    found = []
    for template in _one_parameter_per_group(optimizer):
        for dtype in _comm_dtypes(optimizer):
            probes = _probes(optimizer, template)
            buffer = _flat([probe.grad for probe in probes])
            with _bucket_of(optimizer, dtype, probes, _partition_group(optimizer, probes)):
                partitions = reduce(buffer, *_dtype_argument(optimizer, dtype))
            found.append(_judge(optimizer, probes, partitions, dtype, "ZeRO-3 contiguous reduction"))
    return found


def _one_parameter_per_group(optimizer: Any) -> Iterator[Any]:
    seen = set()
    for group in optimizer.fp16_groups:
        for param in group:
            key = id(_partition_group(optimizer, [param]))
            if key not in seen:
                seen.add(key)
                yield param


def _comm_dtypes(optimizer: Any) -> list[Any]:
    """Releases before 0.17.2 know one communication dtype only. A destroyed engine, which may still be alive when
    ds-gradfix comes on, has no bucket left, and nothing to measure."""
    return list(getattr(optimizer, "ipg_buckets", [optimizer.communication_data_type]))


def _dtype_argument(optimizer: Any, dtype: Any) -> tuple[Any, ...]:
    return (dtype,) if hasattr(optimizer, "ipg_buckets") else ()


def _probes(optimizer: Any, template: Any) -> list[Any]:
    """Two parameters with known gradients, one of a size that the group does not divide, placed as
    ``template`` is. They belong to no model and no optimizer."""
    import torch

    dist = _dist()
    size = dist.get_world_size(group=_partition_group(optimizer, [template]))
    group = _contributing_group(optimizer, template)
    contributors, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    probes = []
    for numel in (2 * size + 1, 2 * size):
        probe: Any = torch.nn.Parameter(torch.zeros(numel, dtype=optimizer.dtype, device=device))
        for name in ("ds_process_group", "ds_zero_placement_family", "ds_zero_partition_group_name"):
            if hasattr(template, name):
                setattr(probe, name, getattr(template, name))
        probe.partition_numel = lambda numel=numel: reduction.chunk_size(numel, size)
        probe.grad = reduction.probe_gradient(numel, contributors, rank).to(probe)
        probes.append(probe)
    return probes


def _contributing_group(optimizer: Any, template: Any) -> Any:
    """The ranks whose gradients belong to a parameter: all that reduce with this optimizer, or the
    replicas of a routed expert. A dense parameter partitioned over fewer ranks is measured wrong."""
    if is_autoep_expert(template):
        return _partition_group(optimizer, [template])
    return optimizer.dp_process_group


def _flat(gradients: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(gradients))


@contextmanager
def _bucket_of(optimizer: Any, dtype: Any, probes: list[Any], group: Any) -> Iterator[None]:
    """Let the optimizer's bucket hold the probes for a while, and then what it held before."""
    if hasattr(optimizer, "ipg_buckets"):
        buckets = optimizer.ipg_buckets
        kept = buckets[dtype]
        buckets[dtype] = type(kept)()
        buckets[dtype].params = probes
        buckets[dtype].process_group = group
        try:
            yield
        finally:
            buckets[dtype] = kept
    else:
        kept = optimizer.params_in_ipg_bucket
        optimizer.params_in_ipg_bucket = probes
        try:
            yield
        finally:
            optimizer.params_in_ipg_bucket = kept


def _judge(optimizer: Any, probes: Sequence[Any], partitions: Any, dtype: Any, path: str) -> Measurement:
    import torch

    dist = _dist()
    group = _partition_group(optimizer, probes)
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    everyone = dist.get_world_size(group=optimizer.dp_process_group)
    facts = optimizer._ds_gradfix.facts
    shards = optimizer.sequence_parallel_size
    scale = reduction.gradient_scale(facts.reduction_op, everyone, shards, facts.convention)
    got, right = [], []
    for probe, partition in zip(probes, partitions, strict=True):
        chunk = reduction.chunk_size(probe.numel(), size)
        own = reduction.probe_sum(probe.numel())[rank * chunk : (rank + 1) * chunk]
        got.append(partition.flatten()[: own.numel()].double().cpu())
        right.append(scale * own)
    ratio, error = reduction.compare(torch.cat(got), torch.cat(right))
    tolerance = reduction.probe_tolerance(dtype, optimizer.dtype, partitions[0].dtype)
    return Measurement(f"{path} in {str(dtype).removeprefix('torch.')}", ratio, error, tolerance)
