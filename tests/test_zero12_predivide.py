"""ZeRO-1/2 with a pre-division by the group size, stock and corrected, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ds_gradfix.verify import Case, measure
from ds_gradfix.verify.compare import Result


def case(stage: int, factor: float, shards: int = 2, zero: dict[str, Any] | None = None, **config: Any) -> Case:
    options = {"stage": stage, "reduce_scatter": False, **(zero or {})}
    return Case(
        {"zero_optimization": options, "gradient_predivide_factor": factor, **config},
        name=f"ZeRO-{stage}, factor {factor:g}, S {shards} {zero or ''} {config or ''}",
        sequence_parallel=shards,
    )


def affected(ranks: int, shards: int) -> list[Case]:
    plain = [case(stage, float(ranks), shards) for stage in (1, 2)]
    if ranks > 2:
        return plain
    return [
        *plain,
        case(2, 2.0, gradient_accumulation_steps=3),
        case(2, 2.0, gradient_clipping=0.01),
        case(1, 2.0, bf16={"enabled": True}),
        case(2, 2.0, zero={"overlap_comm": True}),
        case(2, 2.0, zero={"reduce_bucket_size": 40}),
        replace(case(1, 2.0), optimizer="adamw", steps=3, name="AdamW"),
    ]


def unaffected() -> list[Case]:
    cases = [
        case(1, 1.0),
        case(2, 4.0),
        case(2, 2.0, shards=1),
        case(2, 2.0, prescale_gradients=True),
        replace(case(2, 1.0), config={"zero_optimization": {"stage": 2}}, name="ZeRO-2, as it comes"),
    ]
    return [replace(one, steps=3, optimizer="adamw") for one in cases]


ROWS = ((2, 2), (4, 2))


@cache
def pairs(ranks: int) -> dict[str, tuple[Result, Result]]:
    cases = [one for n, shards in ROWS if n == ranks for one in affected(n, shards)]
    cases += unaffected() if ranks == 2 else []
    stock = measure(cases, ranks=ranks, corrected=False)
    corrected = measure(cases, ranks=ranks, corrected=True)
    return {str(one): pair for one, pair in zip(cases, zip(stock, corrected, strict=True), strict=True)}


def both(one: Case, ranks: int) -> tuple[Result, Result]:
    stock, corrected = pairs(ranks)[str(one)]
    assert stock.error is None and corrected.error is None, (one.name, stock.error, corrected.error)
    return stock, corrected


@pytest.mark.parametrize(("ranks", "shards"), ROWS)
def test_the_sequence_parallel_size_is_lost_and_found(ranks: int, shards: int) -> None:
    for one in affected(ranks, shards):
        stock, corrected = both(one, ranks)
        rounding = 2e-2 if "bf16" in one.name else 1e-5
        if one.optimizer == "sgd" and "clipping" not in one.name:
            assert list(stock.ratios.values()) == pytest.approx([1 / shards] * 3, rel=rounding), one.name
        assert not stock.right, one.name
        assert corrected.right, (one.name, corrected.verdicts)
        assert list(corrected.ratios.values()) == pytest.approx([1.0] * 3, rel=rounding), one.name


def test_any_other_job_is_stock_bit_for_bit() -> None:
    for one in unaffected():
        stock, corrected = both(one, 2)
        assert stock.right, (one.name, stock.verdicts)
        assert corrected.digest == stock.digest, one.name
