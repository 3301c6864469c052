"""The oldest wrapt that is allowed, on real ranks. All other tests run with the newest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import releases
from launching import launch
from test_engine import results

OLDEST = "1.16.0"


@pytest.fixture(scope="module")
def oldest() -> str:
    """What PYTHONPATH must be. Skips the tests where it can't be had, and says so."""
    folder = releases.FOLDER.parent / f"wrapt-{OLDEST}-py{sys.version_info.major}{sys.version_info.minor}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"wrapt=={OLDEST}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"wrapt {OLDEST} can't be had here: {done.stderr.strip().splitlines()[-1]}")
    found = subprocess.run(
        [sys.executable, "-c", "import wrapt; print(wrapt.__version__, wrapt.__file__)"],
        env={"PYTHONPATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == [OLDEST, str(Path(folder, "wrapt", "__init__.py"))]
    return str(folder)


def test_its_hooks_correct_what_is_imported_later(oldest: str) -> None:
    for rank in launch("engines.py", "plain", env={"PYTHONPATH": oldest, "DS_GRADFIX": "1"}):
        assert rank.status == 0, rank.output[-3000:]
        assert results(rank)["plain"]["ratio"] == 1.0


def test_its_hooks_correct_what_is_there_already_and_leave_nothing(oldest: str) -> None:
    for rank in launch("engines.py", "late", env={"PYTHONPATH": oldest}):
        assert rank.status == 0, rank.output[-3000:]
        assert results(rank)["late"]["ratios"] == [0.5, 1.0, 0.5]
