"""`import deepspeed` with DS_GRADFIX=1 against without: CPU time of the whole process, paired."""

from __future__ import annotations

import os
import sys

from _figures import Row, figure, ratios

TITLE = "import deepspeed, DS_GRADFIX=1 over unset (CPU time of the process)"
LIMIT = 1.03


def measure(quick: bool) -> list[Row]:
    rounds = 2 if quick else 15
    times: dict[str, list[float]] = {"unset": [], "1": []}
    for number in range(-1, rounds):
        for value in list(times)[:: 1 if number % 2 else -1]:
            took = cpu_seconds({} if value == "unset" else {"DS_GRADFIX": value})
            if number >= 0:  # the first round reads files that are not in memory yet
                times[value].append(took)
    return [figure("import deepspeed", ratios(times["1"], times["unset"]), limit=LIMIT)]


def cpu_seconds(variables: dict[str, str]) -> float:
    environment = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name} | variables
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import deepspeed"], environment)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"import deepspeed ended with status {status}")
    return usage.ru_utime + usage.ru_stime
