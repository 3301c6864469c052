"""Interpreter start-up and `ds-gradfix run`, each scenario in an interpreter of its own.

The interpreters belong to a virtual environment that holds this project as its wheel lays it out. DeepSpeed and the
activation are stand-ins where only the mechanics of importing are in question.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = Path(importlib.util.find_spec("deepspeed").origin).parents[1]
WAITING = "[finder for finder in sys.meta_path if getattr(finder, 'name', None) == 'deepspeed' and finder.waiting]"


class Interpreter:
    """A Python with a site-packages directory of its own."""

    def __init__(self, directory):
        venv.create(directory, symlinks=True)
        self.directory = directory
        self.python = str(directory / "bin" / "python")
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(directory)}))

    def run(self, *arguments, path=(), **environment):
        inherited = {
            name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name and name != "PYTHONPATH"
        }
        return subprocess.run(
            [self.python, *map(str, arguments)],
            env={**inherited, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
            cwd=self.directory,  # `python -m` looks there first, so not in a checkout of this project
            capture_output=True,
            text=True,
            timeout=120,
        )

    def evaluate(self, code, **options):
        """The JSON that the code prints last, and what it wrote to stderr."""
        done = self.run("-c", textwrap.dedent(code), **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    interpreter = Interpreter(tmp_path_factory.mktemp("installed") / "env")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ds_gradfix", interpreter.site_packages / "ds_gradfix", ignore=ignore)
    shutil.copytree(ROOT / "patches", interpreter.site_packages / "ds_gradfix" / "patches", ignore=ignore)
    shutil.copy(ROOT / "ds_gradfix_startup.pth", interpreter.site_packages)
    return interpreter


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Interpreter(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture
def fake_deepspeed(tmp_path):
    """A directory with a DeepSpeed that says whether ds-gradfix had been activated before its first line ran."""
    (tmp_path / "deepspeed.py").write_text("import sys\nactivated_before = getattr(sys, 'activations', 0)\n")
    return tmp_path


def with_activation(body):
    """Code that puts a stand-in with this body in place of the activation."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return "\n".join(
        (
            "import json, sys, types",
            "def enable_from_environment():",
            "    sys.activations = getattr(sys, 'activations', 0) + 1",
            body,
            "activation = sys.modules['ds_gradfix.activation'] = types.ModuleType('ds_gradfix.activation')",
            "activation.enable_from_environment = enable_from_environment",
            "",
        )
    )


def imported(stderr):
    """The modules in the report of `-X importtime`."""
    return set(re.findall(r"^import time:.*\|\s+(\S+)$", stderr, re.MULTILINE))


# --- What start-up costs


def test_unset_the_start_up_file_imports_nothing(installed, bare):
    with_file = imported(installed.run("-X", "importtime", "-c", "pass").stderr)
    without_file = imported(bare.run("-X", "importtime", "-c", "pass").stderr)
    assert "site" in with_file
    assert with_file == without_file


def test_set_it_imports_only_its_own_two_modules(installed, bare):
    with_file = imported(installed.run("-X", "importtime", "-c", "pass", DS_GRADFIX="1").stderr)
    without_file = imported(bare.run("-X", "importtime", "-c", "pass", DS_GRADFIX="1").stderr)
    assert with_file - without_file == {"ds_gradfix", "ds_gradfix._boot"}


def test_the_start_file_names_a_function_as_pep_829_resolves_it(installed):
    entry = (ROOT / "ds_gradfix_startup.start").read_text().strip()
    code = f"""
        import json, pkgutil, sys
        pkgutil.resolve_name({entry!r})()
        print(json.dumps([getattr(sys, '_ds_gradfix_boot', None), len({WAITING})]))
    """
    assert installed.evaluate(code)[0] == [None, 0]
    assert installed.evaluate(code, DS_GRADFIX="1")[0] == ["start-up file", 1]


# --- On and off


def started(interpreter, *flags, **environment):
    done = interpreter.run(*flags, "-c", "import sys; print(getattr(sys, '_ds_gradfix_boot', None))", **environment)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("value", ["1", "on", "TRUE", " yes "])
def test_on(installed, value):
    assert started(installed, DS_GRADFIX=value) == "start-up file"


