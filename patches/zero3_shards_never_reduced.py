"""ZeRO-3 partitions over the data-parallel group of an mpu, and so never reduces across sequence shards."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import STOCK_PARTITION_SIZE, Facts, dense_partition_groups
from ds_gradfix.patches._shards import measure_reach, ranks_of
from ds_gradfix.patches._zero3 import measure_contiguous, measure_scatter
from ds_gradfix.registry import Effect, Measurement, Patch, Rewrite, Target, known_sources
from ds_gradfix.source import Rule

ID = "zero3-shards-never-reduced"


class _Partition:
    """What the rewritten conversion calls where DeepSpeed asks the mpu for the ranks to partition over."""

    @staticmethod
    def group(offload: Any, mpu: Any) -> Any:
        """The group that the optimizer reduces over, where the mpu has sequence shards that its data-parallel group
        leaves out. Without an optimizer there is no such group, and nothing to reduce."""
        stock, every = mpu.get_data_parallel_group(), offload.dp_process_group
        if every is None or not hasattr(mpu, "get_sequence_data_parallel_group"):
            return stock
        held, wanted = ranks_of(stock), ranks_of(every)
        if set(held) >= set(wanted):
            return stock
        setattr(offload, STOCK_PARTITION_SIZE, len(held))
        return every


PARTITION = Rewrite(
    Target(
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload._convert_to_zero_parameters",
    ),
    (Rule("mpu.get_data_parallel_group()", "_ds_gradfix.group(self, mpu)"),),
    _Partition,
    early=True,
)


def _affects(facts: Facts) -> Effect | None:
    held = facts.dense_partition_size
    if facts.zero_stage != 3 or facts.sequence_parallel_size == 1 or held is None or held >= facts.group_size:
        return None
    return Effect(
        None,
        f"ZeRO-3 parameters are partitioned over {held} of the {facts.group_size} ranks that share their gradients,"
        " which are then never reduced across sequence shards: the ranks' weights drift apart",
    )


def _strays(engine: Any) -> list[Any]:
    wanted = set(ranks_of(engine.optimizer.dp_process_group))
    return [group for group in dense_partition_groups(engine) if not wanted <= set(ranks_of(group))]


def _refuse(engine: Any) -> str | None:
    if not _strays(engine):
        return None
    return (
        "build the model inside deepspeed.zero.Init(data_parallel_group=mpu.get_sequence_data_parallel_group()), or let"
        " the mpu's get_data_parallel_group() span the sequence shards too."
    )


def _measure(engine: Any) -> list[Measurement]:
    wanted = engine.optimizer.dp_process_group
    reach = [
        measure_reach(group, wanted, "reach of ZeRO-3's partitions") for group in dense_partition_groups(engine)
    ]
    config = engine._config.zero_config
    scattered = config.reduce_scatter or not config.contiguous_gradients
    return [*reach, *(measure_scatter(engine) if scattered else measure_contiguous(engine))]


PATCH = Patch(
    id=ID,
    title="ZeRO-3 never reduces across sequence shards when an mpu says which ranks are data-parallel",
    symptom="With a Megatron-style mpu, sequence parallelism and a model built outside zero.Init, the ranks of one"
    " sequence train on their own gradients; their weights drift apart, and nothing is said.",
    cause="Parameters are partitioned over mpu.get_data_parallel_group(), while the optimizer is given the group of"
    " data-parallel replicas times sequence shards. The reduction follows the partitions (up to 0.19.2 the two mix,"
    " and ranks beyond the smaller group lose their gradients).",
    fix="Parameters are partitioned over the group that the optimizer reduces over, as"
    " zero.Init(data_parallel_group=...) with that group would. A model that its owner has partitioned over too few"
    " ranks is refused.",
    upstream=(),
    retire="When the oldest supported DeepSpeed partitions over what it reduces over; none does up to 0.19.8.",
    corrections=(PARTITION,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
    refuse=_refuse,
)
