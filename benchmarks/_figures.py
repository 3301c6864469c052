"""Medians of paired measurements with their spread, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
"""One figure: ``case``, ``value`` (a median), ``interval`` (its 95% confidence interval), ``quartiles`` of single
rounds, ``unit``, ``limit`` (None if nothing is promised) and ``verdict``."""


def figure(case: str, values: Sequence[float], unit: str = "ratio", limit: float | None = None) -> Row:
    """The median of one value a round, against what it may be at most."""
    low, _, high = statistics.quantiles(values, n=4)
    value, interval = statistics.median(values), median_interval(values)
    return {
        "case": case,
        "value": value,
        "interval": interval,
        "quartiles": [low, high],
        "unit": unit,
        "limit": limit,
        "verdict": verdict(value, interval, limit),
    }


def counted(case: str, number: float, unit: str) -> Row:
    """A figure without a spread: a count."""
    nothing = dict.fromkeys(("interval", "quartiles", "limit"))
    return {"case": case, "value": number, "unit": unit, "verdict": "", **nothing}


def verdict(value: float, interval: Sequence[float], limit: float | None) -> str:
    if limit is None:
        return ""
    if value <= limit:
        return "holds"
    return "within the noise" if interval[0] <= limit else "MISSED"


def median_interval(values: Sequence[float]) -> list[float]:
    """The 95% confidence interval of the median, whatever the distribution: two order statistics."""
    reach = round(0.98 * len(values) ** 0.5)
    middle = len(values) // 2
    ordered = sorted(values)
    return [ordered[max(middle - reach, 0)], ordered[min(middle + reach, len(values) - 1)]]


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Ours over theirs, round by round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def table(title: str, rows: Iterable[Row]) -> str:
    """The figures for people."""
    lines = [title, f"{'':48}{'median':>9}  {'95% interval':19}{'at most':>8}"]
    for row in rows:
        digits = 0 if row["interval"] is None else 3
        spread = "" if row["interval"] is None else "{:.3f} .. {:.3f}".format(*row["interval"])
        limit = "" if row["limit"] is None else f"{row['limit']:g}"
        line = f"{row['case']:48}{row['value']:9.{digits}f}  {spread:19}{limit:>8}  {row['unit']}  {row['verdict']}"
        lines.append(line.rstrip())
    return "\n".join(lines)
