"""Start a script as N local ranks and collect what each printed; for tests that need more than the oracle's model."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from other_releases import folder_of

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
    Ranks that ds-gradfix shall start up with are processes of their own, others are forked; see forking.py.
    """
    base = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key}
    base |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as directory:
        base |= {"RENDEZVOUS": f"file://{directory}/meet", **(env or {})}
        logs = [Path(directory, f"{rank}.log") for rank in range(ranks)]
        envs = [
            {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(rank_env[rank] if rank_env else {})}
            for rank in range(ranks)
        ]
        starts_up = any("DS_GRADFIX" in key for one in envs for key in one)
        run = _in_processes if starts_up else _forked
        statuses = run([str(RANKS / script), *arguments], envs, logs, timeout)
        return [Ended(status, log.read_text(encoding="utf-8")) for status, log in zip(statuses, logs, strict=True)]


def _in_processes(command: list[str], envs: list[dict[str, str]], logs: list[Path], timeout: float) -> list[int]:
    processes = []
    for env, path in zip(envs, logs, strict=True):
        with path.open("w") as log:
            whole = [sys.executable, *command]
            processes.append(subprocess.Popen(whole, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        return [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def _forked(command: list[str], envs: list[dict[str, str]], logs: list[Path], timeout: float) -> list[int]:
    server = _server(envs[0].get("PYTHONPATH", ""))
    script, *arguments = command
    request = {"script": script, "arguments": arguments, "env": envs, "logs": list(map(str, logs)), "timeout": timeout}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks ranks has died"
    statuses: list[int] = json.loads(answer)
    return statuses


@cache
def _server(path: str) -> subprocess.Popen[str]:
    """The process that forks ranks with this PYTHONPATH; it ends with this one."""
    env = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "LOCAL_SIZE": "1"}
    env |= {"PYTHONPATH": path} if path else {}
    command = [sys.executable, str(RANKS.parent / "forking.py")]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def played(
    script: str,
    *scenarios: str,
    ranks: int = 2,
    release: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> dict[str, dict[str, list[Any]]]:
    """What a script that ends with ``scenario.play`` gave: scenario -> ``stock`` or ``corrected`` -> by rank.

    ``release`` is another DeepSpeed than the one installed. An outcome that is an error is ``{"error": traceback}``.
    """
    # DeepSpeed asks that the first two be set; some releases compile the experts' gate, which takes a minute.
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHDYNAMO_DISABLE": "1"}
    path = {"PYTHONPATH": folder_of(release)} if release else {}
    ended = launch(script, *scenarios, ranks=ranks, env={**base, **path, **(env or {})}, timeout=timeout)
    for rank in ended:
        assert rank.status == 0, rank.output[-3000:]
    said = [json.loads(rank.output.splitlines()[-1]) for rank in ended]
    assert release is None or {one["deepspeed"] for one in said} == {release}
    return {
        name: {mode: [one["scenarios"][name][mode] for one in said] for mode in ("stock", "corrected")}
        for name in said[0]["scenarios"]
    }


def free_port() -> int:
    """A port for a launcher that needs one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
