"""`python -m ds_gradfix`: the commands of `ds-gradfix`, and `run` may be left out before what is plainly a program.

    python -m ds_gradfix doctor              a command
    python -m ds_gradfix train.py --lr 1     a program: ends in .py or .pyz, or has a path separator in it
    python -m ds_gradfix -m package.train    a program: a module

Anything else is taken for a command, so that a mistyped one is answered with the list of commands.
"""

import os
import sys

from ds_gradfix.cli import main as commands


def main() -> int:
    """Run `ds-gradfix` with this process's arguments."""
    arguments = sys.argv[1:]
    return commands(["run", *arguments] if is_program(arguments) else arguments)


def is_program(arguments: list[str]) -> bool:
    """Whether these arguments name a program to run rather than a command of ours."""
    if not arguments:
        return False
    first = arguments[0]
    return first == "-m" or first.endswith((".py", ".pyz")) or (os.sep in first and not first.startswith("-"))


if __name__ == "__main__":
    sys.exit(main())
