"""Engine initialisation on real ranks: the configuration's section, the self-check, and what the ranks agree on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import Ended, launch

ON = {"DS_GRADFIX": "1"}


def results(ended: Ended) -> dict[str, Any]:
    lines = [line.removeprefix("RESULT ") for line in ended.output.splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line) for line in lines)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks with DS_GRADFIX=1 say of everything that can share a launch."""
    ended = launch("engines.py", "forms", "bad key", "bad value", "bad section", "trace", "raising", env=ON)
    assert [rank.status for rank in ended] == [0, 0], ended[0].output[-3000:] + ended[1].output[-3000:]
    logged = ended[0].output.count("[INFO] ds-gradfix: ")
    assert logged == 5, "one line of log for each engine"
    assert "[INFO] ds-gradfix: " not in ended[1].output, "on rank 0 only"
    return [results(rank) for rank in ended]


def test_the_section_is_read_from_every_form_of_the_configuration(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["forms"]["found"] == dict.fromkeys(("dict", "path", "base64", "args"), ["warn", 1.0])


def test_the_users_own_dictionary_is_never_changed(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["forms"]["dict_unchanged"] for rank in ranks)


def test_a_wrong_section_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["bad key"].startswith("SettingsError") and "did you mean 'self_check'" in rank["bad key"]
        assert "'loud' is not allowed" in rank["bad value"] and "'error', 'warn', 'off'" in rank["bad value"]
        assert "it is an object" in rank["bad section"]


def test_the_self_check_measures_and_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["trace"] == {"unchanged": True, "measured": [1.0, 1.0], "wrong": []}  # a reduction and the norm


def test_a_failure_on_one_rank_raises_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["raising"].startswith("SelfCheckError")
        assert "rank 1: zero3-scatter-scale could not be measured: ValueError: a rank of its own" in rank["raising"]


def test_ranks_that_differ_are_named_on_all_of_them() -> None:
    ended = launch("engines.py", "timed", env=ON, rank_env=[{}, {"DS_GRADFIX_EXCLUDE": "zero3-scatter-scale"}])
    for rank in map(results, ended):
        said = rank["timed"]["said"]
        assert said.startswith("SelfCheckError")
        assert 'the ranks differ in patches in force: ["zero3-scatter-scale"] on rank 0; [] on rank 1' in said
        assert rank["timed"]["seconds"] < 30


def test_a_rank_without_ds_gradfix_is_noticed_in_bounded_time() -> None:
    ended = launch("engines.py", "timed", env=ON, rank_env=[{}, {"DS_GRADFIX": "0"}])
    first, second = map(results, ended)
    assert "rank 1 did not answer: is ds-gradfix installed and on there?" in first["timed"]["said"]
    assert second["timed"]["said"] == "accepted"
    assert first["timed"]["seconds"] < 30


@pytest.fixture(scope="module")
def started_off() -> list[dict[str, Any]]:
    """What two ranks say that turn ds-gradfix on themselves."""
    return list(map(results, launch("engines.py", "reports", "late", "launching")))


def test_enabling_late_corrects_live_engines_and_disabling_leaves_them_stock(started_off: list[dict[str, Any]]) -> None:
    for rank in started_off:
        assert rank["late"]["ratios"] == [0.5, 1.0, 0.5]


def test_a_rank_that_has_imported_the_launcher_does_not_differ(started_off: list[dict[str, Any]]) -> None:
    assert [rank["launching"] for rank in started_off] == ["accepted", "accepted"]


def test_the_report_says_which_reduction_is_in_force_and_where(started_off: list[dict[str, Any]]) -> None:
    for rank in started_off:
        mean, total = rank["reports"]["mean"], rank["reports"]["SUM"]
        assert rank["reports"]["refusal"].startswith("GradfixError: this engine is not under ds-gradfix")
        assert (mean["op"], mean["divisor"], mean["convention"]) == ("mean", 1.0, "sum")
        assert (total["op"], total["divisor"], total["convention"]) == ("sum", 1.0, None)
        assert list(mean["patches"]) == ["zero3-scatter-scale"] and list(total["patches"]) == ["zero3-sum-reduction"]
        for said in (mean, total):
            assert said["by"] == "ds-gradfix" and "__avg_scatter_grads" in said["where"]
            assert (said["group_size"], said["sequence_parallel_size"]) == (2, 2)
            assert said["param_groups"] == [{"parameters": 1, "elements": 12, "reduced_over": [2]}]


def test_off_is_stock() -> None:
    for rank in map(results, launch("engines.py", "plain", env={"DS_GRADFIX": "off"})):
        assert rank["plain"]["ratio"] == 0.5
