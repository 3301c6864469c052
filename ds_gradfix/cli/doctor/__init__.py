"""`ds-gradfix doctor`: looks at this installation, and at one job's configuration, and says what to do.

Every check stands alone: it looks at what it needs, and one that fails says so in its own place and stops no other.
None imports torch or DeepSpeed into this process. The slow one, which has an interpreter of its own import them, is
the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches

from rich.console import Console
from rich.text import Text

from ds_gradfix.cli._job import add_size_arguments
from ds_gradfix.cli._screen import console, print_hanging, print_json
from ds_gradfix.cli.doctor import screen
from ds_gradfix.cli.doctor.installation import check_environment, check_installed, check_patches, check_start_up
from ds_gradfix.cli.doctor.job import check_config, check_job
from ds_gradfix.cli.doctor.look import Look
from ds_gradfix.cli.doctor.outcome import EXIT_STATUS, Check, Outcome, examine
from ds_gradfix.cli.doctor.surroundings import check_launcher, check_other_tools
from ds_gradfix.errors import GradfixError

CHECKS = {
    "installed": Check("what is installed, and from where", check_installed),
    "environment": Check("whether DS_GRADFIX is on here, and every DS_GRADFIX_* variable means something",
                         check_environment),
    "patches": Check("what each patch is on this DeepSpeed", check_patches),
    "start-up": Check("whether DS_GRADFIX=1 starts ds-gradfix in a fresh interpreter", check_start_up),
    "launcher": Check("what the deepspeed launcher carries to other nodes", check_launcher),
    "config": Check("whether the configuration can be read, and what its own section decides", check_config,
                    of_a_job=True),
    "job": Check("whether the job is affected, by what factor, and whether it will be corrected", check_job,
                 of_a_job=True),
    "other-tools": Check("whether another tool has changed what patches correct; imports DeepSpeed in an interpreter"
                         " of its own, which takes seconds", check_other_tools),
}  # fmt: skip
"""By their stable names, in the order in which they are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `doctor` accepts."""
    parser.description = (
        "Look at this installation and, given a DeepSpeed configuration, at that job. Exit status: 0 all is well,"
        " 1 there is something to act on, 2 something could not be looked at. Needs no GPU."
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="run these checks only (default: all)")
    parser.add_argument("--config", metavar="CONFIG.json", help="the DeepSpeed configuration of a job")
    add_size_arguments(parser)
    parser.add_argument("--all", action="store_true", help="list each patch, not only those that correct something")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", action="store_true", help="the checks and what each looks at; nothing is run")
    form.add_argument("--markdown", action="store_true", help="a block to paste into an issue")
    form.add_argument("--json", action="store_true", help="one JSON document, as docs/doctor.schema.json says")


def run(args: argparse.Namespace) -> int:
    """Run the checks, show the outcomes, and return the exit status of the worst."""
    if args.config is None and (args.ranks or args.sequence_parallel):
        raise GradfixError("--ranks and --sequence-parallel describe a job: give its configuration too, with --config")
    names = _chosen(args.checks, args.config is not None)
    if args.list:
        for name, check in CHECKS.items():
            print_hanging(console(), Text(name, "bold"), Text(check.purpose), indent=13)
        return 0
    look = Look(args.config, args.ranks, args.sequence_parallel)
    with Console(stderr=True).status("Looking ..."):  # only where that is a terminal
        outcomes = {name: examine(CHECKS[name], look) for name in names}
    worst = max((outcome.status for outcome in outcomes.values()), key=EXIT_STATUS.__getitem__)
    if args.json:
        print_json({"status": worst, "checks": [_data(name, outcome) for name, outcome in outcomes.items()]})
    elif args.markdown:
        print(screen.markdown(outcomes, args.all))
    else:
        screen.show(console(), outcomes, args.all)
    return EXIT_STATUS[worst]


def _chosen(asked: Sequence[str], with_config: bool) -> list[str]:
    """The checks to run, in their order. Raises GradfixError for one that does not exist or lacks what it looks at."""
    for name in asked:
        if name not in CHECKS:
            near = get_close_matches(name, CHECKS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise GradfixError(f"there is no check {name!r}{hint} The checks are: {', '.join(CHECKS)}")
        if CHECKS[name].of_a_job and not with_config:
            raise GradfixError(f"the check {name!r} looks at a job: give its configuration, with --config CONFIG.json")
    wanted = asked or [name for name, check in CHECKS.items() if with_config or not check.of_a_job]
    return [name for name in CHECKS if name in wanted]


def _data(name: str, outcome: Outcome) -> dict[str, object]:
    found = {"name": name, **asdict(outcome)}
    del found["listing"]  # the same is in the data
    return found
