"""One job's measurement, stock and corrected, as a table with verdicts for people and as plain data for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_gradfix.verify.compare import Comparison, Number, Result, Step
from ds_gradfix.verify.config import section

RIGHT, WRONG, COULD_NOT_RUN = "right", "wrong", "could not run"
_COLOURS = {True: "green", False: "bold red", None: "yellow"}


@dataclass(frozen=True)
class Report:
    """What was measured for one configuration."""

    config: str
    """Where the configuration was read."""
    ranks: int
    notes: tuple[str, ...]
    """What the oracle did differently from the configuration, a sentence each."""
    results: Mapping[str, Result]
    """By run, `stock`, `corrected` or both, in this order; the last one decides the status."""

    @property
    def status(self) -> str:
        """RIGHT, WRONG or COULD_NOT_RUN."""
        decisive = list(self.results.values())[-1]
        if decisive.error:
            return COULD_NOT_RUN
        return RIGHT if decisive.right else WRONG


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data for JSON; numbers that JSON cannot express, infinities and NaN, become null."""
    case = next(iter(report.results.values())).case
    return {
        "status": report.status,
        "config": report.config,
        "ranks": report.ranks,
        "sequence_parallel": case.sequence_parallel,
        "steps": case.steps,
        "optimizer": case.optimizer,
        "notes": list(report.notes),
        "runs": {run: _result_data(result) for run, result in report.results.items()},
    }


def show(report: Report, screen: Console) -> None:
    """Print heading, notes, table and verdicts; 80 columns are enough."""
    screen.print(Text(report.config, "bold"))
    for line in _circumstances(report):
        screen.print(line)
    for note in report.notes:
        screen.print(Text(f"Note: {note}.", "dim"))
    measured = {run: result for run, result in report.results.items() if result.steps}
    if measured:
        screen.print()
        shown = _shown_step(measured)
        screen.print(_table(measured, shown))
        screen.print(f"Step {shown + 1}: ratio to the float64 reference, and relative error.")
    screen.print()
    for invariant in ("gradient", "norm", "update"):
        screen.print(_verdict_line(invariant, report.results))
    for run, result in report.results.items():
        if result.error:
            screen.print(Text(f"{run} could not run: {result.error.strip().splitlines()[-1]}", "bold red"))


def _circumstances(report: Report) -> list[str]:
    result = list(report.results.values())[-1]
    case, versions = result.case, result.versions
    stage = section(case.config, "zero_optimization").get("stage", 0)
    steps = "1 step" if case.steps == 1 else f"{case.steps} steps"
    lines = [f"ZeRO-{stage}, {report.ranks} ranks, sequence parallel {case.sequence_parallel}, {steps}"]
    if versions:
        lines.append(f"DeepSpeed {versions['deepspeed']}, torch {versions['torch']}, {versions['backend']}")
    return lines


def _shown_step(measured: Mapping[str, Result]) -> int:
    """The first step in which something is wrong, else the first."""
    count = min(len(result.steps) for result in measured.values())
    return next(
        (index for index in range(count) if any(_is_wrong(result.steps[index]) for result in measured.values())), 0
    )


def _is_wrong(step: Step) -> bool:
    return bool(step.ranks_differ) or not all(comparison.right for comparison in (*step.gradients, *step.updates))


def _table(measured: Mapping[str, Result], index: int) -> Table:
    steps = {run: result.steps[index] for run, result in measured.items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gradient of", overflow="fold")
    table.add_column("size", justify="right")
    for run in steps:
        table.add_column(f"{run}\nratio", justify="right")
        table.add_column(f"{run}\nerror", justify="right")
    first = next(iter(steps.values()))
    for row, comparison in enumerate(first.gradients):
        same = [step.gradients[row] for step in steps.values()]
        cells = [_cells(gradient.ratio, gradient.error, gradient.right) for gradient in same]
        table.add_row(
            comparison.name, str(comparison.numel), *_flat(cells), end_section=row == len(first.gradients) - 1
        )
    norms = [_cells(step.norm.ratio, step.norm.error, measured[run].norm.right) for run, step in steps.items()]
    table.add_row("global norm", "", *_flat(norms))
    worst = [max(step.updates, key=lambda update: update.error / update.tolerance) for step in steps.values()]
    table.add_row(
        "update, at worst", "", *_flat([_cells(update.ratio, update.error, update.right) for update in worst])
    )
    return table


def _cells(ratio: float | None, error: float | None, right: bool | None) -> tuple[Text, Text]:
    colour = _COLOURS[right]
    return (
        Text("-" if ratio is None else f"{ratio:.6g}", colour),
        Text("-" if error is None else f"{error:.2g}", colour),
    )


def _flat(cells: list[tuple[Text, Text]]) -> list[Text]:
    return [cell for pair in cells for cell in pair]


def _verdict_line(invariant: str, results: Mapping[str, Result]) -> Text:
    line = Text(f"{invariant}: ")
    for position, (run, result) in enumerate(results.items()):
        verdict = result.verdicts[invariant]
        line.append(f"{', ' if position else ''}{run} ")
        line.append(verdict.words, _COLOURS[verdict.right])
    return line


def _result_data(result: Result) -> dict[str, Any]:
    return {
        "right": result.right,
        "error": result.error,
        "versions": result.versions,
        "verdicts": {
            name: {"right": verdict.right, "words": verdict.words} for name, verdict in result.verdicts.items()
        },
        "digest": result.digest,
        "steps": [
            {
                "gradients": [_comparison_data(comparison) for comparison in step.gradients],
                "norm": _number_data(step.norm),
                "updates": [_comparison_data(comparison) for comparison in step.updates],
                "loss": _number_data(step.loss),
                "ranks_differ": list(step.ranks_differ),
            }
            for step in result.steps
        ],
    }


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    return {
        "name": comparison.name,
        "size": comparison.numel,
        "ratio": _finite(comparison.ratio),
        "error": _finite(comparison.error),
        "tolerance": comparison.tolerance,
        "right": comparison.right,
    }


def _number_data(number: Number) -> dict[str, Any]:
    fields = {"got": number.got, "expected": number.expected, "ratio": number.ratio, "error": number.error}
    return {name: _finite(value) for name, value in fields.items()}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
