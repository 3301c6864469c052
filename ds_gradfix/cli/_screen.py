"""What the commands write: words for people, wrapped to the screen, or one JSON document for machines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

SCHEMA = 1
"""The version of every JSON document; it changes when a key that was there goes or means something else."""


def console() -> Console:
    """The screen: nothing is coloured by guess, and no text is taken for markup. 80 columns wide where it is a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path or a line of source that the terminal cannot show must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def print_hanging(screen: Console, label: Text, text: Text, indent: int) -> None:
    """Print `text` behind `label`, wrapped to the screen, every line of it starting in column `indent`."""
    lead = label.copy()
    for line in text.wrap(screen, max(1, screen.width - indent)):
        lead.pad_right(indent - lead.cell_len)
        line.rstrip()
        screen.print(Text.assemble(lead, line), soft_wrap=True)
        lead = Text()


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document, with its schema's version first."""
    print(json.dumps({"schema_version": SCHEMA, **document}, indent=2))
