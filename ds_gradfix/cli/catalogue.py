"""`ds-gradfix list`: every patch, from its card, with its verdict on the installed DeepSpeed."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from ds_gradfix.cli._screen import console, print_hanging, print_json
from ds_gradfix.installed import find_installed
from ds_gradfix.registry import Entry, Verdict, discover, make_plan
from ds_gradfix.settings import Settings

_COLOURS = {Verdict.DEFECTIVE: "bold bright_red", Verdict.FIXED: "green", Verdict.UNRECOGNISED: "bold"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `list` accepts."""
    parser.description = "Every patch, with its verdict on the installed DeepSpeed. Imports neither it nor torch."
    parser.add_argument("--json", action="store_true", help="one JSON document, with the cause and fix of each defect")


def run(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    plan = make_plan(find_installed(), discover(), Settings())
    if args.json:
        print_json({"deepspeed": plan.installed.deepspeed, "patches": [_data(entry) for entry in plan.entries]})
        return 0
    screen = console()
    for entry in plan.entries:
        _show(screen, entry)
    screen.print("To see what a patch changes: ds-gradfix diff PATCH")
    return 0


def _show(screen: Console, entry: Entry) -> None:
    patch = entry.patch
    screen.print(Text(patch.id, "bold"))
    rows = [("title", patch.title), ("symptom", patch.symptom), *(("upstream", link) for link in patch.upstream)]
    rows += [("plug-in", patch.plugin)] if patch.plugin else []
    for label, text in rows:
        print_hanging(screen, Text(f"  {label}"), Text(text), indent=12)
    here = Text.assemble((entry.verdict.value, _COLOURS.get(entry.verdict, "")), f": {entry.reason}")
    print_hanging(screen, Text("  here"), here, indent=12)
    screen.print()


def _data(entry: Entry) -> dict[str, Any]:
    patch = entry.patch
    return {
        "id": patch.id,
        "title": patch.title,
        "symptom": patch.symptom,
        "cause": patch.cause,
        "fix": patch.fix,
        "upstream": list(patch.upstream),
        "retire": patch.retire,
        "plugin": patch.plugin,
        "targets": [str(target) for target in patch.targets],
        "verdict": entry.verdict.value,
        "reason": entry.reason,
    }
