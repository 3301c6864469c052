"""Write what README.md and docs say of patches and settings from the cards and the settings: `python tools/readme.py`.

The pages of the patches, which show DeepSpeed's functions, are written by tools/pages.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from ds_gradfix.errors import SettingsError
from ds_gradfix.registry import Patch, Verdict, catalogue, discover, releases_with
from ds_gradfix.settings import SECTION, Settings, read_section, variable

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"


# --------------------------------------------------------------------------------------- patches


def patch_table(folder: str) -> str:
    """A row for each patch; ``folder`` leads from the page to those of the patches."""
    return "\n".join(f"| {link(patch, folder)} | {patch.title} | {span(patch)} |" for patch in discover(plugins=False))


def link(patch: Patch, folder: str) -> str:
    return f"[`{patch.id}`]({folder}{patch.id}.md)"


def releases_of(patch: Patch) -> list[str]:
    """The releases in which a patch has something to correct: they have its defect, and what it needs."""
    mine = [entry for entry in catalogue() if entry["verdicts"].get(patch.id) == Verdict.DEFECTIVE.value]
    defective = frozenset(release for entry in mine for release in entry["releases"])
    needed = [releases_with(str(target)) for target in patch.needs]
    return sorted(defective.intersection(*needed), key=Version)


def span(patch: Patch) -> str:
    """The first and the last of them, in words."""
    releases = releases_of(patch)
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def symptoms(ids: str) -> str:
    """A line for each of the patches named: what one sees of its defect, and where."""
    patches = {patch.id: patch for patch in discover(plugins=False)}
    named = [patches[patch_id] for patch_id in ids.split()]
    return "\n".join(f"- {link(patch, 'patches/')} ({span(patch)}): {patch.symptom}" for patch in named)


# -------------------------------------------------------------------------------------- settings


def settings() -> str:
    return "\n\n".join(_setting(setting) for setting in dataclasses.fields(Settings))


def _setting(setting: dataclasses.Field[object]) -> str:
    name, default = setting.name, setting.default
    words = "none" if default in (None, ()) else f"`{default}`".replace("False", "false").replace("True", "true")
    key = f'`"{name}"` in `"{SECTION}"`' if _stands_in_a_section(name) else "none: a configuration is read too late"
    rows = [
        ("argument", f"`enable({name}=...)`"),
        ("variable", f"`{variable(name)}`"),
        ("key", key),
        ("allowed", setting.metadata["read"].__doc__.removesuffix(".")),
        ("default", words),
    ]
    lines = [f"## {name}", "", setting.metadata["doc"], "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {label} | {text} |" for label, text in rows)])


def _stands_in_a_section(name: str) -> bool:
    """Whether a section may give this setting some value."""
    for value in (True, "sum", "error", "patch-id"):
        try:
            read_section({name: value})
        except SettingsError:
            continue
        return True
    return False


# ----------------------------------------------------------------------------------------- pages


def written(text: str, folder: str = "docs/patches/") -> str:
    """A page with its tables of patches as they should be."""
    pattern = re.compile(r"(\| patch \| what is wrong[^\n]*\n\|[-|]+\n)(?:\|[^\n]*\n)*")
    return pattern.sub(lambda found: f"{found.group(1)}{patch_table(folder)}\n", text)


def with_symptoms(text: str) -> str:
    """The page of symptoms: under each `<!-- patches: ID ... -->` the lines of these patches."""
    pattern = re.compile(r"(<!-- patches: ([^>]+) -->\n)(?:- [^\n]*\n)*")
    return pattern.sub(lambda found: f"{found.group(1)}{symptoms(found.group(2))}\n", text)


def with_settings(text: str) -> str:
    """The page of settings: everything behind the mark."""
    head, mark, _ = text.partition("<!-- settings -->\n")
    return f"{head}{mark}\n{settings()}\n"


PAGES: dict[Path, Callable[[str], str]] = {
    README: written,
    DOCS / "patches" / "README.md": lambda text: written(text, ""),
    DOCS / "configuration.md": with_settings,
    DOCS / "troubleshooting.md": with_symptoms,
}
"""Each page, and what brings it up to date."""


if __name__ == "__main__":
    for page, renew in PAGES.items():
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
