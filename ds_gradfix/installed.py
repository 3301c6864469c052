"""What is installed here, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Installed:
    """DeepSpeed's version and package folder (None: not installed), and the versions around it."""

    deepspeed: str | None
    deepspeed_path: Path | None
    torch: str | None
    ds_gradfix: str | None

    @property
    def release(self) -> Version | None:
        """DeepSpeed's version without its local part, None if it says nothing usable."""
        try:
            return Version(Version(self.deepspeed).public) if self.deepspeed else None
        except InvalidVersion:
            return None

    def module_file(self, module: str) -> Path | None:
        """The source file of a DeepSpeed module, None if there is none."""
        if self.deepspeed_path is None:
            return None
        stem = self.deepspeed_path.joinpath(*module.split(".")[1:])
        return next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()), None)

    def has_bytecode(self, module: str) -> bool:
        """Whether a DeepSpeed module is there as bytecode, beside its source or without."""
        if self.deepspeed_path is None:
            return False
        stem = self.deepspeed_path.joinpath(*module.split(".")[1:])
        return stem.with_suffix(".pyc").is_file() or (stem / "__init__.pyc").is_file()


def find_installed() -> Installed:
    """Look at this environment: metadata and files only."""
    path = _package_path("deepspeed")
    return Installed(
        deepspeed=_deepspeed_version(path),
        deepspeed_path=path,
        torch=distribution_version("torch"),
        ds_gradfix=distribution_version("ds-gradfix"),
    )


def distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_path(name: str) -> Path | None:
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None):
        return Path(str(module.__file__)).parent
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent


def _deepspeed_version(path: Path | None) -> str | None:
    """The version of the package at ``path``: what it writes in itself outranks the metadata,
    which may belong to another copy (a checkout on the path before an installed one)."""
    if path is None:
        return None
    try:
        text = (path / "git_version_info_installed.py").read_text(encoding="utf-8")
        found = re.search(r"^version\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if found:
            return found.group(1)
    except (OSError, ValueError):
        pass
    return distribution_version("deepspeed")
