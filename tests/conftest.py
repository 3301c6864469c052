"""What the tests of commands share, when `main` runs in this process."""

import functools
import json
import os

import pytest

from ds_gradfix import registry, source
from ds_gradfix.cli import catalogue, diff
from ds_gradfix.cli.doctor import look
from ds_gradfix.installed import Installed


@functools.cache
def read_once(path, qualnames):
    return source.find_functions(path, qualnames)


@pytest.fixture
def environment(monkeypatch):
    """This process as a shell that knows nothing of ds-gradfix, 80 columns wide. It reads DeepSpeed's files once."""
    for name in [name for name in os.environ if "DS_GRADFIX" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(registry, "find_functions", lambda path, qualnames: read_once(path, tuple(qualnames)))
    return monkeypatch


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def deepspeed(environment, tmp_path):
    """Let the commands find another DeepSpeed: of this version, with a stage3.py of this text; or, by default, none."""

    def find(version=None, stage3=""):
        folder = tmp_path / "deepspeed" if version else None
        if folder:
            module = folder / "runtime" / "zero" / "stage3.py"
            module.parent.mkdir(parents=True)
            module.write_text(stage3)
        installed = Installed(version, folder, torch="2.13.0", ds_gradfix="0.1.0")
        for command_module in (look, catalogue, diff):
            environment.setattr(command_module, "find_installed", lambda: installed)

    return find