@pytest.mark.parametrize("value", ["", "0", "off", "OFF", " false ", "no", "No"])
def test_off(installed, value):
    assert started(installed, DS_GRADFIX=value) == "None"
    assert started(installed, PYTHON_DS_GRADFIX=value) == "None"


def test_the_alias_decides_only_where_the_variable_is_not_set(installed):
    assert started(installed, PYTHON_DS_GRADFIX="1") == "start-up file"
    assert started(installed, PYTHON_DS_GRADFIX="1", DS_GRADFIX="0") == "None"
    assert started(installed, PYTHON_DS_GRADFIX="1", DS_GRADFIX="") == "None"
    assert started(installed, PYTHON_DS_GRADFIX="0", DS_GRADFIX="1") == "start-up file"


def test_isolated_mode_starts_it_and_no_site_does_not(installed):
    assert started(installed, "-I", DS_GRADFIX="1") == "start-up file"
    assert started(installed, "-E", DS_GRADFIX="1") == "start-up file"
    assert started(installed, "-S", DS_GRADFIX="1") == "None"


# --- The import of DeepSpeed


def test_activation_comes_before_the_first_line_of_deepspeed(installed, fake_deepspeed):
    code = f"""
        before = len({WAITING})
        import deepspeed
        import deepspeed
        print(json.dumps([before, deepspeed.activated_before, len({WAITING}), sys.activations]))
    """
    result, stderr = installed.evaluate(
        with_activation("assert 'deepspeed' not in sys.modules") + textwrap.dedent(code),
        path=[fake_deepspeed],
        DS_GRADFIX="1",
    )
    assert result == [1, 1, 0, 1]
    assert stderr == ""


def test_deepspeed_imported_already_is_activated_at_once(installed, fake_deepspeed):
    code = """
        import deepspeed
        from ds_gradfix import _boot
        _boot.install("test")
        _boot.install("again")
        print(json.dumps([sys.activations, sys._ds_gradfix_boot]))
    """
    result, _ = installed.evaluate(with_activation("pass") + textwrap.dedent(code), path=[fake_deepspeed])
    assert result == [1, "test"]


def test_starting_twice_waits_once(installed):
    code = f"""
        import json, sys
        from ds_gradfix import _boot
        _boot.main()
        waiting = len({WAITING})
        _boot.cancel()
        print(json.dumps([waiting, len({WAITING})]))
    """
    assert installed.evaluate(code, DS_GRADFIX="1")[0] == [1, 0]


def test_a_failing_activation_is_one_line_and_deepspeed_is_imported(installed, fake_deepspeed):
    result, stderr = installed.evaluate(
        with_activation("1 / 0") + f"import deepspeed\nprint(json.dumps([deepspeed.activated_before, len({WAITING})]))",
        path=[fake_deepspeed],
        DS_GRADFIX="1",
    )
    assert result == [1, 0]
    (line,) = stderr.splitlines()
    assert line.startswith("ds-gradfix: ") and "ZeroDivisionError" in line


def test_a_refusal_reaches_the_user_at_every_attempt(installed, fake_deepspeed):
    refuse = "from ds_gradfix.errors import PlanError; raise PlanError('no patch is called nonesuch')"
    code = """
        refused = []
        for attempt in range(2):
            try:
                import deepspeed
            except RuntimeError as error:
                refused.append(str(error))
        print(json.dumps([refused, "deepspeed" in sys.modules]))
    """
    result, _ = installed.evaluate(
        with_activation(refuse) + textwrap.dedent(code), path=[fake_deepspeed], DS_GRADFIX="1"
    )
    assert result == [["no patch is called nonesuch"] * 2, False]


def test_a_broken_package_never_breaks_the_interpreter(installed, tmp_path):
    package = tmp_path / "ds_gradfix"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "ds_gradfix" / "_boot.py", package)
    (tmp_path / "deepspeed.py").touch()
    result, stderr = installed.evaluate("import json, deepspeed; print(json.dumps(1))", path=[tmp_path], DS_GRADFIX="1")
    assert result == 1
    assert len(stderr.splitlines()) == 1 and "ds_gradfix.activation" in stderr


def test_whatever_else_goes_wrong_at_start_up_is_one_line(installed):
    code = "import json; from ds_gradfix import _boot; del _boot.install; _boot.main(); print(json.dumps(1))"
    result, stderr = installed.evaluate(code, DS_GRADFIX="1")
    assert stderr.startswith("ds-gradfix: could not start: NameError") and len(stderr.splitlines()) == 1


