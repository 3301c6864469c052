"""The ranks tell each other what they have, through the process group's store, in bounded time.

A collective would hang where one rank does not join it; a store does not. Every rank posts a text,
the first rank waits for all of them until a deadline and posts what it saw, everyone reads that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

TIMEOUT = timedelta(seconds=60)
# A rank waits this much longer for the first rank's answer than that one waits for the others.
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


def exchange(
    store: Any, topic: str, rank: int, world_size: int, text: str, timeout: timedelta | None = None
) -> Agreement:
    """Tell all ranks ``text`` under ``topic`` (the same on all ranks, used once) and hear theirs.

    ``store`` is a torch.distributed store; ``timeout`` is TIMEOUT if not given. Every rank gets the same
    answer; one that hears nothing from the first rank in time reports that one missing.
    """
    timeout = TIMEOUT if timeout is None else timeout
    store.set(f"{topic}/{rank}", text)
    if rank == 0:
        answer = _collect(store, topic, world_size, timeout)
        store.set(f"{topic}/answer", json.dumps([answer.said, answer.missing]))
        return answer
    if not _wait(store, [f"{topic}/answer"], timeout + GRACE):
        # A first rank that comes later must not find us here and go on alone.
        store.delete_key(f"{topic}/{rank}")
        return Agreement({text: (rank,)}, missing=(0,))
    said, missing = json.loads(store.get(f"{topic}/answer"))
    return Agreement({text: tuple(ranks) for text, ranks in said.items()}, tuple(missing))


def _collect(store: Any, topic: str, world_size: int, timeout: timedelta) -> Agreement:
    keys = [f"{topic}/{rank}" for rank in range(world_size)]
    present = list(range(world_size))
    if not _wait(store, keys, timeout):
        present = [rank for rank in range(world_size) if store.check([keys[rank]])]
    said: dict[str, list[int]] = {}
    for rank in present:
        said.setdefault(store.get(keys[rank]).decode(), []).append(rank)
    missing = tuple(sorted(set(range(world_size)) - set(present)))
    return Agreement({text: tuple(ranks) for text, ranks in said.items()}, missing)


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
