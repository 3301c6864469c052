"""The oracle can fail: on stock DeepSpeed 0.19.8 it is right where that is right, and sees every published defect.

What it measures on the corrected side belongs to the tests of the corrections.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
import torch

from ds_gradfix.cli import main
from ds_gradfix.verify import Case, Model, RankFailure, measure, oracle
from ds_gradfix.verify.compare import Number, Result, compared
from ds_gradfix.verify.config import ConfigError, case_from_config
from ds_gradfix.verify.page import STYLE, page
from ds_gradfix.verify.reference import train
from ds_gradfix.verify.report import Report

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "zero3_sequence_parallel.json"
HALF_TYPES = {"fp16": {"fp16": {"enabled": True}}, "bf16": {"bf16": {"enabled": True}}}
ODD = Model(widths=(3, 5, 7, 1), bias=True, frozen=("layers.0.bias",), unused=(5, 16))
BIASED = Model(bias=True)


def zero(stage: int, scatter: bool = True, contiguous: bool = True, bucket: int = 500, **config: Any) -> dict[str, Any]:
    section = {
        "stage": stage,
        "reduce_scatter": scatter,
        "contiguous_gradients": contiguous,
        "reduce_bucket_size": bucket,
    }
    return {"zero_optimization": section, **config}


RIGHT_ON_STOCK = {
    **{f"ZeRO-{stage}": Case(zero(stage), steps=3) for stage in range(4)},
    **{
        f"ZeRO-{stage} {dtype} AdamW": Case(zero(stage, gradient_clipping=0.5, **config), steps=5, optimizer="adamw")
        for stage in (1, 2, 3)
        for dtype, config in HALF_TYPES.items()
    },
    "accumulated, clipped": Case(zero(2, gradient_accumulation_steps=3, gradient_clipping=0.1), steps=2),
    "odd sizes, frozen, unused, groups": Case(zero(3), steps=2, model=ODD, learning_rates=(0.1, 0.02, 0.005)),
    "AdamW": Case(zero(3), steps=5, optimizer="adamw", model=ODD),
    "fp16 communication": Case(zero(1, communication_data_type="fp16")),
    "autocast": Case(zero(2, torch_autocast={"enabled": True, "dtype": "bfloat16"})),
    "after autocast": Case(zero(2)),
    "offload": Case({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "sum": Case(zero(2, gradient_allreduce_op="sum")),
    "ZeRO-2, S 2": Case(zero(2), sequence_parallel=2),
    "ZeRO-3 all-reduce, S 2": Case(zero(3, scatter=False), sequence_parallel=2),
    "again": Case(zero(3), steps=3),
}
WRONG_ON_STOCK = {
    "scatter, S 2": Case(zero(3), sequence_parallel=2, steps=2),
    "not contiguous, S 2": Case(zero(3, scatter=False, contiguous=False), sequence_parallel=2),
    "mixed bucket, S 2": Case(zero(3, scatter=False, bucket=16), sequence_parallel=2, model=BIASED),
    "predivide": Case(zero(3, scatter=False, gradient_predivide_factor=2.0)),
    "predivide, not contiguous, S 2": Case(
        zero(3, scatter=False, contiguous=False, gradient_predivide_factor=2.0), sequence_parallel=2
    ),
    "clipped": Case(zero(3, gradient_clipping=0.01), sequence_parallel=2),
    "fp16, ZeRO-0": Case(zero(0, **HALF_TYPES["fp16"])),
}
REFUSED_BY_STOCK = {"sum, ZeRO-3": Case(zero(3, gradient_allreduce_op="sum"))}


@pytest.fixture(scope="module")
def stock() -> dict[str, Result]:
    """Every case on stock DeepSpeed, in one launch; one is refused in between, which must not disturb the others."""
    cases = {**WRONG_ON_STOCK, **REFUSED_BY_STOCK, **RIGHT_ON_STOCK}
    return dict(zip(cases, measure(list(cases.values()), ranks=2, corrected=False)))


@pytest.mark.parametrize("name", RIGHT_ON_STOCK)
def test_unaffected_cases_are_right_on_stock(stock: dict[str, Result], name: str) -> None:
    result = stock[name]
    assert result.right, (result.verdicts, result.error)
    assert not any(step.ranks_differ for step in result.steps)
    assert all(abs(step.loss.got / step.loss.expected - 1) < 0.05 for step in result.steps if step.loss.got)
    # No verdict may be a close call: rounding must stay well under what is called wrong.
    assert max(c.error / c.tolerance for step in result.steps for c in (*step.gradients, *step.updates)) < 0.7


def test_fp32_zero0_reports_no_norm_and_that_is_not_wrong(stock: dict[str, Result]) -> None:
    assert stock["ZeRO-0"].norm.right is None
    assert stock["ZeRO-0"].norm.words == "not reported"
    assert stock["ZeRO-1"].norm.right is True


@pytest.mark.parametrize(
    "name, ratio",
    [
        ("scatter, S 2", 0.5),
        ("not contiguous, S 2", 0.5),
        ("predivide", 0.5),
        ("predivide, not contiguous, S 2", 0.25),
        ("clipped", 0.5),
        ("fp16, ZeRO-0", 1 / 128),
    ],
)
def test_published_defects_are_seen(stock: dict[str, Result], name: str, ratio: float) -> None:
    result = stock[name]
    assert result.ratios == pytest.approx({f"layers.{i}.weight": ratio for i in range(3)}, rel=0.01)
    assert not result.right
    assert result.gradient.words == f"{1 / ratio:.3g}x too small"


def test_where_the_gradient_is_wrong_so_are_norm_and_update(stock: dict[str, Result]) -> None:
    assert {verdict.words for verdict in stock["scatter, S 2"].verdicts.values()} == {"2x too small"}


def test_clipping_hides_a_scale_from_the_update_only(stock: dict[str, Result]) -> None:
    result = stock["clipped"]
    assert (result.gradient.right, result.norm.right, result.update.right) == (False, False, True)


def test_one_backward_pass_can_mix_scales(stock: dict[str, Result]) -> None:
    result = stock["mixed bucket, S 2"]
    right = {"layers.0.bias", "layers.2.bias"}  # 8 elements and 1: these fit the bucket of 16
    assert result.ratios == pytest.approx({name: 1.0 if name in right else 0.5 for name in result.ratios})
    assert len(result.ratios) == 6
    assert result.gradient.words == "2x too small in 4 of 6 parameters"


def test_a_refused_case_carries_its_traceback(stock: dict[str, Result]) -> None:
    result = stock["sum, ZeRO-3"]
    assert result.error is not None and "ValueError: gradient_allreduce_op='sum'" in result.error
    assert not result.right and not result.steps


def test_equal_runs_have_equal_digests(stock: dict[str, Result]) -> None:
    assert stock["again"].digest == stock["ZeRO-3"].digest
    assert stock["again"].digest != stock["ZeRO-1"].digest


def outcomes_of(case: Case, ranks: int = 2) -> list[dict[str, Any]]:
    """What ranks that compute like the reference would save; no two ranks share a tensor."""
    reference = train(case, ranks)

    def steps() -> list[dict[str, Any]]:
        return [
            {
                "gradients": {name: gradient.float() for name, gradient in step.gradients.items()},
                "parameters": {name: value.float() for name, value in step.after.items()},
                "norm": step.norm,
                "loss": step.loss,
            }
            for step in reference
        ]

    return [{"steps": steps(), "versions": {}, "backend": "none"} for _ in range(ranks)]


def judged(case: Case, outcomes: list[dict[str, Any]]) -> Result:
    return compared(case, corrected=False, outcomes=outcomes)


def test_perfect_ranks_are_right() -> None:
    case = Case(zero(1, gradient_clipping=0.1), steps=3, model=ODD)
    assert {verdict.words for verdict in judged(case, outcomes_of(case)).verdicts.values()} == {"right"}


def test_a_slightly_wrong_scale_of_one_parameter_in_one_step_is_wrong() -> None:
    case = Case(zero(1), steps=3)
    outcomes = outcomes_of(case)
    for outcome in outcomes:
        outcome["steps"][1]["gradients"]["layers.2.weight"] *= 1.0001
    result = judged(case, outcomes)
    assert result.gradient.words == "1.0001x too large in 1 of 3 parameters, from step 2 on"
    assert result.norm.right and result.update.right


def test_noise_is_not_called_a_scale() -> None:
    case = Case(zero(1))
    outcomes = outcomes_of(case)
    for outcome in outcomes:
        outcome["steps"][0]["gradients"]["layers.1.weight"].flatten()[7] += 1.0
    assert judged(case, outcomes).gradient.words.startswith("wrong by ")


def test_a_rank_of_its_own_opinion_is_wrong() -> None:
    case = Case(zero(1))
    outcomes = outcomes_of(case)
    outcomes[1]["steps"][0]["gradients"]["layers.0.weight"] *= 1 + 2**-22
    result = judged(case, outcomes)
    assert result.gradient.words == "ranks differ"
    assert result.norm.right and result.update.right


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
def test_a_meaningless_norm_is_wrong(norm: float) -> None:
    case = Case(zero(1))
    outcomes = outcomes_of(case)
    for outcome in outcomes:
        outcome["steps"][0]["norm"] = norm
    assert judged(case, outcomes).norm.words == "wrong"


@pytest.mark.parametrize(
    "name, change",
    [("layers.0.bias", 1e-6), ("unused.0", 1e-6), ("layers.1.weight", float("nan"))],
    ids=["frozen", "unused", "not a number"],
)
def test_a_parameter_that_should_not_have_changed_so_is_wrong(name: str, change: float) -> None:
    case = Case(zero(1), model=ODD)
    outcomes = outcomes_of(case)
    for outcome in outcomes:
        outcome["steps"][0]["parameters"][name].flatten()[0] += change
    result = judged(case, outcomes)
    assert result.update.right is False
    assert [update.name for update in result.steps[0].updates if not update.right] == [name]


def test_the_reference_is_the_written_invariant() -> None:
    """(S / D) sum_r g_r over four ranks in two sequence groups, from plain autograd; sum is D / S times that."""
    from ds_gradfix.verify.model import Stack, batch, loss

    case = Case(zero(1, gradient_clipping=1e-3), sequence_parallel=2)
    net = Stack(case.model).float().double()
    for rank in range(4):
        inputs, targets = batch(case.model, rank=rank, step=0, micro_batch=0)
        (loss(net(inputs.float().double()), targets) * 2 / 4).backward()
    (step,) = train(case, ranks=4)
    norm = torch.stack([parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]).norm()
    assert step.norm == pytest.approx(float(norm))
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
        clipped = step.gradients[name] * 1e-3 / (step.norm + 1e-6)
        torch.testing.assert_close(step.after[name], parameter.detach() - 0.1 * clipped)
    (summed,) = train(replace(case, config=zero(1, gradient_allreduce_op="sum")), ranks=4)
    assert summed.norm == pytest.approx(2 * step.norm)


@pytest.fixture
def broken_ranks(tmp_path: Path) -> dict[str, str]:
    """An environment whose DeepSpeed never answers on rank 0, nor on rank 1, or fails there if told to."""
    return with_broken("deepspeed", tmp_path)


def with_broken(package: str, directory: Path) -> dict[str, str]:
    """An environment in which importing the package breaks a rank; each leaves its process id in `directory`."""
    (directory / package).mkdir()
    (directory / package / "__init__.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(directory)!r}, os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1' and 'ILL_FATED' in os.environ:\n"
        "    raise OSError('rank 1 lost its device')\n"
        "def wait_for_a_peer_that_never_comes():\n"
        "    time.sleep(600)\n"
        "wait_for_a_peer_that_never_comes()\n"
    )
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "DIRECTORY": str(directory)}


def processes(environment: dict[str, str]) -> list[int]:
    return [int(file.read_text()) for file in Path(environment["DIRECTORY"]).glob("*.pid")]


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


def test_a_rank_that_dies_ends_the_run_with_its_traceback(broken_ranks: dict[str, str]) -> None:
    with pytest.raises(RankFailure, match="rank 1 died") as failure:
        measure([Case(zero(1))], corrected=False, env={**broken_ranks, "ILL_FATED": "1"})
    assert "Traceback" in str(failure.value) and "OSError: rank 1 lost its device" in str(failure.value)
    assert not any(map(alive, processes(broken_ranks)))


def test_ranks_that_hang_end_in_bounded_time_and_say_where(tmp_path: Path) -> None:
    hanging = with_broken("torch", tmp_path)  # the first import of a rank: no slow one comes before it
    with pytest.raises(RankFailure, match="no rank got on for 8 s; still running: 0, 1") as failure:
        measure([Case(zero(1))], corrected=False, env=hanging, timeout=8)
    assert str(failure.value).count("wait_for_a_peer_that_never_comes") == 2
    assert len(processes(hanging)) == 2 and not any(map(alive, processes(hanging)))


def test_no_rank_survives_a_killed_command(broken_ranks: dict[str, str]) -> None:
    command = subprocess.Popen([sys.executable, "-m", "ds_gradfix.verify", str(EXAMPLE), "--stock"], env=broken_ranks)
    wait_until(lambda: len(processes(broken_ranks)) == 2, seconds=90)
    command.send_signal(signal.SIGKILL)
    command.wait()
    wait_until(lambda: not any(map(alive, processes(broken_ranks))), seconds=30)


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_exits_2_with_the_traceback_of_a_dying_rank(
    broken_ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_ranks["PYTHONPATH"])
    monkeypatch.setenv("ILL_FATED", "1")
    assert main(["verify", str(EXAMPLE), "--stock"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "OSError: rank 1 lost its device" in captured.err


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr of a command that could not run."""
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"zero_optimization": ', "can't be read as JSON"),
        ("[1, 2]", "no JSON object"),
        ('{"zero_optimization": 3}', '"zero_optimization" must be an object'),
        (
            '{"gradient_accumulation_steps": 0}',
            '"gradient_accumulation_steps" is 0; it must be a whole number, 1 or more',
        ),
        ('{"gradient_clipping": "much"}', "\"gradient_clipping\" is 'much'; it must be a number"),
        (
            '{"optimizer": {"type": "OneBitAdam"}}',
            "\"optimizer.type\" is 'OneBitAdam'; the oracle can check Adam, AdamW",
        ),
        (
            '{"optimizer": {"type": "SGD", "params": {"lr": "fast"}}}',
            "\"optimizer.params.lr\" is 'fast'; it must be a number",
        ),
        ('{"communication_data_type": "int8"}', "data type 'int8' is not known; allowed: bf16"),
        ('{"sequence_parallel_size": 3}', None),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_in_one_sentence(
    text: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    arguments = [str(file), *(["--ranks", "4"] if said is None else [])]
    assert (said or "4 ranks") in refusal(arguments, capsys)


def test_other_reasons_not_to_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.json can't be read: No such file" in refusal(["nowhere.json"], capsys)
    assert "--steps is 0" in refusal([str(EXAMPLE), "--steps", "0"], capsys)
    monkeypatch.setattr(oracle, "missing_packages", lambda: ["deepspeed"])
    assert "deepspeed must be installed" in refusal([str(EXAMPLE)], capsys)


def test_a_trainers_configuration_is_read() -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
    }
    case, notes = case_from_config(config, name="", ranks=4, sequence_parallel=2, steps=1)
    assert case.config["zero_optimization"] == {"stage": 2}
    assert case.config["gradient_accumulation_steps"] == 4
    assert (case.optimizer, case.optimizer_options) == ("adamw", {"betas": [0.8, 0.9], "weight_decay": 0.0})
    assert any("bf16.enabled, optimizer.params.lr, zero_optimization.reduce_bucket_size" in note for note in notes)
    assert config["bf16"] == {"enabled": "auto"}


