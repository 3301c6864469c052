"""A report as one HTML page: it asks nothing of anybody, neither a script nor a file nor the network."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone

from ds_gradfix import __version__
from ds_gradfix.verify._markup import Markup, element
from ds_gradfix.verify.compare import Number, Result, Step
from ds_gradfix.verify.picture import Series, curves, legend, ratios
from ds_gradfix.verify.report import INVARIANTS, RIGHT, WRONG, Report, circumstances, lines, measured_runs, shown_step
from ds_gradfix.verify.report import legend as words_of_table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_WORDS = {RIGHT: "is right", WRONG: "is wrong"}
_KINDS = {True: "right", False: "wrong", None: "unknown"}
_SIGNS = {True: "\u2713 ", False: "\u2717 ", None: ""}

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2024; --faint: #59626b; --rule: #d5dae0; --raised: #f4f6f8;
  --stock: #b8500a; --corrected: #0b62a8; --reference: #9aa4ae; --right: #14713a; --wrong: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e4e8ec; --faint: #a3adb8;
  --rule: #3a424a; --raised: #1e2328; --stock: #ff9f5a; --corrected: #74b8ff; --reference: #6d7781; --right: #6fd394;
  --wrong: #ff8a80; } }
@media print { :root { color-scheme: light; } figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; }
code, pre { font: .875rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--raised); border: 1px solid var(--rule); border-radius: 4px;
  padding: .6rem .8rem; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: min(100%, 26rem); }
caption { text-align: left; color: var(--faint); padding-bottom: .3rem; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; }
td.number, th.number { text-align: right; padding: .2rem 0 .2rem 1rem; }
td.number { white-space: nowrap; }
.scroll { overflow-x: auto; }
.facts th { white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
.verdict { font-size: 1.15rem; font-weight: 600; margin: .5rem 0 1rem; }
.right { color: var(--right); } .wrong { color: var(--wrong); font-weight: 600; }
.unknown, .faint { color: var(--faint); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: .5rem 0; max-width: 34rem; } figcaption { font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0 0 .3rem; padding: 0;
  font-size: .875rem; } .legend svg { vertical-align: middle; }
.picture { display: block; width: 100%; height: auto; }
svg text { font: 12.5px system-ui, sans-serif; fill: var(--text); paint-order: stroke; stroke: var(--page);
  stroke-width: 4px; }
svg .grid { stroke: var(--rule); } svg .one { stroke: var(--text); }
svg .line { fill: none; stroke-width: 2; } svg .line.reference, svg .line.other { stroke-width: 6; opacity: .55; }
svg .line.other { stroke-dasharray: 7 5; } svg .line.stock { stroke-dasharray: 5 4; }
svg .stock { stroke: var(--stock); fill: none; stroke-width: 2; }
svg .corrected { stroke: var(--corrected); } svg path.corrected { fill: var(--corrected); }
svg .reference, svg .other { stroke: var(--reference); }
svg circle.reference, svg circle.other { fill: var(--reference); }
@media (max-width: 30rem) { table { font-size: .8125rem; } td.number, th.number { padding-left: .6rem; }
  svg text { font-size: 14.5px; } }
"""


