"""The pictures of a report, as SVG inside a page: curves over steps, and ratios by parameter.

Colours, widths of lines and fonts are the page's (`page.STYLE`), by class: a run's marks differ in shape as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ds_gradfix.verify._markup import Markup, element

WIDTH, HEIGHT = 440, 240
"""Of a curve's coordinates: at a phone's width its text is still read without zooming."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 34
_ROW, _NAMES, _LONGEST_NAME = 30, 140, 16
_MANY_STEPS = 40
_WIDE = 30.0
"""Where the largest number is so many times the smallest, the axis is logarithmic."""


@dataclass(frozen=True)
class Series:
    """One line of a curve: its label, its class in the page's style, and a number for each step (None: no answer)."""

    label: str
    kind: str
    values: Sequence[float | None]

    @property
    def points(self) -> list[tuple[int, float]]:
        """(step, value) of the steps that have a finite number."""
        return [(step, value) for step, value in enumerate(self.values, 1) if _is_finite(value)]


def mark(kind: str, x: float, y: float) -> Markup:
    """What stands for one measurement of this kind."""
    if kind == "stock":
        return element("circle", class_=kind, cx=x, cy=y, r=5)
    if kind == "corrected":
        return element("path", class_=kind, d=f"M{x:.6g} {y - 4:.6g}l4 4l-4 4l-4-4z")
    return element("circle", class_=kind, cx=x, cy=y, r=2)


def legend(labels: Mapping[str, str]) -> Markup:
    """Which mark and line is whose: label -> kind."""
    entries = []
    for label, kind in labels.items():
        line = element("line", class_=f"line {kind}", x1=1, x2=31, y1=8, y2=8)
        sample = element("svg", line, mark(kind, 16, 8), viewBox="0 0 32 16", width=32, height=16, aria_hidden="true")
        entries.append(element("li", sample, " ", label))
    return element("ul", *entries, class_="legend")


def curves(name: str, title: str, lines: Sequence[Series]) -> Markup:
    """Numbers over optimizer steps. `name` is the picture's own in the page."""
    values = [value for line in lines for _, value in line.points]
    steps = max((len(line.values) for line in lines), default=0)
    if not values:
        nothing = _label(WIDTH / 2, HEIGHT / 2, "no number was reported", "middle")
        return _picture(name, title, f"{title}: no number was reported.", HEIGHT, [nothing])
    scale = _logarithmic if min(values) > 0 and max(values) / min(values) > _WIDE else _linear
    place, ticks = scale(min(values), max(values))

    def x(step: float) -> float:
        inner = WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * ((step - 1) / (steps - 1) if steps > 1 else 0.5)

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - place(value))

    parts = [_level(y(tick), f"{tick:.6g}") for tick in ticks]
    every = max(1, math.ceil(steps / 8))
    parts += [_label(x(step), HEIGHT - 18, str(step), "middle") for step in range(1, steps + 1, every)]
    parts.append(_label(_LEFT + (WIDTH - _LEFT - _RIGHT) / 2, HEIGHT - 3, "optimizer step", "middle"))
    for line in lines:
        parts += [_path(run, x, y, line.kind) for run in _unbroken(line.points)]
        if steps <= _MANY_STEPS:
            parts += [mark(line.kind, x(step), y(value)) for step, value in line.points]
    return _picture(name, title, f"{title}. {_in_words(lines)}", HEIGHT, parts)