def test_ranks_must_hold_whole_sequence_groups() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share sequences in groups of 2"):
        measure([Case(zero(1), sequence_parallel=2)], ranks=3, corrected=False)


@pytest.fixture
def measured(stock: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> dict[bool, Result]:
    """What the command is given for its stock (False) and its corrected run (True), in place of ranks."""
    results = {False: stock["scatter, S 2"], True: stock["ZeRO-3 all-reduce, S 2"]}
    monkeypatch.setattr(oracle, "measure", lambda cases, *, corrected, **options: [results[corrected]])
    return results


@pytest.mark.parametrize("option, status", [("--both", 0), ("--corrected", 0), ("--stock", 1)])
def test_the_exit_status_is_the_corrected_runs(
    measured: dict[bool, Result], option: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(EXAMPLE), option]) == status
    capsys.readouterr()
    assert main(["verify", str(EXAMPLE), option, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == ["right", "wrong"][status]
    assert list(document["runs"]) == (["stock", "corrected"] if option == "--both" else [option[2:]])


def test_a_refused_corrected_run_exits_2(
    stock: dict[str, Result], measured: dict[bool, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    measured[True] = stock["sum, ZeRO-3"]
    assert main(["verify", str(EXAMPLE)]) == 2
    captured = capsys.readouterr()
    assert "corrected could not run: ValueError: gradient_allreduce_op='sum'" in captured.out.replace("\n", " ")
    assert "Traceback" in captured.err
    measured[False], measured[True] = stock["sum, ZeRO-3"], stock["ZeRO-3"]
    assert main(["verify", str(EXAMPLE)]) == 0


def test_the_table_fits_80_columns(measured: dict[bool, Result], capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(EXAMPLE)])
    out = capsys.readouterr().out
    assert "gradient: stock 2x too small, corrected right" in out
    assert max(len(line) for line in out.splitlines() if str(EXAMPLE) not in line) <= 80
    assert "\x1b" not in out


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], str]:
    """The command as a user types it, and the page that it leaves: two launches of real ranks."""
    page = tmp_path_factory.mktemp("report") / "page.html"
    command = [sys.executable, "-m", "ds_gradfix.verify", str(EXAMPLE), "--report", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, page.read_text(encoding="utf-8")


def test_the_example_shows_a_wrong_gradient_made_right(shown: tuple[subprocess.CompletedProcess[str], str]) -> None:
    """None of the ranks' noise is on the screen."""
    done, _ = shown
    for invariant in ("gradient", "norm", "update"):
        assert f"{invariant}: stock 2x too small, corrected right" in done.stdout
    assert done.stderr == "" and "[INFO]" not in done.stdout


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium, to open the page in")
@pytest.mark.parametrize("width, dark", [(1000, False), (400, True)])
def test_the_page_in_a_real_browser(
    shown: tuple[subprocess.CompletedProcess[str], str], width: int, dark: bool
) -> None:
    _, page = shown
    # Without its policy, which would keep the browser from asking and us from seeing that it wants to.
    free, policies = re.subn('<meta http-equiv="Content-Security-Policy" [^>]*>', "", page)
    seen = browser.seen(free, width=width, dark=dark)
    assert policies == 1
    for words in (EXAMPLE.name, "The corrected run is right", "2x too small", "1.7e-07", "2.26233", "torch 2.", "gloo"):
        assert words in seen["text"]
    assert seen["width"] == width, "wider than the screen"
    assert len(seen["pictures"]) == 3 and min(map(min, seen["pictures"])) > 90
    assert seen["cut_off"] == [] and min(seen["sizes"]) >= 10
    assert seen["requests"] == [] and seen["scripts"] == 0
    assert (browser.contrast(seen["background"], "rgb(0, 0, 0)") < 2) == dark
    assert min(browser.contrast(colour, seen["background"]) for colour in seen["colours"]) >= 4.5


class Tags(HTMLParser):
    """Every element of a page with its attributes; refuses a page whose elements do not close as they opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [own for name, own in self.found if name == tag and attributes.items() <= own.items()]


def tags_of(results: dict[str, Result], config: str = "job.json") -> Tags:
    return Tags(page(Report(config, 2, ("a note",), results), "ds-gradfix verify job.json"))


def test_the_page_draws_every_step_and_every_parameter(stock: dict[str, Result]) -> None:
    tags = tags_of({"stock": stock["scatter, S 2"], "corrected": stock["accumulated, clipped"]})
    kinds = ("stock", "reference", "corrected", "other")  # the two runs have a reference each: they are two jobs
    lines = {kind: [places(line) for line in tags.all("polyline", **{"class": f"line {kind}"})] for kind in kinds}
    assert [[len(line) for line in same] for same in lines.values()] == [[2, 2]] * 4
    # 3 parameters, 2 steps of loss and 2 of norm; one in each of 3 legends
    assert [len(tags.all("circle", **{"class": "stock"})), len(tags.all("path", **{"class": "corrected"}))] == [10, 10]
    stock_norm, reference, corrected_norm, other = (lines[kind][1][0][1] for kind in kinds)
    assert stock_norm > reference + 20 and abs(corrected_norm - other) < 0.01, "lower is further down"
    assert len(tags.all("svg", role="img")) == 3 and len(tags.all("table")) == len(tags.all("caption")) == 4
    assert all(head.get("scope") for head in tags.all("th"))


def places(line: dict[str, str | None]) -> list[tuple[float, float]]:
    """The points of a polyline, (x, y) each."""
    pairs = (point.split(",") for point in (line["points"] or "").split())
    return [(float(x), float(y)) for x, y in pairs]


@pytest.mark.parametrize(
    "one, other",
    [
        ("odd sizes, frozen, unused, groups", "odd sizes, frozen, unused, groups"),
        ("fp16, ZeRO-0", "ZeRO-0"),
        ("sum, ZeRO-3", "ZeRO-3"),
        ("ZeRO-3", "sum, ZeRO-3"),
        ("sum, ZeRO-3", "sum, ZeRO-3"),
    ],
)
def test_the_page_of_any_job_is_whole_and_alone(stock: dict[str, Result], one: str, other: str) -> None:
    hostile = "<img src=x onerror=alert(1)>\"'&</style>.json"
    tags = tags_of({"stock": stock[one], "corrected": stock[other]}, config=hostile)
    assert tags.all("img") == tags.all("script") == tags.all("iframe") == []
    loaded = [own[key] for _, own in tags.found for key in ("src", "href", "xlink:href", "style") if key in own]
    assert loaded == ["data:,"]
    assert "url(" not in STYLE and "@import" not in STYLE


def test_numbers_that_no_axis_has_a_place_for(stock: dict[str, Result]) -> None:
    right = stock["ZeRO-3"]
    first, second, third = right.steps
    gradients = tuple(
        replace(gradient, ratio=ratio) for gradient, ratio in zip(first.gradients, (-0.25, math.nan, math.inf))
    )
    broken = replace(first, gradients=gradients, loss=Number(math.nan, 1e30), norm=Number(math.inf, 0.0))
    text = page(Report("job.json", 2, (), {"stock": replace(right, steps=(broken, second, third))}), "command")
    assert "layers.0.weight: stock -0.25; layers.1.weight: stock nan; layers.2.weight: stock inf" in text
    drawn = [str(own[key]) for _, own in Tags(text).found for key in ("points", "x", "y", "cx", "cy") if key in own]
    assert len(drawn) > 20 and not any("nan" in place or "inf" in place for place in drawn)
    assert len(places(Tags(text).all("polyline", **{"class": "line stock"})[0])) == 2


@pytest.mark.parametrize(
    "path, reason",
    [
        (".", "it is a directory"),
        ("missing/page.html", "missing: No such file or directory"),
        ("job.json", "it is the file that is read"),
        ("job.json/page.html", "job.json: Not a directory"),
        ("/dev/null", "it is not a regular file"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_trained(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_bytes(EXAMPLE.read_bytes())
    monkeypatch.setattr(oracle, "measure", lambda *_, **__: pytest.fail("ranks were started"))
    said = refusal(["job.json", "--report", path], capsys)
    assert said.startswith(f"ds-gradfix verify: --report {path} can't be written: ") and reason in said
    assert os.listdir() == ["job.json"]


def test_a_page_takes_an_older_ones_place_in_one_step(
    measured: dict[bool, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    assert main(["verify", str(EXAMPLE), "--stock", "--json", "--report", str(tmp_path / "link.html")]) == 1
    json.loads(capsys.readouterr().out)
    assert (tmp_path / "link.html").is_symlink() and sorted(os.listdir(tmp_path)) == ["link.html", "old.html"]
    assert "--steps 3 --stock" in (tmp_path / "old.html").read_text(encoding="utf-8")


def test_what_is_wrong_is_marked_where_there_is_no_colour(
    measured: dict[bool, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verify", str(EXAMPLE)])
    out = capsys.readouterr().out
    assert out.count("0.5 *") == 5 and "* is more than rounding explains." in out
    main(["verify", str(EXAMPLE), "--corrected"])
    assert "*" not in capsys.readouterr().out
