"""`ds-gradfix diff PATCH`: exactly what a patch changes in the installed DeepSpeed."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from ds_gradfix.cli._screen import console, print_hanging
from ds_gradfix.errors import GradfixError, RewriteError
from ds_gradfix.installed import find_installed
from ds_gradfix.registry import Correction, Finding, Rewrite, Steer, Verdict, discover, make_plan
from ds_gradfix.settings import Settings
from ds_gradfix.source import Function, diff, rewrite

_COLOURS = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `diff` accepts."""
    parser.description = (
        "The difference between the installed function and the corrected one, for a patch that rewrites it; the"
        " installed function and the one that stands in for it, for a patch that replaces it."
    )
    parser.add_argument("patch", metavar="PATCH", help="the id of a patch; ds-gradfix list has them")


def run(args: argparse.Namespace) -> int:
    """Print what the patch changes. Raises GradfixError for an id that no patch has, and without a DeepSpeed."""
    plan = make_plan(find_installed(), discover(), Settings())
    entry = plan.entry(args.patch)
    if plan.installed.deepspeed_path is None:
        raise GradfixError("DeepSpeed is not installed here, so there is nothing to compare with")
    screen = console()
    found = f"{entry.patch.id} on DeepSpeed {plan.installed.deepspeed}: {entry.verdict.value}: {entry.reason}"
    print_hanging(screen, Text(), Text(found), indent=0)
    for correction, finding in zip(entry.patch.corrections, entry.findings, strict=True):
        screen.print()
        _show(screen, correction, finding, forced=not entry.act)
    return 0


def _show(screen: Console, correction: Correction, finding: Finding, forced: bool) -> None:
    if finding.function is None or finding.verdict in (Verdict.ABSENT, Verdict.FIXED):
        screen.print(f"Nothing to correct in {finding.target}: {finding.verdict.value}, {finding.reason}.")
        return
    if isinstance(correction, Steer):
        _print_code(screen, Text(f"It sets, on an engine that needs it, what {finding.target} obeys:"))
        for line in steered(correction):
            _print_code(screen, Text(f"    {line}"))
        return
    verb = "rewrite" if isinstance(correction, Rewrite) else "replace"
    _print_code(screen, Text(f"{f'Forced, it would {verb}' if forced else f'It {verb}s'} {finding.target}:"))
    if isinstance(correction, Rewrite):
        _show_rewrite(screen, correction, finding.source())
    else:
        function = finding.source()
        _show_source(screen, f"installed: {function.path}:{_first_line(function)}", _text(function))
        _show_source(screen, f"in its place: {_place(correction.body)}", source_of(correction.body))


def steered(correction: Steer) -> list[str]:
    """What it sets, as assignments; where a function makes the value, a call of it."""
    values = correction.values.items()
    return [f"engine.{name} = {f'{v.__name__}(engine)' if callable(v) else repr(v)}" for name, v in values]


def _show_rewrite(screen: Console, correction: Rewrite, function: Function) -> None:
    try:
        changed = diff(function, rewrite(function, correction.rules))
    except RewriteError as error:
        screen.print(f"It does not fit: {error}")
        return
    for line in changed.splitlines():
        colour = next((colour for start, colour in _COLOURS if line.startswith(start)), "")
        _print_code(screen, Text(line, colour))


def _show_source(screen: Console, heading: str, source: str) -> None:
    screen.print()
    _print_code(screen, Text(heading, "bold"))
    _print_code(screen, Text(source.rstrip("\n")))


def _print_code(screen: Console, text: Text) -> None:
    """Source and names are never wrapped: they may be on their way into a file, or into an editor."""
    screen.print(text, soft_wrap=True)


def _first_line(function: Function) -> int:
    return min([function.line, *(decorator.lineno for decorator in function.node.decorator_list)])


def _text(function: Function) -> str:
    """The function as it stands in its file, comments and all."""
    lines = function.path.read_text(encoding="utf-8").split("\n")
    return "\n".join(lines[_first_line(function) - 1 : function.node.end_lineno])


def _place(body: Callable[..., Any]) -> str:
    code = inspect.unwrap(body).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def source_of(body: Callable[..., Any]) -> str:
    """Our own function's text, comments and all."""
    try:
        return inspect.getsource(body)
    except OSError:
        return "(its source is not at hand)"
