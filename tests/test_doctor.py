"""`ds-gradfix doctor`: each check, and how what they find is shown."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import jsonschema
import pytest
from command_line import AFFECTED, STRANGE, command, python
from rich.cells import cell_len

from ds_gradfix import _boot, cli
from ds_gradfix.cli import doctor
from ds_gradfix.cli.doctor import look as looking
from ds_gradfix.cli.doctor import installation, surroundings
from ds_gradfix.cli.doctor.outcome import EXIT_STATUS, Check
from ds_gradfix.cli.doctor.outcome import examine as examined
from ds_gradfix.patches import zero3_predivide_postscale, zero3_scatter_scale
from ds_gradfix.registry import discover

pytestmark = pytest.mark.usefixtures("environment")

SCATTER, PREDIVIDE = zero3_scatter_scale.PATCH, zero3_predivide_postscale.PATCH
UNAFFECTED = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
TOO_SMALL = "ZeRO-3 gradients come out 2x too small"
SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "doctor.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def real_probe():
    return looking.probe_start_up()


@pytest.fixture
def examine(capsys, environment, real_probe, tmp_path):
    """Run the doctor in this process; its exit status and its checks by name. The interpreters of its own are asked
    once for all tests, or never where nothing of them is tested; the home folder is empty."""
    environment.setattr(looking, "probe_start_up", lambda: real_probe)
    environment.setattr(surroundings, "live_places", lambda targets: {"places": [], "not_importable": []})
    home = tmp_path / "home"
    home.mkdir()
    environment.setenv("HOME", str(home))
    environment.chdir(home)

    def run(*arguments):
        status = cli.main(["doctor", "--json", *arguments])
        document = json.loads(capsys.readouterr().out)
        jsonschema.validate(document, SCHEMA)
        assert EXIT_STATUS[document["status"]] == status
        return status, {check["name"]: check for check in document["checks"]}

    return run


# --- doctor: one job


def test_an_affected_job_is_to_be_acted_on_with_the_one_line_that_helps(config):
    done = command("doctor", "job", "--config", config(AFFECTED))
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert f"{TOO_SMALL}; not corrected by zero3-scatter-scale: ds-gradfix is off." in said
    assert "To do: export DS_GRADFIX=1" in said
    assert said.endswith("Something to act on: job.")
    assert done.stderr == ""


def test_an_affected_job_is_well_where_ds_gradfix_is_on(config):
    done = command("doctor", "job", "--config", config(AFFECTED), DS_GRADFIX="1")
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
        "launcher": "ok",
        "job": "unknown",
        "other-tools": "ok",
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
    done = command("doctor", "environment", DS_GRADFIX="1", DS_GRADFIX_SELFCHECK="off", DS_GRADFIX_STRICT="maybe")
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
    assert list(checks) == ["installed", "environment", "patches", "start-up", "launcher", "other-tools"]
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
    probe = looking.Probe(None, None, (), "")
    environment.setattr(looking, "probe_start_up", lambda: dataclasses.replace(probe, **changes))


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
    outcome = examined(doctor.CHECKS["start-up"], looking.Look(None, None, None))
    assert outcome.status == "act"
    assert "No start-up file (ds_gradfix_startup.pth) is installed" in outcome.details


def test_an_interpreter_that_cannot_be_asked(environment, tmp_path):
    environment.setattr(sys, "executable", str(tmp_path / "none"))
    outcome = examined(doctor.CHECKS["start-up"], looking.Look(None, None, None))
    assert outcome.status == "unknown"
    assert outcome.summary.startswith("A fresh interpreter")


def test_a_check_that_raises_is_a_finding_of_that_check(examine, environment):
    def explode(look):
        raise ZeroDivisionError("of all things")

    environment.setitem(doctor.CHECKS, "patches", Check("explodes", explode))
    status, checks = examine()
    assert status == 2
    assert checks["patches"]["summary"] == "This check failed: ZeroDivisionError: of all things"
    assert [name for name, check in checks.items() if check["status"] == "ok"] == [
        "installed",
        "environment",
        "start-up",
        "launcher",
        "other-tools",
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
    assert "Could not be looked at: installed, patches, job, other-tools." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_no_torch(examine, environment):
    environment.setattr(installation, "_folder", lambda package: None if package == "torch" else os.getcwd())
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


# --- doctor: the launcher


@pytest.mark.parametrize(
    ("variables", "lines", "status", "said"),
    [
        ({}, None, "ok", "ds-gradfix is off here: there is nothing to carry"),
        ({"DS_GRADFIX": "0"}, None, "ok", "ds-gradfix is off here: there is nothing to carry"),
        ({"DS_GRADFIX": "1", "DS_GRADFIX_STRICT": "1"}, None, "ok", "carries DS_GRADFIX, DS_GRADFIX_STRICT to every"),
        ({"DS_GRADFIX": "1", "DS_GRADFIX_ONLY": "$x"}, None, "act", "DS_GRADFIX_ONLY: '$x' would not arrive"),
        ({"DS_GRADFIX": "1"}, "DS_GRADFIX=1\nNCCL_DEBUG=INFO\n", "ok", "carries DS_GRADFIX to every node"),
        ({"DS_GRADFIX": "1"}, "DS_GRADFIX=0\n", "act", "line 1: every rank on several nodes gets DS_GRADFIX=0; here"),
        ({}, "A=b=c\nPYTHON_DS_GRADFIX=1\n", "act", "line 2: every rank on several nodes gets PYTHON_DS_GRADFIX=1"),
        ({}, "# a comment\n", "act", "line 1: '# a comment' sets no variable"),
        ({}, "A=1\n\n", "act", "line 2: '' sets no variable, and the launcher stops at it"),
    ],
)
def test_what_the_launcher_carries_to_other_nodes(examine, environment, variables, lines, status, said):
    for name, value in variables.items():
        environment.setenv(name, value)
    if lines is not None:
        Path(".deepspeed_env").write_text(lines)
    _, checks = examine("launcher")
    launcher = checks["launcher"]
    assert launcher["status"] == status
    assert said in " ".join([launcher["summary"], *launcher["details"]])


def test_the_launcher_s_file_of_another_name_and_the_one_that_outranks(examine, environment, tmp_path):
    """As DeepSpeed's launcher reads them: by the name in DS_ENV_FILE, the home folder's first."""
    environment.setenv("DS_GRADFIX", "1")
    environment.setenv("DS_ENV_FILE", "job.env")
    environment.chdir(tmp_path)
    (tmp_path / "home" / ".deepspeed_env").write_text("DS_GRADFIX=0\n")
    (tmp_path / "home" / "job.env").write_text("DS_GRADFIX=0\n")
    (tmp_path / "job.env").write_text("DS_GRADFIX=1\n")
    _, checks = examine("launcher")
    assert checks["launcher"]["status"] == "ok"
    assert checks["launcher"]["data"]["carried"] == {"DS_GRADFIX": "1"}


# --- doctor: start-up files


def installed_in(folder, version):
    metadata = folder / f"ds_gradfix-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-gradfix\nVersion: {version}\n")


def test_a_start_up_file_whose_package_is_gone_is_to_be_removed(examine, environment, tmp_path):
    environment.setattr(installation, "site_folders", lambda: [tmp_path])
    (tmp_path / looking.START_UP_FILE).touch()
    _, checks = examine("start-up")
    assert checks["start-up"]["to_do"] == [f"remove {tmp_path / looking.START_UP_FILE}"]
    installed_in(tmp_path, "0.1.0")
    _, checks = examine("start-up")
    assert checks["start-up"]["status"] == "ok"


def test_several_versions_are_named(examine, environment, tmp_path):
    installed_in(tmp_path / "other", "99.0")
    environment.syspath_prepend(str(tmp_path / "other"))
    _, checks = examine("start-up")
    assert checks["start-up"]["status"] == "act"
    assert f"ds-gradfix 99.0 is installed in {tmp_path / 'other'}" in checks["start-up"]["details"]
    assert checks["start-up"]["to_do"] == ["keep one version of ds-gradfix, and uninstall the others"]


# --- doctor: other tools

TOOL = """
import functools
import wrapt

