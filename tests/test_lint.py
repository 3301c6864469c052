"""ruff over everything, mypy, strict, over what is installed. What they look for is in pyproject.toml."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def installed(tool):
    return pytest.mark.skipif(importlib.util.find_spec(tool) is None, reason=f"needs {tool}, of the extra 'test'")


def clean(*command, cwd):
    done = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@installed("ruff")
def test_ruff_finds_nothing():
    clean("ruff", "check", "--no-cache", ".", cwd=ROOT)


@installed("mypy")
def test_mypy_finds_nothing(tmp_path):
    """In the layout of an installation: `patches/` is `ds_gradfix.patches` there only."""
    sources = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(ROOT / "ds_gradfix", tmp_path / "ds_gradfix", ignore=sources)
    shutil.copytree(ROOT / "patches", package / "patches", ignore=sources)
    cache = ROOT / ".mypy_cache"  # torch's types take twenty seconds to read the first time
    clean("mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, cwd=tmp_path)
