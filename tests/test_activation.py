"""Every order of import, enable and disable, each in a process of its own, with the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

# What every script starts with. Its hooks are there before ds-gradfix's: they see the objects that DeepSpeed defines.
PRELUDE = '''
import importlib, json, os, sys
import wrapt
import ds_gradfix

ZERO3 = "deepspeed.runtime.zero.stage3"
OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
SCATTER = (ZERO3, f"{OPTIMIZER}.__avg_scatter_grads")
CONTIGUOUS = (ZERO3, f"{OPTIMIZER}.__avg_scatter_contiguous_grads")
ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine.__init__")
CONFIG = ("deepspeed.runtime.config", "DeepSpeedConfig.__init__")
OUR_PATCHES = ("zero3-scatter-scale", "zero3-predivide-postscale")
OTHERS = [p["patch"] for p in ds_gradfix.status()["plan"] if p["patch"] not in OUR_PATCHES]
PLACES = tuple(sorted({ENGINE, CONFIG, *(
    tuple(t["target"].split(":")) for p in ds_gradfix.status()["plan"] for t in p["targets"] if t["fingerprint"])}))
defined = {}

def note(module):
    for place in PLACES:
        if place[0] == module.__name__:
            defined[place] = now(place)

for name in sorted({module for module, _ in PLACES}):
    wrapt.register_post_import_hook(note, name)

def now(place):
    owner = sys.modules[place[0]]
    *classes, name = place[1].split(".")
    for part in classes:
        owner = vars(owner)[part]
    return vars(owner)[mangled(place)]

def mangled(place):
    *classes, name = place[1].split(".")
    return f"_{classes[-1]}{name}" if name.startswith("__") and not name.endswith("__") else name

def import_deepspeed():
    import deepspeed
    for module, _ in PLACES:
        importlib.import_module(module)
    assert set(defined) == set(PLACES), defined

def told():
    """The status, as it comes back from JSON: all of it is plain data."""
    status = ds_gradfix.status()
    assert json.loads(json.dumps(status)) == json.loads(json.dumps(ds_gradfix.status()))
    return json.loads(json.dumps(status))

def corrected(without=()):
    """Exactly the places of the patches that act are occupied, and the status says so."""
    status = told()
    assert status["enabled"] is True
    assert status["problems"] == {}, status["problems"]
    acting = {p["patch"] for p in status["plan"] if p["action"] == "correct"}
    assert acting == {p["patch"] for p in status["plan"] if p["verdict"] == "defective"} - set(without), acting
    assert acting >= set(OUR_PATCHES) - set(without)
    places = {tuple(slot["target"].split(":")) for slot in status["slots"]}
    named = {tuple(t["target"].split(":")) for p in status["plan"] if p["patch"] in acting for t in p["targets"]}
    assert {ENGINE, CONFIG} <= places <= {ENGINE, CONFIG, *named}
    for patch, place in (("zero3-scatter-scale", SCATTER), ("zero3-predivide-postscale", CONTIGUOUS)):
        assert place in places or patch not in acting
    for place in PLACES:
        assert (now(place) is defined[place]) is (place not in places), (place, now(place))
        if place in places:
            assert now(place).__wrapped__ is defined[place]
    assert all(slot["in_place"] for slot in status["slots"])

def stock():
    """The very objects that DeepSpeed defined are where they were, and the status says that ds-gradfix is off."""
    for place in PLACES:
        assert now(place) is defined[place], (place, now(place))
    off()

def off():
    status = told()
    assert (status["enabled"], status["slots"], status["problems"], status["engines"]) == (False, [], {}, [])

def engine(config, **section):
    """A real engine on one rank, without the shared-memory operator that would be compiled first."""
    import socket, torch, deepspeed
    from ds_gradfix.verify._compat import prepare
    prepare(deepspeed.__version__, on_cpu=True)
    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        deepspeed.init_distributed("gloo")
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    if section:
        config["ds_gradfix"] = section
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
'''

SCRIPTS = {
    "enable, import, disable": """
        ds_gradfix.enable()
        assert "torch" not in sys.modules and "deepspeed" not in sys.modules
        assert told()["slots"] == [] and told()["enabled"]
        import_deepspeed()
        corrected()
        ds_gradfix.disable()
        stock()
    """,
    "enable, disable, import, enable, disable": """
        ds_gradfix.enable()
        ds_gradfix.disable()
        off()
        import_deepspeed()
        stock()
        ds_gradfix.enable()
        corrected()
        ds_gradfix.disable()
        stock()
    """,
    "import, enable twice, disable twice, and again": """
        import_deepspeed()
        for _ in range(2):
            ds_gradfix.enable()
            first = {place: now(place) for place in PLACES}
            ds_gradfix.enable()
            assert all(now(place) is first[place] for place in PLACES), "the second call does nothing"
            corrected()
            ds_gradfix.disable()
            stock()
            ds_gradfix.disable()
            stock()
    """,
    "disable, enable twice, import, disable twice": """
        ds_gradfix.disable()
        off()
        ds_gradfix.enable()
        ds_gradfix.enable()
        import_deepspeed()
        corrected()
        ds_gradfix.disable()
        ds_gradfix.disable()
        stock()
    """,
    "other arguments take effect, before and after the import": """
        from ds_gradfix.errors import SettingsError
        everything = [p["patch"] for p in told()["plan"]]
        ds_gradfix.enable(exclude=["zero3-predivide-postscale"])
        ds_gradfix.enable(only=["zero3-scatter-scale"], self_check="warn")
        assert told()["settings"]["only"] == ["zero3-scatter-scale"]
        assert told()["settings"]["exclude"] == []
        import_deepspeed()
        others = set(everything) - {"zero3-scatter-scale"}
        corrected(without=others)
        for bad in ({"only": ["zero3-scater-scale"]}, {"self_check": "eror"}, {"strict": "maybe"}):
            try:
                ds_gradfix.enable(**bad)
            except SettingsError:
                corrected(without=others)
            else:
                raise AssertionError(f"{bad} was accepted")
        ds_gradfix.enable(exclude=everything)
        corrected(without=everything)
        ds_gradfix.enable()
        corrected()
        ds_gradfix.disable()
        stock()
    """,
    "copies made before are corrected and put back": """
        import types
        import_deepspeed()
        user = sys.modules["user"] = types.ModuleType("user")
        user.taken, user.config_init = now(SCATTER), now(CONFIG)
        bound_to = object.__new__(getattr(sys.modules[ZERO3], OPTIMIZER))
        bound = getattr(bound_to, mangled(SCATTER))
        ds_gradfix.enable()
        corrected()
        assert user.taken is now(SCATTER) and user.config_init is now(CONFIG)
        slots = {slot["target"].rpartition(".")[2]: slot for slot in told()["slots"]}
        assert slots["__avg_scatter_grads"]["aliases"] == ["user.taken"]
        assert any("bound method" in said for said in slots["__avg_scatter_grads"]["held_elsewhere"]), slots
        ds_gradfix.disable()
        stock()
        assert user.taken is defined[SCATTER] and user.config_init is defined[CONFIG]
    """,
    "another tool's replacement is refused, and nothing is half undone": """
        from ds_gradfix.errors import SlotError
        ds_gradfix.enable()
        import_deepspeed()
        def foreign_tool(*args): pass
        ours = now(SCATTER)
        owner = getattr(sys.modules[ZERO3], OPTIMIZER)
        setattr(owner, mangled(SCATTER), foreign_tool)
        assert [s["in_place"] for s in told()["slots"] if s["target"].endswith("__avg_scatter_grads")] == [False]
        try:
            ds_gradfix.disable()
        except SlotError as error:
            assert "foreign_tool" in str(error), error
        else:
            raise AssertionError("a foreign replacement was undone")
        assert now(SCATTER) is foreign_tool and told()["enabled"]
        assert all(now(place) is not defined[place] for place in (CONTIGUOUS, ENGINE, CONFIG))
        setattr(owner, mangled(SCATTER), ours)
        ds_gradfix.disable()
        stock()
    """,
    "a hook that fails does not break the import and is reported": """
        import logging
        from ds_gradfix import slots
        install = slots.install
        def failing(module, qualname, *args):
            if "avg_scatter" in qualname:
                raise ZeroDivisionError("in a hook")
            return install(module, qualname, *args)
        slots.install = failing
        ds_gradfix.enable()
        import_deepspeed()
        assert now(SCATTER) is defined[SCATTER] and now(CONTIGUOUS) is defined[CONTIGUOUS]
        problems = told()["problems"]
        for place in (SCATTER, CONTIGUOUS):
            assert problems[":".join(place)] == "ZeroDivisionError: in a hook", problems
        assert len(problems) == 2, problems
        assert now(ENGINE) is not defined[ENGINE] and now(CONFIG) is not defined[CONFIG]
        ds_gradfix.disable()
        stock()
    """,
    "import ds_gradfix is free": """
        import subprocess
        script = "import sys; old = set(sys.modules); import ds_gradfix; print(sorted(set(sys.modules) - old))"
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == "['ds_gradfix']", said.stdout
        status = told()
        off()
        actions = {p["patch"]: p["action"] for p in status["plan"]}
        assert all(actions[patch] == "correct" for patch in OUR_PATCHES), actions
        assert not {"torch", "deepspeed", "rich"} & set(sys.modules)
    """,
    "disable() outranks DS_GRADFIX=1 also before the import": """
        os.environ["DS_GRADFIX"] = "1"
        from ds_gradfix import _boot
        _boot.main()
        ds_gradfix.disable()
        import_deepspeed()
        stock()
    """,
    "enable() with arguments outranks DS_GRADFIX=1": """
        os.environ["DS_GRADFIX"] = "1"
        from ds_gradfix import _boot
        _boot.main()
        ds_gradfix.enable(only=["zero3-scatter-scale"])
        import_deepspeed()
        corrected(without=[*OTHERS, "zero3-predivide-postscale"])
        ds_gradfix.disable()
        stock()
    """,
    "a late enable survives any object in the process": """
        import weakref
        import_deepspeed()
        class Thing: pass
        proxy = weakref.proxy(Thing())  # dead: asking it anything raises ReferenceError
        class Lazy:
            @property
            def __class__(self):
                raise RuntimeError("not loaded")
        lazy = Lazy()
        ds_gradfix.enable()
        corrected()
    """,
    "engines: settings by their precedence, engaged late, let go": """
        from ds_gradfix.errors import SettingsError
        import_deepspeed()
        ds_gradfix.enable()
        for section, said in (({"self_chek": "off"}, "did you mean 'self_check'?"),
                              ({"exclude": ["zero3-scater-scale"]}, "did you mean 'zero3-scatter-scale'?")):
            try:
                engine({}, **section)
            except SettingsError as error:
                assert said in str(error), error
            else:
                raise AssertionError(f"{section} was accepted")
        first = engine({}, self_check="off", exclude=["zero3-scatter-scale"])
        assert first._ds_gradfix.settings.self_check == "off"
        assert first._ds_gradfix.settings.exclude == ("zero3-scatter-scale",)
        assert [e["facts"]["zero_stage"] for e in told()["engines"]] == [0]
        ds_gradfix.enable(self_check="warn")
        assert first._ds_gradfix.settings.self_check == "warn", "an argument outranks the configuration"
        ds_gradfix.disable()
        assert not hasattr(first, "_ds_gradfix") and not hasattr(first.optimizer, "_ds_gradfix")
        stock()
        second = engine({})
        assert not hasattr(second, "_ds_gradfix")
        ds_gradfix.enable()
        assert len(told()["engines"]) == 2
        assert second._ds_gradfix.settings.self_check == "error"
    """,
    "an argument that equals the default still outranks the configuration": """
        import_deepspeed()
        ds_gradfix.enable()
        ds_gradfix.enable(self_check="error")
        made = engine({}, self_check="off")
        assert made._ds_gradfix.settings.self_check == "error", made._ds_gradfix.settings
    """,
    "what was captured while it was on is stock when it is off": """
        ds_gradfix.enable()
        import_deepspeed()
        from deepspeed.runtime.engine import DeepSpeedEngine
        class Engine(DeepSpeedEngine):
            init = DeepSpeedEngine.__init__
            def __init__(self, *args, **kwargs):
                Engine.init(self, *args, **kwargs)
        import deepspeed
        ds_gradfix.disable()
        deepspeed.DeepSpeedEngine = Engine
        made = engine({})
        assert type(made) is Engine
        assert not hasattr(made, "_ds_gradfix")
        off()
    """,
    "two plug-ins that correct one place differently": """
        import dataclasses, pathlib, tempfile
        from ds_gradfix.errors import PlanError
        site = pathlib.Path(tempfile.mkdtemp())
        info = site / "gradfix_conflict-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: gradfix-conflict\\nVersion: 1.0\\n")
        (info / "entry_points.txt").write_text("[ds_gradfix.patches]\\nconflict = gradfix_conflict:PATCH\\n")
        (site / "gradfix_conflict.py").write_text(
            "import dataclasses\\n"
            "from ds_gradfix.patches.zero3_scatter_scale import PATCH as OTHER\\n"
            "from ds_gradfix.registry import Replace\\n"
            "correction = Replace(OTHER.corrections[0].target, lambda *a: None)\\n"
            "PATCH = dataclasses.replace(OTHER, id='conflict', corrections=(correction,))\\n")
        sys.path.insert(0, str(site))
        for _ in range(2):
            try:
                ds_gradfix.enable()
            except PlanError as error:
                assert "conflict" in str(error) and "exclude one of them" in str(error), error
            else:
                raise AssertionError("a conflict was accepted")
            assert told()["enabled"] is False, "a refusal leaves ds-gradfix off"
        ds_gradfix.enable(exclude=["conflict"])
        assert told()["enabled"] is True
    """,
}

# With a DeepSpeed whose scattered reduction nobody knows.
UNRECOGNISED = """
from ds_gradfix.errors import GradfixError
ds_gradfix.enable()
import_deepspeed()
verdicts = {p["patch"]: (p["verdict"], p["action"]) for p in told()["plan"]}
assert all(verdicts[patch] == ("unrecognised", "leave") for patch in OUR_PATCHES), verdicts
assert now(SCATTER) is defined[SCATTER]
engine({})
for section in ({"strict": True}, {"only": ["zero3-scatter-scale"]}, {"force": ["zero3-scatter-scale"]}):
    try:
        engine({}, **section)
    except GradfixError:
        pass
    else:
        raise AssertionError(f"{section} was silently dropped")
