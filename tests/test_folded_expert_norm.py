"""Experts folded over tensor-parallel ranks under ZeRO-1 and ZeRO-2: the norm and the clipped update, by numbers known
in advance and against a whole model in float64; and everything else as stock DeepSpeed does it, to the bit.
"""

from __future__ import annotations

import importlib.util
import shutil
from functools import cache
from math import inf, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from extras import needs
from launching import played
from other_releases import folder_of

from ds_gradfix.installed import Installed
from ds_gradfix.patches.folded_expert_norm import ID, PATCH
from ds_gradfix.registry import Entry, Verdict, make_plan
from ds_gradfix.settings import Settings

RELEASES = (None, "0.19.5")
KINDS = ("native", "routed", "dense")
STAGES = (1, 2)
NATIVE = [[1.8, 2.4], [2.4, 3.2]]
FOLDED = [[0, 0, 0], [4, 8, 8]]
"""Gradients on each rank: shards of norms 3 and 4, and one expert of norm 12 on the second rank."""


@cache
def outcomes(release: str | None) -> dict[str, list[Any]]:
    """Of tests/ranks/folded_experts.py: stock or corrected -> by rank."""
    asked = ["every release"] if release else ["every release", "one release"]
    found = played("folded_experts.py", *asked, release=release)
    failed = [rank["error"] for part in asked for ranks in found[part].values() for rank in ranks if "error" in rank]
    assert not failed, failed[0]
    return {
        mode: [{case: one for part in asked for case, one in found[part][mode][rank].items()} for rank in range(2)]
        for mode in ("stock", "corrected")
    }


def each(release: str | None, mode: str, case: str) -> list[Any]:
    return [rank[case] for rank in outcomes(release)[mode]]


def wrong(ranks: list[Any], norm: float) -> list[str]:
    """What is not as it must be after a step with a clip of 1 whose norm is ``norm``."""
    found = []
    for rank, one in enumerate(ranks):
        if one["norm"] != pytest.approx(norm, rel=1e-6):
            found.append(f"rank {rank}: norm {one['norm']:.6f}")
        right = {"native": NATIVE[rank], "folded": FOLDED[rank]}
        for name in right.keys() & one["lost"].keys():
            if one["lost"][name] != pytest.approx([value / (norm + 1e-6) for value in right[name]], rel=1e-5):
                found.append(f"rank {rank}: {name} lost {one['lost'][name]}")
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_published_norms(release: str | None, stage: int) -> None:
    for mode in ("stock", "corrected"):
        assert wrong(each(release, mode, f"native {stage}"), 5) == []
    case = f"native and folded {stage}"
    assert {one["norm"] for one in each(release, "stock", case)} == {5}
    assert len(wrong(each(release, "stock", case), 13)) == 5  # both norms, and all but the expert without a gradient
    assert wrong(each(release, "corrected", case), 13) == []
    assert all(ID in one["in force"] for one in each(release, "corrected", case))


@pytest.mark.parametrize("stage", STAGES)
def test_native_experts_as_if_they_were_folded_would_be_seen(stage: int) -> None:
    """A correction that takes every expert for a folded one loses the native shards of the other rank."""
    ranks = each(None, "corrected", f"every group folded {stage}")
    assert [one["norm"] for one in ranks] == pytest.approx([sqrt(9 + 144), sqrt(16 + 144)])  # 12.369317, 12.649111
    assert len(wrong(ranks, 13)) == 5
    assert not any(one["measured"]["right"] for one in ranks)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("stage", STAGES)
def test_copies_on_both_ranks_count_once(release: str | None, stage: int) -> None:
    case = f"with copies {stage}"
    assert wrong(each(release, "corrected", case), 85) == []  # 84 on both ranks, and 13
    assert [one["norm"] for one in each(release, "stock", case)] == pytest.approx([sqrt(84**2 + 5**2)] * 2)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_that_is_not_finite_clips_nothing_to_a_finite_number(release: str | None, stage: int) -> None:
    """The step is left out: by DeepSpeed itself from 0.19.8 on, before that by nonfinite-norm, which hears of it."""
    ranks = each(release, "corrected", f"not finite {stage}")
    assert {one["norm"] for one in ranks} == {inf}
    assert all(set(values) == {0} for one in ranks for values in one["lost"].values())


