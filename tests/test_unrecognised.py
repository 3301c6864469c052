"""Builds of DeepSpeed that no catalogue knows, on real ranks: left alone, measured, forced; and never corrected twice.

How the plan sees such builds is tested in test_registry.py.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from launching import Ended, launch
from test_engine import results

BEFORE = "full_grads_for_rank = [p.grad for p in params_to_reduce]\n"


SQUARES = "total_norm_cuda = torch.sum(torch.pow(torch.stack(grad_norms), norm_type))"


def built(folder: Path, old: str, new: str) -> str:
    """A whole copy of the installed DeepSpeed with a version of its own and one line of ZeRO-3 changed."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    left_out = shutil.ignore_patterns("__pycache__", "csrc")
    shutil.copytree(Path(spec.origin).parent, folder / "deepspeed", ignore=left_out)
    file = folder / "deepspeed" / "runtime" / "zero" / "stage3.py"
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")
    version = folder / "deepspeed" / "git_version_info_installed.py"
    version.write_text(version.read_text(encoding="utf-8").replace("0.19.8", "0.19.9+abc"), encoding="utf-8")
    return str(folder)


VENDOR = "full_grads_for_rank = list(full_grads_for_rank)"
"""Changes nothing: the defect is still there."""
UPSTREAM = "full_grads_for_rank = [grad * self.sequence_parallel_size for grad in full_grads_for_rank]"
"""The divisor put right, in another way than ours."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    edits = {"vendor": VENDOR, "upstream": UPSTREAM}
    lines = {name: f"{BEFORE}        {edit}\n" for name, edit in edits.items()}
    return {name: built(tmp_path_factory.mktemp(name), BEFORE, line) for name, line in lines.items()}


def ran(build: str, **env: str) -> tuple[float, str]:
    """The gradient over the right one, and what rank 0 said."""
    first, second = launch("engines.py", "plain", env={"PYTHONPATH": build, "DS_GRADFIX": "1", **env})
    assert (first.status, second.status) == (0, 0), first.output[-3000:]
    return results(first)["plain"]["ratio"], said(first)


def said(rank: Ended) -> str:
    return "\n".join(line for line in rank.output.splitlines() if "ds-gradfix: " in line)


def test_a_vendor_build_is_left_alone_and_what_it_does_is_measured(builds: dict[str, str]) -> None:
    ratio, log = ran(builds["vendor"])
    assert ratio == 0.5
    assert "force='zero3-scatter-scale' would correct it all the same" in log
    assert "ZeRO-3 gradients come out 2x too small. Measured on this engine: the ZeRO-3 scattered reduction" in log
    assert "gives 0.5 times the right value" in log
    assert "DeepSpeed 0.19.9+abc runs as it is" in log


def test_it_can_be_forced(builds: dict[str, str]) -> None:
    ratio, log = ran(builds["vendor"], DS_GRADFIX_FORCE="zero3-scatter-scale")
    assert ratio == 1.0
    assert "zero3-scatter-scale is on" in log


def test_a_build_that_is_fixed_in_another_way_is_left_alone(builds: dict[str, str]) -> None:
    ratio, log = ran(builds["upstream"])
    assert ratio == 1.0
    assert "Measured on this engine: nothing is wrong" in log


def test_not_even_force_corrects_it_twice(builds: dict[str, str]) -> None:
    ratio, _ = ran(builds["upstream"], DS_GRADFIX_FORCE="zero3-scatter-scale")
    assert ratio == 1.0


def test_a_norm_that_nobody_knew_to_be_wrong_stops_the_job(tmp_path: Path) -> None:
    """No patch is about ZeRO-3's norm: what is measured on every engine finds it."""
    build = built(tmp_path, SQUARES, f"{SQUARES} * 2")
    for rank in launch("engines.py", "timed", env={"PYTHONPATH": build, "DS_GRADFIX": "1"}):
        said = results(rank)["timed"]["said"]
        assert said.startswith("SelfCheckError")
        assert "ranks 0-1: gradient-norm: the ZeRO-3 gradient norm gives 1.41421 times the right value" in said
