"""The command line: `ds-gradfix COMMAND`. Each command is a module of this package with `add_arguments` and `run`.

Only the module of the command at hand is imported: `ds-gradfix list` must not wait for what `verify` needs, and `run`
must not put anything into a process that is about to become a training job.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass

from ds_gradfix.errors import GradfixError

DESCRIPTION = "Corrects known gradient defects of an unmodified DeepSpeed at run time."


@dataclass(frozen=True)
class Command:
    """A command: the module that has it, relative to this package, and what it is for."""

    module: str
    purpose: str


COMMANDS = {
    "doctor": Command(".doctor", "look at this installation, and at one job's configuration"),
    "verify": Command(".verify", "measure gradients, norm and update, stock and corrected, against float64"),
    "list": Command(".catalogue", "every patch: the defect, what one sees of it, and whether it is here"),
    "diff": Command(".diff", "what one patch changes in the installed DeepSpeed"),
    "run": Command(".run", "run a program with ds-gradfix active in it"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is `sys.argv[1:]` where it is not given.

    An error that ds-gradfix raises on purpose is one line on stderr and status 2, except under `run`, where it belongs
    to the program that runs.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"] and argv[1:2] not in (["-h"], ["--help"]):
        # Not through argparse, which takes a program's own `--` and options for itself.
        from ds_gradfix.cli import run

        return run.run(argparse.Namespace(arguments=argv[1:]))
    name = next((argument for argument in argv if argument in COMMANDS), None)
    module = importlib.import_module(COMMANDS[name].module, __name__) if name else None
    parser = argparse.ArgumentParser("ds-gradfix", description=DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for known, command in COMMANDS.items():
        subparser = commands.add_parser(known, help=command.purpose, allow_abbrev=False)
        if known == name and module is not None:
            module.add_arguments(subparser)
    args = parser.parse_args(argv)
    assert module is not None  # the parser has refused anything else
    try:
        return int(module.run(args))
    except GradfixError as error:
        print(f"ds-gradfix {name}: {error}", file=sys.stderr)
        return 2
