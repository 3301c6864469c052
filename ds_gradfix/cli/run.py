"""`ds-gradfix run`: a program with ds-gradfix active, where a start-up file is not welcome."""

import argparse
import os
import runpy
import sys

from ds_gradfix import _boot

DESCRIPTION = """\
Run a Python program as `python` would, with ds-gradfix active in it.

DS_GRADFIX=1 is set for the processes that it starts, which are corrected where
the start-up file of ds-gradfix is installed. Where it is not, put this command
inside the launcher instead:

  torchrun --nproc_per_node 2 -m ds_gradfix run train.py
  deepspeed --num_gpus 2 --no_local_rank --module ds_gradfix run train.py

`python -m ds_gradfix` is `ds-gradfix`; there, `run` may be left out before
`-m`, before a name that ends in .py or .pyz, and before a path with a separator
in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` accepts. Whatever follows the program's name belongs to the program."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [-h] [-m MODULE | SCRIPT] ARGS..."
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Activate ds-gradfix and run the program in this process. Its exit and its exceptions pass through."""
    words = list(args.arguments)
    if words[:1] == ["--"]:
        del words[0]
    is_module = bool(words) and words[0].startswith("-m")
    if is_module:
        # As Python itself takes it: `-m module` or `-mmodule`, and everything behind it is the program's.
        words[:1] = [words[0][2:]] if words[0] != "-m" else []
    problem = _problem(words, is_module)
    if problem:
        print(f"ds-gradfix run: {problem}", file=sys.stderr)
        return 2
    os.environ[_boot.VARIABLE] = "1"
    _boot.install("ds-gradfix run")
    sys.argv[:] = words
    if is_module:
        _replace_path_entry(os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        _replace_path_entry(os.path.dirname(os.path.realpath(words[0])))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _problem(words: list[str], is_module: bool) -> str | None:
    if not words:
        return "give it a SCRIPT, or -m MODULE"
    if not is_module and words[0].startswith("-"):
        return f"there is no option {words[0]!r}; allowed before the program is -m alone"
    if not is_module and not os.path.exists(words[0]):
        return f"there is no file {words[0]!r}"
    return None


def _replace_path_entry(directory: str) -> None:
    """Put `directory` where Python put the directory of ds-gradfix's own script, unless it was told to put none."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # before Python 3.11 only -I says so
        sys.path[0] = directory
