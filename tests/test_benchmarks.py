"""The benchmarks run and say what they measured; how fast anything is belongs to no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS), *arguments], capture_output=True, text=True, timeout=240)


def test_a_quick_run_leaves_its_figures(tmp_path: Path) -> None:
    done = run("norms", "--quick", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["ranks"] == 2 and {"torch", "deepspeed", "device"} <= set(found["where"])
    norms = found["figures"]["The sharded norm, 2 ranks"]
    assert {"10 tensors, 1 groups, over stock's loop", "1000 tensors, 4 groups, over stock's loop"} <= {
        row["case"] for row in norms
    }
    assert all(row["interval"][0] <= row["value"] <= row["interval"][1] for row in norms)
    assert "1000 tensors, 4 groups, over stock's loop" in done.stdout


def test_a_benchmark_that_does_not_exist_is_refused() -> None:
    done = run("norm")
    assert done.returncode == 2 and "'norm' is no benchmark; they are startup, " in done.stderr
