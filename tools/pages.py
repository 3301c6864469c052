"""Write docs/patches: a page for each patch, from its card, its change and what was measured: `python tools/pages.py`.

The change is that of the newest release which has the defect, whose sources come from the package index (see
tools/releases.py). Of DeepSpeed's code a page quotes the lines that go, and no others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import matrix
import readme
import releases

from ds_gradfix.cli.diff import source_of, steered
from ds_gradfix.registry import Correction, Entry, Finding, Patch, Rewrite, Steer, Verdict, discover, make_plan
from ds_gradfix.settings import Settings
from ds_gradfix.source import diff, rewrite

FOLDER = readme.DOCS / "patches"


def page(patch: Patch) -> str:
    """Raises releases.Unavailable where the release's sources can't be had."""
    newest = readme.releases_of(patch)[-1]
    upstream = ", ".join(f"[{_number(url)}]({url})" for url in patch.upstream) or "not reported, as far as we know"
    lines = [
        f"# {patch.id}",
        "",
        f"{patch.title}.",
        "",
        "| | |",
        "|---|---|",
        f"| DeepSpeed | {readme.span(patch)} |",
        f"| upstream | {upstream} |",
        f"| corrects | {', '.join(f'`{target.qualname}`' for target in patch.targets)} |",
        f"| card | [{_file(patch.affects)}](../../{_file(patch.affects)}) |",
        "",
        f"**What one sees.** {patch.symptom}",
        "",
        f"**What goes wrong.** {patch.cause}",
        "",
        f"**What the patch does.** {patch.fix}",
        "",
        f"**When it goes.** {patch.retire}",
        *_measured(patch),
        "",
        f"## The change, on DeepSpeed {newest}",
        *_change(_entry(patch, newest)),
    ]
    return "\n".join(lines) + "\n"


def _number(url: str) -> str:
    return f"#{url.rpartition('/')[2]}"


def _file(function: object) -> str:
    """A file of ours, from the root."""
    return str(Path(inspect.getfile(inspect.unwrap(function))).resolve().relative_to(readme.ROOT))  # type: ignore[arg-type]


def _entry(patch: Patch, release: str) -> Entry:
    return make_plan(releases.as_installed(release), [patch], Settings()).entries[0]


# -------------------------------------------------------------------------------------- measured


@cache
def _every() -> dict[str, list[matrix.Row]]:
    results = matrix.read()
    return {release: matrix.rows_of(results, release) for release in results["releases"]}


def _measured(patch: Patch) -> list[str]:
    """The rows of the matrix in which this patch's defect bites."""
    mine = dict.fromkeys(
        one.name for rows in _every().values() for one in rows if one.affected and patch.id in one.patches
    )
    rows = [line for name in mine for line in matrix.lines_of(name, _every())]
    if not rows:
        return []
    heading = ["", "## Measured", "", "What was measured over what is right; see [the matrix](../matrix.md).", ""]
    return [*heading, *matrix.HEADING, *rows]


# ---------------------------------------------------------------------------------------- change


def _change(entry: Entry) -> Iterator[str]:
    for correction, finding in zip(entry.patch.corrections, entry.findings, strict=True):
        if finding.verdict is Verdict.DEFECTIVE:
            yield from ("", f"### `{finding.target}`", "")
            yield from _one(correction, finding)


def _one(correction: Correction, finding: Finding) -> Iterator[str]:
    if isinstance(correction, Steer) and not correction.values:
        yield "Nothing is changed here: by its source one knows that the defect is there."
    elif isinstance(correction, Steer):
        yield "No code goes in: on an engine that needs it, what the function obeys is set."
        yield from _block("python", "\n".join(steered(correction)))
    elif isinstance(correction, Rewrite):
        function = finding.source()
        changed = diff(function, rewrite(function, correction.rules), context=0)
        yield "Lines of the installed function change:"
        yield from _block("diff", changed)
        used = dict.fromkeys(re.findall(r"_ds_gradfix\.(\w+)", changed))
        helpers = [getattr(correction.helper, name) for name in used]
        functions = [helper for helper in helpers if inspect.isroutine(helper)]
        if functions:
            yield from ("", f"`_ds_gradfix` is ours, from `{_file(functions[0])}`:")
            yield from _block("python", "\n\n".join(dedent(source_of(function)).rstrip() for function in functions))
    else:
        yield f"A function of ours, from `{_file(correction.body)}`, runs in its place, and may call the installed one:"
        yield from _block("python", source_of(correction.body).rstrip())


def _block(language: str, text: str) -> list[str]:
    return ["", f"```{language}", text, "```"]


def pages() -> dict[Path, str]:
    """Every page, by its file."""
    return {FOLDER / f"{patch.id}.md": page(patch) for patch in discover(plugins=False)}


if __name__ == "__main__":
    found = pages()
    for old in set(FOLDER.glob("*.md")) - {*found, FOLDER / "README.md"}:
        old.unlink()
    for file, text in found.items():
        file.write_text(text, encoding="utf-8")
