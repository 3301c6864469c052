"""Transformers' own Trainer over two ranks that share a sequence, without a change of its code: with DS_GRADFIX=1 alone
its gradients are those of a single process on every ZeRO stage, because its loss is recognised by evidence.

Runs in the environment that ds-gradfix is installed in, since its start-up file is what turns it on.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from launching import RANKS, free_port, launch
from packaging.version import Version

SCRIPT = "train_with_transformers.py"
SUM = {"ds_gradfix": {"sequence_parallel_reduction": "sum"}}
CONFIGS: tuple[dict[str, Any], ...] = (
    *({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)),
    *({"zero_optimization": {"stage": stage}, **SUM} for stage in (2, 3)),
)


def missing() -> str | None:
    """What this environment lacks to run the Trainer with sequence parallelism."""
    for package, oldest in (("transformers", "5.0"), ("accelerate", "1.12")):
        try:
            if Version(version(package)) < Version(oldest):
                return f"{package} {version(package)} is older than {oldest}"
        except PackageNotFoundError:
            return f"{package} is not installed"
    return None


needs_transformers = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@cache
def outputs(on: str) -> tuple[list[float], str]:
    """For each of CONFIGS the ratio to the right gradient, the same for all parameters; and what rank 0 printed."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "configs.json").write_text(json.dumps(CONFIGS))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
        ended = launch(SCRIPT, name, env={**meeting, "HF_HUB_OFFLINE": "1", "DS_GRADFIX": on})
        assert {rank.status for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)
        trainings = json.loads((directory / "ratios.json").read_text())
    found = []
    for parameters in trainings:
        assert len(parameters) > 20
        assert max(off for _, off in parameters.values()) < 1e-3  # a multiple of the right gradient
        ratio, *others = (ratio for ratio, _ in parameters.values())
        assert others == pytest.approx([ratio] * len(others), rel=1e-3)
        found.append(ratio)
    return found, ended[0].output


def test_the_training_script_does_not_know_ds_gradfix() -> None:
    text = (RANKS / SCRIPT).read_text()
    assert "import ds_gradfix" not in text and "sequence_parallel_reduction" not in text


@needs_transformers
def test_the_trainer_is_recognised_and_its_gradients_are_right_on_every_stage() -> None:
    ratios, said = outputs("1")
    assert ratios[:3] == pytest.approx([1, 1, 1], rel=1e-3)
    assert said.count("reduced by mean (Accelerate's parallelism config has sp_size=2: the loss of Transformers'") == 3


@needs_transformers
def test_a_setting_outranks_the_evidence_and_would_double_them() -> None:
    ratios, said = outputs("1")
    assert ratios[3:] == pytest.approx([2, 2], rel=1e-3)
    assert said.count("reduced by sum (set by sequence_parallel_reduction)") == 2


@needs_transformers
def test_without_ds_gradfix_only_zero3_is_right() -> None:
    ratios, _ = outputs("0")
    assert ratios == pytest.approx([2, 2, 1, 2, 1], rel=1e-3)  # a section that nobody reads changes nothing
