"""One rank of the oracle: `python -m ds_gradfix.verify._rank DIRECTORY`, started by `launch`.

Reads DIRECTORY/job.json; writes, for each case, DIRECTORY/<case>.<rank>.pt, and, on rank 0, one byte to
DIRECTORY/steps for each optimizer step. torch and DeepSpeed are imported after ds-gradfix is enabled, as in a training
script.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ds_gradfix.verify.cases import Case

COLLECTIVE_TIMEOUT = timedelta(seconds=75)
AGREEMENT_SECONDS = 5.0
"""How long a rank that failed waits for the others to fail too: a refused configuration fails on every rank at once."""


def main(directory: Path) -> int:
    """Run every case of the job; 0 when each gave a result or failed alike on all ranks."""
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads((directory / "job.json").read_text())
    rank = int(os.environ["RANK"])
    enabled: dict[str, Any] | None = None
    for index, case in enumerate(map(Case.from_json, job["cases"])):
        try:
            if job["corrected"] and case.enable != enabled:
                _enable(case.enable, again=enabled is not None)
                enabled = case.enable
            outcome = _trained(case, directory)
        except Exception:
            outcome = {"error": traceback.format_exc()}
        _save(outcome, _outcome_file(directory, index, rank))
        if "error" in outcome and not _all_failed(directory, index):
            sys.stderr.write(outcome["error"])
            sys.stderr.flush()
            os._exit(1)  # a normal exit would wait for the ranks that wait for this one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Standard input is a pipe that closes when the parent ends, however it ends."""
    sys.stdin.read()
    os._exit(1)


def _enable(options: dict[str, Any], *, again: bool) -> None:
    import ds_gradfix

    if again:
        ds_gradfix.disable()
    ds_gradfix.enable(**options)


def _outcome_file(directory: Path, case: int, rank: int) -> Path:
    return directory / f"{case}.{rank}.pt"


def _save(outcome: dict[str, Any], file: Path) -> None:
    """Write all or nothing: another process may be looking."""
    import torch

    part = file.with_suffix(".part")
    torch.save(outcome, part)
    part.replace(file)


def _all_failed(directory: Path, case: int) -> bool:
    import torch

    deadline = time.monotonic() + AGREEMENT_SECONDS
    files = [_outcome_file(directory, case, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return all("error" in torch.load(file, weights_only=True) for file in files)


def _joined(directory: Path) -> Any:
    """This rank's torch.device; at the first call the ranks meet, through a file of the job: no port to race for."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_cpu = torch.cuda.device_count() < ranks
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if torch.distributed.is_initialized():
        return device
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.cuda.set_device(device)
    import deepspeed

    from ds_gradfix.verify import _compat

    _compat.prepare(deepspeed.__version__, on_cpu=on_cpu)
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        init_method=(directory / "store").as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=COLLECTIVE_TIMEOUT,
    )
    deepspeed.init_distributed()
    return device


def _trained(case: Case, directory: Path) -> dict[str, Any]:
    """Train one case with DeepSpeed; what each step gave, as torch data."""
    import torch

    device = _joined(directory)
    import deepspeed

    from ds_gradfix.verify import _compat, _mpu
    from ds_gradfix.verify import model as reference_model
    from ds_gradfix.verify.config import precision, prepared

    _compat.forget_last_engine()
    config = prepared(case)
    net = reference_model.Stack(case.model).float().to(device)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=reference_model.optimizer(case, net.parameters()),
        config=config,
        mpu=_mpu.for_size(case.sequence_parallel, stage=int(config.get("zero_optimization", {}).get("stage", 0))),
    )
    inputs_dtype = getattr(torch, precision(case).master)
    steps = []
    try:
        for step in range(case.steps):
            steps.append(_step(case, engine, step, device, inputs_dtype))
            if os.environ["RANK"] == "0":
                with (directory / "steps").open("ab") as progress:
                    progress.write(b".")
    finally:
        with suppress(AttributeError):  # up to 0.15.4 some configurations have less to destroy than it thinks
            engine.destroy()
        del engine, net
        gc.collect()
        gc.freeze()  # what torch and DeepSpeed imported is never garbage: do not search it again
    return {"steps": steps, "versions": {"deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)},
            "backend": torch.distributed.get_backend()}  # fmt: skip


def _step(case: Case, engine: Any, step: int, device: Any, dtype: Any) -> dict[str, Any]:
    """One optimizer step: gradients just before it, norm and full fp32 parameters just after it."""
    import torch

    from ds_gradfix.verify import _readings
    from ds_gradfix.verify import model as reference_model
    from ds_gradfix.verify.config import accumulation_steps

    losses = []
    gradients: dict[str, Any] = {}
    for micro_batch in range(accumulation_steps(case.config)):
        rank = int(os.environ["RANK"])
        inputs, targets = reference_model.batch(case.model, rank=rank, step=step, micro_batch=micro_batch)
        loss = reference_model.loss(engine(inputs.to(device, dtype)), targets.to(device, torch.float32))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            gradients = _readings.gradients(engine)
        engine.step()
    return {"gradients": gradients, "norm": _readings.norm(engine), "parameters": _readings.parameters(engine),
            "loss": sum(losses) / len(losses)}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
