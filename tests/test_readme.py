"""The documentation says what the cards, the settings and the files are today."""

import re
from pathlib import Path

import pages
import pytest
import readme
import releases

from ds_gradfix.registry import discover

TEXTS = sorted([*readme.ROOT.glob("*.md"), *readme.DOCS.glob("**/*.md")])


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: str(page.relative_to(readme.ROOT)))
def test_what_is_written_from_cards_and_settings_is_not_stale(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert readme.PAGES[page](text) == text, "run: python tools/readme.py"


def test_every_patch_has_its_page_and_it_is_not_stale() -> None:
    try:
        expected = pages.pages()
    except releases.Unavailable as error:
        pytest.skip(f"the sources that the pages are about can't be had here: {error}")
    there = set(pages.FOLDER.glob("*.md")) - {pages.FOLDER / "README.md"}
    stale = [file.name for file, text in expected.items() if file not in there or file.read_text("utf-8") != text]
    assert (stale, there - set(expected)) == ([], set()), "run: python tools/pages.py"


def test_every_patch_stands_under_a_symptom() -> None:
    named = re.findall(r"<!-- patches: ([^>]+) -->", (readme.DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert set(" ".join(named).split()) == {patch.id for patch in discover(plugins=False)}


def test_a_span_begins_where_what_the_patch_needs_does() -> None:
    spans = {patch.id: readme.span(patch) for patch in discover(plugins=False)}
    assert spans["folded-expert-norm"].startswith("0.19.3 ")  # what it corrects is there from 0.17.1 on
    assert spans["fp16-zero0-loss-scale"].startswith("0.18.3 ")


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(readme.ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file, and to a heading of it as GitHub names them."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _without_code(page)):
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", _without_code(file), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


def _without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
