"""What DeepSpeed's launcher starts on other nodes, for one case after the other, each in a fork of its own.

    CASES       JSON in the environment, a list of objects: `runner`, `env` (variables to set), `package` (the folder
                of another release, whose launcher it shall be, else null)
    RECORDS     a folder; the stand-ins on PATH write there, by the name that they were started under

Prints a list as long: `command` (the words of the runner's own command line) and `environment` (what of ours is there),
or `error`.
"""

import json
import multiprocessing
import os
from pathlib import Path

import deepspeed.launcher

import ds_gradfix


def started(case):
    records = Path(os.environ["RECORDS"], str(os.getpid()))
    records.mkdir()
    os.environ.update(case["env"], RECORDS=str(records))
    if case["package"]:
        deepspeed.launcher.__path__ = [f"{case['package']}/launcher"]
        deepspeed.__path__.append(case["package"])  # for what has been removed since
    from deepspeed.launcher import runner

    hosts = records / "hosts"
    hosts.write_text("127.0.0.1 slots=2\n127.0.0.2 slots=2\n")
    words = ["--hostfile", str(hosts), "--launcher", case["runner"], "--no_ssh_check", "--master_addr", "127.0.0.1"]
    try:
        runner.main([*words, "train.py"])
    except ds_gradfix.activation.GradfixError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    (command,) = [found for name in ("pdsh", "mpirun", "srun") if (found := records / name).exists()]
    words, _, environment = command.read_text().partition("\n\n")
    return {"command": words.split("\0"), "environment": environment.split()}


if __name__ == "__main__":
    ds_gradfix.enable()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as forks:
        print(json.dumps(forks.map(started, json.loads(os.environ["CASES"]), chunksize=1)))
