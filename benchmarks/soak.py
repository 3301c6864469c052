"""A long run with ds-gradfix on beside the same on stock: does memory grow, do the weights drift?

    python benchmarks/soak.py [--steps N] [--ranks R] [--json]

Every job is trained twice, at the same time, by R local ranks each. In the jobs named "right" nothing is to be
corrected, and every weight must be the one of stock, to the bit. In "corrected", ZeRO-3 with sequence parallelism of R,
stock gets the loss times R, which for a power of two is exact: again the same bits. Memory is a rank's resident set
after a tenth of the steps and at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOBS = {"right, ZeRO-0": (0, False), "right, ZeRO-2": (2, False), "right, ZeRO-3": (3, False), "corrected": (3, True)}
SAMPLES = 20
WIDTH = 32


def main() -> None:
    """Train all jobs and print the table, or the same as JSON; the status is 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {name: compare(name, args.ranks, args.steps) for name in JOBS}
    print(json.dumps(results, indent=2) if args.json else table(results, args.steps))
    sys.exit(not all(one["same_bits"] for one in results.values()))


def compare(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """Both runs of one job."""
    with tempfile.TemporaryDirectory() as directory:
        runs = {
            mode: [start(name, mode, rank, ranks, steps, Path(directory, mode)) for rank in range(ranks)]
            for mode in ("off", "on")
        }
        said = {mode: [last_line(process) for process in run] for mode, run in runs.items()}
    return {
        "same_bits": all(one["bits"] == other["bits"] for one, other in zip(said["off"], said["on"], strict=True)),
        "engaged": said["on"][0]["engaged"],
        **{f"growth_mib_{mode}": max(one["mib"][-1] - one["mib"][0] for one in run) for mode, run in said.items()},
        **{f"mib_{mode}": [one["mib"] for one in run] for mode, run in said.items()},
    }


def start(name: str, mode: str, rank: int, ranks: int, steps: int, meeting: Path) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if "DS_GRADFIX" not in key} | {
        "DS_GRADFIX": mode,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "MEETING": meeting.as_uri(),
    }
    command = [sys.executable, "-c", "import soak, sys; soak.train(sys.argv[1], int(sys.argv[2]))", name, str(steps)]
    folder = Path(__file__).parent
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def last_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(process.communicate()[0].splitlines()[-1])
    return said


def train(name: str, steps: int) -> None:
    """One rank: what JOBS says, and a line of JSON about it."""
    from datetime import timedelta

    import deepspeed
    import torch

    from ds_gradfix.verify import _compat, _mpu

    _compat.prepare(deepspeed.__version__, on_cpu=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = os.environ["MEETING"]
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=90)
    )
    deepspeed.init_distributed()
    stage, corrected = JOBS[name]
    weight = ranks if corrected and os.environ["DS_GRADFIX"] == "off" else 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        mpu=_mpu.for_size(ranks if corrected else 1, stage=stage),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1e6,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    draw = torch.Generator().manual_seed(rank)
    bits, mib = hashlib.sha256(), []
    for step in range(1, steps + 1):
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw)).square().mean() * weight)
        engine.step()
        if step % max(steps // SAMPLES, 1) == 0:
            with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
                for parameter in model.parameters():
                    bits.update(parameter.detach().numpy().tobytes())
            if step >= steps // 10:
                mib.append(round(resident_mib(), 1))
    engaged = sorted(getattr(getattr(engine, "_ds_gradfix", None), "patches", ()))
    print(json.dumps({"bits": bits.hexdigest(), "mib": mib, "engaged": engaged}), flush=True)
    os._exit(0)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def table(results: dict[str, dict[str, Any]], steps: int) -> str:
    lines = [f"{steps} steps; memory grown after the first tenth, in MiB", f"{'job':<16}{'off':>8}{'on':>8}  weights"]
    for name, one in results.items():
        bits = "the same bits" if one["same_bits"] else "DIFFERENT"
        lines.append(f"{name:<16}{one['growth_mib_off']:>8.1f}{one['growth_mib_on']:>8.1f}  {bits}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
