"""Start a script as N local ranks and collect what each printed; for tests that need more than the oracle's model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

RANKS = Path(__file__).parent / "ranks"


@dataclass(frozen=True)
class Ended:
    """One rank's exit status and everything it printed."""

    status: int
    output: str


def launch(
    script: str,
    *arguments: str,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    rank_env: Sequence[Mapping[str, str]] = (),
    timeout: float = 240,
) -> list[Ended]:
    """Run tests/ranks/SCRIPT as local ranks that meet through a file (RENDEZVOUS in their environment).

    ``rank_env`` adds to single ranks' environments. A rank that is not done in ``timeout`` seconds fails the test.
    """
    base = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key}
    base |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as directory:
        base |= {"RENDEZVOUS": f"file://{directory}/meet", **(env or {})}
        logs = [Path(directory, f"{rank}.log").open("w+", encoding="utf-8") for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(RANKS / script), *arguments],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(rank_env[rank] if rank_env else {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            statuses = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        ended = []
        for status, log in zip(statuses, logs, strict=True):
            with log:
                log.seek(0)
                ended.append(Ended(status, log.read()))
        return ended


def free_port() -> int:
    """A port for a launcher that needs one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
