"""What an installed ds-gradfix costs every start of the interpreter: paired CPU time with its wheel and without.

The virtual environments differ in the wheel alone: one has it, one has not, and a second one without it shows what the
measurement makes of no difference at all. Each round starts the interpreter once in every situation, in an order that
rotates, and the CPU time (user and system) of each is set against that of the same round without the wheel. The median
of these differences is the cost, given with its 95% confidence interval and the quartiles of single rounds. All of them
grow with the load on the machine, as start-up itself does.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _figures import Row, figure

ROOT = Path(__file__).resolve().parents[1]
TITLE = "Start of the interpreter, over one without the wheel (CPU time)"
TARGET_MS = 0.3
WARM_UP = 10
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Situation:
    """One way of starting an interpreter."""

    name: str
    python: str
    variables: dict[str, str]

    def cpu_ms(self) -> float:
        """The CPU time of one start that does nothing else."""
        environment = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name} | self.variables
        child = os.posix_spawn(self.python, [self.python, "-c", "pass"], environment)
        _, status, usage = os.wait4(child, 0)
        if status:
            raise RuntimeError(f"{self.name}: the interpreter ended with status {status}")
        return 1000 * (usage.ru_utime + usage.ru_stime)


def situations(directory: Path) -> list[Situation]:
    """The baseline first: no wheel. Then the same again, and the wheel with DS_GRADFIX unset, and set."""
    traces = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, directory / "source", ignore=traces)  # building leaves traces of its own
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    subprocess.run([*PIP, "wheel", *offline, "--wheel-dir", directory, source], check=True)
    (wheel,) = directory.glob("*.whl")
    pythons = {}
    for name in ("none", "same", "with"):  # names of one length, so that paths are too
        venv.create(directory / name, symlinks=True)
        pythons[name] = str(directory / name / "bin" / "python")
    subprocess.run([*PIP, "--python", pythons["with"], "install", *offline, wheel], check=True)
    return [
        Situation("not installed", pythons["none"], {}),
        Situation("not installed, once more", pythons["same"], {}),
        Situation("installed, DS_GRADFIX unset", pythons["with"], {}),
        Situation("installed, DS_GRADFIX=1", pythons["with"], {"DS_GRADFIX": "1"}),
    ]


def rows(rounds: int) -> list[Row]:
    """What each situation but the first adds to the first, by round."""
    with tempfile.TemporaryDirectory() as directory:
        baseline, *others = times(situations(Path(directory)), rounds).items()
    return [
        figure(name, [ours - base for ours, base in zip(took, baseline[1], strict=True)], "ms added", limit_of(name))
        for name, took in others
    ]


def limit_of(name: str) -> float | None:
    return TARGET_MS if name.endswith("unset") else None


def times(situations: list[Situation], rounds: int) -> dict[str, list[float]]:
    """The CPU time of each situation, by round."""
    taken: dict[str, list[float]] = {situation.name: [] for situation in situations}
    for order in rotations(situations, WARM_UP):
        for situation in order:
            situation.cpu_ms()
    for order in rotations(situations, rounds):
        for situation in order:
            taken[situation.name].append(situation.cpu_ms())
    return taken


def rotations(situations: list[Situation], rounds: int) -> Iterator[list[Situation]]:
    """Every situation once a round, none always before another."""
    for number in range(rounds):
        shift = number % len(situations)
        yield situations[shift:] + situations[:shift]
