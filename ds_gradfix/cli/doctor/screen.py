"""How the doctor's findings are shown: for a screen, and as a block for an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.text import Text

from ds_gradfix.cli._screen import print_hanging
from ds_gradfix.cli.doctor.outcome import ACT, OK, UNKNOWN, Outcome

_COLOURS = {OK: "green", ACT: "bold red", UNKNOWN: "bold magenta"}


def show(screen: Console, outcomes: Mapping[str, Outcome], every_item: bool) -> None:
    """Print every outcome, then what they come to."""
    indent = 2 + max(len(outcome.status) for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        summary = Text.assemble((f"{name}: ", "bold"), outcome.summary)
        print_hanging(screen, Text(outcome.status, _COLOURS[outcome.status]), summary, indent)
        for line in _lines(outcome, every_item):
            print_hanging(screen, Text(), Text(line), indent + 2)
        for line in outcome.to_do:
            print_hanging(screen, Text(), Text(f"To do: {line}", "bold"), indent + 2)
    screen.print()
    screen.print(conclusion(outcomes))


def conclusion(outcomes: Mapping[str, Outcome]) -> str:
    said = []
    for status, words in ((ACT, "Something to act on"), (UNKNOWN, "Could not be looked at")):
        names = [name for name, outcome in outcomes.items() if outcome.status == status]
        if names:
            said.append(f"{words}: {', '.join(names)}.")
    return " ".join(said) or "All is well: nothing to act on."


def markdown(outcomes: Mapping[str, Outcome], every_item: bool) -> str:
    """The same to paste into an issue. The home folder is not named in it."""
    lines = ["### ds-gradfix doctor", "", f"On {platform.platform()}. {conclusion(outcomes)}", ""]
    lines += ["| check | status | found |", "|---|---|---|"]
    lines += [f"| {name} | {outcome.status} | {_cell(outcome.summary)} |" for name, outcome in outcomes.items()]
    lines += ["", "<details><summary>Details</summary>", "", "```text", *_details(outcomes, every_item), "```", ""]
    home = os.path.expanduser("~")
    text = "\n".join([*lines, "</details>"])
    return text.replace(home, "~") if len(home) > 1 else text


def _details(outcomes: Mapping[str, Outcome], every_item: bool) -> Iterator[str]:
    for name, outcome in outcomes.items():
        yield f"{name}: {outcome.status}"
        yield from (f"  {line}" for line in _lines(outcome, every_item))
        yield from (f"  To do: {line}" for line in outcome.to_do)


def _lines(outcome: Outcome, every_item: bool) -> list[str]:
    return list(outcome.listing if every_item and outcome.listing else outcome.details)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
