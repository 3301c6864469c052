"""`gradient_allreduce_op: "sum"`, real DeepSpeed on real ranks, against the float64 oracle and against the mean."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from other_releases import folder_of

from ds_gradfix.verify import Case, Model, measure
from ds_gradfix.verify.compare import Result
from ds_gradfix.verify.config import precision

SUM: dict[str, Any] = {"gradient_allreduce_op": "sum"}
ODD = Model(widths=(5, 7, 3, 1), bias=True, unused=(11,), frozen=("layers.1.bias",))
"""Sizes that neither 2 nor 3 divide, some smaller than the number of ranks."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_ACCUMULATION: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
CPU_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
ALL_REDUCE: dict[str, Any] = {"reduce_scatter": False}
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


def key(one: Case) -> str:
    return json.dumps(one.as_json() | {"name": ""}, sort_keys=True)


@pytest.fixture(scope="module")
def corrected() -> dict[str, Result]:
    """Two ranks, this DeepSpeed: every sum, and the mean of each core case that DeepSpeed takes with a mean."""
    cases = {key(one): one for one in (*matrix(2), *core(2), *map(mean, comparable()))}
    return dict(zip(cases, measure(list(cases.values()), corrected=True), strict=True))


def comparable() -> list[Case]:
    """The core cases whose mean is no question of sequence shards and meets none of DeepSpeed's assertions."""
    return [one for one in core(2) if one.sequence_parallel == 1 and not asserted(one)]


def asserted(one: Case) -> bool:
    """ZeRO-2 and ZeRO-3 take no pre-division together with reduce_scatter; a sum has none."""
    zero = one.config["zero_optimization"]
    divides = "gradient_predivide_factor" in one.config or "prescale_gradients" in one.config
    return bool(zero["stage"] and zero.get("reduce_scatter", True) and divides)


def raw(result: Result) -> list[float]:
    """Every element of every parameter's gradient, before the last step."""
    return [element for gradient in result.steps[-1].gradients for element in gradient.got]


def test_every_sum_is_the_oracle_s(corrected: dict[str, Result]) -> None:
    assert len(corrected) > 130
    for result in corrected.values():
        assert result.right, (result.case.name, result.verdicts, result.error)


def test_a_sum_is_world_size_times_the_mean(corrected: dict[str, Result]) -> None:
    for one in comparable():
        total, gradient = raw(corrected[key(one)]), raw(corrected[key(mean(one))])
        tolerance = precision(one).tolerance * max(map(abs, total))
        assert total == pytest.approx([2 * element for element in gradient], rel=0, abs=tolerance), one.name


def test_what_deepspeed_has_natively_is_its_own_bit_for_bit(corrected: dict[str, Result]) -> None:
    """ZeRO 0-2 of 0.19.6 and later: with ds-gradfix on, the very same run. ZeRO-3 refuses, without it."""
    native = [one for one in core(2) if one.config["zero_optimization"]["stage"] < 3]
    refused = [case(3), case(3, ALL_REDUCE), case(3, {"zero_hpz_partition_size": 2})]
    stock = measure([*native, *refused], corrected=False)
    for result in stock[: len(native)]:
        assert result.right, (result.case.name, result.verdicts, result.error)
        assert result.digest == corrected[key(result.case)].digest, result.case.name
    for result in stock[len(native) :]:
        assert result.error is not None and "ValueError: gradient_allreduce_op='sum'" in result.error


def test_three_ranks() -> None:
    """ZeRO-2 shares its code with ZeRO-1."""
    cases = [one for one in core(3) if one.config["zero_optimization"]["stage"] != 2]
    for result in measure(cases, ranks=3, corrected=True):
        assert result.right, (result.case.name, result.verdicts, result.error)


def test_gradients_that_are_never_reduced_are_not_summed_in_silence() -> None:
    """On a CPU DeepSpeed drops the reduction of gradients apart altogether before 0.19.8."""
    env = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    env["PYTHONPATH"] = folder_of("0.19.5")
    for result in measure([case(1, APART), case(2, APART)], corrected=True, env=env):
        assert result.error is not None and "SelfCheckError" in result.error and "bucket reduction" in result.error
