"""The commands that look: `list` and `diff`, and the root that all commands hang on.

Commands run in processes of their own, as a user starts them, where the process matters: what it imports, what it
writes where, how it ends. Everything else calls `main` in this process.
"""

import dataclasses
import json

import pytest
from command_line import AFFECTED, STRANGE, command, python
from rich.cells import cell_len

from ds_gradfix import cli
from ds_gradfix.cli import diff
from ds_gradfix.installed import find_installed
from ds_gradfix.patches import zero3_predivide_postscale, zero3_scatter_scale
from ds_gradfix.registry import Verdict, discover, make_plan
from ds_gradfix.settings import Settings

pytestmark = pytest.mark.usefixtures("environment")

SCATTER, PREDIVIDE = zero3_scatter_scale.PATCH, zero3_predivide_postscale.PATCH


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
    assert document["schema_version"] == 1
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


def test_diff_of_a_patch_that_steers_names_what_it_sets(capsys):
    assert cli.main(["diff", "fp16-zero0-loss-scale"]) == 0
    assert "    engine.torch_autocast_z0_gradscaler = LossScaler(engine)\n" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "arguments", [["doctor"], ["list"], ["-h"], *([name, "-h"] for name in cli.COMMANDS)], ids=" ".join
)
def test_nothing_is_wider_than_the_screen(capsys, config, arguments):
    if arguments == ["doctor"]:
        arguments = ["doctor", "config", "job", "--config", config({**AFFECTED, "ds_gradfix": {"self_check": "warn"}})]
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
main(["doctor", "patches", "start-up", "job", "--config", {config(AFFECTED)!r}])
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