@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_experts_count_too(stage: int) -> None:
    """DeepSpeed refuses AutoEP and AutoTP together with offload; parameters may come from elsewhere."""
    case = f"offloaded {stage}"
    assert {one["norm"] for one in each(None, "stock", case)} == {5}
    assert wrong(each(None, "corrected", case), 13) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_of_folded_experts_and_others_is_an_error(stage: int) -> None:
    case = f"one group {stage}"
    for rank in each(None, "stock", case):
        assert rank == {"error": "nothing", "off": "nothing"}
    for rank in each(None, "corrected", case):
        assert rank["error"].startswith("SelfCheckError: ds-gradfix: ranks 0-1: folded-expert-norm could not be")
        assert rank["off"].startswith("GradfixError: the optimizer's parameter group 1 has AutoEP experts")


@pytest.mark.parametrize("stage", STAGES)
def test_the_host_waits_no_more_often_than_in_stock(stage: int) -> None:
    case = f"native and folded {stage}"
    for stock, corrected in zip(each(None, "stock", case), each(None, "corrected", case), strict=True):
        assert corrected["waits"] <= stock["waits"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_self_check_sees_the_defect_and_leaves_the_engine_as_it_was(release: str | None, stage: int) -> None:
    for kind in ("folded", "native") if release else ("folded", "native", "routed", "dense", "offloaded"):
        for mode in ("stock", "corrected"):
            for one in each(release, mode, f"measured {kind} {stage}"):
                assert one["untouched"]
                if kind in ("folded", "offloaded") and mode == "stock":
                    assert one["ratio"] < 0.95 and not one["right"]
                else:
                    assert one["ratio"] == pytest.approx(1, abs=2e-6) and one["right"], (kind, mode)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("release", "kind"), [*((None, kind) for kind in KINDS), ("0.19.5", "native")])
def test_without_folded_experts_every_bit_is_stock(release: str | None, stage: int, kind: str) -> None:
    stock, corrected = (each(release, mode, f"trained {kind} {stage}") for mode in ("stock", "corrected"))
    for ours, theirs in zip(corrected, stock, strict=True):
        # That another patch is in force (nonfinite-norm, before 0.19.8) changes no bit of finite gradients either.
        assert {**ours, "in force": None} == {**theirs, "in force": None}
    assert stock[0]["norms"] == stock[1]["norms"]


# ---------------------------------------------------------------------------------- a whole model


needs_transformers = needs(transformers="5.0")  # the first with a GLM4-MoE that AutoEP takes


