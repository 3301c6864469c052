"""What a mean does over sequence shards, for three ways to write the loss: real Ulysses attention, real DeepSpeed, real
ranks, against the single-process gradient of the mean over all tokens.

The table that makes the setting necessary is stock's own; with it, every loss has a convention under which every
parameter is right on every ZeRO stage and path.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from launching import launch
from other_releases import folder_of

from ds_gradfix.engine import LOSSES as WORDS
from ds_gradfix.engine import Engagement, convention_of, summary
from ds_gradfix.facts import facts_from_config
from ds_gradfix.settings import Settings

SHARDS = 2
LOSSES = ("gathered tokens", "own shard", "gathered shards")
SUMMED, AVERAGED = (1.0, 2.0, 2.0), (0.5, 1.0, 1.0)
"""The three losses' gradients, in units of the right one, where shards are summed and where they are averaged."""

BUCKET = 100
"""Elements: of the model's parameters the largest one does not fit."""
APART = {"reduce_scatter": False, "contiguous_gradients": False}
PATHS: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    *({"stage": stage, **path} for stage in (1, 2) for path in ({}, {"reduce_scatter": False}, APART)),
    {"stage": 3},
    {"stage": 3, "reduce_scatter": False},
    {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": BUCKET},
    {"stage": 3, **APART},
)


Outcomes = dict[tuple[str, int], dict[str, Any]]
"""By convention (or "stock") and place in PATHS."""


SUMMED_UP = {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}
MEAN = {"sequence_parallel_reduction": "mean"}
BESIDE_A_SUM: tuple[dict[str, Any], ...] = (
    {"on": True, "config": SUMMED_UP},
    {"on": True, "config": SUMMED_UP, "arguments": MEAN},
    {"on": True, "config": SUMMED_UP, "variables": {"DS_GRADFIX_SEQUENCE_PARALLEL_REDUCTION": "mean"}},
    {"on": True, "config": {**SUMMED_UP, "ds_gradfix": MEAN}},
)
"""A sum alone, and beside a convention from each place that can set one."""


@cache
def trained(ranks: int, release: str | None = None) -> tuple[Outcomes, list[dict[str, Any]]]:
    """Every convention on every path, and BESIDE_A_SUM, from one launch."""
    paths, conventions = list(PATHS), ["stock", "sum", "mean"]
    if ranks > 2:  # ZeRO-1 and ZeRO-2 share their reductions: to save time, one of them takes every path
        paths = [path for path in PATHS if path["stage"] != 1 or len(path) == 1]
    if release is not None:  # not contiguous, ZeRO-1/2 of older releases does not reduce on a CPU, and ZeRO-3 can't end
        paths, conventions = [path for path in PATHS if path != {**path, **APART}], ["sum", "mean"]
    keys = [(convention, PATHS.index(path)) for convention in conventions for path in paths]
    cases: list[dict[str, Any]] = []
    for convention, path in keys:
        section = {} if convention == "stock" else {"ds_gradfix": {"sequence_parallel_reduction": convention}}
        cases.append({"on": convention != "stock", "config": {"zero_optimization": PATHS[path], **section}})
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # DeepSpeed asks that they be set
    if release is not None:
        env["PYTHONPATH"] = folder_of(release)
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([*cases, *BESIDE_A_SUM], file)
        file.flush()
        ended = launch("sequence_parallel_losses.py", file.name, ranks=ranks, env=env)
    assert {rank.status for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)
    outcomes = json.loads(ended[0].output.splitlines()[-1])
    return dict(zip(keys, outcomes, strict=False)), outcomes[len(keys) :]


def outcomes(ranks: int) -> Outcomes:
    return trained(ranks)[0]


def ratios(outcome: dict[str, Any], parameter: str) -> tuple[float, ...]:
    for loss in LOSSES:
        assert outcome["losses"][loss][parameter][1] < 1e-5, (loss, parameter)  # a multiple of the right gradient
    return tuple(outcome["losses"][loss][parameter][0] for loss in LOSSES)


def stock_averages(path: dict[str, Any], elements: int) -> bool:
    scattered = path.get("reduce_scatter", True) or not path.get("contiguous_gradients", True)
    return path["stage"] == 3 and (scattered or elements > path.get("reduce_bucket_size", 500_000_000))


both_worlds = pytest.mark.parametrize("ranks", [2, 4], ids=["S=2", "S=2 x dp=2"])


@both_worlds
def test_stock_gives_the_table(ranks: int) -> None:
    for (convention, index), outcome in outcomes(ranks).items():
        if convention == "stock":
            for parameter, elements in outcome["sizes"].items():
                expected = AVERAGED if stock_averages(PATHS[index], elements) else SUMMED
                assert ratios(outcome, parameter) == pytest.approx(expected, rel=1e-5), (PATHS[index], parameter)


