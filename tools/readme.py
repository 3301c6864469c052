"""Write the tables of README.md from the cards and the settings: `python tools/readme.py`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from packaging.version import Version

from ds_gradfix.registry import Patch, Verdict, catalogue, discover
from ds_gradfix.settings import Settings, variable

README = Path(__file__).resolve().parent.parent / "README.md"


def patch_table() -> str:
    return "\n".join(f"| `{patch.id}` | {patch.symptom} | {_releases(patch)} |" for patch in discover(plugins=False))


def _releases(patch: Patch) -> str:
    """The releases in which a patch has something to correct."""
    mine = [entry for entry in catalogue() if entry["verdicts"].get(patch.id) == Verdict.DEFECTIVE.value]
    releases = sorted({Version(release) for entry in mine for release in entry["releases"]})
    return f"{releases[0]} to {releases[-1]}"


def settings_table() -> str:
    rows = []
    for setting in dataclasses.fields(Settings):
        default = "none" if setting.default in (None, ()) else f"`{setting.default}`".replace("False", "false")
        rows.append(f"| `{setting.name}` | `{variable(setting.name)}` | {setting.metadata['doc']} | {default} |")
    return "\n".join(rows)


def written(text: str) -> str:
    """The README with its tables as they should be."""
    for heading, table in (("| patch |", patch_table()), ("| setting |", settings_table())):
        pattern = re.compile(rf"({re.escape(heading)}[^\n]*\n\|[-|]+\n)(?:\|[^\n]*\n|[A-Z ]+TABLE\n)*")
        text = pattern.sub(lambda found, rows=table: found.group(1) + rows + "\n", text)
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
