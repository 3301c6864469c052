"""`import deepspeed` with DS_GRADFIX=1 against without: CPU time of the whole process, paired.

Bytecode is kept, as installers leave it, also where this environment says not to write any.
"""

from __future__ import annotations

import os
import sys
import tempfile

from _figures import Row, figure, ratios

TITLE = "import deepspeed, DS_GRADFIX=1 over unset (CPU time of the process)"
LIMIT = 1.03


def measure(quick: bool) -> list[Row]:
    rounds = 2 if quick else 15
    times: dict[str, list[float]] = {"unset": [], "1": []}
    with tempfile.TemporaryDirectory() as bytecode:
        for number in range(-1, rounds):
            for value in list(times)[:: 1 if number % 2 else -1]:
                variables = {} if value == "unset" else {"DS_GRADFIX": value}
                took = cpu_seconds({"PYTHONPYCACHEPREFIX": bytecode, **variables})
                if number >= 0:  # the first round compiles, and reads what is not in memory yet
                    times[value].append(took)
    return [figure("import deepspeed", ratios(times["1"], times["unset"]), limit=LIMIT)]


def cpu_seconds(variables: dict[str, str]) -> float:
    ours = ("DS_GRADFIX", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if not any(name in key for name in ours)} | variables
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import deepspeed"], environment)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"import deepspeed ended with status {status}")
    return usage.ru_utime + usage.ru_stime
