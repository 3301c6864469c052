"""The commands that look: `doctor`, `list` and `diff`, and the root that all commands hang on.

Commands run in processes of their own, as a user starts them, where the process matters: what it imports, what it
writes where, how it ends. Everything else calls `main` in this process.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
from rich.cells import cell_len

from ds_gradfix import _boot, cli, registry, source
from ds_gradfix.cli import catalogue, diff, doctor
from ds_gradfix.installed import Installed, find_installed
from ds_gradfix.patches import zero3_predivide_postscale, zero3_scatter_scale
from ds_gradfix.registry import Verdict, discover, make_plan
from ds_gradfix.settings import Settings

SCATTER, PREDIVIDE = zero3_scatter_scale.PATCH, zero3_predivide_postscale.PATCH
AFFECTED = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}
UNAFFECTED = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
TOO_SMALL = "ZeRO-3 gradients come out 2x too small"


def python(*arguments, cwd=None, **environment):
    """Run this interpreter, in 80 columns and without any DS_GRADFIX variable but those given."""
    inherited = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name and "COLOR" not in name}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**inherited, "COLUMNS": "80", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(*arguments, **options):
    return python("-m", "ds_gradfix", *arguments, **options)


@functools.cache
def read_once(path, qualnames):
    return source.find_functions(path, qualnames)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """This process as a shell that knows nothing of ds-gradfix, 80 columns wide. It reads DeepSpeed's files once."""
    for name in [name for name in os.environ if "DS_GRADFIX" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(registry, "find_functions", lambda path, qualnames: read_once(path, tuple(qualnames)))
    return monkeypatch


@pytest.fixture(scope="module")
def real_probe():
    return doctor.probe_start_up()


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def examine(capsys, environment, real_probe):
    """Run the doctor in this process; its exit status and its checks by name. Start-up is probed once for all tests."""
    environment.setattr(doctor, "probe_start_up", lambda: real_probe)

    def run(*arguments):
        status = cli.main(["doctor", "--json", *arguments])
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == 1
        assert doctor.EXIT_STATUS[document["status"]] == status
        return status, {check["name"]: check for check in document["checks"]}

    return run


@pytest.fixture
def deepspeed(environment, tmp_path):
    """Let the commands find another DeepSpeed: of this version, with a stage3.py of this text; or, by default, none."""

    def find(version=None, stage3=""):
        folder = tmp_path / "deepspeed" if version else None
        if folder:
            module = folder / "runtime" / "zero" / "stage3.py"
            module.parent.mkdir(parents=True)
            module.write_text(stage3)
        installed = Installed(version, folder, torch="2.13.0", ds_gradfix="0.1.0")
        for command_module in (doctor, catalogue, diff):
            environment.setattr(command_module, "find_installed", lambda: installed)

    return find


STRANGE = """
class DeepSpeedZeroOptimizer_Stage3:
    def __avg_scatter_grads(self, params_to_reduce):
        return "strange"  # a comment

    def __avg_scatter_contiguous_grads(self, buffer):
        return buffer
"""


# --- doctor: one job


def test_an_affected_job_is_to_be_acted_on_with_the_one_line_that_helps(config):
    done = command("doctor", "--config", config(AFFECTED))
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert f"{TOO_SMALL}; not corrected by zero3-scatter-scale: ds-gradfix is off." in said
    assert "To do: export DS_GRADFIX=1" in said
    assert said.endswith("Something to act on: job.")
    assert done.stderr == ""


def test_an_affected_job_is_well_where_ds_gradfix_is_on(config):
    done = command("doctor", "--config", config(AFFECTED), DS_GRADFIX="1")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert f"{TOO_SMALL}; corrected by zero3-scatter-scale." in said
    assert said.endswith("All is well: nothing to act on.")


def test_an_unaffected_job_with_auto_values_is_well(examine, config):
    status, checks = examine("--config", config(UNAFFECTED))
    assert status == 0
    assert checks["job"]["summary"] == "ZeRO-2, 2 ranks, sequence parallel 1: not affected by any known defect"


@pytest.mark.parametrize(
    ("content", "arguments", "factors"),
    [
        ({"zero_optimization": {"stage": 3}}, [], {}),
        ({"zero_optimization": {"stage": 3}}, ["--sequence-parallel", "4"], {SCATTER.id: 0.25}),
        (AFFECTED, ["--ranks", "4", "--sequence-parallel", "1"], {}),
        ({**AFFECTED, "sequence_parallel_size": "auto"}, [], {}),
        ({"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 4}, [], {}),
        (
            {"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 4},
            ["--ranks", "4"],
            {PREDIVIDE.id: 0.25},
        ),
        ({}, ["--ranks", "8", "--sequence-parallel", "8"], {}),
    ],
)
def test_the_expected_factor_follows_the_job(examine, config, content, arguments, factors):
    status, checks = examine("--config", config(content), *arguments)
    assert {effect["patch"]: effect["factor"] for effect in checks["job"]["data"]["effects"]} == factors
    assert status == bool(factors)


def test_comments_in_a_configuration_are_read_as_deepspeed_reads_them(examine, config):
    pytest.importorskip("hjson")
    _, checks = examine("--config", config('{\n  # which stage\n  "zero_optimization": {"stage": 3}\n}'))
    assert checks["job"]["data"]["facts"]["zero_stage"] == 3


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"zero_optimization": ', "line 1"),
        ("[1, 2]", "holds no JSON object"),
        ('{"bf16": {}, "bf16": {}}', "stands twice: bf16"),
    ],
)
def test_a_configuration_that_cannot_be_read_stops_only_what_needs_it(examine, config, content, named):
    status, checks = examine("--config", config(content))
    assert status == 2
    assert named in checks["config"]["summary"]
    assert {name: check["status"] for name, check in checks.items()} == {
        "installed": "ok",
        "environment": "ok",
        "patches": "ok",
        "config": "unknown",
        "start-up": "ok",
        "job": "unknown",
    }


def test_a_configuration_that_is_not_there(examine, tmp_path):
    status, checks = examine("--config", str(tmp_path / "none.json"))
    assert status == 2
    assert checks["config"]["summary"].endswith("none.json can't be read: No such file or directory")


@pytest.mark.parametrize(
    ("content", "arguments", "named"),
    [
        ({"zero_optimization": True}, [], "zero_optimization"),
        ({"zero_optimization": {"stage": "three"}}, [], "three"),
        ({"sequence_parallel_size": "2x"}, [], "sequence_parallel_size"),
        (AFFECTED, ["--ranks", "3"], "3 ranks can't share sequences in groups of 2"),
    ],
)
def test_a_job_that_cannot_be_made_out(examine, config, content, arguments, named):
    status, checks = examine("--config", config(content), *arguments)
    assert status == 2
    assert checks["job"]["status"] == "unknown"
    assert named in checks["job"]["summary"]
    assert "This check failed" not in checks["job"]["summary"]


# --- doctor: the convention over sequence shards


@pytest.mark.parametrize(
    ("zero", "convention", "change"),
    [
        ({"stage": 0}, "sum", "as in stock"),
        ({"stage": 2}, "sum", "as in stock"),
        ({"stage": 3}, "sum", "x2 of stock"),
        ({"stage": 0}, "mean", "x1/2 of stock"),
        ({"stage": 2}, "mean", "x1/2 of stock"),
        ({"stage": 3}, "mean", "as in stock"),
        ({"stage": 3, "reduce_scatter": False, "contiguous_gradients": False}, "mean", "as in stock"),
    ],
)
def test_what_a_convention_does_to_a_job(examine, config, environment, zero, convention, change):
    environment.setenv("DS_GRADFIX", "1")
    content = {"zero_optimization": zero, "ds_gradfix": {"sequence_parallel_reduction": convention}}
    status, checks = examine("--config", config(content), "--sequence-parallel", "2")
    assert status == 0
    job = checks["job"]
    assert job["data"]["facts"]["convention"] == convention
    assert job["data"]["affected"] is (change != "as in stock")
    stands, other = [line for line in job["details"] if "reduc" in line and "corrected by" not in line]
    assert f"reduces by {convention!r} (set by sequence_parallel_reduction), {change}: right where" in stands
    megatron = "Megatron-DeepSpeed"
    assert (megatron in stands, megatron in other) == (convention == "sum", convention == "mean")


def test_without_a_setting_the_default_is_named_and_what_would_change_it(examine, config):
    _, checks = examine("--config", config(AFFECTED))
    said = " ".join(checks["job"]["details"])
    assert "reduces by 'sum' (DeepSpeed's own convention, by default), x2 of stock" in said
    assert "sequence_parallel_reduction='mean' is right where the loss is the mean of the rank's own shard" in said
    assert "Transformers' Trainer included, decides on 'mean'" in said


def test_a_variable_outranks_the_section_s_convention(examine, config, environment):
    environment.setenv("DS_GRADFIX_SEQUENCE_PARALLEL_REDUCTION", "mean")
    _, checks = examine("--config", config({**AFFECTED, "ds_gradfix": {"sequence_parallel_reduction": "sum"}}))
    assert checks["job"]["data"]["facts"]["convention"] == "mean"


@pytest.mark.parametrize("content", [{"zero_optimization": {"stage": 3}}, {**AFFECTED, "gradient_allreduce_op": "sum"}])
def test_where_a_convention_has_no_meaning_none_is_named(examine, config, content):
    _, checks = examine("--config", config(content))
    assert "sequence shards" not in " ".join(checks["job"]["details"])


def test_a_convention_beside_a_sum_is_refused(examine, config):
    content = {**AFFECTED, "gradient_allreduce_op": "sum", "ds_gradfix": {"sequence_parallel_reduction": "sum"}}
    status, checks = examine("--config", config(content))
    assert status == 1
    assert checks["job"]["status"] == "act"
    assert "sequence_parallel_reduction: 'sum' has no meaning with" in checks["job"]["summary"]


# --- doctor: settings


def test_an_unknown_key_in_the_section_is_named_with_the_near_miss(examine, config):
    status, checks = examine("--config", config({**UNAFFECTED, "ds_gradfix": {"self_chek": "warn"}}))
    assert status == 1
    assert checks["config"]["status"] == "act"
    assert "self_chek" in checks["config"]["summary"]
    assert "did you mean 'self_check'?" in checks["config"]["summary"]


def test_an_unknown_patch_in_the_section_is_named_with_the_near_miss(examine, config):
    status, checks = examine("--config", config({**UNAFFECTED, "ds_gradfix": {"exclude": ["zero3-scater-scale"]}}))
    assert status == 1
    assert "did you mean 'zero3-scatter-scale'?" in checks["config"]["summary"]


def test_what_the_section_decides_and_what_outranks_it(examine, config, environment):
    environment.setenv("DS_GRADFIX_SELF_CHECK", "off")
    section = {"self_check": "warn", "exclude": PREDIVIDE.id}
    status, checks = examine("--config", config({**UNAFFECTED, "ds_gradfix": section}))
    assert status == 0
    assert checks["config"]["details"] == [
        'self_check = "warn", outranked by DS_GRADFIX_SELF_CHECK=off',
        f'exclude = ["{PREDIVIDE.id}"]',
    ]


@pytest.mark.parametrize(
    ("section", "to_do"),
    [
        ({"exclude": SCATTER.id}, f'take {SCATTER.id} out of "exclude" in the "ds_gradfix" section'),
        ({"only": PREDIVIDE.id}, f'add {SCATTER.id} to "only" in the "ds_gradfix" section'),
        ({"strikt": True}, 'correct its "ds_gradfix" section'),
    ],
)
def test_a_job_whose_section_leaves_the_correction_out(examine, config, environment, section, to_do):
    environment.setenv("DS_GRADFIX", "1")
    status, checks = examine("--config", config({**AFFECTED, "ds_gradfix": section}))
    assert status == 1
    assert checks["job"]["to_do"] == [to_do]


@pytest.mark.parametrize(
    ("variables", "to_do"),
    [
        ({"DS_GRADFIX": "off"}, "export DS_GRADFIX=1"),
        ({"DS_GRADFIX": "0", "PYTHON_DS_GRADFIX": "1"}, "export DS_GRADFIX=1"),
        ({"DS_GRADFIX": "1", "DS_GRADFIX_EXCLUDE": SCATTER.id}, f"take {SCATTER.id} out of DS_GRADFIX_EXCLUDE"),
        ({"DS_GRADFIX": "1", "DS_GRADFIX_ONLY": PREDIVIDE.id}, f"add {SCATTER.id} to DS_GRADFIX_ONLY"),
        ({"DS_GRADFIX": "1", "DS_GRADFIX_STRICT": "maybe"}, "correct the DS_GRADFIX_* variables"),
    ],
)
def test_a_job_in_an_environment_that_leaves_the_correction_out(examine, config, environment, variables, to_do):
    for name, value in variables.items():
        environment.setenv(name, value)
    status, checks = examine("--config", config(AFFECTED))
    assert status == 1
    assert checks["job"]["to_do"] == [to_do]


@pytest.mark.parametrize(
    ("variables", "on", "summary"),
    [
        ({}, False, "DS_GRADFIX is not set: ds-gradfix is off unless a job asks for it itself."),
        ({"DS_GRADFIX": "yes"}, True, "DS_GRADFIX=yes: ds-gradfix is on."),
        ({"DS_GRADFIX": "no"}, False, "DS_GRADFIX=no: ds-gradfix is off."),
        ({"PYTHON_DS_GRADFIX": "1"}, True, "PYTHON_DS_GRADFIX=1: ds-gradfix is on."),
    ],
)
def test_the_environment_says_whether_ds_gradfix_is_on(examine, environment, variables, on, summary):
    for name, value in variables.items():
        environment.setenv(name, value)
    status, checks = examine()
    assert status == 0
    assert checks["environment"]["data"]["on"] is on
    assert checks["environment"]["summary"] == summary


def test_every_variable_that_means_nothing_is_named(config):
    done = command("doctor", DS_GRADFIX="1", DS_GRADFIX_SELFCHECK="off", DS_GRADFIX_STRICT="maybe")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "DS_GRADFIX_SELFCHECK: there is no such variable; did you mean 'DS_GRADFIX_SELF_CHECK'?" in said
    assert "DS_GRADFIX_STRICT: 'maybe' is not allowed" in said
    assert "DeepSpeed is not installed" not in said


def test_a_patch_that_a_variable_names_wrongly(examine, environment):
    environment.setenv("DS_GRADFIX_ONLY", "zero3-scater-scale")
    status, checks = examine()
    assert status == 1
    assert "did you mean 'zero3-scatter-scale'?" in checks["environment"]["details"][0]
    assert checks["patches"]["status"] == "ok"


# --- doctor: the installation


def test_a_healthy_installation(examine):
    status, checks = examine()
    assert status == 0
    assert list(checks) == ["installed", "environment", "patches", "start-up"]
    installed = checks["installed"]["data"]
    assert set(installed) == {"Python", "ds-gradfix", "DeepSpeed", "torch", "wrapt"}
    assert installed["DeepSpeed"]["path"].endswith("deepspeed")
    patches = {patch["id"]: patch for patch in checks["patches"]["data"]["patches"]}
    assert patches[SCATTER.id]["verdict"] == "defective"
    assert patches[SCATTER.id]["action"] == "correct"


def test_start_up_is_seen_to_fire_in_a_fresh_interpreter(real_probe):
    assert real_probe.started_by == "start-up file"
    assert os.path.samefile(real_probe.boot_file, _boot.__file__)


def probe_as(environment, **changes):
    probe = doctor.Probe(None, None, (), "")
    environment.setattr(doctor, "probe_start_up", lambda: dataclasses.replace(probe, **changes))


@pytest.mark.parametrize(
    ("probe", "detail"),
    [
        ({}, "No start-up file (ds_gradfix_startup.pth) is installed"),
        ({"start_up_files": ("elsewhere",)}, "Its start-up file is in elsewhere"),
        ({"stderr": "Error processing line 1\nImportError: gone"}, "It wrote: ImportError: gone"),
        (
            {"started_by": "start-up file", "boot_file": "other/_boot.py"},
            "It starts another copy of ds-gradfix: other/_boot.py",
        ),
    ],
)
def test_start_up_that_does_not_fire_is_found_out(examine, environment, config, probe, detail):
    environment.setenv("DS_GRADFIX", "1")
    probe_as(environment, **probe)
    status, checks = examine("--config", config(AFFECTED))
    assert status == 1
    assert checks["start-up"]["status"] == "act"
    assert detail in checks["start-up"]["details"]
    assert checks["job"]["to_do"] == ["start the job with: ds-gradfix run"]


def test_an_interpreter_without_start_up_files_is_probed_as_it_is(environment, tmp_path):
    """An editable install without its .pth: `-S` reads no start-up file at all."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    interpreter.chmod(0o755)
    environment.setattr(sys, "executable", str(interpreter))
    outcome = doctor.examine(doctor.check_start_up, doctor.Look(None, None, None))
    assert outcome.status == "act"
    assert "No start-up file (ds_gradfix_startup.pth) is installed" in outcome.details


def test_an_interpreter_that_cannot_be_asked(environment, tmp_path):
    environment.setattr(sys, "executable", str(tmp_path / "none"))
    outcome = doctor.examine(doctor.check_start_up, doctor.Look(None, None, None))
    assert outcome.status == "unknown"
    assert outcome.summary.startswith("A fresh interpreter")


def test_a_check_that_raises_is_a_finding_of_that_check(examine, environment):
    def explode(look):
        raise ZeroDivisionError("of all things")

    environment.setitem(doctor.CHECKS, "patches", explode)
    status, checks = examine()
    assert status == 2
    assert checks["patches"]["summary"] == "This check failed: ZeroDivisionError: of all things"
    assert [name for name, check in checks.items() if check["status"] == "ok"] == [
        "installed",
        "environment",
        "start-up",
    ]


def test_no_deepspeed(config):
    """In a process that has none, nor the parser that comes with it."""
    code = f"""
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in ("deepspeed", "hjson"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Nothing())
from ds_gradfix.cli import main
sys.exit(main(["doctor", "--config", {config(AFFECTED)!r}]))
"""
    done = python("-c", code)
    assert done.returncode == 2
    assert "installed: DeepSpeed is not installed in this environment" in done.stdout
    assert "Could not be looked at: installed, patches, job." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_no_torch(examine, environment):
    environment.setattr(doctor, "_folder", lambda package: None if package == "torch" else os.getcwd())
    status, checks = examine()
    assert status == 1
    assert checks["installed"]["to_do"] == ["install torch"]


def test_a_deepspeed_whose_source_nobody_knows(examine, config, environment, deepspeed):
    environment.setenv("DS_GRADFIX", "1")
    deepspeed("99.0", STRANGE)
    path = config(AFFECTED)
    status, checks = examine("--config", path)
    assert status == 1
    assert checks["patches"]["summary"] == f"{len(discover())} patches can't tell whether this DeepSpeed has the defect"
    said = f"If this DeepSpeed has the defect, {TOO_SMALL}; {SCATTER.id} can't"
    assert any(detail.startswith(said) for detail in checks["job"]["details"])
    assert checks["job"]["to_do"] == [f"ds-gradfix verify {path}"]


@pytest.mark.parametrize(
    ("op", "zero", "status", "said"),
    [
        ("sum", {"stage": 1}, "ok", "this DeepSpeed does what it asks for by itself"),
        ("SUM", {"stage": 3}, "ok", "corrected by zero3-sum-reduction"),
        ("sum", {"stage": 3, "zero_quantized_gradients": True}, "act", "zero_quantized_gradients"),
        ("avg", {"stage": 3}, "act", "allowed are"),
    ],
)
def test_a_job_that_asks_for_a_sum(examine, config, environment, op, zero, status, said):
    environment.setenv("DS_GRADFIX", "1")
    path = config({"gradient_allreduce_op": op, "zero_optimization": zero})
    _, checks = examine("--config", path)
    assert checks["job"]["status"] == status
    assert said in " ".join([checks["job"]["summary"], *checks["job"]["details"]])


# --- list


def test_list_shows_every_card(capsys):
    assert cli.main(["list"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    plan = make_plan(find_installed(), discover(), Settings())
    for entry in plan.entries:
        patch = entry.patch
        for text in (patch.id, patch.title, patch.symptom, *patch.upstream, f"here {entry.verdict.value}: "):
            assert text in said


def test_list_as_json(capsys):
    assert cli.main(["list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    patches = {patch["id"]: patch for patch in document["patches"]}
    assert set(patches) >= {SCATTER.id, PREDIVIDE.id}
    assert patches[SCATTER.id]["cause"] == SCATTER.cause
    assert patches[SCATTER.id]["upstream"] == list(SCATTER.upstream)
    assert patches[SCATTER.id]["verdict"] == "defective"


def test_list_without_deepspeed(capsys, deepspeed):
    deepspeed()
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.count("absent: DeepSpeed is not installed") == len(discover())


# --- diff


def test_diff_of_a_replacement_shows_both_functions_and_their_places(capsys):
    assert cli.main(["diff", SCATTER.id]) == 0
    out = capsys.readouterr().out
    assert "stage3.py:" in out
    assert "def __avg_scatter_grads(" in out
    assert "_zero3.py:" in out
    assert "def _scatter(" in out


def test_the_installed_function_is_shown_as_it_stands_in_its_file(capsys):
    cli.main(["diff", SCATTER.id])
    path, line = (
        next(text for text in capsys.readouterr().out.splitlines() if text.startswith("installed: "))
        .split(": ", 1)[1]
        .rsplit(":", 1)
    )
    with open(path, encoding="utf-8") as file:
        first = file.read().split("\n")[int(line) - 1]
    assert first.strip() in ("@instrument_w_nvtx", "def __avg_scatter_grads(")


def test_diff_of_a_rewrite_is_a_unified_diff(capsys):
    assert cli.main(["diff", PREDIVIDE.id]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("--- installed/stage3.py:") for line in lines) == 1
    assert sum(line.startswith("+++ corrected/stage3.py") for line in lines) == 1
    assert "-    buffer_to_reduce.div_(averaging_world_sz / float(self.sequence_parallel_size))" in lines


def test_diff_of_an_unknown_patch():
    done = command("diff", "zero3-scater-scale")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds-gradfix diff: ")
    assert "did you mean 'zero3-scatter-scale'?" in line


def test_diff_without_deepspeed(capsys, deepspeed):
    deepspeed()
    assert cli.main(["diff", SCATTER.id]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "ds-gradfix diff: DeepSpeed is not installed here, so there is nothing to compare with\n"


def test_diff_on_source_that_nobody_knows(capsys, deepspeed):
    deepspeed("99.0", STRANGE)
    assert cli.main(["diff", PREDIVIDE.id]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{PREDIVIDE.id} on DeepSpeed 99.0: unrecognised: " in said
    assert "Forced, it would replace" in said
    assert 'return "strange" # a comment' in said
    assert "Forced, it would rewrite" in said
    assert "It does not fit: " in said


def test_diff_where_the_function_is_absent(capsys, deepspeed):
    deepspeed("0.1", "class DeepSpeedZeroOptimizer_Stage3: pass")
    assert cli.main(["diff", SCATTER.id]) == 0
    out = capsys.readouterr().out
    assert "absent: this release does not have it" in " ".join(out.split())
    assert "def " not in out


def test_diff_where_upstream_has_the_fix(capsys, monkeypatch):
    fixed = {
        target: dict.fromkeys(sources, Verdict.FIXED)
        for target, sources in zero3_scatter_scale.PATCH.fingerprints.items()
    }
    monkeypatch.setattr(diff, "discover", lambda: (dataclasses.replace(SCATTER, fingerprints=fixed),))
    assert cli.main(["diff", SCATTER.id]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fixed upstream: this release has the fix" in out
    assert "def " not in out


def test_diff_is_coloured_on_a_terminal_only():
    plain, coloured = command("diff", PREDIVIDE.id), command("diff", PREDIVIDE.id, FORCE_COLOR="1")
    assert "\x1b" not in plain.stdout
    assert "\x1b[32m+" in coloured.stdout
    assert "\x1b[31m-" in coloured.stdout


# --- the screen, and what a command may import


@pytest.mark.parametrize("arguments", [["doctor"], ["list"], ["diff", "-h"], ["doctor", "-h"], ["-h"]])
def test_nothing_is_wider_than_the_screen(capsys, config, arguments):
    if arguments == ["doctor"]:
        arguments = ["doctor", "--config", config({**AFFECTED, "ds_gradfix": {"self_check": "warn"}})]
    try:
        cli.main(arguments)
    except SystemExit as end:
        assert end.code == 0
    out = capsys.readouterr().out
    assert out
    assert max(map(cell_len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize("activation", ["0", "1"])
def test_looking_imports_neither_torch_nor_deepspeed_and_activates_nothing(activation, config):
    code = f"""
import sys
from ds_gradfix.cli import main
main(["list"])
print([name for name in sys.modules if name in ("ds_gradfix.cli.doctor", "ds_gradfix.cli.diff")])
main(["diff", {PREDIVIDE.id!r}])
main(["doctor", "--config", {config(AFFECTED)!r}])
print()
print([name for name in ("torch", "deepspeed", "ds_gradfix.activation") if name in sys.modules])
"""
    done = python("-c", code, DS_GRADFIX=activation)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("[]") == 2
    assert lines[-1] == "[]"


# --- the root


def test_the_root_lists_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["doctr"], "'doctor'"),
        (["list", "--jso"], "--jso"),
        (["doctor", "--ranks", "0"], "--ranks"),
    ],
)
def test_arguments_that_mean_nothing(capsys, arguments, named):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert named.replace("'", "") in capsys.readouterr().err


def test_ranks_without_a_configuration(capsys):
    assert cli.main(["doctor", "--ranks", "2"]) == 2
    assert capsys.readouterr().err.startswith("ds-gradfix doctor: --ranks and --sequence-parallel describe a job")


def test_a_program_gets_its_arguments_untouched(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    arguments = ["--json", "-m", "list", "--ran", "-h", "--", "doctor", "--config=x", "-1", ""]
    done = command("run", program, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == arguments


def test_an_error_of_ds_gradfix_in_a_program_belongs_to_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("from ds_gradfix.errors import SelfCheckError\nraise SelfCheckError('measured 0.5')\n")
    done = command("run", program)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "SelfCheckError: measured 0.5" in done.stderr
