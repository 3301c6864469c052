"""`gradient_allreduce_op: "sum"`, real DeepSpeed on real ranks, against the float64 oracle and against the mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_gradfix.verify import Case, Model

SUM = {"gradient_allreduce_op": "sum"}
ODD = Model(widths=(5, 7, 3, 1), bias=True, unused=(11,), frozen=("layers.1.bias",))
"""Sizes that neither 2 nor 3 divide, some smaller than the number of ranks."""
BF16 = {"bf16": {"enabled": True}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
CPU_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
ALL_REDUCE = {"reduce_scatter": False}
APART = {"contiguous_gradients": False}


def case(stage: int, zero: dict[str, Any] | None = None, *, model: Model | None = None, **config: Any) -> Case:
    """A sum under this stage with these options."""
    return Case(
        {"zero_optimization": {"stage": stage, **(zero or {})}, **SUM, **config},
        name=f"ZeRO-{stage} {zero or ''} {config or ''}{' odd' if model else ''}",
        model=model or Model(),
    )


def any_stage(stage: int) -> list[Case]:
    """What may be combined with every stage."""
    return [
        case(stage),
        case(stage, model=ODD),
        case(stage, gradient_accumulation_steps=3),
        case(stage, gradient_clipping=0.01),
        case(stage, communication_data_type="bf16"),
        case(stage, communication_data_type="fp16"),
        case(stage, **BF16),
        case(stage, fp16={"enabled": True}),
    ]


def divided(stage: int, ranks: int, zero: dict[str, Any]) -> list[Case]:
    """Ways of dividing, of which a sum has none."""
    return [
        case(stage, zero, gradient_predivide_factor=float(ranks)),
        case(stage, zero, gradient_predivide_factor=5.0),
        case(stage, zero, prescale_gradients=True),
    ]


def stage_0(ranks: int) -> list[Case]:
    return [*any_stage(0), *divided(0, ranks, {})]


def stages_1_and_2(stage: int, ranks: int) -> list[Case]:
    single = {"use_multi_rank_bucket_allreduce": False}
    found = [
        *any_stage(stage),
        *divided(stage, ranks, ALL_REDUCE),
        # Together with reduce_scatter ZeRO-2 asserts that nothing pre-divides.
        *divided(stage, ranks, {})[1:],
        case(stage, ALL_REDUCE),
        case(stage, single, model=ODD),
        case(stage, {**ALL_REDUCE, **single}),
        case(stage, APART),
        case(stage, {**APART, **ALL_REDUCE}, prescale_gradients=True),
        case(stage, {"reduce_bucket_size": 40}),
        case(stage, {"reduce_bucket_size": 40, **ALL_REDUCE}, gradient_predivide_factor=5.0),
        case(stage, {"overlap_comm": True}),
        case(stage, {"overlap_comm": True, **ALL_REDUCE}),
        case(stage, CPU_OPTIMIZER, gradient_accumulation_steps=2),
        case(stage, {**CPU_OPTIMIZER, **ALL_REDUCE}),
    ]
    if stage == 1:
        found.append(case(1, **BF16, **FP32_ACCUMULATION))
    return found


def stage_3(ranks: int) -> list[Case]:
    mixed = {**ALL_REDUCE, "reduce_bucket_size": 40}
    return [
        *any_stage(3),
        *divided(3, ranks, {}),
        *divided(3, ranks, mixed),
        *divided(3, ranks, {**ALL_REDUCE, **APART}),
        case(3, ALL_REDUCE),
        case(3, ALL_REDUCE, model=ODD),
        case(3, ALL_REDUCE, **BF16),
        case(3, ALL_REDUCE, fp16={"enabled": True}),
        case(3, ALL_REDUCE, communication_data_type="fp16"),
        case(3, ALL_REDUCE, gradient_accumulation_steps=3),
        case(3, APART),
        case(3, {"reduce_bucket_size": 40}),
        case(3, {"overlap_comm": True}),
        case(3, {"overlap_comm": True, **ALL_REDUCE}),
        case(3, {"zero_hpz_partition_size": ranks}),
        case(3, {"zero_hpz_partition_size": ranks, **ALL_REDUCE}),
        case(3, CPU_OPTIMIZER, gradient_accumulation_steps=2),
        case(3, {**CPU_OPTIMIZER, "offload_param": {"device": "cpu"}, **ALL_REDUCE}),
        case(3, {"sub_group_size": 100}),
        case(3, {"stage3_param_persistence_threshold": 100_000}),
    ]


def sharded(ranks: int) -> list[Case]:
    """One sequence shared by all ranks: a sum knows no difference."""
    found = [case(stage, zero) for stage in range(4) for zero in ({}, ALL_REDUCE)[: 1 + bool(stage)]]
    found.append(case(3, {**ALL_REDUCE, "reduce_bucket_size": 40}, gradient_predivide_factor=float(ranks)))
    return [replace(one, sequence_parallel=ranks, name=f"{one.name}S {ranks}") for one in found]


def matrix(ranks: int) -> list[Case]:
    return [*stage_0(ranks), *stages_1_and_2(1, ranks), *stages_1_and_2(2, ranks), *stage_3(ranks), *sharded(ranks)]


def core(ranks: int) -> list[Case]:
    """The part of the matrix that other releases are held to: each path of each stage."""
    single = {"use_multi_rank_bucket_allreduce": False}
    both = [
        one
        for stage in (1, 2)
        for one in (
            case(stage, model=ODD),
            case(stage, gradient_clipping=0.01),
            *divided(stage, ranks, ALL_REDUCE),
            case(stage, prescale_gradients=True),
            case(stage, single, model=ODD),
            case(stage, {"reduce_bucket_size": 40}),
            case(stage, {"overlap_comm": True}),
            case(stage, CPU_OPTIMIZER, gradient_accumulation_steps=2),
            case(stage, fp16={"enabled": True}),
        )
    ]
    mixed = {**ALL_REDUCE, "reduce_bucket_size": 40}
    return [
        case(0, gradient_accumulation_steps=3),
        case(0, communication_data_type="bf16"),
        case(0, **BF16),
        *divided(0, ranks, {}),
        *both,
        case(1, gradient_accumulation_steps=3),
        case(1, **BF16, **FP32_ACCUMULATION),
        case(3, model=ODD),
        case(3, gradient_clipping=0.01),
        case(3, prescale_gradients=True),
        *divided(3, ranks, mixed),
        case(3, {**ALL_REDUCE, **APART}, gradient_predivide_factor=5.0),
        case(3, ALL_REDUCE, fp16={"enabled": True}),
        case(3, communication_data_type="fp16"),
        case(3, {"overlap_comm": True}, gradient_accumulation_steps=3),
        case(3, {"zero_hpz_partition_size": ranks}),
        case(3, {**CPU_OPTIMIZER, "offload_param": {"device": "cpu"}, **ALL_REDUCE}),
        *sharded(ranks),
    ]


def mean(summed: Case) -> Case:
    """The same job without the key."""
    config = {key: value for key, value in summed.config.items() if key not in SUM}
    return replace(summed, config=config, name=f"{summed.name} mean")