"""


def run(script: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    path = os.pathsep.join(filter(None, (path, environment.get("PYTHONPATH"))))
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + dedent(script) + "\nprint('finished')\n"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The scripts of the selected tests, two at a time."""
    selected = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, script) for name, script in SCRIPTS.items() if name in selected}


def edited_deepspeed(folder: Path) -> Path:
    """A whole copy of the installed DeepSpeed with one line more in ``__avg_scatter_grads``."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "deepspeed" / "runtime" / "zero" / "stage3.py"
    text, line = file.read_text(encoding="utf-8"), "full_grads_for_rank = [p.grad for p in params_to_reduce]\n"
    assert text.count(line) == 1
    text = text.replace(line, f"{line}        full_grads_for_rank = list(full_grads_for_rank)\n")
    file.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_order(name: str, runs: Runs) -> None:
    finished(runs[name].result())


def test_an_unknown_deepspeed_is_left_alone_and_a_configuration_that_insists_is_refused(tmp_path: Path) -> None:
    finished(run(UNRECOGNISED, str(edited_deepspeed(tmp_path))))


def finished(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.rstrip().endswith("finished"), "the script came to its end"


def test_an_iterator_of_names_is_read_once() -> None:
    script = (
        "import ds_gradfix; from ds_gradfix import activation\n"
        "ds_gradfix.enable(only=iter(['zero3-scatter-scale']))\n"
        "ds_gradfix.enable(only=['zero3-scatter-scale'])\n"
        "print(activation._state.arguments, ds_gradfix.status()['settings']['only'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'only': ('zero3-scatter-scale',)} ('zero3-scatter-scale',)"
