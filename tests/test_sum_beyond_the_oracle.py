"""Summed gradients where the oracle's dense model does not reach, each against gradients computed apart from DeepSpeed.

Sparse gradients, experts, pipelines, the client's own zero.Init, ds-gradfix coming on late; and sums to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from launching import launch
from other_releases import folder_of

Outcomes = list[dict[str, Any]]
"""Of every rank: its DeepSpeed's version and its scenarios."""


def ran(ranks: int, env: Mapping[str, str] | None = None) -> Outcomes:
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # DeepSpeed asks that they be set
    base["TORCHDYNAMO_DISABLE"] = "1"  # some releases compile the experts' gate, which takes longer than all the rest
    ended = launch("beyond_the_oracle.py", "corrected", ranks=ranks, env={**base, **(env or {})})
    for rank in ended:
        assert rank.status == 0, rank.output[-3000:]
    return [json.loads(rank.output.splitlines()[-1]) for rank in ended]


def wrong(outcomes: Outcomes) -> dict[str, str]:
    """By scenario, what is not as it should be."""
    found = {}
    for rank, outcome in enumerate(outcomes):
        for name, scenario in outcome["scenarios"].items():
            if "error" in scenario:
                found[name] = f"rank {rank}: {scenario['error']}"
                continue
            tolerance = 0.0 if name.startswith("exact") else 2e-2 if "bf16" in name else 1e-5
            for parameter, (got, expected) in scenario["gradients"].items():
                size = max(map(abs, expected))
                error = max(abs(a - b) for a, b in zip(got, expected, strict=True))
                if not (size > 0 and error <= tolerance * size):
                    found[name] = f"rank {rank}: {parameter} is off by {error}, its largest element is {size}"
    return found


def test_this_deepspeed() -> None:
    outcomes = ran(2)
    assert len(outcomes[0]["scenarios"]) > 30
    assert wrong(outcomes) == {}


def test_three_ranks_sum_to_the_bit() -> None:
    """A division would show: three rounded thirds of these whole numbers, times three, are other numbers."""
    outcomes = ran(3)
    assert len(outcomes[0]["scenarios"]) > 12
    assert wrong(outcomes) == {}


@pytest.mark.parametrize("release", ["0.16.9"])
def test_a_release_that_ignores_the_key(release: str) -> None:
    outcomes = ran(2, {"PYTHONPATH": folder_of(release)})
    assert outcomes[0]["deepspeed"].startswith(release)
    assert wrong(outcomes) == {}
