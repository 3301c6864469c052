"""What jobs and other tools do beside training: several engines, compiling, copying, reloading, wrapping, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from launching import launch
from test_engine import results

SCENARIOS = (
    "two configurations", "initialized twice", "compiled", "copies", "failing", "wrapped before, plain",
    "wrapped before, wrapt", "wrapped after, plain", "wrapped after, wrapt", "replaced", "replaced, warn",
    "replaced on one rank", "reloaded",
)  # fmt: skip
PLACE = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads"
NESTED = ".plain.<locals>" if sys.version_info >= (3, 11) else ""
TOOLS = {"plain": f"{NESTED}.another_tool", "wrapt": ".pass_on"}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    ended = launch("odd.py", *SCENARIOS)
    assert [rank.status for rank in ended] == [0, 0], ended[0].output[-3000:] + ended[1].output[-3000:]
    return list(map(results, ended))


def test_engines_with_different_configurations_do_not_mix(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["two configurations"]["turns"] == [0.5, 1.0, 0.5, 1.0]
        assert (rank["two configurations"]["rebuilt"], rank["two configurations"]["other"]) == (0.5, 0.5)


def test_a_model_that_is_given_to_an_engine_again_follows_its_new_configuration(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["initialized twice"]["ratios"] == [0.5, 1.0], "a mean over the shards, then a sum"


def test_compiled_modules_and_engines_are_corrected(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["compiled"] == {"ratios": [0.5, 1.0], "compiled": [True, True]}


def test_models_and_hooks_are_copied_and_pickled_as_on_stock(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        corrected, stock = rank["copies"]["corrected"], rank["copies"]["stock"]
        assert isinstance(stock["model, deepcopy, 2"], list) and len(stock) == 16
        for name in stock:
            # ZeRO-3 is corrected, so its model has learnt something else.
            assert type(corrected[name]) is type(stock[name]), name
            assert corrected[name] == stock[name] or name.startswith("model") and name.endswith("3"), name


def test_the_jobs_own_errors_pass_through(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        corrected, stock = rank["failing"]["corrected"], rank["failing"]["stock"]
        assert len(stock) == 11
        for name, (kind, _, function, line) in stock.items():
            assert kind not in ("nothing", "SelfCheckError") and function and line, name
            if name != "inside a replaced function":
                assert corrected[name] == stock[name], "the same error, from the same line of source"
        kind, said, _, line = corrected["inside a replaced function"]
        assert line and kind == stock["inside a replaced function"][0], said


@pytest.mark.parametrize("tool", TOOLS)
def test_another_tools_wrapper_from_before_is_named_and_kept(ranks: list[dict[str, Any]], tool: str) -> None:
    for rank in ranks:
        found = rank[f"wrapped before, {tool}"]
        assert f"{PLACE} was wrapped by __main__{TOOLS[tool]} before" in found["log"]
        assert (found["ratio"], found["disabled"], found["kept"]) == (1.0, "accepted", True)


@pytest.mark.parametrize("tool", TOOLS)
def test_another_tools_wrapper_from_after_runs_ours_and_is_not_undone(ranks: list[dict[str, Any]], tool: str) -> None:
    for rank in ranks:
        found = rank[f"wrapped after, {tool}"]
        assert (found["ratio"], found["in_place"], found["at last"]) == (1.0, False, "accepted")
        assert found["disabled"].startswith(f"SlotError: {PLACE} now holds __main__{TOOLS[tool]}, which is not ours")


def test_a_replacement_of_ours_is_measured_and_not_undone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["replaced"]["outcome"]
        assert said.startswith("SelfCheckError") and "gives 0.5 times the right value" in said
        assert rank["replaced, warn"]["outcome"] == "accepted"
        for name in ("replaced", "replaced, warn"):
            assert f"now holds __main__{TOOLS['plain']}, which is not ours" in rank[name]["disabled"]


def test_a_replacement_on_one_rank_is_a_difference_between_the_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["replaced on one rank"]["outcome"]
        assert said.startswith("SelfCheckError: ds-gradfix: the ranks differ in slots: ")
        assert f'["{PLACE}"] on rank 0; ["{PLACE}, where __main__{TOOLS["plain"]} is now"] on rank 1' in said


def test_a_module_that_is_reloaded_is_corrected_again_and_stock_at_last(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["reloaded"]
        assert (found["ratios"], found["stock"]) == ([1.0, 1.0], [0.5, 0.5])
        assert found["left"] == [False, False]
        assert (found["disabled"], found["enabled"]) == ("accepted", "accepted")


def test_threads_that_import_at_once_a_fork_and_a_spawned_process_are_all_corrected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
        import importlib, json, multiprocessing, sys, threading

        def state(send):
            fresh = "deepspeed" not in sys.modules
            threads = [threading.Thread(target=importlib.import_module, args=("deepspeed",)) for _ in range(4)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            import ds_gradfix
            slots = ds_gradfix.status()["slots"]
            send([fresh, len(slots), all(slot["in_place"] for slot in slots)])

        if __name__ == "__main__":
            found = []
            state(found.append)
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                child = context.Process(target=state, args=(queue.put,))
                child.start()
                child.join(200)
                found.append(queue.get())
            print(json.dumps(found))
        """)
    )
    env = {**os.environ, "DS_GRADFIX": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    main, forked, spawned = json.loads(done.stdout.splitlines()[-1])
    assert main[0] is spawned[0] is True and forked[0] is False
    assert main[1:] == forked[1:] == spawned[1:] and main[1] > 20 and main[2]
