"""Routed experts in fp16 and bf16 without ZeRO: which gradients the clip norm counts; see ranks/half_experts.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from launching import played


@cache
def outcomes() -> dict[str, dict[str, list[Any]]]:
    return played("half_experts.py")


@pytest.mark.parametrize("name", ["fp16", "bf16", "fused fp16", "fused bf16"])
def test_every_expert_counts_once(name: str) -> None:
    for rank in outcomes()[name]["corrected"]:
        assert rank["norm"] == pytest.approx(1.0, rel=1e-3)
        assert rank["update"] == pytest.approx(1.0, rel=2e-3)


def test_stock_leaves_experts_out() -> None:
    for rank in outcomes()["bf16"]["stock"]:
        assert rank["dense"] < 0.99
        assert rank["norm"] == pytest.approx(rank["dense"], rel=1e-3)
        assert rank["update"] > 1.01