def test_two_threads_activate_once_and_both_find_it_done(installed, fake_deepspeed):
    code = """
        import importlib, threading
        seen = []
        def import_it():
            seen.append([importlib.import_module("deepspeed").activated_before, sys.activated])
        threads = [threading.Thread(target=import_it) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(json.dumps([seen, sys.activations]))
    """
    result, stderr = installed.evaluate(
        with_activation("import time; time.sleep(0.2); sys.activated = 1") + textwrap.dedent(code),
        path=[fake_deepspeed],
        DS_GRADFIX="1",
    )
    assert result == [[[1, 1]] * 4, 1], stderr


def test_looking_for_deepspeed_activates_nothing_and_leaves_its_loader_usable(installed, fake_deepspeed):
    code = f"""
        import importlib.util
        spec = importlib.util.find_spec("deepspeed")
        found = [len({WAITING}), "activations" in dir(sys), spec.loader.get_source("deepspeed")[:10]]
        import deepspeed
        print(json.dumps([found, deepspeed.activated_before, type(deepspeed.__loader__).__name__, deepspeed.__file__]))
    """
    result, _ = installed.evaluate(
        # Our own activation looks for DeepSpeed too.
        with_activation("import importlib.util; importlib.util.find_spec('deepspeed')") + textwrap.dedent(code),
        path=[fake_deepspeed],
        DS_GRADFIX="1",
    )
    assert result == [[1, False, "import sys"], 1, "SourceFileLoader", str(fake_deepspeed / "deepspeed.py")]


def test_another_tool_that_waits_for_deepspeed_gets_its_turn(installed, fake_deepspeed):
    code = """
        import wrapt
        hooked = []
        wrapt.register_post_import_hook(lambda module: hooked.append(module.activated_before), "deepspeed")
        if sys.argv[1] == "after":  # wrapt puts its finder before all others
            sys.meta_path.insert(1, sys.meta_path.pop(0))
        import deepspeed
        print(json.dumps([hooked, sys.activations]))
    """
    for turn in ("before", "after"):
        program = with_activation("pass") + textwrap.dedent(code)
        done = installed.run("-c", program, turn, path=[fake_deepspeed, THIRD_PARTY], DS_GRADFIX="1")
        assert json.loads(done.stdout) == [[1], 1], done.stderr


def test_an_import_in_another_thread_does_not_deadlock_with_the_activation(installed, fake_deepspeed):
    """Activation imports what another thread is importing, with importlib's global lock yet to take."""
    (fake_deepspeed / "shared.py").write_text(
        "import sys\nsys.importing.set()\nsys.activating.wait(20)\nimport later\n"
    )
    (fake_deepspeed / "later.py").touch()
    code = """
        import threading
        sys.importing, sys.activating = threading.Event(), threading.Event()
        thread = threading.Thread(target=__import__, args=("shared",))
        thread.start()
        sys.importing.wait(20)
        import deepspeed
        thread.join()
        print(json.dumps(sys.activations))
    """
    result, _ = installed.evaluate(
        with_activation("sys.activating.set(); import shared") + textwrap.dedent(code),
        path=[fake_deepspeed],
        DS_GRADFIX="1",
    )
    assert result == 1


def test_a_folder_called_deepspeed_is_not_deepspeed(installed, tmp_path):
    (tmp_path / "deepspeed").mkdir()
    code = f"import json, sys, deepspeed; print(json.dumps([len({WAITING}), 'ds_gradfix.activation' in sys.modules]))"
    assert installed.evaluate(code, path=[tmp_path], DS_GRADFIX="1")[0] == [1, False]


def test_without_deepspeed_nothing_is_activated(installed):
    code = f"""
        import importlib.util, json, sys
        found = importlib.util.find_spec("deepspeed")
        try:
            import deepspeed
        except ModuleNotFoundError as error:
            print(json.dumps([found, error.name, "ds_gradfix.activation" in sys.modules, len({WAITING})]))
    """
    result, stderr = installed.evaluate(code, DS_GRADFIX="1")
    assert result == [None, "deepspeed", False, 1]
    assert stderr == ""


