"""Patches of other distributions: the example one, built and installed, and every way in which one can be broken."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from launching import launch
from test_packaging import ALONE, BUILT, ROOT, build_wheel, run

from ds_gradfix import plugins
from ds_gradfix.cli.catalogue import _data
from ds_gradfix.errors import SettingsError
from ds_gradfix.facts import Facts
from ds_gradfix.installed import find_installed
from ds_gradfix.registry import Patch, Verdict, discover, make_plan
from ds_gradfix.settings import Settings

GOOD = """
from dataclasses import replace
from ds_gradfix.registry import Effect, Replace, Rewrite, Steer, Target, Verdict
from ds_gradfix.source import Rule
from ds_gradfix.patches.zero3_scatter_scale import PATCH as OTHER
GOOD = replace(OTHER, id="aaa-plugin", affects=lambda facts: Effect(2, "as the test says"))
HERE, FORCED = OTHER.targets[0], {}
def rewritten(*rules):
    return replace(GOOD, id="aaa-rewrite", corrections=(Rewrite(HERE, rules, None),))
"""

# What a card must not be, each with what is said of it.
CARDS = {
    "PATCH = 'not a patch'": "PATCH is of type str; allowed is Patch",
    "PATCH = GOOD.__class__": "PATCH is of type type; allowed is Patch",
    "PATCH = replace(GOOD, id=3)": "PATCH.id is of type int; allowed is str",
    "PATCH = replace(GOOD, id='a,b')": "the id 'a,b' is not allowed; allowed are lower-case words",
    "PATCH = replace(GOOD, title=' ')": "title is empty",
    "PATCH = replace(GOOD, upstream='https://x')": "PATCH.upstream is of type str",
    "PATCH = replace(GOOD, upstream=(1,))": "PATCH.upstream[0] is of type int; allowed is str",
    "PATCH = replace(GOOD, corrections=())": "corrections is empty",
    "PATCH = replace(GOOD, corrections=GOOD.corrections * 2)": "two of its corrections have the same target",
    "PATCH = replace(GOOD, corrections=(3,))": "corrections[0] is of type int; allowed is Replace | Rewrite | Steer",
    "PATCH = replace(GOOD, corrections=(Replace('a:b', print),))": "PATCH.corrections[0].target is of type str",
    "PATCH = replace(GOOD, corrections=(Replace(Target(None, 'b'), print),))": "target.module is of type NoneType",
    "PATCH = replace(GOOD, corrections=(Replace(Target('os', 'system'), print),))": "target 'os:system' is not allowed",
    "PATCH = replace(GOOD, corrections=(Replace(Target('deepspeed..x', 'f'), print),))": "is not allowed; allowed are",
    "PATCH = replace(GOOD, corrections=(Replace(HERE, None),))": "PATCH.corrections[0].body is of type NoneType",
    "PATCH = replace(GOOD, corrections=(Steer(HERE, {1: 2}),))": "a key of PATCH.corrections[0].values is of type int",
    "PATCH = rewritten('a')": "PATCH.corrections[0].rules[0] is of type str; allowed is Rule",
    "PATCH = rewritten(Rule('a', 'b', (1,)))": "PATCH.corrections[0].rules[0].times is of type tuple",
    "PATCH = replace(GOOD, affects=None)": "PATCH.affects is of type NoneType; allowed is Callable",
    "PATCH = replace(GOOD, measure=())": "PATCH.measure is of type tuple; allowed is Callable",
    "PATCH = replace(GOOD, fingerprints=[])": "PATCH.fingerprints is of type list; allowed is Mapping",
    "PATCH = replace(GOOD, fingerprints={'a': {'b': 'defective'}})": "PATCH.fingerprints['a']['b'] is of type str",
    "PATCH = replace(GOOD, option='key')": "PATCH.option is of type str",
    "PATCH = replace(GOOD, needs=(HERE, 'x'))": "PATCH.needs[1] is of type str",
    "PATCH = replace(GOOD, refuse=True)": "PATCH.refuse is of type bool",
    "PATCH = OTHER": "'zero3-scatter-scale' is the id of another patch",
    "pass": "AttributeError: module",
    "def f(:": "SyntaxError: ",
    "import not_there_at_all": "ModuleNotFoundError: No module named 'not_there_at_all'",
    "raise ZeroDivisionError('in the plug-in,\\non two lines')": "ZeroDivisionError: in the plug-in, on two lines",
    "import sys; sys.exit('out')": "SystemExit: out",
    "raise GeneratorExit": "GeneratorExit: ",
    "class E(BaseException):\n    __str__ = None\nraise E": "E: no text",
    "class P(type(OTHER)):\n    targets = property(lambda self: 1 / 0)\nPATCH = P(**vars(GOOD))": "ZeroDivisionError",
}

Plugin = Callable[..., str]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Install a distribution that offers a patch, for real: metadata and a module on the path."""

    def install(source: str) -> str:
        module = f"gradfix_plugin_{len(sys.path)}"
        distribution(tmp_path / module, module, source)
        monkeypatch.syspath_prepend(str(tmp_path / module))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    plugins.tell.cache_clear()
    return install


