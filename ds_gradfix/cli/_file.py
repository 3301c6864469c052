"""A file that a command writes: whole or not at all, and known to be possible before the work that fills it."""

from __future__ import annotations

import os
from pathlib import Path

from ds_gradfix.errors import GradfixError


def check_writable(option: str, path: str, *, read: str) -> None:
    """Raise GradfixError, naming `option` and `path`, unless `write` will do. Nothing is left or changed.

    `read` is the file that the command reads, which it must not replace.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        raise _refusal(option, path, "it is a directory" if file.is_dir() else "it is not a regular file")
    if file.exists() and Path(read).exists() and file.samefile(read):
        raise _refusal(option, path, "it is the file that is read")
    part = _part(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise _refusal(option, path, f"{part.parent}: {error.strerror}") from error


def write(option: str, path: str, text: str) -> None:
    """Put `text` into the file in one step: nobody sees half of it. Raises GradfixError as the check does."""
    part = _part(path)
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(os.path.realpath(path))
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _refusal(option, path, error.strerror or str(error)) from error


def _part(path: str) -> Path:
    """Beside the file that is meant, where a rename is one step; a link stays a link."""
    file = Path(os.path.realpath(path))
    return file.with_name(f".{file.name}.{os.getpid()}.part")


def _refusal(option: str, path: str, reason: str) -> GradfixError:
    return GradfixError(f"{option} {path} can't be written: {reason}; name a file in a directory that can be written")
