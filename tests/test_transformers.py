"""Transformers' own Trainer and Accelerate's Accelerator, without a change of their code: with DS_GRADFIX=1 alone the
gradients of two ranks are those of a single process, and so is the norm that is logged. Where the ranks share a
sequence that holds on every ZeRO stage, because the loss is recognised by evidence.

Runs in the environment that ds-gradfix is installed in, since its start-up file is what turns it on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from extras import needs
from launching import RANKS, free_port, launch
from other_releases import folder_of

SCRIPT = "train_with_transformers.py"
SUM = {"ds_gradfix": {"sequence_parallel_reduction": "sum"}}
PREDIVIDED = {"gradient_predivide_factor": 2}
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


JOBS: dict[str, dict[str, Any]] = {
    **{f"shards, ZeRO-{stage}": {"sequence_parallel": True, "config": zero(stage)} for stage in (1, 2, 3)},
    **{f"shards, ZeRO-{stage}, sum": {"sequence_parallel": True, "config": zero(stage) | SUM} for stage in (2, 3)},
    "Trainer, dict": {"config": zero(2), "clip": 0.5},
    "Trainer, file": {
        "as_file": True,
        "config": {
            "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
            **zero(3, reduce_scatter=False, **dict.fromkeys(BUCKETS, "auto")),
            **PREDIVIDED,
        },
    },
    "Accelerator, dict": {"by": "accelerator", "config": zero(3, reduce_scatter=False) | PREDIVIDED},
}
"""By name, the fields of a Job of the script's; what is not said there is "auto"."""


@dataclass(frozen=True)
class Found:
    """Of one job: the ratio to the right gradient, the same for all parameters, and that of the norm it logged."""

    gradient: float
    norm: float


needs_transformers = needs(transformers="5.0", accelerate="1.12")  # the first with sequence parallelism


SHARDS = tuple(f"shards, ZeRO-{stage}" for stage in (1, 2, 3))
SUMMED = tuple(f"shards, ZeRO-{stage}, sum" for stage in (2, 3))
APART = ("Trainer, dict", "Trainer, file", "Accelerator, dict")


@cache
def outputs(
    on: bool, release: str | None = None, jobs: tuple[str, ...] = tuple(JOBS)
) -> tuple[dict[str, Found], str]:
    """What was found for each of these JOBS, and what rank 0 printed."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "jobs.json").write_text(json.dumps([JOBS[job] for job in jobs]))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
        path = {"PYTHONPATH": folder_of(release), "TORCHDYNAMO_DISABLE": "1"} if release else {}
        env = {**meeting, "HF_HUB_OFFLINE": "1", **path, **({"DS_GRADFIX": "1"} if on else {})}
        ended = launch(SCRIPT, name, env=env)
        assert {rank.status for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)
        trainings = json.loads((directory / "found.json").read_text())
    found = {}
    for job, training in zip(jobs, trainings, strict=True):
        parameters = training["parameters"].values()
        assert len(parameters) > 20
        assert max(off for _, off in parameters) < 1e-3, job  # a multiple of the right gradient
        ratio, *others = (ratio for ratio, _ in parameters)
        assert others == pytest.approx([ratio] * len(others), rel=1e-3), job
        assert training["right norm"] > JOBS[job].get("clip", 0)  # else nothing would be clipped
        found[job] = Found(ratio, training["norm"])
    return found, ended[0].output


def ratios(on: bool, *jobs: str) -> list[float]:
    return [outputs(on)[0][job].gradient for job in jobs]


def test_the_training_script_does_not_know_ds_gradfix() -> None:
    text = (RANKS / SCRIPT).read_text()
    assert "import ds_gradfix" not in text and "sequence_parallel_reduction" not in text


@needs_transformers
def test_the_trainer_is_recognised_and_its_gradients_are_right_on_every_stage() -> None:
    assert ratios(True, *SHARDS) == pytest.approx([1, 1, 1], rel=1e-3)
    _, said = outputs(True)
    assert said.count("reduced by mean (Accelerate's parallelism config has sp_size=2: the loss of Transformers'") == 3


@needs_transformers
def test_a_setting_outranks_the_evidence_and_would_double_them() -> None:
    assert ratios(True, *SUMMED) == pytest.approx([2, 2], rel=1e-3)
    _, said = outputs(True)
    assert said.count("reduced by sum (set by sequence_parallel_reduction)") == 2


@needs_transformers
def test_gradients_are_right_however_the_configuration_is_given() -> None:
    assert ratios(True, *APART) == pytest.approx([1, 1, 1], rel=1e-3)


@needs_transformers
def test_the_logged_norm_is_the_one_of_a_single_process() -> None:
    found, _ = outputs(True)
    right = [*SHARDS, *APART]
    assert [found[job].norm for job in right] == pytest.approx([1] * len(right), rel=1e-5)


@needs_transformers
def test_on_a_release_that_ignores_who_divides_by_the_micro_batches() -> None:
    """Stock 0.18.3 gives updates of 0.47 (clipped), 0.25 and 0.5 times the right ones, and norms of 0.25, 0.25, 0.5."""
    found, said = outputs(True, "0.18.3", APART)
    assert said.count("accumulation-scale-ignored is on") == len(APART)
    for one in found.values():
        assert (one.gradient, one.norm) == (pytest.approx(1, rel=1e-3), pytest.approx(1, rel=1e-5))


@needs_transformers
def test_without_ds_gradfix_only_some_are_right() -> None:
    assert ratios(False, *SHARDS) == pytest.approx([2, 2, 1], rel=1e-3)
    assert ratios(False, *SUMMED) == pytest.approx([2, 1], rel=1e-3)  # a section that nobody reads changes nothing
    assert ratios(False, *APART) == pytest.approx([1, 0.5, 0.5], rel=1e-3)
    found, _ = outputs(False)
    assert all(one.norm == pytest.approx(one.gradient, rel=1e-3) for one in found.values())