def distribution(site: Path, module: str, source: str) -> None:
    """A distribution of one module: its metadata, and code that follows that of a good one."""
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ds_gradfix.patches]\nthe-point = {module}:PATCH\n")
    (site / f"{module}.py").write_text(GOOD + dedent(source))


def of_plugins(patches: tuple[Patch, ...]) -> list[Patch]:
    return [patch for patch in patches if patch.plugin is not None]


def test_a_patch_of_another_distribution_is_found_and_says_whose_it_is(plugin: Plugin) -> None:
    name = plugin("PATCH = GOOD")
    (entry,) = make_plan(find_installed(), of_plugins(discover()), Settings()).entries
    assert _data(entry)["id"] == "aaa-plugin"
    assert _data(entry)["plugin"] == f"{name} 1.0"
    assert entry.act and entry.verdict is Verdict.DEFECTIVE


@pytest.mark.parametrize(("source", "said"), CARDS.items())
def test_a_broken_plugin_is_told_once_and_harms_nothing(
    plugin: Plugin, source: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    built_in = discover()
    name = plugin(source)
    assert discover() == discover() == built_in
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"ds-gradfix: the plug-in 'the-point' ({name}:PATCH) of {name} 1.0 is left out: "
    )
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_broken_metadata_file_hides_no_plugin(
    plugin: Plugin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = plugin("PATCH = GOOD")
    (file,) = tmp_path.glob(f"{broken}/*/entry_points.txt")
    file.write_text("[ds_gradfix.patches]\njust a line\n")
    name = plugin("PATCH = GOOD")
    assert [patch.plugin for patch in of_plugins(discover())] == [f"{name} 1.0"]
    assert str(file.parent) in caplog.text and "can't be read" in caplog.text


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("lambda facts: 1 / 0", "affects(): ZeroDivisionError: division by zero"),
        ("lambda facts: exit(3)", "affects(): SystemExit: 3"),
        ("lambda facts: 'twice'", "affects(): Misfit: what it returns is of type str"),
        ("lambda facts: Effect('2', 'x')", "affects(): Misfit: what it returns.factor is of type str"),
        ("lambda: None", "affects(): TypeError"),
    ],
)
def test_a_patch_whose_predicate_fails_does_not_act(
    plugin: Plugin, function: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = plugin(f"PATCH = replace(GOOD, affects={function})")
    (patch,) = of_plugins(discover())
    assert [patch.affects(Facts(zero_stage=3, group_size=2)) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"ds-gradfix: {name} 1.0, aaa-plugin: {said}")


def test_a_patch_whose_predicate_works_acts(plugin: Plugin) -> None:
    plugin("PATCH = GOOD")
    (patch,) = of_plugins(discover())
    effect = patch.affects(Facts(zero_stage=3, group_size=2))
    assert effect is not None and (effect.factor, effect.words) == (2, "as the test says")


def test_a_patch_that_measures_nonsense_is_heard_by_the_self_check(plugin: Plugin) -> None:
    plugin("PATCH = replace(GOOD, measure=lambda engine: [1.0])")
    (patch,) = of_plugins(discover())
    with pytest.raises(RuntimeError, match=r"measure\(\): Misfit: what it returns\[0\] is of type float"):
        patch.measure(None)


def test_an_option_of_a_plugin_still_refuses_a_value(plugin: Plugin) -> None:
    plugin("""
        from ds_gradfix.errors import SettingsError
        from ds_gradfix.patches.zero3_sum_reduction import PATCH as SUM
        def asked(config):
            if config: raise SettingsError("not this value")
            return 1 / 0
        PATCH = replace(GOOD, option=replace(SUM.option, asked=asked))
        """)
    (patch,) = of_plugins(discover())
    assert patch.option is not None
    assert not patch.option.asked({})
    with pytest.raises(SettingsError, match="not this value"):
        patch.option.asked({"key": 1})


def test_rules_that_are_no_python_leave_the_function_alone(plugin: Plugin) -> None:
    plugin("PATCH = rewritten(Rule('f(', ''))")
    (entry,) = make_plan(find_installed(), of_plugins(discover()), Settings()).entries
    assert (entry.act, entry.verdict) == (False, Verdict.UNRECOGNISED)
    assert entry.reason.startswith("its rules can't be applied: SyntaxError")


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_turned_off_no_entry_point_is_read(
    plugin: Plugin, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [plugin("PATCH = GOOD"), plugin("raise SystemExit")]
    (tmp_path / names[1] / f"{names[1]}-1.0.dist-info" / "entry_points.txt").write_text("[ds_gradfix.patches]\nx\n")
    if by == "variable":
        monkeypatch.setenv("DS_GRADFIX_PLUGINS", "0")
    assert of_plugins(discover(False if by == "argument" else None)) == []
    assert not set(names) & set(sys.modules)
    assert caplog.text == ""


def test_a_bad_value_of_the_variable_loads_nothing(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plugin("PATCH = GOOD")
    monkeypatch.setenv("DS_GRADFIX_PLUGINS", "flase")
    with pytest.raises(SettingsError, match="DS_GRADFIX_PLUGINS: 'flase' is not allowed"):
        discover()
    assert name not in sys.modules


BROKEN_IN_USE = {
    "leaves": "import os, sys; sys.exit(0)",
    "predicate": "PATCH = replace(GOOD, id='predicate', affects=lambda _: 1 / 0, corrections=(Replace(INFO, print),))",
    "steers": "PATCH = replace(GOOD, id='steers', corrections=(Steer(INFO, {'global_steps': 7, 'not.there': 1}),))",
    "rules": "PATCH = replace(GOOD, id='rules', corrections=(Rewrite(INFO, (Rule('f(', ''),), None),))",
}
# On a function that they would harm. All of its installed source is called defective.
INFO = """
from ds_gradfix.installed import find_installed
from ds_gradfix.registry import read_functions
from ds_gradfix.source import fingerprint
INFO = Target("deepspeed.runtime.engine", "DeepSpeedEngine.get_lr")
MARK = fingerprint(read_functions(find_installed(), [INFO])[INFO].node)
GOOD = replace(GOOD, fingerprints={str(INFO): {MARK: Verdict.DEFECTIVE}})
"""


def test_the_example_is_in_force_on_an_engine_and_broken_ones_beside_it_are_not(tmp_path: Path) -> None:
    """Built as a wheel and installed; turned on by the variable alone."""
    source = shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin", ignore=BUILT)
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", *ALONE, "--target", site, build_wheel(source, tmp_path))
    for name, code in BROKEN_IN_USE.items():
        distribution(site, f"gradfix_{name}", INFO + code)

    (rank,) = launch("with_plugins.py", ranks=1, env={"DS_GRADFIX": "1", "PYTHONPATH": str(site)})

    assert rank.status == 0, rank.output[-3000:]
    said = json.loads(rank.output.splitlines()[-1])
    assert said["info"] == [1, 1, 1]
    assert said["plugins"]["batch-info"] == "ds-gradfix-example-plugin 1.0"
    assert said["in force"] == ["batch-info"]
    assert (said["built-in"], said["steps"]) == (len(discover(plugins=False)), 1)
    lines = [line for line in rank.output.splitlines() if "ds-gradfix: " in line]
    for text in (
        "batch-info is a patch of ds-gradfix-example-plugin 1.0, not of ds-gradfix",
        "batch-info is on (get_batch_info() gives functions instead of numbers; corrected, measured 1 of the right",
        "(gradfix_leaves:PATCH) of gradfix_leaves 1.0 is left out: SystemExit: 0",
        "gradfix_predicate 1.0, predicate: affects(): ZeroDivisionError: division by zero; the patch is left out",
        "gradfix_steers 1.0, steers: AttributeError: 'DeepSpeedEngine' object has no attribute 'not'",
        "rules: its rules can't be applied: SyntaxError",
    ):
        assert sum(text in line for line in lines) == 1, (text, rank.output)
