"""What the tests can do without: packages that not every environment has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version


def needs(**packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of these packages is not installed, or older than said."""
    lacking = [problem for name, oldest in packages.items() if (problem := _problem(name, oldest))]
    return pytest.mark.skipif(bool(lacking), reason=", ".join(lacking))


def _problem(package: str, oldest: str) -> str | None:
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    return None if Version(found) >= Version(oldest) else f"{package} {found} is older than {oldest}"
