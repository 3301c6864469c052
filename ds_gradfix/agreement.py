"""The ranks tell each other what they have, through the process group's store, in bounded time.

A collective would hang where one rank does not join it; a store does not. Every rank posts a text, the one that
comes first waits for all of them until a deadline and posts what it saw, everyone reads that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ds_gradfix.errors import SelfCheckError

TIMEOUT = timedelta(seconds=60)
# A rank waits this much longer for the answer than the one that collects it waits for the others.
GRACE = timedelta(seconds=10)


@dataclass(frozen=True)
class Agreement:
    """Which ranks said what. ``said`` maps each distinct text to its ranks; ``missing`` are ranks
    that said nothing in time."""

    said: dict[str, tuple[int, ...]]
    missing: tuple[int, ...] = ()

    @property
    def unanimous(self) -> bool:
        return len(self.said) == 1 and not self.missing


def post(store: Any, topic: str, rank: int, text: str) -> None:
    """Tell all ranks ``text`` under ``topic`` without waiting for theirs.

    ``store`` is a torch.distributed store; a topic is the same on all ranks and used once. Raises SelfCheckError if
    the store is gone.
    """
    with _store_at_hand():
        store.set(f"{topic}/{rank}", text)


def exchange(
    store: Any, topic: str, rank: int, world_size: int, text: str, timeout: timedelta | None = None
) -> Agreement:
    """:func:`post`, and hear what the others posted; ``timeout`` is TIMEOUT if not given.

    Every rank that asks gets the same answer; one that hears nothing in time from the rank that collects it
    reports that one missing. Raises SelfCheckError if the store is gone.
    """
    timeout = TIMEOUT if timeout is None else timeout
    post(store, topic, rank, text)
    with _store_at_hand():
        if store.add(f"{topic}/asked", 1) == 1:
            store.set(f"{topic}/collector", str(rank))
            answer = _collect(store, topic, world_size, timeout)
            store.set(f"{topic}/answer", json.dumps([answer.said, answer.missing]))
            return answer
        if not _wait(store, [f"{topic}/answer"], timeout + GRACE):
            return Agreement({text: (rank,)}, missing=(int(store.get(f"{topic}/collector")),))
        said, missing = json.loads(store.get(f"{topic}/answer"))
        return Agreement({text: tuple(ranks) for text, ranks in said.items()}, tuple(missing))


@contextmanager
def _store_at_hand() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all of torch's are
        raise SelfCheckError(
            f"the ranks can't be compared: the process group's store does not answer ({error}). The process that keeps"
            " it, rank 0 or the launcher, has ended: see its own output"
        ) from error


def _collect(store: Any, topic: str, world_size: int, timeout: timedelta) -> Agreement:
    keys = [f"{topic}/{rank}" for rank in range(world_size)]
    present = list(range(world_size))
    if not _wait(store, keys, timeout):
        present = [rank for rank in range(world_size) if store.check([keys[rank]])]
    said: dict[str, list[int]] = {}
    for rank, text in zip(present, _read(store, [keys[rank] for rank in present]), strict=True):
        said.setdefault(text.decode(), []).append(rank)
    missing = tuple(sorted(set(range(world_size)) - set(present)))
    return Agreement({text: tuple(ranks) for text, ranks in said.items()}, missing)


def _read(store: Any, keys: list[str]) -> list[bytes]:
    # One round trip where the store can: of 4,096 ranks each by itself takes a quarter of a second.
    together = getattr(store, "has_extended_api", bool)()  # torch 2.0 has none
    return list(store.multi_get(keys)) if together else [store.get(key) for key in keys]


def _wait(store: Any, keys: Sequence[str], timeout: timedelta) -> bool:
    try:
        store.wait(list(keys), timeout)
    except RuntimeError:  # torch's DistStoreError is one; older releases raise it plainly
        return False
    return True


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
