"""bf16 without ZeRO-2/3 on releases that get its optimizer wrong, against the float64 oracle over three steps.

0.18.4 has every one of the defects.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from other_releases import folder_of

from ds_gradfix.verify import Case, measure
from ds_gradfix.verify.compare import Result


def job(stage: int, optimizer: str, accumulation: int, **more: Any) -> Case:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": accumulation,
        **more,
    }
    return Case(config, name=f"ZeRO-{stage} {optimizer} x{accumulation} {more or ''}", steps=3, optimizer=optimizer)


def without_zero() -> list[Case]:
    cases = [job(0, optimizer, steps) for optimizer in ("sgd", "adamw") for steps in (1, 3)]
    return [*cases, job(0, "sgd", 1, gradient_clipping=0.05)]


FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def with_fp32_accumulation() -> list[Case]:
    cases = [job(1, optimizer, steps, **FP32) for optimizer in ("sgd", "adamw") for steps in (1, 3)]
    return [*cases, job(1, "sgd", 1, gradient_clipping=0.05, **FP32)]


def unaffected() -> list[Case]:
    return [job(1, "adamw", 2), job(1, "adamw", 1)]


@cache
def pairs(release: str) -> list[tuple[Case, Result, Result]]:
    cases = [*without_zero(), *with_fp32_accumulation(), *unaffected()]
    env = {**os.environ, "PYTHONPATH": folder_of(release)}
    stock, corrected = (measure(cases, corrected=corrected, env=env) for corrected in (False, True))
    return list(zip(cases, stock, corrected, strict=True))


@pytest.mark.parametrize("release", ["0.18.4"])
def test_every_step_is_right(release: str) -> None:
    for case, stock, corrected in pairs(release):
        assert corrected.error is None and corrected.right, (case.name, corrected.error, corrected.verdicts)
        if case in unaffected():
            assert stock.digest == corrected.digest, case.name
        else:
            assert not stock.right, case.name