def test_the_real_deepspeed_is_imported_whatever_becomes_of_the_activation(installed):
    result, stderr = installed.evaluate(
        with_activation("raise ValueError('broken')")
        + "import deepspeed\nprint(json.dumps(hasattr(deepspeed, 'initialize')))",
        path=[THIRD_PARTY],
        DS_GRADFIX="1",
    )
    assert result is True
    assert "ValueError: broken" in stderr


def test_the_real_activation_meets_the_real_deepspeed(installed):
    code = """
        import json, sys
        before = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "wrapt", "rich", "packaging"))
        import deepspeed
        print(json.dumps([before, "ds_gradfix.activation" in sys.modules]))
    """
    result, stderr = installed.evaluate(code, path=[THIRD_PARTY], DS_GRADFIX="1")
    assert result == [[], True]
    assert "could not be activated" not in stderr


# --- ds-gradfix run

PROGRAM = """
import json, os, sys
import neighbour
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, neighbour.__file__, sys.modules["__main__"].__file__]))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").touch()
    return tmp_path / "program.py"


@pytest.mark.parametrize("prefix", [["run"], []])
@pytest.mark.parametrize("arguments", [[], ["--lr", "1", "-m", "x", "-h", "--", "--version"]])
def test_run_gives_a_script_what_python_gives_it(installed, program, prefix, arguments):
    path = [THIRD_PARTY]
    plain = installed.run(program, *arguments, path=path)
    ours = installed.run("-m", "ds_gradfix", *prefix, program, *arguments, path=path)
    assert plain.returncode == 0
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, "")


@pytest.mark.parametrize("prefix", [["run"], []])
def test_run_gives_a_module_what_python_gives_it(installed, program, prefix):
    path = [program.parent, THIRD_PARTY]
    plain = installed.run("-m", "program", "--lr", "1", path=path)
    ours = installed.run("-m", "ds_gradfix", *prefix, "-m", "program", "--lr", "1", path=path)
    assert plain.returncode == 0
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, "")


def test_run_adds_no_directory_where_python_was_told_to_add_none(installed, tmp_path):
    script = tmp_path / "path.py"
    script.write_text("import sys; print(sys.path)")
    plain, ours = installed.run("-I", script), installed.run("-I", "-m", "ds_gradfix", "run", script)
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)


@pytest.mark.parametrize("ending, code", [("sys.exit(7)", 7), ("sys.exit('no')", 1), ("sys.exit()", 0), ("1 / 0", 1)])
def test_run_ends_as_the_program_ends(installed, tmp_path, ending, code):
    script = tmp_path / "ending.py"
    script.write_text(f"import sys\n{ending}\n")
    path = [THIRD_PARTY]
    plain, ours = installed.run(script, path=path), installed.run("-m", "ds_gradfix", "run", script, path=path)
    assert ours.returncode == plain.returncode == code
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_run_activates_this_process_and_those_it_starts(installed, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys\n"
        "print(sys._ds_gradfix_boot, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(sys._ds_gradfix_boot)'], check=True)\n"
    )
    done = installed.run("-m", "ds_gradfix", "run", script, path=[THIRD_PARTY])
    assert done.stdout.splitlines() == ["ds-gradfix run", "start-up file"], done.stderr


def test_run_without_a_program_is_an_error(installed):
    done = installed.run("-m", "ds_gradfix", "run", path=[THIRD_PARTY])
    assert done.returncode == 2
    assert "SCRIPT" in done.stderr


@pytest.mark.parametrize(
    "words, seen",
    [
        (["{script}", "a", "--", "--c", "-m", "x"], ["a", "--", "--c", "-m", "x"]),
        (["--", "{script}", "1"], ["1"]),
        (["-m", "program", "a", "--", "--c"], ["a", "--", "--c"]),
        (["-mprogram", "a", "b"], ["a", "b"]),
        (["-m", "program", "--help"], ["--help"]),
    ],
)
def test_run_leaves_the_programs_own_arguments_alone(tmp_path, words, seen):
    script = tmp_path / "program.py"
    script.write_text("import sys; print(sys.argv[1:])")
    words = [word.format(script=script) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "ds_gradfix", "run", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(seen), "")


@pytest.mark.parametrize(
    "words, said",
    [([], "give it a SCRIPT"), (["gone.py"], "there is no file 'gone.py'"), (["-x"], "there is no option '-x'")],
)
def test_run_says_what_it_can_not_run(words, said):
    done = subprocess.run([sys.executable, "-m", "ds_gradfix", "run", *words], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
