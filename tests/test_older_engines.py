"""Turning ds-gradfix on when engines exist already, on real ranks that hold different ones; and ranks that fail."""

from __future__ import annotations

from typing import Any

import pytest
from launching import free_port, launch
from test_engine import results

SCENARIOS = (
    "shared", "on one rank", "none on the first", "alike", "alike, audited", "destroyed", "refused on one rank",
    "refused late", "unreadable on one rank", "unreadable", "pipelines", "pipelines alike",
)  # fmt: skip
MEASURED = "measured 1 of the right value"
PROMPTLY = 20.0
"""Seconds: nobody has waited for a rank that does not come, which takes the 20 seconds of older_engines.py."""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    ended = launch("older_engines.py", *SCENARIOS)
    assert [rank.status for rank in ended] == [0, 0], ended[0].output[-3000:] + ended[1].output[-3000:]
    return list(map(results, ended))


def both(ranks: list[dict[str, Any]], scenario: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (rank[scenario] for rank in ranks)
    assert max(first["seconds"], second["seconds"]) < PROMPTLY
    return first, second


def accepted(ranks: list[dict[str, Any]], scenario: str) -> tuple[str, str]:
    """What each rank logged where none raised."""
    first, second = both(ranks, scenario)
    assert (first["outcome"], second["outcome"]) == ("accepted", "accepted")
    return first["log"], second["log"]


def test_engines_that_all_ranks_hold_are_measured_and_corrected(ranks: list[dict[str, Any]]) -> None:
    log, _ = accepted(ranks, "shared")
    assert log.count("an engine from before, from now on: ZeRO-3") == 2
    assert log.count(f"corrected, {MEASURED}") == 2
    for rank in ranks:
        assert rank["shared"]["ratios"] == [1.0, 1.0]


def test_an_engine_on_some_ranks_only_is_said_and_makes_nobody_wait(ranks: list[dict[str, Any]]) -> None:
    log, _ = accepted(ranks, "on one rank")
    assert "rank 1 has none like it" in log
    assert log.count(f"corrected, {MEASURED}") == 1, "the one that both hold"
    assert [rank["on one rank"]["ratios"] for rank in ranks] == [[1.0], [1.0]]
    first, second = accepted(ranks, "none on the first")
    assert first == "" and "rank 0 has none like it" in second


def test_engines_that_only_a_rank_itself_tells_apart_are_corrected_without_a_measurement(
    ranks: list[dict[str, Any]],
) -> None:
    log, other = accepted(ranks, "alike")
    assert "ranks 0-1 can't tell it from another one like it" in log and other == "", "said once"
    assert MEASURED not in log
    for rank in ranks:
        assert rank["alike"]["ratios"] == [1.0, 1.0]


def test_engines_that_only_a_rank_itself_tells_apart_are_not_audited(ranks: list[dict[str, Any]]) -> None:
    for log in accepted(ranks, "alike, audited"):
        assert log.count("this engine is not audited: the ranks can't tell it from others") == 2
    for rank in ranks:
        assert rank["alike, audited"]["ratios"] == [1.0, 1.0]


def test_destroyed_engines_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    log, _ = accepted(ranks, "destroyed")
    assert log.count("an engine from before") == 1 and f"corrected, {MEASURED}" in log
    for rank in ranks:
        assert rank["destroyed"]["corrected"] == [False, False, False, True]
        assert rank["destroyed"]["ratios"] == [1.0]


def test_a_pipelines_last_stage_may_hold_an_older_engine_than_others(ranks: list[dict[str, Any]]) -> None:
    log, last = accepted(ranks, "pipelines")
    assert "without being measured" not in log and log.count("an engine from before, from now on") == 1
    assert "rank 0 has none like it" in last
    assert all(rank["pipelines"]["corrected"] for rank in ranks)
    log, _ = accepted(ranks, "pipelines alike")
    assert "rank 1 can't tell it from another one like it" in log
    assert all(rank["pipelines alike"]["corrected"] for rank in ranks)


@pytest.mark.parametrize("scenario", ["refused on one rank", "refused late"])
def test_a_section_that_one_rank_refuses_late_stops_all_of_them(ranks: list[dict[str, Any]], scenario: str) -> None:
    first, second = both(ranks, scenario)
    assert second["outcome"].startswith("SettingsError: exclude: there is no patch 'nonesuch'")
    assert first["outcome"].startswith("SelfCheckError: ds-gradfix: rank 1 stopped, and so must all: SettingsError")


def test_an_engine_that_one_rank_can_not_read_stops_all_of_them(ranks: list[dict[str, Any]]) -> None:
    for rank in both(ranks, "unreadable on one rank"):
        assert rank["outcome"].startswith("SelfCheckError: ds-gradfix: rank 1 can't read the engine"), rank["outcome"]


def test_an_engine_that_no_rank_can_read_stays_stock(ranks: list[dict[str, Any]]) -> None:
    for log in accepted(ranks, "unreadable"):
        assert "this engine can't be read, and nothing is corrected or audited for it" in log
    assert not any(rank["unreadable"]["corrected"] for rank in ranks)


def test_a_rank_that_is_killed_in_the_self_check_is_named() -> None:
    first, second = launch("older_engines.py", "rank 1 killed")
    assert (first.status, second.status) == (0, -9)
    said = results(first)["rank 1 killed"]
    assert said["outcome"].startswith("SelfCheckError") and "rank 1 did not finish the self-check" in said["outcome"]
    assert said["seconds"] < PROMPTLY


def test_the_rank_that_keeps_the_store_is_missed_as_soon() -> None:
    meeting = {"RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}"}
    first, second = launch("older_engines.py", "rank 0 killed", env=meeting)
    assert (first.status, second.status) == (-9, 0)
    said = results(second)["rank 0 killed"]
    assert said["outcome"].startswith("SelfCheckError: the ranks can't be compared"), said["outcome"]
    assert said["seconds"] < PROMPTLY
