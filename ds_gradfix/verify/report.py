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

from ds_gradfix.verify.compare import Comparison, Number, Result
from ds_gradfix.verify.config import precision, section

RIGHT, WRONG, COULD_NOT_RUN = "right", "wrong", "could not run"
INVARIANTS = ("gradient", "norm", "update")
_COLOURS = {True: "green", False: "bold bright_red", None: ""}
"""Of the terminal's own sixteen, those that are read on a light and on a dark background."""


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
    """Print heading, notes, table and verdicts; 80 columns are enough, and no meaning is in a colour alone."""
    screen.print(Text(report.config, "bold"), soft_wrap=True)
    for line in circumstances(report):
        screen.print(line)
    for note in report.notes:
        screen.print(f"Note: {note}.")
    measured = measured_runs(report)
    if measured:
        screen.print()
        shown = shown_step(measured)
        screen.print(_table(measured, shown))
        screen.print()
        screen.print(legend(measured, shown))
    screen.print()
    for invariant in INVARIANTS:
        screen.print(_verdict_line(invariant, report.results))
    for run, result in report.results.items():
        if result.error:
            screen.print(Text(f"{run} could not run: {result.error.strip().splitlines()[-1]}", _COLOURS[False]))


def circumstances(report: Report) -> list[str]:
    """How it was measured, a line each."""
    result = list(report.results.values())[-1]
    case, versions = result.case, result.versions
    stage = section(case.config, "zero_optimization").get("stage", 0)
    steps = "1 step" if case.steps == 1 else f"{case.steps} steps"
    lines = [f"ZeRO-{stage}, {report.ranks} ranks, sequence parallel {case.sequence_parallel}, {steps}"]
    if versions:
        lines.append(f"DeepSpeed {versions['deepspeed']}, torch {versions['torch']}, {versions['backend']}")
    return lines


def measured_runs(report: Report) -> dict[str, Result]:
    """The runs that have steps, by name."""
    return {run: result for run, result in report.results.items() if result.steps}


def shown_step(measured: Mapping[str, Result]) -> int:
    """The index of the first step in which something is wrong, else of the first."""
    count = min(len(result.steps) for result in measured.values())
    return next((index for index in range(count) if any(_is_wrong(run, index) for run in measured.values())), 0)


def legend(measured: Mapping[str, Result], index: int) -> str:
    """What the numbers of a table of this step are."""
    said = f"Step {index + 1}: ratio to the float64 reference, and relative error"
    wrong = any(cell.right is False for line in lines(measured, index) for cell in line.cells)
    return f"{said}.\n* is more than rounding explains." if wrong else f"{said}."


def _is_wrong(result: Result, index: int) -> bool:
    step = result.steps[index]
    compared = all(comparison.right for comparison in (*step.gradients, *step.updates))
    return bool(step.ranks_differ) or not compared or _norm_right(result, index) is False


def _norm_right(result: Result, index: int) -> bool | None:
    step = result.steps[index]
    return None if step.norm.error is None else step.norm.error <= precision(result.case).tolerance


@dataclass(frozen=True)
class Cell:
    """What one run measured: ratio and error as shown, and whether that is right (None: not reported)."""

    ratio: str
    error: str
    right: bool | None

    @property
    def marked_error(self) -> str:
        """The error, and a mark where it is wrong."""
        return f"{self.error} {'*' if self.right is False else ' '}"


@dataclass(frozen=True)
class Line:
    """One row of the table: a parameter, the norm or the update, with a cell for each run."""

    name: str
    size: str
    cells: tuple[Cell, ...]


def lines(measured: Mapping[str, Result], index: int) -> list[Line]:
    """The rows of the table of one step: a gradient each, then the norm, then the update that is furthest off."""
    steps = {run: result.steps[index] for run, result in measured.items()}
    by_parameter = zip(*(step.gradients for step in steps.values()), strict=True)
    gradients = [Line(same[0].name, str(same[0].numel), tuple(map(_cell, same))) for same in by_parameter]
    norms = (_norm_cell(result, index) for result in measured.values())
    worst = (max(step.updates, key=lambda update: update.error / update.tolerance) for step in steps.values())
    return [
        *gradients,
        Line("global norm", "", tuple(norms)),
        Line("update, at worst", "", tuple(map(_cell, worst))),
    ]


def _cell(comparison: Comparison) -> Cell:
    return _numbers(comparison.ratio, comparison.error, comparison.right)


def _norm_cell(result: Result, index: int) -> Cell:
    norm = result.steps[index].norm
    return _numbers(norm.ratio, norm.error, _norm_right(result, index))


def _numbers(ratio: float | None, error: float | None, right: bool | None) -> Cell:
    return Cell("-" if ratio is None else f"{ratio:.6g}", "-" if error is None else f"{error:.2g}", right)


def _table(measured: Mapping[str, Result], index: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("gradient of", overflow="fold")
    table.add_column("size", justify="right")
    for run in measured:
        table.add_column(f"{run}\nratio", justify="right")
        table.add_column(f"{run}\nerror", justify="right")
    *gradients, norm, update = lines(measured, index)
    for line in (*gradients, norm, update):
        table.add_row(line.name, line.size, *_texts(line), end_section=bool(gradients) and line is gradients[-1])
    return table


def _texts(line: Line) -> list[Text]:
    return [Text(text, _COLOURS[cell.right]) for cell in line.cells for text in (cell.ratio, cell.marked_error)]


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
