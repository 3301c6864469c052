"""Summed gradients where the oracle's dense model does not reach: sparse gradients, experts, pipelines, the client's own
zero.Init, ds-gradfix coming on late; and sums to the bit. Each against gradients computed apart from DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import other_releases

SCRIPT = Path(__file__).parent / "ranks" / "beyond_the_oracle.py"
SECONDS = 300

Outcomes = list[dict[str, Any]]
"""Of every rank: its DeepSpeed's version and its scenarios."""


def launched(ranks: int, env: Mapping[str, str], *, corrected: bool = True) -> Outcomes:
    """Run the script on so many ranks; none is left behind."""
    with tempfile.TemporaryDirectory() as name:
        processes = []
        try:
            for rank in range(ranks):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "OMP_NUM_THREADS": 1}
                own.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=29500, DS_ACCELERATOR="cpu")
                with Path(name, f"{rank}.log").open("wb") as log:
                    command = [sys.executable, str(SCRIPT), name, str(int(corrected))]
                    rank_env = {**env, **{key: str(value) for key, value in own.items()}}
                    processes.append(subprocess.Popen(command, env=rank_env, stdout=log, stderr=subprocess.STDOUT))
            for process in processes:
                process.wait(SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        logs = [Path(name, f"{rank}.log").read_text(errors="replace")[-2000:] for rank in range(ranks)]
        assert all(process.returncode == 0 for process in processes), "\n---\n".join(logs)
        return [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(ranks)]


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
    outcomes = launched(2, os.environ)
    assert len(outcomes[0]["scenarios"]) > 30
    assert wrong(outcomes) == {}


def test_three_ranks_sum_to_the_bit() -> None:
    """A division would show: three rounded thirds of these whole numbers, times three, are other numbers."""
    outcomes = launched(3, os.environ)
    assert len(outcomes[0]["scenarios"]) > 12
    assert wrong(outcomes) == {}


@pytest.mark.parametrize("release", ["0.16.9", "0.19.5"])
def test_a_release_that_ignores_the_key(release: str) -> None:
    outcomes = launched(2, other_releases.environment(release))
    assert outcomes[0]["deepspeed"].startswith(release)
    assert wrong(outcomes) == {}
