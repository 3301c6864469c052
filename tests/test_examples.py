"""The examples, each as its own text says to start it: right with DS_GRADFIX=1 and no other change. The one with
sequence parallelism under both launchers, and wrong on stock DeepSpeed.

Runs in the environment that ds-gradfix is installed in, since its start-up file is what is tested.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from extras import needs
from launching import free_port

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPT = EXAMPLES / "train_sequence_parallel.py"
BIN = Path(sys.executable).parent
STEP = re.compile(r"^step \d+  loss (\S+)  gradient is (\S+) x", re.MULTILINE)


def torchrun(port):
    return [BIN / "torchrun", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port]


def deepspeed(port):
    return [BIN / "deepspeed", "--num_gpus", "2", "--master_port", port]


def accelerate(port):
    config = EXAMPLES / "hf_trainer.json"
    words = "launch --use_deepspeed --num_processes 2 --deepspeed_config_file"
    return [BIN / "accelerate", *words.split(), config, "--main_process_port", port]


def train(launcher, **environment):
    """The losses and the relative gradients that the example prints."""
    output = launch(launcher, SCRIPT, "--steps", 2, **environment)
    steps = [(float(loss), float(ratio)) for loss, ratio in STEP.findall(output)]
    assert len(steps) == 2, output
    return steps


def launch(launcher, *arguments, **environment):
    """What two ranks print."""
    inherited = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name}
    done = subprocess.run(
        [str(word) for word in (*launcher(free_port()), *arguments)],
        # Launchers start `python` and look for tools by name; two ranks share this machine's cores.
        env={**inherited, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_summed_gradients_train_as_averaged_ones_do(tmp_path):
    """Losses, full gradients and full parameters of five steps, for AdamW on ZeRO 0-3 and Muon on ZeRO 1-3."""
    figure = tmp_path / "losses.png"
    drawing = ["--figure", figure] if importlib.util.find_spec("matplotlib") else []
    # Muon's own kernels are for torch.compile, which would need a compiler here, and time.
    output = launch(torchrun, EXAMPLES / "sum_equivalence.py", *drawing, DS_GRADFIX="1", TORCHDYNAMO_DISABLE="1")
    found = re.findall(r"^(\w+), ZeRO-(\d): .* loss (\S+)  gradient (\S+)  parameter (\S+)$", output, re.MULTILINE)
    assert [(optimizer, stage) for optimizer, stage, *_ in found] == [
        *(("AdamW", stage) for stage in "0123"),
        *(("Muon", stage) for stage in "123"),
    ]
    for optimizer, stage, *differences in found:
        assert max(map(float, differences)) < 1e-6, (optimizer, stage, differences)
    assert figure.exists() or not drawing


@pytest.mark.parametrize(("op", "ratio"), [("sum", "1.0000"), ("mean", "0.5000")])
def test_contrastive_learning_over_gathered_embeddings_wants_a_sum(op, ratio):
    output = launch(torchrun, EXAMPLES / "contrastive_sum.py", "--op", op, DS_GRADFIX="1")
    assert f"{op}, ZeRO-3: the gradient is {ratio} x the whole batch's, else off by" in output


@needs(transformers="5.0", accelerate="1.12")
def test_transformers_trainer_under_accelerate_launch():
    output = launch(accelerate, EXAMPLES / "hf_trainer.py", DS_GRADFIX="1", HF_HUB_OFFLINE="1")
    assert re.findall(r"^step \d .* is (\S+) x the single-process norm$", output, re.MULTILINE) == ["1.00"] * 3


@needs(transformers="5.0")
def test_folded_experts_are_clipped_by_the_whole_models_norm():
    output = launch(torchrun, EXAMPLES / "moe_autoep_autotp.py", DS_GRADFIX="1", HF_HUB_OFFLINE="1")
    assert re.findall(r"^step \d .* is (\S+) x the whole model's$", output, re.MULTILINE) == ["1.0000"] * 3


@pytest.mark.parametrize("name", ["train_sequence_parallel", "hf_trainer", "moe_autoep_autotp"])
def test_what_trains_does_not_know_ds_gradfix(name):
    for path in EXAMPLES.glob(f"{name}.*"):
        code = path.read_text().rpartition('"""')[2]
        assert code and not re.search("grad.?fix", code, re.IGNORECASE)


@pytest.mark.parametrize("launcher", [torchrun, deepspeed])
def test_the_example_is_wrong_without_and_right_with(launcher):
    stock = train(launcher)
    corrected = train(launcher, DS_GRADFIX="1")
    assert [ratio for _, ratio in stock] == [0.5, 0.5]
    assert [ratio for _, ratio in corrected] == [1.0, 1.0]
    # The first loss comes before any update; a full step then goes further down than half of one.
    assert corrected[0][0] == stock[0][0]
    assert corrected[1][0] < stock[1][0]


@pytest.mark.parametrize("launcher, options", [(torchrun, ["-m"]), (deepspeed, ["--no_local_rank", "--module"])])
def test_run_inside_a_launcher_needs_no_variable(launcher, options, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys; print(f'rank {os.environ[\"RANK\"]} by {sys._ds_gradfix_boot}, {sys.argv[1:]}')\n"
    )
    output = launch(launcher, *options, "ds_gradfix", "run", script, "--lr", 1)
    for rank in (0, 1):
        assert f"rank {rank} by ds-gradfix run, ['--lr', '1']" in output
