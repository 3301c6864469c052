"""Older DeepSpeed releases for the tests; see tools/releases.py for where they come from and stay."""

from __future__ import annotations

from functools import cache

import pytest
import releases


@cache
def folder_of(release: str) -> str:
    """What PYTHONPATH must be for ranks with this release. Skips the test where it can't be had, and says so."""
    try:
        return str(releases.folder_of(release))
    except releases.Unavailable as error:
        pytest.skip(f"DeepSpeed {release} can't be had here: {error}")
