"""What an installed ds-gradfix costs every start of the interpreter: paired CPU time with its wheel and without.

    python benchmarks/startup.py [--rounds N] [--json]

The virtual environments differ in the wheel alone: one has it, one has not, and a second one without it shows what the
measurement makes of no difference at all. Each round starts the interpreter once in every situation, in an order that
rotates, and the CPU time (user and system) of each is set against that of the same round without the wheel. The median
of these differences is the cost, given with its 95% confidence interval and the quartiles of single rounds. All of them
grow with the load on the machine, as start-up itself does.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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


def main() -> None:
    """Measure and print the table, or the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = measure(situations(Path(directory)), args.rounds)
    print(json.dumps(results, indent=2) if args.json else table(results))


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


def measure(situations: list[Situation], rounds: int) -> dict[str, Any]:
    """The CPU time of each situation, and of each but the first what it adds to the first, by round."""
    times: dict[str, list[float]] = {situation.name: [] for situation in situations}
    for order in rotations(situations, WARM_UP):
        for situation in order:
            situation.cpu_ms()
    for order in rotations(situations, rounds):
        for situation in order:
            times[situation.name].append(situation.cpu_ms())
    baseline = times[situations[0].name]
    rows = []
    for situation in situations:
        differences = [ours - base for ours, base in zip(times[situation.name], baseline, strict=True)]
        quartile1, median, quartile3 = statistics.quantiles(differences, n=4)
        rows.append(
            {
                "situation": situation.name,
                "cpu_ms": statistics.median(times[situation.name]),
                "added_ms": median,
                "added_ms_95%": median_interval(differences),
                "added_ms_quartiles": [quartile1, quartile3],
            }
        )
    return {"python": sys.version.split()[0], "rounds": rounds, "target_ms": TARGET_MS, "rows": rows}


def median_interval(values: list[float]) -> list[float]:
    """The 95% confidence interval of the median, whatever the distribution: two order statistics."""
    reach = round(0.98 * len(values) ** 0.5)
    middle = len(values) // 2
    ordered = sorted(values)
    return [ordered[max(middle - reach, 0)], ordered[min(middle + reach, len(values) - 1)]]


def rotations(situations: list[Situation], rounds: int) -> Iterator[list[Situation]]:
    """Every situation once a round, none always before another."""
    for number in range(rounds):
        shift = number % len(situations)
        yield situations[shift:] + situations[:shift]


def table(results: dict[str, Any]) -> str:
    """The results for people."""
    lines = [
        f"Python {results['python']}, {results['rounds']} rounds; CPU milliseconds, medians",
        "",
        f"{'':30}{'start-up':>10}{'added':>10}   {'95% interval':20}half of the rounds within",
    ]
    for row in results["rows"]:
        line = f"{row['situation']:30}{row['cpu_ms']:10.3f}"
        if row is not results["rows"][0]:
            intervals = (f"{low:+.3f} .. {high:+.3f}" for low, high in (row["added_ms_95%"], row["added_ms_quartiles"]))
            line += f"{row['added_ms']:+10.3f}   " + "".join(f"{interval:20}" for interval in intervals).rstrip()
        lines.append(line)
    lines += ["", f"target with DS_GRADFIX unset: at most +{results['target_ms']:.3f}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
