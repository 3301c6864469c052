"""A job, as a command is told of it: a DeepSpeed configuration file, a number of ranks, a sequence-parallel size."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_gradfix.errors import GradfixError


class CannotLook(GradfixError):
    """There is nothing to look at, or it can't be read; the message says what and why."""


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--ranks` and `--sequence-parallel`; `job_size` reads them."""
    parser.add_argument("--ranks", type=_count, metavar="N", help="the job's ranks, without model parallelism"
                        " (default: 2, or S where that is more)")  # fmt: skip
    parser.add_argument("--sequence-parallel", type=_count, metavar="S", help="ranks that share one sequence"
                        " (default: the configuration's sequence_parallel_size, or 1)")  # fmt: skip


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")


def job_size(config: Mapping[str, Any], ranks: int | None, sequence_parallel: int | None) -> tuple[int, int]:
    """The ranks and the sequence-parallel size of a job: what was said, then what the configuration says.

    Raises CannotLook where they do not go together.
    """
    shards = sequence_parallel or _shards(config)
    ranks = ranks or max(2, shards)
    if ranks % shards:
        raise CannotLook(f"{ranks} ranks can't share sequences in groups of {shards}: it must divide their number")
    return ranks, shards


def _shards(config: Mapping[str, Any]) -> int:
    given = config.get("sequence_parallel_size")
    if given in (None, "auto"):
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise CannotLook(f'"sequence_parallel_size" is {given!r}; it must be a whole number, 1 or more')
    return given


def read_config_file(path: str) -> dict[str, Any]:
    """A configuration file, as DeepSpeed would read it. Raises CannotLook, with the place, where it would not."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        config = _parser().loads(text, object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise CannotLook(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CannotLook(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CannotLook(f"{path} holds no JSON object")
    return config


def _parser() -> Any:
    """DeepSpeed's own parser, which allows comments, where it is installed."""
    try:
        return importlib.import_module("hjson")
    except ImportError:
        return json


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"DeepSpeed refuses a key that stands twice: {', '.join(twice)}")
    return dict(pairs)
