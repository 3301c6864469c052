"""Other releases of DeepSpeed that a test may run its ranks with: plain folders, named by version, in one folder.

That folder is named by DS_GRADFIX_RELEASES. The variable is taken out of the environment: ds-gradfix, on in a rank,
would refuse it as no setting of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = os.environ.pop("DS_GRADFIX_RELEASES", None)


def folder_of(release: str) -> str:
    """What PYTHONPATH must be for ranks with this release; the test is skipped where it is not at hand."""
    if FOLDER is None:
        pytest.skip("DS_GRADFIX_RELEASES names no folder with other releases of DeepSpeed")
    folder = Path(FOLDER, release).resolve()
    if not folder.is_dir():
        pytest.skip(f"DS_GRADFIX_RELEASES has no DeepSpeed {release}")
    return str(folder)