@both_worlds
def test_a_convention_is_the_same_on_every_stage_and_path(ranks: int) -> None:
    for (convention, index), outcome in outcomes(ranks).items():
        if convention == "stock":
            continue
        for parameter in outcome["sizes"]:
            expected = SUMMED if convention == "sum" else AVERAGED
            assert ratios(outcome, parameter) == pytest.approx(expected, rel=1e-5), (PATHS[index], parameter)
        report = outcome["report"]
        assert (report["convention"], report["because"]) == (convention, "set by sequence_parallel_reduction")
        assert report["divisor"] == (ranks // SHARDS if convention == "sum" else ranks)
        assert report["left_out"] == {}


RIGHT = {"gathered tokens": "sum", "own shard": "mean", "gathered shards": "mean"}
"""For each loss, the convention that it wants."""


def check_right(found: Outcomes) -> None:
    for (convention, index), outcome in found.items():
        for loss in (loss for loss, wanted in RIGHT.items() if wanted == convention):
            for parameter, (ratio, _) in outcome["losses"][loss].items():
                assert ratio == pytest.approx(1, rel=1e-5), (loss, PATHS[index], parameter)


@both_worlds
def test_the_right_convention_makes_every_loss_right_everywhere(ranks: int) -> None:
    check_right(outcomes(ranks))


@pytest.mark.parametrize("release", ["0.16.9"])
def test_so_it_does_on_an_older_release(release: str) -> None:
    check_right(trained(2, release)[0])


def test_a_mixed_bucket_is_really_mixed() -> None:
    sizes = outcomes(2)["stock", 0]["sizes"].values()
    assert min(sizes) < BUCKET < max(sizes)


# --- what decides it


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process have an Accelerator with a parallelism config of these attributes, or none."""

    def pretend(**parallelism: Any) -> None:
        module = ModuleType("accelerate.state")
        shared = {"parallelism_config": SimpleNamespace(**parallelism) if parallelism else None}
        module.AcceleratorState = SimpleNamespace(_shared_state=shared)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "accelerate.state", module)

    return pretend


def test_by_default_it_is_deepspeeds_own() -> None:
    assert convention_of(Settings(), SHARDS) == ("sum", "DeepSpeed's own convention, by default")


def test_the_parallelism_config_of_an_accelerator_is_evidence(accelerate: Any) -> None:
    accelerate(sp_backend="deepspeed", sp_size=4)
    assert convention_of(Settings(), 2)[0] == "sum", "another job's shards are no evidence"
    convention, because = convention_of(Settings(), 4)
    assert convention == "mean"
    assert "Accelerate's parallelism config has sp_size=4" in because


@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"sp_backend": "deepspeed", "sp_size": 1, "cp_size": 2},
        {"cp_size": 2},  # Accelerate before 1.12
        {"sp_backend": "another", "sp_size": 2},
    ],
)
def test_no_other_parallelism_is(accelerate: Any, parallelism: dict[str, Any]) -> None:
    accelerate(**parallelism)
    assert convention_of(Settings(), SHARDS)[0] == "sum"


@pytest.mark.parametrize("convention", ["sum", "mean"])
def test_a_setting_outranks_the_evidence(accelerate: Any, convention: str) -> None:
    accelerate(sp_backend="deepspeed", sp_size=2)
    settings = Settings(sequence_parallel_reduction=convention)
    assert convention_of(settings, SHARDS) == (convention, "set by sequence_parallel_reduction")


def test_beside_a_sum_every_place_that_sets_it_is_refused() -> None:
    accepted, *refused = trained(2)[1]
    assert accepted["report"]["op"] == "sum"
    for outcome in refused:
        assert outcome["refused"] == (
            "sequence_parallel_reduction: 'mean' has no meaning with \"gradient_allreduce_op\": \"sum\", which adds up"
            " all ranks: leave one of the two out"
        )


# --- what is said about it


def line(config: dict[str, Any], convention: str, because: str = "because") -> str:
    facts = facts_from_config(config, 2, SHARDS, convention)
    engagement = Engagement(facts, Settings(), because, {}, {}, {})
    plan: Any = SimpleNamespace(installed=SimpleNamespace(deepspeed="0.19.8"))
    said: str = summary(engagement, None, plan)
    return said


@pytest.mark.parametrize("convention, other", [("sum", "mean"), ("mean", "sum")])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_log_says_which_what_it_changes_and_who_wants_the_other(
    path: dict[str, Any], convention: str, other: str
) -> None:
    said = line({"zero_optimization": path}, convention)
    changes = {"sum": ("as in stock", "x2 of stock"), "mean": ("x1/2 of stock", "as in stock")}[convention]
    small, large = (changes[stock_averages(path, elements=elements)] for elements in (1, 10**12))
    mixed = f"{large} for parameters larger than reduce_bucket_size, {small} for the others"
    change = small if small == large else mixed
    assert f"gradients are reduced by {convention} (because), {change}: {WORDS[convention]}" in said
    assert f"sequence_parallel_reduction={other!r} is {WORDS[other]}" in said


def test_the_log_says_nothing_where_it_has_no_meaning() -> None:
    assert "shards" not in line({"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}, "sum")


# --- experts


@pytest.mark.parametrize("release", [None, "0.16.9"])
def test_under_zero0_experts_follow_the_convention_as_dense_layers_do(release: str | None) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ended = launch("experts_over_shards.py", env=env if release is None else {**env, "PYTHONPATH": folder_of(release)})
    assert {rank.status for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)
    found = json.loads(ended[0].output.splitlines()[-1])
    assert len(found["mean"]) == 7
    for convention, expected in (("stock", SHARDS), ("sum", SHARDS), ("mean", 1)):
        for ratio, off in found[convention]:
            assert ratio == pytest.approx(expected, rel=1e-4), convention
            assert off < 1e-4
