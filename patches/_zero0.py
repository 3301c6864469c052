"""The engine's own reduction (ZeRO stage 0, BF16_Optimizer, pipelines): divisor, mode and measurement."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.patches._zero12 import scale_of
from ds_gradfix.registry import Measurement, Rewrite, Steer, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.engine"
CLASS = "DeepSpeedEngine"


class _Engine:
    """What the rewritten reduction calls where DeepSpeed counts the ranks to average over."""

    @staticmethod
    def replicas(engine: Any, group_size: int) -> float:
        """The divisor that invariant 1 wants: a number of ranks, as DeepSpeed's reductions take it."""
        return 1 / scale_of(engine, group_size, engine.sequence_parallel_size)


NON_EXPERT = Rewrite(
    Target(MODULE, f"{CLASS}._reduce_non_expert_gradients"),
    (
        Rule(
            "dist.get_world_size($group) / float(self.sequence_parallel_size)",
            "_ds_gradfix.replicas(self, dist.get_world_size($group))",
        ),
    ),
    _Engine,
)

# Every release has this switch and obeys it; up to 0.19.5 nothing sets it, and it stops the division
# only without a pre-division: that is why the configuration has none.
_SUM = {
    "gradient_average": False,
    "_config.gradient_predivide_factor": 1.0,
    "_config.prescale_gradients": False,
}
DENSE_SUM = Steer(Target(MODULE, f"{CLASS}.allreduce_bucket"), _SUM)
SPARSE_SUM = Steer(Target(MODULE, f"{CLASS}.sparse_allreduce"), _SUM)


def measure(engine: Any) -> list[Measurement]:
    """Known gradients through the engine's own reduction of dense gradients."""
    probe = probe_of(engine)
    engine._reduce_non_expert_gradients([probe], probe.numel())
    return measured(engine, "engine's reduction of dense gradients", probe)


def probe_of(engine: Any) -> Any:
    """This rank's part of a known gradient for the engine's own reduction: two elements for each rank, and one."""
    dist = sys.modules["deepspeed.comm"]
    group = engine.seq_data_parallel_group
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    dtype = next(iter(engine.module.parameters())).dtype
    return reduction.probe_gradient(2 * size + 1, size, rank).to(device=device, dtype=dtype)


def measured(engine: Any, path: str, got: Any) -> list[Measurement]:
    """What has become of a probe, over what should have."""
    size = sys.modules["deepspeed.comm"].get_world_size(group=engine.seq_data_parallel_group)
    right = scale_of(engine, size, engine.sequence_parallel_size) * reduction.probe_sum(len(got))
    tolerance = reduction.probe_tolerance(got.dtype, engine.communication_data_type)
    return [Measurement(path, *reduction.compare(got.double().cpu(), right), tolerance)]


class _Experts:
    """What the rewritten reduction of experts calls where DeepSpeed counts the ranks to average over."""

    @staticmethod
    def replicas(engine: Any) -> float:
        """The full data-parallel size, whatever the expert-parallel size is: a dense gradient's divisor."""
        group_size = sys.modules["deepspeed.comm"].get_world_size(group=engine.seq_data_parallel_group)
        return _Engine.replicas(engine, group_size)


EXPERT = Rewrite(
    Target(MODULE, f"{CLASS}._reduce_expert_gradients"),
    (Rule("dist.get_world_size(groups._get_data_parallel_group())", "_ds_gradfix.replicas(self)"),),
    _Experts,
)
