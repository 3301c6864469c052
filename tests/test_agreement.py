"""The ranks' exchange over real stores, with ranks that differ, are late, or are not there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_gradfix import agreement
from ds_gradfix.agreement import Agreement, exchange, name_ranks, post
from ds_gradfix.errors import SelfCheckError

SHORT = timedelta(seconds=0.6)
LONG = timedelta(seconds=30)
BOUND = 8.0
"""Seconds within which every rank must have an answer where SHORT is its patience."""

Connect = Callable[[int], Any]


@pytest.fixture(params=["tcp", "file", "prefix"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """A real torch store, one client for each rank, as ranks in different processes have it."""
    if request.param == "file":
        return lambda rank: dist.FileStore(str(tmp_path / "store"), -1)
    server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)

    def client(rank: int) -> Any:
        store = dist.TCPStore("localhost", server.port, None, is_master=False, wait_for_workers=False)
        return dist.PrefixStore("default_pg/0", store) if request.param == "prefix" else store

    return client


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE", timedelta(seconds=0.6))


def talk(
    connect: Connect, texts: dict[int, str], world_size: int, timeout: timedelta, delays: dict[int, float] | None = None
) -> dict[int, Agreement]:
    """Let the ranks in ``texts`` exchange, each in a thread with a store of its own."""
    heard: dict[int, Agreement] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            store = connect(rank)
            time.sleep((delays or {}).get(rank, 0.0))
            heard[rank] = exchange(store, "topic", rank, world_size, texts[rank], timeout)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND + max((delays or {0: 0.0}).values()) + timeout.total_seconds())
    assert not errors, errors
    assert heard.keys() == texts.keys(), "every rank has an answer in bounded time"
    return heard


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_that_say_the_same_agree(connect: Connect, world_size: int) -> None:
    heard = talk(connect, dict.fromkeys(range(world_size), "same"), world_size, LONG)
    for answer in heard.values():
        assert answer.unanimous
        assert answer == Agreement({"same": tuple(range(world_size))}, ())


def test_ranks_that_differ_are_told_who_said_what(connect: Connect) -> None:
    texts = {0: "a", 1: "b", 2: "a", 3: '{"c": "é\\u0000"}'}
    heard = talk(connect, texts, 4, LONG)
    for answer in heard.values():
        assert not answer.unanimous
        assert answer == Agreement({"a": (0, 2), "b": (1,), texts[3]: (3,)}, ())


def test_an_empty_text_is_a_text(connect: Connect) -> None:
    for answer in talk(connect, {0: "", 1: ""}, 2, LONG).values():
        assert answer == Agreement({"": (0, 1)}, ())


def test_a_missing_rank_is_named_by_all_in_bounded_time(connect: Connect) -> None:
    started = time.monotonic()
    heard = talk(connect, {0: "a", 1: "a", 3: "b"}, 5, SHORT)
    assert time.monotonic() - started < BOUND
    for answer in heard.values():
        assert not answer.unanimous
        assert answer == Agreement({"a": (0, 1), "b": (3,)}, (2, 4))


def test_one_missing_rank_is_enough_not_to_agree(connect: Connect) -> None:
    for answer in talk(connect, {0: "a", 1: "a"}, 3, SHORT).values():
        assert not answer.unanimous
        assert answer.missing == (2,)


def test_a_missing_first_rank_is_named_by_the_others_in_bounded_time(connect: Connect) -> None:
    started = time.monotonic()
    heard = talk(connect, {1: "a", 2: "a"}, 3, SHORT)
    assert time.monotonic() - started < BOUND
    for answer in heard.values():
        assert not answer.unanimous
        assert answer == Agreement({"a": (1, 2)}, (0,))


def test_a_rank_that_posts_is_heard_and_need_not_wait(connect: Connect) -> None:
    post(connect(0), "topic", 0, "stopped")
    for answer in talk(connect, {1: "a", 2: "a"}, 3, LONG).values():
        assert answer == Agreement({"stopped": (0,), "a": (1, 2)}, ())


def test_a_collector_that_dies_is_named_in_bounded_time(connect: Connect) -> None:
    store = connect(0)
    store.add("topic/asked", 1)
    store.set("topic/collector", "0")
    for rank, answer in talk(connect, {1: "a", 2: "a"}, 3, SHORT).items():
        assert answer == Agreement({"a": (rank,)}, (0,))


def test_a_store_whose_keeper_has_ended_is_an_error_of_ours() -> None:
    keeper = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("localhost", keeper.port, None, is_master=False, wait_for_workers=False)
    threading.Timer(0.5, lambda: keepers.clear()).start()
    keepers = [keeper]
    del keeper
    with pytest.raises(SelfCheckError, match="the process group's store does not answer"):
        exchange(store, "topic", 0, 2, "a", LONG)
    with pytest.raises(SelfCheckError, match="the process group's store does not answer"):
        post(store, "other", 0, "a")


def test_a_late_rank_hears_what_the_others_heard(connect: Connect) -> None:
    """It was given up: it must not go on as if all agreed."""
    heard = talk(connect, dict.fromkeys(range(3), "a"), 3, SHORT, {2: 2.0})
    for answer in heard.values():
        assert answer == Agreement({"a": (0, 1)}, (2,))


def test_a_rank_that_is_late_but_in_time_is_waited_for(connect: Connect) -> None:
    heard = talk(connect, dict.fromkeys(range(3), "a"), 3, LONG, {0: 0.3, 2: 0.6})
    assert all(answer.unanimous for answer in heard.values())


def test_a_first_rank_that_comes_after_the_others_have_given_up_does_not_go_on_alone(connect: Connect) -> None:
    """All raise or none does: the others reported rank 0 missing and raise."""
    heard = talk(connect, dict.fromkeys(range(2), "a"), 2, SHORT, {0: 3.0})
    assert heard[1].missing == (0,)
    assert not heard[0].unanimous


def test_topics_do_not_mix(connect: Connect) -> None:
    store = connect(0)
    for topic in ("engine/1/digest", "engine/1/result", "engine/11/digest"):
        assert exchange(store, topic, 0, 1, topic, SHORT) == Agreement({topic: (0,)}, ())


def test_the_default_patience_is_bounded() -> None:
    assert timedelta(0) < agreement.TIMEOUT <= timedelta(minutes=5)


@pytest.mark.parametrize(
    ("said", "missing", "unanimous"),
    [({"a": (0, 1)}, (), True), ({"a": (0, 1)}, (2,), False), ({"a": (0,), "b": (1,)}, (), False), ({}, (0,), False)],
)
def test_unanimity(said: dict[str, tuple[int, ...]], missing: tuple[int, ...], unanimous: bool) -> None:
    assert Agreement(said, missing).unanimous is unanimous


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((0, 1), "ranks 0-1"),
        ((0, 2), "ranks 0, 2"),
        ((0, 1, 2, 3, 7), "ranks 0-3, 7"),
        ((7, 3, 1, 2, 0), "ranks 0-3, 7"),
        ((1, 3, 4, 6), "ranks 1, 3-4, 6"),
        (range(1024), "ranks 0-1023"),
    ],
)
def test_ranks_are_named_in_runs(ranks: Any, text: str) -> None:
    assert name_ranks(ranks) == text


def test_the_names_of_ranks_say_exactly_which() -> None:
    """Read back, every subset of eight ranks is itself."""
    for ranks in itertools.chain.from_iterable(itertools.combinations(range(8), n) for n in range(1, 9)):
        word, _, text = name_ranks(ranks).partition(" ")
        assert word == ("rank" if len(ranks) == 1 else "ranks")
        read: list[int] = []
        for run in text.split(", "):
            first, _, last = run.partition("-")
            read += range(int(first), int(last or first) + 1)
        assert tuple(read) == ranks
