"""The generated tables of README.md are what the cards and the settings say today."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "readme.py")
    assert spec is not None and spec.loader is not None
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.written(text) == text, "run: python tools/readme.py"
