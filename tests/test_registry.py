"""What the plan says about a DeepSpeed on disk: real files of the installed one, copied and edited."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from packaging.version import Version

from ds_gradfix.errors import GradfixError, PlanError, SettingsError
from ds_gradfix.installed import Installed, find_installed
from ds_gradfix.registry import (
    Entry,
    Measurement,
    Patch,
    Plan,
    Replace,
    Rewrite,
    Target,
    Verdict,
    catalogue,
    discover,
    known_sources,
    make_plan,
    newest_known_release,
)
from ds_gradfix.settings import Settings
from ds_gradfix.source import Rule, find_functions, fingerprint

SCATTER_SCALE = "zero3-scatter-scale"
PREDIVIDE = "zero3-predivide-postscale"
BOTH = {SCATTER_SCALE, PREDIVIDE}
MODULE = "deepspeed.runtime.zero.stage3"
CLASS = "DeepSpeedZeroOptimizer_Stage3"
SCATTER = Target(MODULE, f"{CLASS}.__avg_scatter_grads")
CONTIGUOUS = Target(MODULE, f"{CLASS}.__avg_scatter_contiguous_grads")
STAGE3 = Path("runtime", "zero", "stage3.py")

# Pieces of the two functions, to edit them by.
IN_SCATTER = "full_grads_for_rank = [p.grad for p in params_to_reduce]"
IN_CONTIGUOUS = "        grad_offset_in_buffer = 0\n"


def original_package() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


class Copy:
    """A DeepSpeed on disk of which only the parts that the plan looks at are there."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "deepspeed"
        self.file = self.package / STAGE3
        self.file.parent.mkdir(parents=True)
        shutil.copy(original_package() / STAGE3, self.file)

    def installed(self, version: str | None = "0.19.8") -> Installed:
        return Installed(deepspeed=version, deepspeed_path=self.package, torch="2.13.0", ds_gradfix="0.1.0")

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands in stage3.py {text.count(old)} times"
        self.file.write_text(text.replace(old, new), encoding="utf-8")

    def mark(self, target: Target) -> str:
        function = find_functions(self.file, [target.qualname])[target.qualname]
        assert function is not None
        return fingerprint(function.node)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def plan_of(installed: Installed, patches: Any = None, **settings: Any) -> Plan:
    """The plan for the two ZeRO-3 patches, or others."""
    if patches is None:
        patches = [patch for patch in discover() if patch.id in BOTH]
    return make_plan(installed, patches, Settings(**settings))


def acting(plan: Plan) -> set[str]:
    return {entry.patch.id for entry in plan.entries if entry.act}


def verdicts(entry: Entry) -> dict[Target, Verdict]:
    return {finding.target: finding.verdict for finding in entry.findings}


def patch_of(patch_id: str, corrections: tuple[Any, ...], fingerprints: dict[str, dict[str, Verdict]]) -> Patch:
    return Patch(
        id=patch_id,
        title="A patch of the tests",
        symptom="",
        cause="",
        fix="",
        upstream=(),
        retire="",
        corrections=corrections,
        affects=lambda facts: None,
        measure=lambda engine: (),
        fingerprints=fingerprints,
    )


# ----------------------------------------------------------------------------------- verdicts


def test_the_known_release_is_defective_and_both_patches_act(copy: Copy) -> None:
    plan = plan_of(copy.installed())
    assert acting(plan) == BOTH
    for entry in plan.entries:
        assert entry.verdict is Verdict.DEFECTIVE
        assert set(verdicts(entry).values()) == {Verdict.DEFECTIVE}
        assert "known to have this defect" in entry.reason
        for finding in entry.findings:
            assert finding.fingerprint is not None and finding.fingerprint in finding.reason
            assert finding.function is not None and finding.function.path == copy.file
        assert [correction for correction, _ in entry.corrections()] == list(entry.patch.corrections)


