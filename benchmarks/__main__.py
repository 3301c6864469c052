"""What ds-gradfix costs and gains: ratios, measured side by side in one run, against stock in the same process.

    python benchmarks [NAME ...] [--ranks N] [--quick] [--json FILE]

NAME chooses benchmarks: startup, importing, engines, reductions, norms, growth; all of them without one. Everything is
measured in rounds that do each thing once, in an order that rotates; a figure is the median over rounds, with its 95%
confidence interval. On GPUs with NCCL where there are enough for the ranks, else on CPUs with gloo. `--quick` only
shows that everything runs. A table is printed, and all figures go to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import _ranks
import growth
import importing
import startup
from _figures import Row, table

Section = tuple[str, list[Row]]
Measured = Iterator[Section]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), metavar="FILE")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"{unknown[0]!r} is no benchmark; they are {', '.join(BENCHMARKS)}")
    found: dict[str, list[Row]] = {}
    for name in args.names or BENCHMARKS:
        for title, rows in BENCHMARKS[name](args.ranks, args.quick):
            found[title] = rows
            print(table(title, rows), end="\n\n", flush=True)
    where = {"machine": platform.machine(), "python": platform.python_version(), **versions()}
    args.json.write_text(json.dumps({"where": where, "ranks": args.ranks, "figures": found}, indent=1) + "\n")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, **{name: version(name) for name in ("torch", "deepspeed", "ds-gradfix")}}


def of_startup(ranks: int, quick: bool) -> Measured:
    yield startup.TITLE, startup.rows(20 if quick else 300)


def of_import(ranks: int, quick: bool) -> Measured:
    yield importing.TITLE, importing.measure(quick)


def of_engines(ranks: int, quick: bool) -> Measured:
    found = _ranks.run("engines", ranks, quick)
    yield f"Engine init on {ranks} ranks, with the self-check over without ds-gradfix", found["engine init"]
    yield f"A step in which nothing is to be corrected, {ranks} ranks, over stock", found["step"]


def of_reductions(ranks: int, quick: bool) -> Measured:
    yield f"Corrected reductions, {ranks} ranks", _ranks.run("reductions", ranks, quick)


def of_norms(ranks: int, quick: bool) -> Measured:
    yield f"The sharded norm, {ranks} ranks", _ranks.run("norms", ranks, quick)


def of_growth(ranks: int, quick: bool) -> Measured:
    sizes = (2,) if quick else (2, 3, 4)
    yield "Self-check by ranks and parameters", [row for size in sizes for row in _ranks.run("growth", size, quick)]
    yield "Comparing the ranks, through the store", growth.store(quick)


BENCHMARKS: dict[str, Callable[[int, bool], Measured]] = {
    "startup": of_startup,
    "importing": of_import,
    "engines": of_engines,
    "reductions": of_reductions,
    "norms": of_norms,
    "growth": of_growth,
}

if __name__ == "__main__":
    main()
