"""DeepSpeed's own engine features under ds-gradfix: what stock gives, to the bit, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launching import played

Runs = dict[str, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return played("engine_features.py")


@pytest.mark.parametrize(
    "feature",
    ["checkpoint", "universal checkpoint", "no_sync", "overflow", "full gradients", "gathered parameters"],
)
def test_a_feature_gives_what_stock_gives(runs: Runs, feature: str) -> None:
    chosen = {name: modes for name, modes in runs.items() if name.endswith(f": {feature}")}
    assert chosen
    for name, modes in chosen.items():
        assert not any("error" in rank for rank in modes["stock"]), modes["stock"]
        assert modes["corrected"] == modes["stock"], name