def ratios(name: str, title: str, rows: Mapping[str, Mapping[str, float | None]]) -> Markup:
    """The ratio to the reference of each parameter, by run, around the line where both are equal.

    A ratio that a logarithmic axis has no place for stands as a number.
    """
    shown = [ratio for row in rows.values() for ratio in row.values() if _has_place(ratio)]
    place, ticks = _logarithmic(min([0.5, *shown]), max([2.0, *shown]))
    height = _ROW * len(rows) + _BOTTOM

    def x(ratio: float) -> float:
        return _NAMES + (WIDTH - _NAMES - _RIGHT) * place(ratio)

    parts = [_upright(x(tick), height, f"{tick:.6g}", "one" if tick == 1 else "grid") for tick in ticks]
    for index, (parameter, row) in enumerate(rows.items()):
        y = _ROW * (index + 0.5)
        parts.append(_label(_NAMES - 10, y + 4, _shortened(parameter), "end"))
        parts += [mark(run, x(ratio), y) for run, ratio in row.items() if _has_place(ratio)]
        odd = [f"{run} {ratio:.3g}" for run, ratio in row.items() if ratio is not None and not _has_place(ratio)]
        if all(ratio is None for ratio in row.values()):
            odd = ["the reference's gradient is zero"]
        if odd:
            parts.append(_label(_NAMES + 6, y + 4, ", ".join(odd), "start"))
    said = "; ".join(f"{parameter}: {_words_of_row(row)}" for parameter, row in rows.items())
    return _picture(name, title, f"{title}. {said}.", height, parts)


def _words_of_row(row: Mapping[str, float | None]) -> str:
    return ", ".join(f"{run} {'none' if ratio is None else f'{ratio:.6g}'}" for run, ratio in row.items())


def _in_words(lines: Iterable[Series]) -> str:
    sentences = []
    for line in lines:
        points = line.points
        said = f"{points[0][1]:.4g} at step {points[0][0]}" if points else "no number"
        if len(points) > 1:
            said += f", {points[-1][1]:.4g} at step {points[-1][0]}"
        sentences.append(f"{line.label}: {said}.")
    return " ".join(sentences)


def _picture(name: str, title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    heading = element("title", title, id=f"{name}-title")
    words = element("desc", description, id=f"{name}-words")
    return element("svg", heading, words, *parts, class_="picture", role="img", viewBox=f"0 0 {WIDTH} {height:g}",
                   aria_labelledby=f"{name}-title", aria_describedby=f"{name}-words")  # fmt: skip


def _level(y: float, text: str) -> Markup:
    line = element("line", class_="grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y)
    return Markup(line + _label(_LEFT - 6, y + 4, text, "end"))


def _upright(x: float, height: float, text: str, kind: str) -> Markup:
    line = element("line", class_=kind, x1=x, x2=x, y1=0, y2=height - _BOTTOM + 6)
    return Markup(line + _label(x, height - 12, text, "middle"))


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _path(points: Sequence[tuple[int, float]], x: Callable[[float], float], y: Callable[[float], float],
          kind: str) -> Markup:  # fmt: skip
    places = " ".join(f"{x(step):.6g},{y(value):.6g}" for step, value in points)
    return element("polyline", class_=f"line {kind}", points=places)


def _unbroken(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The points, parted where a step has no finite number: no line may lead over a step that nobody measured."""
    runs: list[list[tuple[int, float]]] = []
    for point in points:
        if runs and runs[-1][-1][0] == point[0] - 1:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _shortened(parameter: str) -> str:
    return parameter if len(parameter) <= _LONGEST_NAME else f"\u2026{parameter[1 - _LONGEST_NAME :]}"


def _linear(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value is on the axis, from 0 to 1, and the round numbers to write at it."""
    # Not less than a hundredth of the numbers: rounding is no slope.
    room = max((high - low) * 0.06, max(abs(low), abs(high)) * 0.01) or 1.0
    low, high = low - room, high + room
    step = _round_step((high - low) / 5)
    ticks = [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda value: (value - low) / (high - low), ticks


def _logarithmic(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """The same for an axis on which equal factors are equally long."""
    bottom, top = math.log(low), math.log(high)
    room = (top - bottom) * 0.08
    bottom, top = bottom - room, top + room
    base = 2 if top - bottom < math.log(64) else 10
    powers = range(math.ceil(bottom / math.log(base)), math.floor(top / math.log(base)) + 1)
    every = max(1, math.ceil(len(powers) / 7))
    ticks = [float(base) ** power for power in powers if power % every == 0]
    return lambda value: (math.log(value) - bottom) / (top - bottom), ticks


def _round_step(step: float) -> float:
    unit = 10.0 ** math.floor(math.log10(step))
    return next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= step)


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _has_place(ratio: float | None) -> TypeGuard[float]:
    return _is_finite(ratio) and ratio > 0