def page(report: Report, command: str) -> str:
    """The page as text. `command` is what measures the same again."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", f"ds-gradfix verify: {report.config}"),
        element("style", Markup(STYLE)),
    )
    measured = (*_refusals(report.results), *_measured(measured_runs(report)))
    said = (_heading(report), _verdicts(report), *measured, _circumstances(report), _again(report, command))
    body = element("body", element("main", *said))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _heading(report: Report) -> Markup:
    run, result = list(report.results.items())[-1]
    right = None if result.error else result.right
    words = f"{_SIGNS[right]}The {run} run {_WORDS.get(report.status, report.status)}."
    return element(
        "header",
        element("h1", report.config),
        *(element("p", line) for line in circumstances(report)),
        element("p", words, class_=f"verdict {_KINDS[right]}"),
    )


def _section(title: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), *content)


def _verdicts(report: Report) -> Markup:
    rows = [
        _row(invariant, *(_judged(result.verdicts[invariant].words, result.verdicts[invariant].right)
                          for result in report.results.values()))
        for invariant in INVARIANTS
    ]  # fmt: skip
    heads = [element("tr", _head("invariant"), *map(_head, report.results))]
    caption = "Each run over all steps, against the same training in float64 without DeepSpeed"
    notes = (element("p", f"Note: {note}.", class_="faint") for note in report.notes)
    return _section("Verdicts", _table(caption, heads, rows), *notes)


def _refusals(results: Mapping[str, Result]) -> Iterable[Markup]:
    for run, result in results.items():
        if result.error:
            yield _section(f"The {run} run could not run", element("pre", result.error.strip()))


def _measured(measured: Mapping[str, Result]) -> Iterable[Markup]:
    if not measured:
        return
    shown = shown_step(measured)
    names = [gradient.name for gradient in next(iter(measured.values())).steps[shown].gradients]
    compared = {
        name: {run: result.steps[shown].gradients[index].ratio for run, result in measured.items()}
        for index, name in enumerate(names)
    }
    title = f"Ratio of each gradient to the reference's, step {shown + 1}; 1 is right"
    picture = _figure(title, legend({run: run for run in measured}), ratios("ratios", title, compared))
    yield _section("Gradients, norm and update", picture, _compared(measured, shown))
    loss, norm = _series(measured, lambda step: step.loss), _series(measured, lambda step: step.norm)
    figures = [
        _figure(title, legend({line.label: line.kind for line in series}), curves(name, title, series))
        for name, title, series in (("loss", "Loss", loss), ("norm", "Gradient norm, before clipping", norm))
    ]
    said = ["Each step has data of its own, so the loss need not fall."]
    if len(loss) > len(measured) + 1:
        said.append("In half precision a run's reference takes each step from where the run stands.")
    words, pictures = element("p", " ".join(said)), element("div", *figures, class_="pictures")
    yield _section("Loss and norm of each step", words, pictures, _by_step(loss, norm))


def _figure(title: str, *content: Markup) -> Markup:
    return element("figure", element("figcaption", title), *content)


def _compared(measured: Mapping[str, Result], shown: int) -> Markup:
    runs = (element("th", run, scope="colgroup", colspan=2, class_="number") for run in measured)
    columns = [_head(title, "number") for _ in measured for title in ("ratio", "error")]
    heads = [
        element("tr", element("th", "gradient of", scope="col", rowspan=2),
                element("th", "size", scope="col", rowspan=2, class_="number"), *runs),
        element("tr", *columns),
    ]  # fmt: skip
    rows = []
    for line in lines(measured, shown):
        cells = [_number(text, cell.right) for cell in line.cells for text in (cell.ratio, cell.marked_error.strip())]
        rows.append(_row(line.name, _number(line.size), *cells))
    return _table(words_of_table(measured, shown), heads, rows)


def _series(measured: Mapping[str, Result], number: Callable[[Step], Number]) -> list[Series]:
    """Reference and runs, each with its numbers; one reference where the runs' do not differ."""
    expected = {run: [number(step).expected for step in result.steps] for run, result in measured.items()}
    if len({tuple(f"{value:.9g}" for value in values) for values in expected.values()}) == 1:
        references = [Series("reference", "reference", next(iter(expected.values())))]
    else:
        kinds = zip(("reference", "other"), expected.items())
        references = [Series(f"reference of {run}", kind, values) for kind, (run, values) in kinds]
    runs = [Series(run, run, [number(step).got for step in result.steps]) for run, result in measured.items()]
    return [*references, *runs]


def _by_step(loss: Sequence[Series], norm: Sequence[Series]) -> Markup:
    groups = (element("th", title, scope="colgroup", colspan=len(series), class_="number")
              for title, series in (("loss", loss), ("norm", norm)))  # fmt: skip
    heads = [
        element("tr", element("th", "step", scope="col", rowspan=2), *groups),
        element("tr", *(_head(series.label, "number") for series in (*loss, *norm))),
    ]
    rows = [
        _row(str(step), *(_number("-" if value is None else f"{value:.6g}") for value in values))
        for step, values in enumerate(zip(*(series.values for series in (*loss, *norm))), 1)
    ]
    return _table("Loss: mean over ranks and micro-batches", heads, rows)


def _circumstances(report: Report) -> Markup:
    versions = list(report.results.values())[-1].versions
    facts = {
        "ds-gradfix": __version__,
        "DeepSpeed": versions.get("deepspeed", "unknown: the run was refused"),
        "torch": versions.get("torch", ""),
        "backend": versions.get("backend", ""),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.platform()}, {os.cpu_count()} CPUs",
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("DS_GRADFIX")},
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    rows = [_row(name, element("td", value)) for name, value in facts.items() if value]
    return _section("Environment", _table("What measured", [], rows, class_="facts"))


def _again(report: Report, command: str) -> Markup:
    config = json.dumps(next(iter(report.results.values())).case.config, indent=2)
    return _section("The job", element("p", "Measure it again:"), element("pre", command),
                    element("p", "The configuration, as far as it was measured:"), element("pre", config))  # fmt: skip


def _table(caption: str, heads: Sequence[Markup], rows: Sequence[Markup], **attributes: str) -> Markup:
    """A table that scrolls by itself where the screen is narrower, by keyboard too."""
    head = [element("thead", *heads)] if heads else []
    table = element("table", element("caption", caption), *head, element("tbody", *rows), **attributes)
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _row(title: str, *cells: Markup) -> Markup:
    return element("tr", element("th", title, scope="row"), *cells)


def _head(title: str, class_: str = "") -> Markup:
    return element("th", title, scope="col", **({"class_": class_} if class_ else {}))


def _judged(text: str, right: bool | None) -> Markup:
    return element("td", f"{_SIGNS[right]}{text}", class_=_KINDS[right])


def _number(text: str, right: bool | None = None) -> Markup:
    return element("td", text, class_=f"number{' wrong' if right is False else ''}")
