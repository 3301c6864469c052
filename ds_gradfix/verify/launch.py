"""Start the ranks, wait for them, and end them all when one dies or hangs. Standard library only."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_gradfix.errors import GradfixError
from ds_gradfix.verify.cases import Case

_POLL_SECONDS = 0.05
_DUMP_SECONDS = 1.0
_SHOWN_LINES = 60


class RankFailure(GradfixError):
    """A rank died or hung; the message holds one sentence and the ranks' tracebacks."""


@dataclass
class Launch:
    """Running ranks and the directory where they leave their outcomes, `<case>.<rank>.pt`."""

    directory: Path
    processes: list[subprocess.Popen[bytes]]

    def wait(self, timeout: float, progress: Callable[[int], None]) -> None:
        """Return when every rank is done; `progress` gets the number of optimizer steps so far.

        Raises RankFailure when a rank exits with an error, or when `timeout` seconds pass without any rank getting on.
        """
        seen, deadline = (-1, -1), time.monotonic() + timeout
        while True:
            codes = [process.poll() for process in self.processes]
            dead = [rank for rank, code in enumerate(codes) if code]
            if dead:
                told = "; ".join(f"rank {rank} died with exit code {codes[rank]}" for rank in dead)
                raise RankFailure(f"{told}\n{self._tracebacks(dead)}")
            done = self._steps_done()
            progress(done)
            if all(code == 0 for code in codes):
                return
            now = (done, sum(1 for _ in self.directory.glob("*.pt")))
            if now != seen:
                seen, deadline = now, time.monotonic() + timeout
            if time.monotonic() > deadline:
                hung = [rank for rank, code in enumerate(codes) if code is None]
                self._dump_stacks(hung)
                named = ", ".join(map(str, hung))
                raise RankFailure(f"no rank got on for {timeout:g} s; still running: {named}\n{self._tracebacks(hung)}")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _steps_done(self) -> int:
        try:
            return (self.directory / "steps").stat().st_size
        except FileNotFoundError:
            return 0

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Have these ranks write to their logs where they stand."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)

    def _tracebacks(self, ranks: list[int]) -> str:
        """The end of each rank's log, from its last traceback on."""
        parts = []
        for rank in ranks:
            log = (self.directory / f"{rank}.log").read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- rank {rank} ---", *_from_traceback(log)[-_SHOWN_LINES:]]))
        return "\n".join(parts)


@contextmanager
def launched(
    cases: Sequence[Case], *, ranks: int, corrected: bool, python: str, env: Mapping[str, str]
) -> Iterator[Launch]:
    """Start `ranks` local processes of `python` on the cases; they and their directory are gone when the block ends.

    `env` is the environment to start from.
    """
    with tempfile.TemporaryDirectory(prefix="ds-gradfix-verify-") as name:
        launch = Launch(Path(name), [])
        job = {"cases": [case.as_json() for case in cases], "corrected": corrected}
        (launch.directory / "job.json").write_text(json.dumps(job))
        try:
            for rank in range(ranks):
                rank_env = _environment(env, rank, ranks, corrected=corrected)
                launch.processes.append(_started(python, launch.directory, rank, rank_env))
            yield launch
        finally:
            launch.end()


def _environment(env: Mapping[str, str], rank: int, ranks: int, *, corrected: bool) -> dict[str, str]:
    """`env` for one rank. What would switch ds-gradfix on by itself is removed: a stock rank must be stock."""
    own = {key: value for key, value in env.items() if key not in ("DS_GRADFIX", "PYTHON_DS_GRADFIX")}
    if not corrected:
        own = {key: value for key, value in own.items() if not key.startswith("DS_GRADFIX_")}
    own.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # DeepSpeed asks that it be set; the ranks meet through a file
        OMP_NUM_THREADS="1",
        PYTHONUNBUFFERED="1",
    )
    return own


def _started(python: str, directory: Path, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (directory / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [python, "-m", "ds_gradfix.verify._rank", str(directory)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _from_traceback(log: list[str]) -> list[str]:
    """The log from its last Python traceback on, else from the first dumped stack on, else all of it."""
    errors = [index for index, line in enumerate(log) if line.startswith("Traceback ")]
    stacks = [index for index, line in enumerate(log) if line.startswith(("Current thread ", "Thread 0x"))]
    return log[errors[-1] if errors else stacks[0] if stacks else 0 :]