@wrapt.when_imported("deepspeed.runtime.zero.stage3")
def change(module):
    stage3 = module.DeepSpeedZeroOptimizer_Stage3
    def replacement(self, params):
        return []
    stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = replacement
    inside = stage3.step
    @functools.wraps(inside)
    def wrapper(*args, **kwargs):
        return inside(*args, **kwargs)
    stage3.step = wrapper
    wrapt.wrap_function_wrapper(module, "DeepSpeedZeroOptimizer_Stage3.partition_grads", wrapt_wrapper)

def wrapt_wrapper(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
"""


def test_another_tool_s_functions_are_told_from_deepspeed_s_in_a_live_process(environment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TOOL)
    environment.setenv("PYTHONPATH", str(tmp_path))
    stage3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
    methods = ["__avg_scatter_grads", "step", "partition_grads", "get_grad_norm_direct"]
    found = surroundings.live_places([f"{stage3}.{method}" for method in methods] + ["deepspeed.gone:function"])
    assert found["not_importable"] == ["deepspeed.gone:function"]
    assert {place["target"].rpartition(".")[2]: place["replaced"] for place in found["places"]} == {
        "__avg_scatter_grads": True,
        "step": False,
        "partition_grads": False,
    }
    assert all(place["by"].startswith(f"sitecustomize ({tmp_path / 'sitecustomize.py'}:") for place in found["places"])


@pytest.mark.parametrize(
    ("replaced", "status", "said"),
    [(False, "ok", "wrapped by another tool; the self-check"), (True, "act", "patches correct are another tool's")],
)
def test_a_place_that_another_tool_has_taken_is_named(examine, environment, replaced, status, said):
    place = {"target": "deepspeed.runtime.engine:DeepSpeedEngine.step", "by": "tool (tool.py:1)", "replaced": replaced}
    environment.setattr(surroundings, "live_places", lambda targets: {"places": [place], "not_importable": []})
    _, checks = examine("other-tools")
    tools = checks["other-tools"]
    assert tools["status"] == status
    assert said in tools["summary"]
    assert f"{place['target']} is {'replaced' if replaced else 'wrapped'} by {place['by']}" in tools["details"]


def test_other_tools_that_begin_with_every_interpreter_and_know_deepspeed(examine, environment, tmp_path):
    for package, text in (("shim_of_deepspeed", "# patches DeepSpeed\n"), ("bystander", "pass\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
        (tmp_path / f"{package}.pth").write_text(f"{tmp_path}\nimport {package}\n")
    environment.syspath_prepend(str(tmp_path))
    environment.setattr(looking, "site_folders", lambda: [tmp_path])
    _, checks = examine("other-tools")
    file = tmp_path / "shim_of_deepspeed.pth"
    assert checks["other-tools"]["data"]["start_up"] == [{"file": str(file), "package": "shim_of_deepspeed"}]
    assert checks["other-tools"]["status"] == "ok"


# --- doctor: what is run and how it is shown


def test_the_ordinary_output_of_a_right_installation_fits_a_screen():
    """Real checks, all of them, in a process of its own."""
    done = command("doctor")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert lines[-1] == "All is well: nothing to act on."
    assert len(lines) <= 24
    assert max(map(cell_len, lines)) <= 80
    assert any(line.startswith("ok  other-tools: all ") for line in lines)


def test_all_lists_each_patch_and_why(capsys, examine):
    assert cli.main(["doctor", "patches", "--all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{patch.id}: " in said for patch in discover())
    assert f"{SCATTER.id}: corrected here; the installed source is known to have this defect" in said
    assert "sum-reduction: fixed in this release; this release has the fix" in said


def test_patches_stand_in_groups(examine, environment):
    environment.setenv("DS_GRADFIX_EXCLUDE", SCATTER.id)
    _, checks = examine("patches")
    corrected, left_out, counted = checks["patches"]["details"]
    assert corrected.startswith("corrected here: ")
    assert SCATTER.id not in corrected
    assert left_out == f"left out: {SCATTER.id}"
    assert counted.startswith("fixed in this release: ")


def test_checks_run_by_name_in_their_own_order(examine):
    _, checks = examine("launcher", "installed")
    assert list(checks) == ["installed", "launcher"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("pathces", "there is no check 'pathces'; did you mean 'patches'? The checks are: installed, "),
     ("job", "the check 'job' looks at a job: give its configuration, with --config CONFIG.json")],
)  # fmt: skip
def test_a_check_that_cannot_be_run_is_one_error(capsys, name, said):
    assert cli.main(["doctor", name]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ds-gradfix doctor: {said}")
    assert printed.err.count("\n") == 1


def test_list_names_every_check_and_runs_none(capsys, environment):
    environment.setattr(looking, "find_installed", None)
    assert cli.main(["doctor", "--list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == list(doctor.CHECKS)
    assert max(map(cell_len, out.splitlines())) <= 80


def test_a_block_for_an_issue(capsys, examine, environment, tmp_path):
    environment.setenv("HOME", str(tmp_path))
    path = tmp_path / "a|b.json"
    path.write_text(json.dumps(AFFECTED))
    assert cli.main(["doctor", "--markdown", "environment", "config", "job", "--config", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("### ds-gradfix doctor\n")
    assert "Something to act on: job." in out
    assert '| config | ok | ~/a\\|b.json: it has no "ds_gradfix" settings, and needs none |\n' in out
    assert "\n  To do: export DS_GRADFIX=1\n" in out
    assert str(tmp_path) not in out
    assert out.count("```") == 2


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"checks": [{"name": "installed"}]}, {"status": "fine"}])
def test_the_schema_refuses_what_is_none_of_ours(change):
    right = {"schema_version": 1, "status": "ok", "checks": [
        {"name": "installed", "status": "ok", "summary": "s", "details": [], "to_do": [], "data": {}}]}  # fmt: skip
    jsonschema.validate(right, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**right, **change}, SCHEMA)