def test_the_really_installed_one_is_planned_without_importing_torch_or_deepspeed() -> None:
    script = """
        import sys
        from ds_gradfix.installed import find_installed
        from ds_gradfix.registry import discover, make_plan
        from ds_gradfix.settings import Settings
        plan = make_plan(find_installed(), discover(), Settings())
        print(plan.installed.deepspeed, *(entry.patch.id for entry in plan.entries if entry.act))
        assert not {"torch", "deepspeed", "wrapt", "rich", "hjson"} & set(sys.modules), sorted(sys.modules)
    """
    environment = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    said = subprocess.run(
        [sys.executable, "-c", dedent(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    if find_installed().deepspeed == "0.19.8":
        assert {"0.19.8", *BOTH} <= set(said.stdout.split())


@pytest.mark.parametrize(
    "version", ["0.19.8", "0.19.9", "0.99.0", "0.19.8+vendor.3", "0.19.9+edaa7221", "weird", None, "0.1"]
)
def test_a_known_source_outranks_whatever_version_stands_beside_it(copy: Copy, version: str | None) -> None:
    assert acting(plan_of(copy.installed(version))) == BOTH


@pytest.mark.parametrize("version", ["0.19.8", "0.14.0", "0.20.0", None])
def test_a_version_alone_proves_nothing(copy: Copy, version: str | None) -> None:
    copy.edit(IN_SCATTER, f"{IN_SCATTER}\n        full_grads_for_rank = list(full_grads_for_rank)")
    plan = plan_of(copy.installed(version))
    assert acting(plan) == set()
    for entry in plan.entries:
        assert entry.verdict is Verdict.UNRECOGNISED
        assert verdicts(entry)[SCATTER] is Verdict.UNRECOGNISED
        assert copy.mark(SCATTER) in entry.reason
        assert SCATTER.qualname in entry.reason
        assert f"force='{entry.patch.id}'" in entry.reason
        assert entry.corrections() == ()


def test_layout_comments_and_neighbours_do_not_matter(copy: Copy) -> None:
    copy.edit(IN_SCATTER, f"# a vendor's comment\n\n        {IN_SCATTER}")
    neighbour = "    def set_grad_positions(self):"
    copy.edit(neighbour, f"    def vendor(self):\n        pass\n\n{neighbour}")
    assert acting(plan_of(copy.installed())) == BOTH


def test_only_the_patches_that_need_an_unrecognised_target_stay_out(copy: Copy) -> None:
    copy.edit(IN_CONTIGUOUS, f"{IN_CONTIGUOUS}        pass\n")
    plan = plan_of(copy.installed())
    assert acting(plan) == {SCATTER_SCALE}
    assert verdicts(plan.entry(PREDIVIDE)) == {SCATTER: Verdict.DEFECTIVE, CONTIGUOUS: Verdict.UNRECOGNISED}


def test_a_source_that_is_known_to_be_fixed_is_left_alone(copy: Copy) -> None:
    copy.edit(IN_SCATTER, f"{IN_SCATTER}\n        fixed = True")
    patch = dataclasses.replace(
        plan_of(copy.installed()).entry(SCATTER_SCALE).patch,
        fingerprints={str(SCATTER): {copy.mark(SCATTER): Verdict.FIXED}},
    )
    (entry,) = plan_of(copy.installed(), [patch]).entries
    assert (entry.verdict, entry.act, entry.corrections()) == (Verdict.FIXED, False, ())
    assert "fix" in entry.reason


def test_a_target_that_an_old_release_lacks_is_absent(copy: Copy) -> None:
    text = copy.file.read_text(encoding="utf-8")
    text = text.replace("__avg_scatter_grads", "__moved").replace("__avg_scatter_contiguous_grads", "__gone")
    copy.file.write_text(text)
    plan = plan_of(copy.installed("0.9.0"))
    assert acting(plan) == set()
    for entry in plan.entries:
        assert set(verdicts(entry).values()) == {Verdict.ABSENT}
        assert entry.verdict is Verdict.ABSENT
        assert "does not have it" in entry.reason


@pytest.mark.parametrize("version", ["0.99.0", "99.0+g1234", "nonsense", None])
def test_a_target_that_a_newer_or_nameless_release_lacks_has_moved(copy: Copy, version: str | None) -> None:
    copy.file.unlink()
    plan = plan_of(copy.installed(version))
    for entry in plan.entries:
        assert set(verdicts(entry).values()) == {Verdict.UNRECOGNISED}
        assert not entry.act


def test_the_newest_known_release_itself_counts_as_known(copy: Copy) -> None:
    newest = newest_known_release()
    assert newest >= Version("0.19.8")
    (undivided,) = (patch for patch in discover() if patch.id == "pipeline-accumulation-undivided")
    patch = patch_of("gone", (rewrite_of("A.gone"),), {})
    for one in (undivided, patch):
        copy.file.unlink(missing_ok=True)
        verdict = plan_of(copy.installed(f"{newest}.post1"), [one]).entries[0].verdict
        assert verdict is Verdict.UNRECOGNISED
    assert plan_of(copy.installed(str(newest)), [patch]).entries[0].verdict is Verdict.ABSENT


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+vendor.3", "0.14.0"])
def test_a_build_that_lacks_what_its_release_has_is_not_taken_for_one_without_the_defect(
    copy: Copy, version: str
) -> None:
    copy.edit(f"    def {SCATTER.qualname.rsplit('.', 1)[-1]}(", "    def __moved(")
    for entry in plan_of(copy.installed(version)).entries:
        assert (verdicts(entry)[SCATTER], entry.act) == (Verdict.UNRECOGNISED, False)
        assert f"this build does not have it where DeepSpeed {version.split('+')[0]} has" in entry.reason


def test_a_function_that_lost_an_argument_is_unrecognised(copy: Copy) -> None:
    copy.edit("def __avg_scatter_grads(self, params_to_reduce: List[Parameter],", "def __avg_scatter_grads(self,")
    assert acting(plan_of(copy.installed())) == set()
    assert SCATTER.qualname in plan_of(copy.installed()).entry(SCATTER_SCALE).reason


def test_an_installation_of_bytecode_alone_is_unrecognised_and_the_reason_says_why(copy: Copy) -> None:
    py_compile.compile(str(copy.file), cfile=str(copy.file.with_suffix(".pyc")))
    copy.file.unlink()
    for version in ("0.19.8", "0.9.0", "0.99.0", None):
        for entry in plan_of(copy.installed(version)).entries:
            assert (entry.verdict, entry.act) == (Verdict.UNRECOGNISED, False)
            assert "only its bytecode is installed" in entry.reason


def test_without_deepspeed_everything_is_absent_and_says_so() -> None:
    plan = plan_of(Installed(deepspeed=None, deepspeed_path=None, torch=None, ds_gradfix=None))
    for entry in plan.entries:
        assert (entry.verdict, entry.act, entry.reason) == (Verdict.ABSENT, False, "DeepSpeed is not installed")


@pytest.mark.parametrize("data", [b"def f(:\n", b"\x00", b"\xff\xfe\x00"], ids=["no syntax", "nul", "no text"])
def test_a_file_that_is_no_python_is_unrecognised_and_the_reason_says_why(copy: Copy, data: bytes) -> None:
    copy.file.write_bytes(data)
    for entry in plan_of(copy.installed()).entries:
        assert entry.verdict is Verdict.UNRECOGNISED
        assert not entry.act
        assert "can't be read" in entry.reason


def test_a_file_that_cannot_be_opened_is_unrecognised_and_the_reason_says_why(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # a mode would not stop root
    for entry in plan_of(copy.installed()).entries:
        assert entry.verdict is Verdict.UNRECOGNISED
        assert "Permission denied" in entry.reason


# ------------------------------------------------------------------------- mixed and rewritten


MIXED = """
class A:
    def old(self, b):
        b.div_(2)
        return b

    def new(self, b):
        return b
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Copy:
    """A DeepSpeed with two functions, of which the second has the upstream fix."""
    made = Copy(tmp_path)
    made.file.write_text(MIXED)
    return made


def rewrite_of(qualname: str) -> Rewrite:
    return Rewrite(Target(MODULE, qualname), (Rule("$b.div_(2)", ""),), None)


def test_only_the_defective_half_of_a_half_fixed_release_is_corrected(mixed: Copy) -> None:
    """The rule can't match in the fixed half, where it isn't going to be applied."""
    old, new = Target(MODULE, "A.old"), Target(MODULE, "A.new")
    marks = {str(old): {mixed.mark(old): Verdict.DEFECTIVE}, str(new): {mixed.mark(new): Verdict.FIXED}}
    for order in ((old, new), (new, old)):
        patch = patch_of("half", tuple(rewrite_of(target.qualname) for target in order), marks)
        (entry,) = plan_of(mixed.installed(), [patch]).entries
        assert entry.act, entry.reason
        assert [str(finding.target) for _, finding in entry.corrections()] == [str(old)]


def test_a_defective_half_beside_an_absent_one_is_corrected(mixed: Copy) -> None:
    old = Target(MODULE, "A.old")
    marks = {str(old): {mixed.mark(old): Verdict.DEFECTIVE}}
    patch = patch_of("half", (rewrite_of("A.gone"), rewrite_of("A.old")), marks)
    (entry,) = plan_of(mixed.installed("0.9.0"), [patch]).entries
    assert entry.act
    assert [finding.target for _, finding in entry.corrections()] == [old]


def test_a_rewrite_that_does_not_match_is_refused_and_says_how_often_it_did(mixed: Copy) -> None:
    new = Target(MODULE, "A.new")
    patch = patch_of("wrong", (rewrite_of("A.new"),), {str(new): {mixed.mark(new): Verdict.DEFECTIVE}})
    (entry,) = plan_of(mixed.installed(), [patch]).entries
    assert (entry.verdict, entry.act, entry.corrections()) == (Verdict.UNRECOGNISED, False, ())
    assert "stands there 0 times instead of 1" in entry.reason
    for settings in ({"only": ("wrong",)}, {"strict": True}):
        with pytest.raises(PlanError, match="stands there 0 times"):
            plan_of(mixed.installed(), [patch], **settings)


def test_forcing_a_rewrite_that_does_not_match_is_not_silent(mixed: Copy) -> None:
    """``force`` names a patch: it works or it raises."""
    patch = patch_of("wrong", (rewrite_of("A.new"),), {})
    with pytest.raises(PlanError, match="stands there 0 times"):
        plan_of(mixed.installed(), [patch], force=("wrong",))


# ------------------------------------------------------------------------------------ settings


@pytest.fixture
def strange(copy: Copy) -> Copy:
    """A DeepSpeed whose scattered reduction nobody knows."""
    copy.edit(IN_SCATTER, f"{IN_SCATTER}\n        pass")
    return copy


def test_forced_patches_act_on_a_source_that_is_not_recognised(strange: Copy) -> None:
    plan = plan_of(strange.installed(), force=(SCATTER_SCALE,))
    assert acting(plan) == {SCATTER_SCALE}
    entry = plan.entry(SCATTER_SCALE)
    assert entry.verdict is Verdict.UNRECOGNISED
    assert "forced" in entry.reason and strange.mark(SCATTER) in entry.reason
    assert [finding.target for _, finding in entry.corrections()] == [SCATTER]


@pytest.mark.parametrize("harm", ["missing", "broken"])
def test_nothing_forces_a_patch_into_a_function_that_is_not_there(copy: Copy, harm: str) -> None:
    copy.file.unlink() if harm == "missing" else copy.file.write_text("def f(:")
    try:
        plan = plan_of(copy.installed("0.99.0"), force=(SCATTER_SCALE,))
    except PlanError:
        return
    assert not plan.entry(SCATTER_SCALE).act


@pytest.mark.parametrize("harm", ["missing", "broken"])
def test_forcing_is_not_recommended_where_it_would_not_help(copy: Copy, harm: str) -> None:
    copy.file.unlink() if harm == "missing" else copy.file.write_text("def f(:")
    entry = plan_of(copy.installed("0.99.0")).entry(SCATTER_SCALE)
    assert entry.verdict is Verdict.UNRECOGNISED
    assert "would correct it all the same" not in entry.reason


def test_a_fixed_source_is_not_forced(copy: Copy) -> None:
    fixed = {str(SCATTER): {copy.mark(SCATTER): Verdict.FIXED}}
    patch = dataclasses.replace(plan_of(copy.installed()).entry(SCATTER_SCALE).patch, fingerprints=fixed)
    (entry,) = plan_of(copy.installed(), [patch], force=(SCATTER_SCALE,)).entries
    assert not entry.act


def test_a_patch_that_is_asked_for_by_name_raises_where_it_cannot_act(strange: Copy) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(strange.installed(), only=(SCATTER_SCALE,))
    text = str(caught.value)
    assert SCATTER_SCALE in text and "0.19.8" in text and strange.mark(SCATTER) in text
    assert isinstance(caught.value, GradfixError)


def test_a_patch_that_is_asked_for_by_name_may_be_forced(strange: Copy) -> None:
    plan = plan_of(strange.installed(), only=(SCATTER_SCALE,), force=(SCATTER_SCALE,))
    assert acting(plan) == {SCATTER_SCALE}


def test_asking_for_another_patch_does_not_raise(copy: Copy) -> None:
    copy.edit(IN_CONTIGUOUS, f"{IN_CONTIGUOUS}        pass\n")
    assert acting(plan_of(copy.installed(), only=(SCATTER_SCALE,))) == {SCATTER_SCALE}


def test_strict_raises_for_any_patch_and_excluding_it_helps(strange: Copy) -> None:
    with pytest.raises(PlanError, match="can't act on this DeepSpeed"):
        plan_of(strange.installed(), strict=True)
    assert acting(plan_of(strange.installed(), strict=True, exclude=tuple(BOTH))) == set()


def test_strict_accepts_what_is_recognised(copy: Copy) -> None:
    assert acting(plan_of(copy.installed(), strict=True)) == BOTH


def test_left_out_patches_say_by_what(copy: Copy) -> None:
    plan = plan_of(copy.installed(), only=(PREDIVIDE,), exclude=())
    assert acting(plan) == {PREDIVIDE}
    assert plan.entry(SCATTER_SCALE).reason == "left out by only"
    assert plan.entry(SCATTER_SCALE).verdict is Verdict.DEFECTIVE
    assert plan_of(copy.installed(), exclude=(PREDIVIDE,)).entry(PREDIVIDE).reason == "left out by exclude"


@pytest.mark.parametrize("key", ["only", "exclude", "force"])
def test_an_unknown_patch_is_refused_with_its_near_miss(copy: Copy, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        plan_of(copy.installed(), **{key: ("zero3-scater-scale",)})
    text = str(caught.value)
    assert text.startswith(f"{key}: there is no patch 'zero3-scater-scale'")
    assert f"did you mean '{SCATTER_SCALE}'?" in text
    assert all(patch_id in text for patch_id in BOTH)
    with pytest.raises(SettingsError) as caught:
        plan_of(copy.installed(), **{key: ("qqqq",)})
    assert "did you mean" not in str(caught.value)
    assert "'qqqq'. The patches are" in str(caught.value)


def test_an_unknown_entry_is_refused_too(copy: Copy) -> None:
    with pytest.raises(SettingsError, match="did you mean 'zero3-scatter-scale'"):
        plan_of(copy.installed()).entry("zero3-scatter-scales")


# ----------------------------------------------------------------------------------- discovery


def test_built_in_patches_are_found_in_order() -> None:
    ids = [patch.id for patch in discover()]
    assert ids == sorted(ids)
    assert set(ids) >= BOTH


# -------------------------------------------------------------------------------------- cards


def test_every_card_is_complete() -> None:
    for patch in discover():
        for text in (patch.title, patch.symptom, patch.cause, patch.fix, patch.retire):
            assert text.strip(), patch.id
        assert all(link.startswith("https://") for link in patch.upstream), patch.id  # none: nobody has reported it
        assert patch.corrections
        assert len(set(patch.targets)) == len(patch.targets)
        for target in patch.targets:
            known = patch.fingerprints.get(str(target), {})
            assert Verdict.DEFECTIVE in known.values(), f"{patch.id} knows no defective {target}"


def test_the_catalogue_is_about_targets_that_exist_and_says_each_thing_once() -> None:
    patches = discover()
    named = {target for patch in patches for target in (*patch.targets, *patch.needs)}
    targets = {str(target): {patch.id for patch in patches if target in patch.targets} for target in named}
    seen = set()
    for entry in catalogue():
        assert set(entry["verdicts"]) <= targets[entry["target"]]
        assert entry["releases"]
        assert int(entry["fingerprint"], 16) >= 0 and len(entry["fingerprint"]) == 16
        assert (entry["target"], entry["fingerprint"]) not in seen
        seen.add((entry["target"], entry["fingerprint"]))
        json.dumps(entry)


def test_known_sources_are_the_catalogue_s() -> None:
    known = known_sources(SCATTER_SCALE)
    assert known[str(SCATTER)]["200ec89275a7f0b7"] is Verdict.DEFECTIVE
    assert known_sources("no-such-patch") == {}


@pytest.mark.parametrize(
    ("error", "right"), [(0.0, True), (0.01, True), (0.0101, False), (float("nan"), False), (float("inf"), False)]
)
def test_a_measurement_is_right_within_its_tolerance_and_never_when_it_is_no_number(error: float, right: bool) -> None:
    assert Measurement("path", 1.0, error, 0.01).right is right


def test_targets_print_as_the_catalogue_writes_them() -> None:
    assert str(SCATTER) == f"{MODULE}:{CLASS}.__avg_scatter_grads"
    assert Replace(SCATTER, lambda: None).target == SCATTER


# ---------------------------------------------------------------------------------- installed


def test_what_a_package_says_of_itself_outranks_other_metadata(tmp_path: Path) -> None:
    """A checkout before an installed copy on the path: version and files must be of the same one."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "git_version_info_installed.py").write_text("version='9.8.7+abc'\ngit_hash='x'\n")
    script = """
        from ds_gradfix.installed import find_installed
        installed = find_installed()
        print(installed.deepspeed, installed.release, installed.deepspeed_path)
    """
    environment = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    said = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.split() == ["9.8.7+abc", "9.8.7", str(package)]


def test_a_module_is_found_as_a_file_or_as_a_package(copy: Copy) -> None:
    installed = copy.installed()
    (copy.package / "runtime" / "__init__.py").write_text("")
    assert installed.module_file(MODULE) == copy.file
    assert installed.module_file("deepspeed.runtime") == copy.package / "runtime" / "__init__.py"
    assert installed.module_file("deepspeed.runtime.absent") is None
