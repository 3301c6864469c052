"""ZeRO-3's two reductions, real DeepSpeed on real ranks, stock and corrected, against the float64 oracle.

Every case states what stock DeepSpeed 0.19.8 gives; the corrected run must be right in all three invariants.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ds_gradfix.verify import Case, Model, measure

PARAMETERS = ("layers.0.weight", "layers.1.weight", "layers.2.weight")  # 64, 256 and 32 elements


def zero3(
    scatter: bool, contiguous: bool, bucket: int, factor: float = 1.0, shards: int = 2, zero: Any = None, **config: Any
) -> Case:
    """One row of the published table."""
    stage = {
        "stage": 3,
        "reduce_scatter": scatter,
        "contiguous_gradients": contiguous,
        "reduce_bucket_size": bucket,
        **(zero or {}),
    }
    letters = "".join("FT"[flag] for flag in (scatter, contiguous))
    return Case(
        {"zero_optimization": stage, "gradient_predivide_factor": factor, **config},
        name=f"{letters}, bucket {bucket}, factor {factor:g}, S {shards} {zero or ''} {config or ''}",
        sequence_parallel=shards,
    )


def table(ranks: int, shards: int) -> list[tuple[Case, tuple[float, float, float]]]:
    """The rows with their stock ratios, for the smallest, the largest and the middle parameter in order."""
    short = 1 / shards
    rows = [
        *(zero3(True, contiguous, bucket, shards=shards) for contiguous in (True, False) for bucket in (16, 500)),
        zero3(True, True, 5_000_000, shards=shards),
        zero3(False, False, 500, shards=shards),
        zero3(False, False, 5_000_000, shards=shards),
        zero3(False, False, 500, 2 * ranks, shards=shards),
    ]
    expected = [(row, (short,) * 3) for row in rows]
    # The oversized parameters of a contiguous bucket take the scattered path: 64 and 256 here, 32 does not.
    expected.append((zero3(False, True, 40, shards=shards), (short, short, 1.0)))
    expected.append((zero3(False, True, 16, shards=shards), (short,) * 3))
    expected += [(zero3(False, True, bucket, shards=shards), (1.0,) * 3) for bucket in (500, 5_000_000)]
    expected.append((zero3(False, True, 500, 2 * ranks, shards=shards), (1.0,) * 3))
    expected.append((zero3(False, True, 500, ranks, shards=shards), (1 / ranks,) * 3))
    expected.append((zero3(False, False, 500, ranks, shards=shards), (short / ranks,) * 3))
    expected.append((zero3(False, True, 100, ranks, shards=shards), (1 / ranks, short / ranks, 1 / ranks)))
    return expected


ODD = Model(widths=(5, 7, 3, 1), bias=True, unused=(11,), frozen=("layers.1.bias",))
"""Sizes that neither 2 nor 3 divide, some smaller than the number of ranks."""


def variations(ranks: int, shards: int) -> list[Case]:
    """Rows in which stock is wrong, each with something that must not change what a gradient is."""
    scattered = zero3(True, True, 500, shards=shards)
    divided = zero3(False, True, 40, ranks, shards=shards)
    apart = zero3(False, False, 500, ranks, shards=shards)

    def with_config(case: Case, zero: Any = None, **more: Any) -> Case:
        config = {**case.config, **more}
        config["zero_optimization"] = {**case.config["zero_optimization"], **(zero or {})}
        return replace(case, config=config, name=f"{case.name} + {zero or ''} {more or ''}")

    found = []
    for case in (scattered, divided, apart):
        found += [
            with_config(case, gradient_accumulation_steps=3),
            with_config(case, gradient_clipping=0.01),
            with_config(case, {"overlap_comm": True}),
            with_config(case, {"offload_optimizer": {"device": "cpu"}}, gradient_accumulation_steps=2),
            with_config(case, {"sub_group_size": 100}),
            with_config(case, communication_data_type="bf16"),
            with_config(case, communication_data_type="fp16"),
            with_config(case, bf16={"enabled": True}),
            replace(case, model=ODD, name=f"{case.name} + odd sizes, frozen, unused"),
            replace(case, learning_rates=(0.1, 0.01), steps=3, optimizer="adamw", name=f"{case.name} + groups, AdamW"),
        ]
    return found


def unaffected() -> list[Case]:
    """Jobs in which no defect bites, among them all that are most common."""
    cases = [
        Case({"zero_optimization": {"stage": stage}, **more}, sequence_parallel=shards, name=f"ZeRO-{stage} S{shards}")
        for stage, shards, more in (
            (0, 1, {}),
            (1, 1, {"gradient_clipping": 0.05}),
            (1, 2, {}),
            (2, 1, {"gradient_accumulation_steps": 2}),
            (2, 2, {}),
            (3, 1, {"gradient_clipping": 0.05}),
        )
    ]
    cases.append(zero3(False, True, 5_000_000, shards=2))
    cases.append(zero3(False, True, 500, 4.0, shards=1))
    cases.append(zero3(False, False, 500, 4.0, shards=1))
    return [replace(case, steps=5, optimizer="adamw", learning_rates=(0.01,)) for case in cases]


TABLES = ((2, 2), (2, 1), (3, 3), (4, 2))
VARIED = ((2, 2), (3, 3))


def rows(ranks: int, shards: int) -> list[tuple[Case, tuple[float, float, float]]]:
    found = table(ranks, shards)
    return found if ranks == 2 else found[:1] + found[6:]


@cache
def pairs(ranks: int) -> dict[str, tuple[Any, Any]]:
    """Stock and corrected results by case: one launch of each for all cases with this many ranks."""
    cases = [case for n, shards in TABLES if n == ranks for case, _ in rows(n, shards)]
    cases += [case for n, shards in VARIED if n == ranks for case in variations(n, shards)]
    cases += unaffected() if ranks == 2 else []
    stock = measure(cases, ranks=ranks, corrected=False)
    corrected = measure(cases, ranks=ranks, corrected=True)
    return {str(case): pair for case, pair in zip(cases, zip(stock, corrected, strict=True), strict=True)}


def both(case: Case, ranks: int) -> tuple[Any, Any]:
    stock, corrected = pairs(ranks)[str(case)]
    assert stock.error is None and corrected.error is None, (case.name, stock.error, corrected.error)
    return stock, corrected


@pytest.mark.parametrize(("ranks", "shards"), TABLES)
def test_every_row_of_the_table(ranks: int, shards: int) -> None:
    for case, expected in rows(ranks, shards):
        stock, corrected = both(case, ranks)
        assert tuple(stock.ratios.values()) == pytest.approx(expected, rel=1e-5), case.name
        assert stock.right == (set(expected) == {1.0}), case.name
        assert corrected.right, (case.name, corrected.verdicts)
        assert tuple(corrected.ratios.values()) == pytest.approx((1.0,) * 3, rel=1e-6), case.name


@pytest.mark.parametrize(("ranks", "shards"), VARIED)
def test_variations(ranks: int, shards: int) -> None:
    for case in variations(ranks, shards):
        stock, corrected = both(case, ranks)
        assert not stock.right, case.name
        assert corrected.right, (case.name, corrected.verdicts)


def test_upstream_regression_of_the_sequence_parallel_divisor() -> None:
    """Three wrong and one right before, four right after."""
    cases = [zero3(False, True, 500), zero3(False, False, 500), zero3(True, True, 500), zero3(False, True, 16)]
    results = [both(case, 2) for case in cases]
    assert [stock.right for stock, _ in results] == [True, False, False, False]
    assert all(corrected.right for _, corrected in results)


def test_unaffected_runs_are_stock_bit_for_bit() -> None:
    for case in unaffected():
        stock, corrected = both(case, 2)
        assert stock.right, (case.name, stock.verdicts)
        assert corrected.digest == stock.digest, case.name


def test_affected_runs_are_not() -> None:
    """So that the digest above is seen to be able to differ."""
    stock, corrected = both(zero3(True, True, 500), 2)
    assert corrected.digest != stock.digest


def test_leaving_a_patch_out_leaves_its_defect_and_no_other() -> None:
    case = zero3(False, False, 500, 2.0)  # both defects: 0.25
    measured = {"self_check": "warn"}
    cases = [
        replace(case, enable={"exclude": ["zero3-scatter-scale"], **measured}),
        replace(case, enable={"only": ["zero3-scatter-scale"], **measured}),
        replace(case, enable={"exclude": ["zero3-scatter-scale", "zero3-predivide-postscale"]}),
        replace(case, enable={"exclude": ["zero3-scatter-scale"]}),
    ]
    *left, stopped = measure(cases, corrected=True)
    assert [{round(r or 0, 5) for r in result.ratios.values()} for result in left] == [{0.5}, {0.5}, {0.25}]
    # What is knowingly left wrong stops the job on every rank, unless the user says 'warn'.
    assert stopped.error is not None and "SelfCheckError" in stopped.error
    assert "ranks 0-1" in stopped.error and "0.5 times the right value" in stopped.error
