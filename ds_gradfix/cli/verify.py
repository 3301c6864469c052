"""`ds-gradfix verify`: measures one job's gradients, norm and update, stock and corrected, against float64."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ds_gradfix.cli._file import check_writable, write
from ds_gradfix.cli._job import add_size_arguments, job_size, read_config_file
from ds_gradfix.cli._screen import console, print_json
from ds_gradfix.errors import GradfixError

STOCK, CORRECTED = "stock", "corrected"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verify` accepts."""
    parser.description = (
        "Train a small reference model on local ranks with a DeepSpeed configuration, stock and corrected, and compare"
        " every gradient before each step, the global norm and the update with the same training in float64 without"
        " DeepSpeed. Exit status: 0 right, 1 wrong, 2 could not run; with both runs it is the corrected one's."
        " Needs no GPU (gloo on the CPU, NCCL where there is a GPU for each rank) and no compiler."
    )
    parser.add_argument("config", metavar="CONFIG.json", help="a DeepSpeed configuration")
    add_size_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps (default: 3)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stock", dest="runs", action="store_const", const=(STOCK,), help="only DeepSpeed as installed")
    which.add_argument(
        "--corrected", dest="runs", action="store_const", const=(CORRECTED,), help="only with ds-gradfix"
    )
    which.add_argument("--both", dest="runs", action="store_const", const=(STOCK, CORRECTED), help="both (the default)")
    parser.set_defaults(runs=(STOCK, CORRECTED))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--report", metavar="PAGE.html", help="also write one page that stands alone: the table, the"
                        " curves of loss and norm, the ratios as a picture, the environment")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit status. Raises GradfixError where nothing can be measured."""
    from ds_gradfix.verify.config import case_from_config
    from ds_gradfix.verify.oracle import measure, missing_packages

    if missing := missing_packages():
        raise GradfixError(f"{' and '.join(missing)} must be installed in this environment to measure a job")
    if args.steps < 1:
        raise GradfixError(f"--steps is {args.steps}; it must be 1 or more")
    config = read_config_file(args.config)
    ranks, shards = job_size(config, args.ranks, args.sequence_parallel)
    if args.report is not None:
        check_writable("--report", args.report, read=args.config)
    case, notes = case_from_config(config, name=args.config, ranks=ranks, sequence_parallel=shards, steps=args.steps)
    results = {}
    with _progress(args.runs, args.steps) as advance:
        for name in args.runs:
            (results[name],) = measure([case], ranks=ranks, corrected=name == CORRECTED, progress=advance[name])

    from ds_gradfix.verify.report import COULD_NOT_RUN, RIGHT, WRONG, Report, as_data, show

    report = Report(args.config, ranks, tuple(notes), results)
    if args.report is not None:
        from ds_gradfix.verify.page import page

        write("--report", args.report, page(report, _command(args, ranks, shards)))
    if args.json:
        print_json(as_data(report))
    else:
        show(report, screen := console())
        if args.report is not None:
            screen.print(f"\nReport: {args.report}", soft_wrap=True)
    for name, result in results.items():
        if result.error and report.status == COULD_NOT_RUN:
            print(f"ds-gradfix verify: {name} could not run\n{result.error}", file=sys.stderr)
    return {RIGHT: 0, WRONG: 1, COULD_NOT_RUN: 2}[report.status]


def _command(args: argparse.Namespace, ranks: int, shards: int) -> str:
    """What measures the same again, wherever the configuration's defaults move to."""
    sizes = ["--ranks", str(ranks), "--sequence-parallel", str(shards), "--steps", str(args.steps)]
    which = [f"--{name}" for name in args.runs] if len(args.runs) == 1 else []
    return shlex.join(["ds-gradfix", "verify", args.config, *sizes, *which])


@contextmanager
def _progress(runs: Sequence[str], steps: int) -> Iterator[dict[str, Callable[[int], None]]]:
    """A bar for each run on stderr, where that is a terminal; yields what moves each to a number of optimizer steps."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:

        def mover(run: str) -> Callable[[int], None]:
            task = bar.add_task(f"{run} run", total=steps, start=False)

            def move(done: int) -> None:
                bar.start_task(task)
                bar.update(task, completed=done)

            return move

        yield {run: mover(run) for run in runs}
