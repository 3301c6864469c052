"""A process that has imported torch and DeepSpeed and forks the ranks of one launch after the other.

Importing the two takes each rank several seconds; a fork takes none. Only for ranks that turn ds-gradfix on by
themselves, after DeepSpeed: what start-up and import order do is tested in processes of their own.

    forking.py      reads launches from standard input, one line of JSON each, and answers with the exit statuses
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import deepspeed  # noqa: F401
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer of a process imports torch's compiler
    gc.collect()
    gc.freeze()  # what is imported by now is never garbage: ranks need not search it

    for line in sys.stdin:
        launch = json.loads(line)
        ranks = [_fork(launch, rank) for rank in range(len(launch["logs"]))]
        answers.write(json.dumps(_statuses(ranks, launch["timeout"])) + "\n")
        answers.flush()


def _fork(launch: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with Path(launch["logs"][rank]).open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.environ.clear()
            os.environ.update(launch["env"][rank])
            sys.argv = [launch["script"], *launch["arguments"]]
            sys.path.insert(0, str(Path(launch["script"]).parent))
            runpy.run_path(launch["script"], run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def _statuses(ranks: list[int], timeout: float) -> list[int]:
    """Each rank's exit status, as subprocess has them; after the time all that still run are killed."""

    def kill(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(int(timeout))
    try:
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
