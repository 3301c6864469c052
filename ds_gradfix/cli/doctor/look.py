"""What the doctor's checks look at. Each thing is read once, when the first check asks for it."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_gradfix import _boot
from ds_gradfix.cli._job import CannotLook, read_config_file
from ds_gradfix.errors import GradfixError
from ds_gradfix.installed import Installed, find_installed
from ds_gradfix.registry import Patch, Plan, discover, make_plan
from ds_gradfix.settings import Settings, resolve

START_UP_FILE = "ds_gradfix_startup.pth"
_PROBE_SECONDS = 60


class Look:
    """One look at this installation, at this environment and, where a configuration is given, at one job."""

    def __init__(self, config: str | None, ranks: int | None, sequence_parallel: int | None) -> None:
        self.config_path = config
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    @cached_property
    def installed(self) -> Installed:
        return find_installed()

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        return discover()

    @cached_property
    def _decided(self) -> tuple[Settings, Plan, GradfixError | None]:
        patches = self.patches
        try:
            settings = resolve({}, os.environ)
            return settings, make_plan(self.installed, patches, settings), None
        except GradfixError as refusal:
            return Settings(), make_plan(self.installed, patches, Settings()), refusal

    @property
    def settings(self) -> Settings:
        """The settings of this environment; the default ones where it is refused."""
        return self._decided[0]

    @property
    def plan(self) -> Plan:
        """The plan under these settings."""
        return self._decided[1]

    @property
    def refusal(self) -> GradfixError | None:
        """Why ds-gradfix would not start under the settings of this environment, None if it would."""
        return self._decided[2]

    @cached_property
    def config(self) -> Mapping[str, Any]:
        assert self.config_path is not None
        return read_config_file(self.config_path)

    @cached_property
    def probe(self) -> Probe:
        return probe_start_up()


@dataclass(frozen=True)
class Probe:
    """A fresh interpreter with DS_GRADFIX=1: what started ds-gradfix in it, the module that did, the folders on its
    path that have a start-up file, and what it wrote to stderr."""

    started_by: str | None
    boot_file: str | None
    start_up_files: tuple[str, ...]
    stderr: str

    @property
    def starts(self) -> bool:
        """Whether it was this ds-gradfix that was started."""
        return self.boot_file is not None and os.path.realpath(self.boot_file) == os.path.realpath(_boot.__file__)


_PROBE = f"""
import json, os, sys
print(json.dumps([
    getattr(sys, {_boot.MARKER!r}, None),
    getattr(sys.modules.get({_boot.__name__!r}), "__file__", None),
    [folder for folder in sys.path if folder and os.path.isfile(os.path.join(folder, {START_UP_FILE!r}))],
]))
"""


def probe_start_up() -> Probe:
    """Start an interpreter as a job would be, with DS_GRADFIX=1, and ask what has happened in it."""
    done, answer = ask_an_interpreter(_PROBE, on=True, seconds=_PROBE_SECONDS)
    started_by, boot_file, start_up_files = answer
    return Probe(started_by, boot_file, tuple(start_up_files), done.stderr.strip())


def ask_an_interpreter(
    code: str, *arguments: str, on: bool, seconds: int
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run code in an interpreter of its own, with ds-gradfix on or off; what it did, and its last line, read as JSON.

    Raises CannotLook where it gives no answer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, _boot.VARIABLE: "1" if on else "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotLook(f"A fresh interpreter did not answer in {seconds} seconds") from error
    except OSError as error:
        raise CannotLook(f"A fresh interpreter ({sys.executable}) could not be started: {error}") from error
    try:
        return done, json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise CannotLook(f"A fresh interpreter ({sys.executable}) gave no answer; it wrote: {last}") from error


def site_folders() -> list[Path]:
    """Where this interpreter reads start-up files."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [Path(folder) for folder in dict.fromkeys(map(os.path.realpath, folders)) if os.path.isdir(folder)]


def start_up_files() -> Iterator[Path]:
    """Every file that runs code at the start of this interpreter, ours too."""
    for folder in site_folders():
        yield from sorted(path for path in folder.iterdir() if path.suffix in (".pth", ".start"))
