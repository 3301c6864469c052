"""DeepSpeed's own launcher with every runner of its, and what it hands to other nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import releases
from launching import RANKS, free_port, launch

from ds_gradfix import launcher
from ds_gradfix.errors import SettingsError

BIN = Path(sys.executable).parent
OLDER = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.0")
EXCLUDED = "zero12-expert-copy , fused-fp16-step"
GIVEN = {"DS_GRADFIX": "1", "DS_GRADFIX_EXCLUDE": EXCLUDED, "DS_GRADFIX_FORCE": "", "MY_DS_GRADFIX": "1"}
ARRIVING = {"DS_GRADFIX": "1", "DS_GRADFIX_EXCLUDE": "zero12-expert-copy,fused-fp16-step"}

# How each runner's command line carries a variable, written down from their manuals.
CARRIED = {
    "pdsh": lambda name, value: f"export {name}={value};",
    "openmpi": lambda name, value: f"-x {name}={value} ",
    "mpich": lambda name, value: f"-genv {name}={value} ",
    "impi": lambda name, value: f"-genv {name} {value} ",
    "mvapich": lambda name, value: f"-env {name}={value} ",
}
CASES: dict[str, dict[str, Any]] = {
    **{runner: {"runner": runner, "env": GIVEN} for runner in (*CARRIED, "slurm")},
    "off": {"runner": "pdsh", "env": {**GIVEN, "DS_GRADFIX": "0"}},
    "unset": {"runner": "openmpi", "env": {"DS_GRADFIX_STRICT": "1"}},
    "alias": {"runner": "pdsh", "env": {"PYTHON_DS_GRADFIX": "1", "DS_GRADFIX_STRICT": "1"}},
    "unfit": {"runner": "pdsh", "env": {"DS_GRADFIX": "1", "DS_GRADFIX_ONLY": "a; touch x"}},
}


def executable(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


# A runner's program: it writes down what it was started with.
RECORDER = """#!/bin/sh
if [ "${0##*/}" = mpiname ]; then echo MVAPICH2-GDR; exit; fi
{ printf '%s\\0' "$@"; printf '\\n\\n'; env | grep ^DS_GRADFIX; } > "$RECORDS/${0##*/}"
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the launcher starts for each case: its command line as one text, and our variables in its environment."""
    folder = tmp_path_factory.mktemp("launcher")
    for name in ("pdsh", "mpirun", "srun", "ompi_info", "mpiname", "sinfo"):
        executable(folder / name, RECORDER)
    cases = {name: {"package": None, **case} for name, case in CASES.items()}
    for release in OLDER:
        try:
            package = str(releases.folder_of(release) / "deepspeed")
        except releases.Unavailable:
            continue
        for runner in ("pdsh", "mpich", "slurm"):
            cases[f"{runner} {release}"] = {"runner": runner, "env": GIVEN, "package": package}
    env = {
        "CASES": json.dumps(list(cases.values())),
        "RECORDS": str(folder),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
    }
    (ended,) = launch("launcher_commands.py", ranks=1, env=env)
    assert ended.status == 0, ended.output
    said = json.loads(ended.output.splitlines()[-1])
    for one in said:
        one["text"] = " ".join(one.pop("command", ()))
    return dict(zip(cases, said, strict=True))


@pytest.mark.parametrize("runner", CARRIED)
def test_every_runner_carries_our_variables(runner: str, started: dict[str, dict[str, Any]]) -> None:
    text = started[runner]["text"]
    for name, value in ARRIVING.items():
        assert CARRIED[runner](name, value) in text, text
    assert text.count("DS_GRADFIX") == 2, text


def test_slurm_carries_them_with_everything_else(started: dict[str, dict[str, Any]]) -> None:
    """On its command line a value with a comma would be two."""
    assert "--export=ALL" in started["slurm"]["text"]
    assert "DS_GRADFIX" not in started["slurm"]["text"]
    assert "DS_GRADFIX=1" in started["slurm"]["environment"]


@pytest.mark.parametrize("case", ["off", "unset"])
def test_where_it_is_off_the_launcher_is_left_alone(case: str, started: dict[str, dict[str, Any]]) -> None:
    assert "train.py" in started[case]["text"]
    assert "DS_GRADFIX" not in started[case]["text"]


def test_siblings_follow_the_alias(started: dict[str, dict[str, Any]]) -> None:
    for name in ("PYTHON_DS_GRADFIX", "DS_GRADFIX_STRICT"):
        assert CARRIED["pdsh"](name, "1") in started["alias"]["text"]


def test_a_value_that_a_shell_would_read_stops_the_launcher(started: dict[str, dict[str, Any]]) -> None:
    assert started["unfit"]["error"].startswith("SettingsError: DS_GRADFIX_ONLY: 'a; touch x' would not arrive")


@pytest.mark.parametrize("release", OLDER)
def test_the_runners_of_older_releases_do_too(release: str, started: dict[str, dict[str, Any]]) -> None:
    if f"pdsh {release}" not in started:
        pytest.skip(f"DeepSpeed {release} can't be had here")
    for runner in ("pdsh", "mpich"):
        for name, value in ARRIVING.items():
            assert CARRIED[runner](name, value) in started[f"{runner} {release}"]["text"]
    assert "--export=ALL" in started[f"slurm {release}"]["text"]


@pytest.mark.parametrize("value", ["a b", "it's", '"a"', "a$b", "a%n", "a\nb", "é", "a;b", "`a`", "a\\b", "a|b", "*"])
def test_what_would_not_arrive_as_it_is_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_GRADFIX", "1")
    monkeypatch.setenv("DS_GRADFIX_EXCLUDE", value)
    with pytest.raises(SettingsError) as caught:
        launcher.exported()
    assert str(caught.value).startswith(f"DS_GRADFIX_EXCLUDE: {value!r} would not arrive")
    assert "allowed" in str(caught.value) and "\n" not in str(caught.value)


# A node that is this machine: a login's environment, and nothing of the caller's.
SSH = """#!/bin/sh
until [ "${1#127.0.0.}" != "$1" ]; do shift; done
shift
exec env -i HOME="$HOME" PATH="$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 sh -c "$*"
"""

# Where there is no pdsh: the three things of it that DeepSpeed uses, -w, %n and all nodes at once.
PDSH = """#!/bin/sh
until [ "$1" = -w ]; do shift; done
hosts=$(echo "$2" | tr , ' '); shift 2
rank=0
for host in $hosts; do
    ssh "$host" "$(echo "$*" | sed "s/%n/$rank/g")" &
    rank=$((rank + 1))
done
wait
"""


def test_two_nodes_are_corrected_by_one_variable_on_the_first(tmp_path: Path) -> None:
    """The real pdsh where there is one, with two loopback addresses as nodes, through `python -m`."""
    executable(tmp_path / "ssh", SSH)
    if shutil.which("pdsh") is None:
        executable(tmp_path / "pdsh", PDSH)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", tmp_path / "hosts", "--no_ssh_check"]
    command += ["--master_addr", "127.0.0.1", "--master_port", free_port(), RANKS / "on_every_node.py"]
    inherited = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    path = os.pathsep.join(map(str, (tmp_path, BIN, os.environ["PATH"])))
    done = subprocess.run(
        list(map(str, command)),
        env={**inherited, **GIVEN, "PATH": path, "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    for rank, node in enumerate(("127.0.0.1", "127.0.0.2")):
        left_out = ["zero12-expert-copy", "fused-fp16-step"]
        assert f"rank {rank} of 2: True {tuple(left_out)}" in done.stdout, (node, done.stdout)
