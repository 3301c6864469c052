"""A broken or bare environment: the interpreter starts, DeepSpeed is imported, and is corrected where it can be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from test_boot import ROOT, Interpreter, fake_deepspeed, installed, with_activation

__all__ = ["fake_deepspeed", "installed"]  # fixtures

BARE = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TERM": "dumb"}


def test_a_start_up_file_whose_package_is_gone_does_not_stop_the_interpreter(tmp_path: Path) -> None:
    interpreter = Interpreter(tmp_path / "env")
    shutil.copy(ROOT / "ds_gradfix_startup.pth", interpreter.site_packages)
    asked = interpreter.run("-c", "print('on')", DS_GRADFIX="1")
    assert (asked.returncode, asked.stdout) == (0, "on\n")
    assert "ds_gradfix_startup.pth" in asked.stderr and "No module named 'ds_gradfix'" in asked.stderr
    assert interpreter.run("-c", "pass").stderr == "", "who does not ask for it hears nothing"


def close_stderr() -> None:
    os.close(2)


@pytest.mark.parametrize(("stderr", "before"), [("/dev/full", None), ("/dev/null", close_stderr)])
def test_what_can_not_be_said_on_stderr_harms_no_import(
    installed: Any, fake_deepspeed: Path, stderr: str, before: Callable[[], None] | None
) -> None:
    script = fake_deepspeed / "script.py"
    script.write_text(with_activation("1 / 0") + "import deepspeed\nprint(deepspeed.activated_before)\n")
    env = {**os.environ, **BARE, "DS_GRADFIX": "1", "PYTHONPATH": str(fake_deepspeed)}
    with open(stderr, "w") as full:
        command = [installed.python, str(script)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=full, text=True, preexec_fn=before)
    assert (done.returncode, done.stdout) == (0, "1\n")


SCRIPT = """
    import json, logging, os, sys, traceback

    written = []

    def on_event(event, arguments):
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & 3:
            if any("ds_gradfix" in frame.filename for frame in traceback.extract_stack()):
                written.append(str(arguments[0]))

    sys.addaudithook(on_event)
    import deepspeed
    import ds_gradfix

    fresh = sys.argv[1] == "enable"
    if fresh:
        assert not ds_gradfix.status()["enabled"]
        ds_gradfix.enable()
    status = ds_gradfix.status()
    logging.getLogger("ds_gradfix").warning("said to nobody")
    print(json.dumps({
        "slots": len(status["slots"]),
        "in_place": all(slot["in_place"] for slot in status["slots"]),
        "problems": status["problems"],
        "written": written,
        "flags": [sys.flags.optimize, sys.flags.isolated, sys.flags.no_site],
        "encoding": sys.stderr.encoding,
    }), flush=True)
    os._exit(0)  # without Python's own complaint that it can't write to stderr
"""


@pytest.mark.parametrize(
    ("flags", "how", "expected", "encoding"),
    [
        # Isolated, Python itself does not look at the locale's variables.
        (["-I", "-OO", "-W", "error"], "start-up", [2, 1, 0], "utf-8"),
        (["-S"], "enable", [0, 0, 1], "ascii"),  # no start-up file is read: the script says enable()
    ],
)
def test_corrections_are_in_place_in_a_bare_environment(
    installed: Any, tmp_path: Path, flags: list[str], how: str, expected: list[int], encoding: str
) -> None:
    """Locale C, no home, no terminal, stderr on a full disk; nothing is written by us, so no permission is needed."""
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    home = tmp_path / "home"
    home.touch()  # a file: nothing can be read or made below it
    env = {**os.environ, **BARE, "DS_GRADFIX": "1", "HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if how == "enable":
        env["PYTHONPATH"] = os.pathsep.join((str(installed.site_packages), *filter(None, sys.path)))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-B", *flags, str(script), how],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full, text=True, start_new_session=True,
        )  # fmt: skip
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("slots") > 20
    found["encoding"] = found["encoding"].lower().replace("ansi_x3.4-1968", "ascii")
    said = {"in_place": True, "problems": {}, "written": [], "flags": expected, "encoding": encoding}
    assert found == said