@cache
def glm(ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of tests/ranks/folded_glm4_moe.py: two launches, of which the second resumes what the first has saved."""
    with TemporaryDirectory() as directory:
        env = {"CHECKPOINT": directory, "HF_HUB_OFFLINE": "1"}
        first = ["clipped", "in one go", "saved"] if ranks == 2 else ["clipped"]
        found = played("folded_glm4_moe.py", *first, ranks=ranks, env=env)
        failed = [one["error"] for modes in found.values() for one in modes["corrected"] if "error" in one]
        assert not failed, failed[0]
        return found, played("folded_glm4_moe.py", "resumed", env=env) if ranks == 2 else {}


@needs_transformers
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_folded_glm4_moe_has_the_norm_and_the_updates_of_the_whole_model(ranks: int) -> None:
    cases = glm(ranks)[0]["clipped"]
    for rank in range(ranks):
        for name, one in cases["corrected"][rank].items():
            assert one["norm"] == pytest.approx(1, rel=1e-6), name
            zero3 = name.startswith("3")
            assert one["in force"] == ([] if zero3 else [ID])
            if not zero3:
                assert len(one["updates"]) == 36  # every parameter of the whole model
                assert one["updates"] == pytest.approx(dict.fromkeys(one["updates"], 1), rel=1e-5), name
                assert max(one["errors"].values()) < 1e-5, name


@needs_transformers
@pytest.mark.parametrize("ranks", [2, 4])
def test_stock_clips_a_folded_glm4_moe_too_little(ranks: int) -> None:
    cases = glm(ranks)[0]["clipped"]["stock"]
    for rank in range(ranks):
        for name, one in cases[rank].items():
            if name.startswith("3"):
                assert one["norm"] == pytest.approx(1, rel=1e-6)
                continue
            assert one["norm"] < 0.97, name
            factor = 1 if one["clip"] > 1 else 1 / one["norm"]  # the gradients are right, and divided by the norm
            assert one["updates"] == pytest.approx(dict.fromkeys(one["updates"], factor), rel=1e-5), name


@needs_transformers
def test_before_0_19_8_the_layers_before_folded_experts_have_wrong_gradients() -> None:
    found = played("folded_glm4_moe.py", "without accumulation", release="0.19.5", env={"HF_HUB_OFFLINE": "1"})
    for rank in range(2):
        stock, corrected = (found["without accumulation"][mode][rank] for mode in ("stock", "corrected"))
        for stage in map(str, STAGES):
            ratios = stock[stage]["updates"]
            assert ratios["lm_head.weight"] == pytest.approx(1, rel=1e-4)  # behind the last of them
            assert max(abs(ratio - 1) for ratio in ratios.values()) > 0.2
            assert corrected[stage]["norm"] == pytest.approx(1, rel=1e-6)
            assert corrected[stage]["updates"] == pytest.approx(dict.fromkeys(ratios, 1), rel=1e-5)
            assert max(corrected[stage]["errors"].values()) < 1e-5
            assert corrected[stage]["in force"] == [ID, "folded-input-gradient", "nonfinite-norm"]


@needs_transformers
def test_four_steps_are_two_and_two_more_in_another_process() -> None:
    first, second = glm(2)
    for rank in range(2):
        whole, saved, resumed = (
            part["corrected"][rank] for part in (first["in one go"], first["saved"], second["resumed"])
        )
        for stage in map(str, STAGES):
            assert saved[stage]["norms"] + resumed[stage]["norms"] == whole[stage]["norms"]
            assert resumed[stage]["weights"] == whole[stage]["weights"] != saved[stage]["weights"]


# ------------------------------------------------------------------------------------------- plan


def entry_of(installed: Installed) -> Entry:
    return make_plan(installed, [PATCH], Settings()).entry(ID)


def test_a_release_without_folding_has_it_absent() -> None:
    package = Path(folder_of("0.16.9"), "deepspeed")
    entry = entry_of(Installed("0.16.9", package, "2.13.0", "0.1.0"))
    assert (entry.verdict, entry.act) == (Verdict.ABSENT, False)
    assert "configure_autoep_folding_tp_gradient_reduction" in entry.reason


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("", "", Verdict.DEFECTIVE),
        ("def configure_autoep_folding_tp_gradient_reduction", "def configure", Verdict.ABSENT),
        # No release has upstream's correction yet; a build that has it has another source than any that is known.
        ("norm_groups.append(norm)\n\n        if", "norm_groups.append(norm)\n        if", Verdict.DEFECTIVE),
        ("            self._average_expert_grad_norms(norm_groups)", "            pass", Verdict.UNRECOGNISED),
    ],
)
def test_the_plan_goes_by_the_source(tmp_path: Path, old: str, new: str, verdict: Verdict) -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    file = Path("runtime", "zero", "stage_1_and_2.py")
    (tmp_path / file).parent.mkdir(parents=True)
    shutil.copy(Path(spec.origin).parent / file, tmp_path / file)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert text.count(old) == 1 or not old
    (tmp_path / file).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    entry = entry_of(Installed("0.19.8", tmp_path, "2.13.0", "0.1.0"))
    assert (entry.verdict, entry.act) == (verdict, verdict is Verdict.DEFECTIVE)
    if verdict is Verdict.UNRECOGNISED:
        assert "Left alone" in entry.reason
