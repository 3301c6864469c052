"""`measure`: train cases on local ranks, stock or corrected, and compare with the float64 reference."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ds_gradfix.verify.cases import Case
from ds_gradfix.verify.config import check_ranks
from ds_gradfix.verify.launch import launched

if TYPE_CHECKING:
    from ds_gradfix.verify.compare import Result

TIMEOUT_SECONDS = 180.0


def measure(
    cases: Sequence[Case],
    *,
    ranks: int = 2,
    corrected: bool,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    timeout: float = TIMEOUT_SECONDS,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Train every case in one launch of `ranks` local processes, one after the other; one result for each, in order.

    The ranks run `python` in the environment `env` (this process's by default), without ds-gradfix or, when
    `corrected`, after `ds_gradfix.enable(**case.enable)`. They use NCCL when there is a GPU for each rank, gloo on the
    CPU otherwise. `progress` is called with the number of optimizer steps done so far.

    A case that DeepSpeed refuses alike on every rank gives a result with `error`. A rank that dies on its own, or
    `timeout` seconds without any rank getting on, raise RankFailure; a sequence-parallel size that does not divide
    `ranks` raises ConfigError.
    """
    for case in cases:
        check_ranks(ranks, case.sequence_parallel)
    with launched(
        cases, ranks=ranks, corrected=corrected, python=python, env=os.environ if env is None else env
    ) as launch:
        # While the ranks import torch and DeepSpeed, so does this process torch.
        import torch

        from ds_gradfix.verify.compare import compared

        launch.wait(timeout, progress or (lambda steps: None))
        results = []
        for index, case in enumerate(cases):
            files = [launch.directory / f"{index}.{rank}.pt" for rank in range(ranks)]
            outcomes = [torch.load(file, weights_only=True) for file in files]
            results.append(compared(case, corrected=corrected, outcomes=outcomes))
        return results


def missing_packages() -> list[str]:
    """Those of torch and deepspeed that this interpreter cannot import; found without importing them."""
    return [name for name in ("torch", "deepspeed") if importlib.util.find_spec(name) is None]
