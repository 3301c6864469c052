"""Upstream #6868: with a device mesh gradients are reduced over its data-parallel dimension only."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.patches import _zero0, _zero12
from ds_gradfix.patches._shards import GROUPS, MESH, measure_reach, ranks_of, reduced_over
from ds_gradfix.registry import Effect, Measurement, Patch, Target, known_sources

ID = "mesh-shards-never-reduced"


def _affects(facts: Facts) -> Effect | None:
    shards = facts.sequence_parallel_size
    if not facts.sequence_mesh or shards == 1 or facts.zero_stage == 3:
        return None
    return Effect(
        None,
        f"gradients are reduced over the mesh's data-parallel ranks only, never across its {shards} sequence shards,"
        f" and multiplied by {shards}: the ranks' weights drift apart",
    )


def _shards_of(engine: Any) -> Any:
    return sys.modules[GROUPS]._get_sequence_parallel_group()


def _refuse(engine: Any) -> str | None:
    if set(ranks_of(_shards_of(engine))) <= set(ranks_of(reduced_over(engine))):
        return None
    return (
        "give deepspeed.initialize an mpu with get_sequence_data_parallel_group() instead, such as"
        " deepspeed.runtime.sequence_parallel.parallel_state_sp, or a mesh that covers all ranks."
    )


def _measure(engine: Any) -> list[Measurement]:
    group = reduced_over(engine)
    reach = measure_reach(group, _shards_of(engine), "reach of the reduction among the shards of a sequence")
    zero12 = hasattr(engine.optimizer, "gradient_reduction_w_predivide")
    return [reach, *(_zero12.measure(engine) if zero12 else _zero0.measure(engine))]


PATCH = Patch(
    id=ID,
    title="A device mesh's sequence shards are left out of every reduction",
    symptom="With mesh_param, or data_parallel_size and sequence_parallel_size in the configuration, the ranks of one"
    " sequence each train on their own gradients, sequence_parallel_size times too large; their weights drift apart.",
    cause="The group that gradients are reduced over is asked of an mpu; without one it is the mesh's data-parallel"
    " dimension, while the divisor is the number of replicas of a group over both dimensions.",
    fix="With such a mesh over all ranks, gradients are reduced over all ranks. Any other is refused.",
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/6868",
        "https://github.com/deepspeedai/DeepSpeed/issues/6582",
    ),
    retire="When the oldest supported DeepSpeed reduces over both dimensions; none does up to 0.19.8.",
    corrections=MESH,
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
    needs=(Target("deepspeed.comm.comm", "initialize_mesh_device"),),
    refuse=_refuse,
)
