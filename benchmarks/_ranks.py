"""Local ranks for a benchmark: on GPUs with NCCL where there are enough of them, else on CPUs with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=90)


def run(module: str, ranks: int, quick: bool) -> Any:
    """What ``module.on_rank(quick)`` gives on rank 0 of ``ranks``. Raises RuntimeError where a rank fails."""
    with tempfile.TemporaryDirectory() as directory:
        base = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key} | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            "MEETING": Path(directory, "meet").as_uri(),
            "ANSWER": str(Path(directory, "answer")),
        }
        command = [sys.executable, "-c", f"import _ranks; _ranks.rank({module!r}, {quick})"]
        logs = [Path(directory, f"{rank}.log").open("w+") for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=Path(__file__).parent,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        for process, log in zip(processes, logs, strict=True):
            if process.wait() != 0:
                for other in processes:
                    other.kill()
                log.seek(0)
                raise RuntimeError(f"{module}: a rank failed:\n{log.read()[-3000:]}")
        return json.loads(Path(base["ANSWER"]).read_text())


def rank(module: str, quick: bool) -> None:
    """One rank: meet the others, measure, and let rank 0 leave the answer."""
    import torch

    own, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if on_gpus:
        torch.cuda.set_device(own)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    counting = __import__(module)
    if hasattr(counting, "before_groups"):
        counting.before_groups()
    import deepspeed

    from ds_gradfix.verify import _compat

    _compat.prepare(deepspeed.__version__, on_cpu=not on_gpus)
    torch.distributed.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=os.environ["MEETING"], rank=own, world_size=ranks, timeout=TIMEOUT
    )
    deepspeed.init_distributed()
    found = counting.on_rank(quick)
    if own == 0:
        Path(os.environ["ANSWER"]).write_text(json.dumps(found))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.distributed.get_backend() == "nccl" else "cpu"


def seconds(work: Callable[[], object]) -> float:
    """From the moment when all ranks are ready to the end of this rank's work."""
    import torch

    torch.distributed.barrier()
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    import torch

    if torch.distributed.get_backend() == "nccl":
        torch.cuda.synchronize()


def side_by_side(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Each work once a round, in an order that rotates: seconds by work, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            took = seconds(works[name])
            if number >= 0:
                times[name].append(took)
    return times
