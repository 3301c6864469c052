"""The launch files of examples/multi_node on two nodes that are one machine, as far as it has what they need: Slurm's
and torchrun's with real ranks, DeepSpeed's launcher up to what it would have pdsh run.

Only what starts something on another node is stood in for: srun, scontrol, ssh and pdsh are scripts of a line or two.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import free_port

from ds_gradfix import _boot

FILES = Path(__file__).resolve().parents[1] / "examples" / "multi_node"
SCRIPTS = ("launch_deepspeed.sh", "launch_torchrun.sh", "train.sbatch")
SRUN = """
[ "$1" = --export=ALL ] && shift
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a launch file where these commands are found first; gives its exit status and all that it printed."""

    def run(name, *arguments, commands, **environment):
        for command, text in commands.items():
            (tmp_path / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (tmp_path / command).chmod(0o755)
        inherited = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key}
        path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            ["bash", name, *map(str, arguments)],
            cwd=FILES,
            env={**inherited, "PATH": path, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launch_file_is_a_program_that_stops_at_errors(name):
    assert os.access(FILES / name, os.X_OK)
    assert "\nset -euo pipefail\n" in (FILES / name).read_text()
    assert subprocess.run(["bash", "-n", FILES / name]).returncode == 0


def test_slurm_starts_torchrun_on_each_node_with_corrections_on_every_rank(run):
    status, output = run(
        "train.sbatch",
        "../train_plain.py",
        commands={"scontrol": "printf '127.0.0.1\\nnode2\\n'", "srun": SRUN},
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="1",
    )
    assert status == 0, output
    for rank in (0, 1):
        assert re.search(f"^rank {rank} of 2 .*: reduced by ds-gradfix, .* in force: zero3-predivide", output, re.M)
    assert re.findall(r"gradient is (\S+) x", output) == ["1.00"] * 3


def test_torchrun_is_not_started_without_a_node_rank(run):
    status, output = run("launch_torchrun.sh", "train.py", commands={"torchrun": "echo started"}, NODES="2")
    assert status != 0 and "NODE_RANK: which of them this is, from 0 on" in output and "started" not in output


def test_deepspeeds_launcher_hands_the_variable_on(run):
    """DeepSpeed's real launcher; what it gives pdsh is what every node runs."""
    status, output = run(
        "launch_deepspeed.sh",
        "../train_plain.py",
        commands={"ssh": "echo 127.0.0.1", "pdsh": 'echo "pdsh $*"'},
    )
    assert status == 0, output
    command = re.search("^pdsh .*$", output, re.M)[0]
    assert "-w node1,node2" in command and "../train_plain.py" in command
    exported = dict(re.findall(r"export (\w*DS_GRADFIX\w*)=([^;]*);", command))
    assert exported == {_boot.VARIABLE: "1"}
