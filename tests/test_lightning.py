"""Lightning's Trainer with its DeepSpeedStrategy, without a change of its code: with DS_GRADFIX=1 alone gradients and
norm are those of a single process.

Lightning insists on CUDA. On CPU ranks its refusal is lifted, by the training script; with CUDA devices all is its own.
Runs in the environment that ds-gradfix is installed in, since its start-up file is what turns it on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from extras import needs
from launching import RANKS, free_port, launch

SCRIPT = "train_with_lightning.py"
needs_lightning = needs(lightning="2.6")


def found(tmp_path: Path, ranks: int, **env: str) -> dict[str, float]:
    """Ratios of gradient and norm to the right ones, and how far the gradient is from being a multiple."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = launch(SCRIPT, str(tmp_path / "found.json"), ranks=ranks, env={**meeting, **env})
    assert {rank.status for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)
    measured: dict[str, float] = json.loads((tmp_path / "found.json").read_text())
    return measured


def test_the_training_script_does_not_know_ds_gradfix() -> None:
    assert "import ds_gradfix" not in (RANKS / SCRIPT).read_text()


@needs_lightning
@pytest.mark.parametrize(("env", "ratio"), [({"DS_GRADFIX": "1"}, 1), ({}, 0.5)])
def test_gradient_and_norm_on_cpu_ranks(tmp_path: Path, env: dict[str, str], ratio: float) -> None:
    assert found(tmp_path, 2, **env) == pytest.approx({"gradient": ratio, "norm": ratio, "off": 0}, abs=1e-5)


@needs_lightning
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradient_and_norm_on_gpus(tmp_path: Path) -> None:
    measured = found(tmp_path, min(2, torch.cuda.device_count()), DS_GRADFIX="1", DS_ACCELERATOR="cuda")
    assert measured == pytest.approx({"gradient": 1, "norm": 1, "off": 0}, abs=1e-5)
