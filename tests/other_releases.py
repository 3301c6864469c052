"""Older DeepSpeed releases for the tests, each in a folder of its own to put in PYTHONPATH.

They are installed from the package index on first use, into the ignored `.cache/releases` (or where
GRADFIX_TEST_RELEASES says), and kept. DeepSpeed's setup imports torch, so the build uses this environment; nothing is
compiled and nothing but DeepSpeed is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("GRADFIX_TEST_RELEASES") or Path(__file__).resolve().parents[1] / ".cache" / "releases")


@cache
def folder_of(release: str) -> str:
    """What PYTHONPATH must be for ranks with this release. Skips the test where it can't be had, and says so."""
    folder = FOLDER / release
    if not (folder / "deepspeed").is_dir():
        part = FOLDER / f".{release}.{os.getpid()}"
        command = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(part)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command, f"deepspeed=={release}"],
            env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"DeepSpeed {release} can't be installed here: {done.stderr.strip()[-300:]}")
        part.replace(folder)
    return str(folder)
