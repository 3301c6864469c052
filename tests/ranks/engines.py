"""Makes ZeRO-3 engines with a sequence-parallel size of 2 in the ways that the arguments name, and says what happened.

    engines.py SCENARIO...        one JSON line for each on every rank

The ranks meet through a file, so that DS_GRADFIX may differ between them from the start.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from ds_gradfix import agreement

importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # gloo itself; waits for no compiler
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
SHARDS = 2


def config(**more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }


def engine(given: Any = None, **initialize: Any) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    initialize = {"mpu": parallel_state_sp, **initialize}
    made, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=given, **initialize)
    return made


def ratio(made: Any) -> float:
    """Of the reduced gradient to the sum over the two shards of one sequence, which is what is right."""
    x = torch.full((1, 4), float(1 + int(os.environ["RANK"])))
    made.backward(made(x).sum())
    (param,) = made.module.parameters()
    got = deepspeed.utils.safe_get_full_grad(param)
    made.step()
    return float(got.mean()) / 3.0


def forms(directory: Path) -> dict[str, Any]:
    """The configuration in every form that deepspeed.initialize takes; the section is read from each."""
    rank = os.environ["RANK"]
    given = config(ds_gradfix={"self_check": "warn"})
    before = json.dumps(given)
    path = directory / f"config.{rank}.json"
    path.write_text(before)
    text = base64.urlsafe_b64encode(before.encode()).decode()
    made = {
        "dict": engine(given),
        "path": engine(str(path)),
        "base64": engine(text),
        "args": engine(None, args=Namespace(deepspeed_config=str(path), local_rank=int(rank))),
    }
    found = {form: [e._ds_gradfix.settings.self_check, round(ratio(e), 6)] for form, e in made.items()}
    return {"found": found, "dict_unchanged": json.dumps(given) == before}


def refused(**section: Any) -> str:
    return attempt(config(ds_gradfix=section))


def attempt(given: dict[str, Any]) -> str:
    return attempted(lambda: engine(given))


def attempted(call: Callable[[], Any]) -> str:
    """What it raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def state(made: Any) -> str:
    """Everything that a self-check could have touched, as text."""
    optimizer = made.optimizer
    buckets = {
        str(dtype): [bucket.elements, len(bucket.params), str(bucket.process_group), id(bucket), id(bucket.buffer)]
        for dtype, bucket in optimizer.ipg_buckets.items()
    }
    params = [
        [p.ds_tensor.tolist(), str(p.ds_status), None if p.grad is None else p.grad.tolist(), sorted(vars(p))]
        for p in made.module.parameters()
    ]
    comms = deepspeed.comm.comm.comms_logger
    return json.dumps(
        {
            "buckets": buckets,
            "params": params,
            "partitions": [t.tolist() for t in optimizer.fp16_partitioned_groups_flat],
            "averaged": {str(k): str(v) for k, v in optimizer.averaged_gradients.items()},
            "rng": torch.get_rng_state().tolist(),
            "timers": [sorted(made.timers.timers), made.tput_timer.global_step_count],
            "collectives": json.dumps(comms.comms_dict, default=str),
            "steps": [made.micro_steps, made.global_steps, optimizer.micro_step_id],
        }
    )


def trace() -> dict[str, Any]:
    """The state of an engine before and after its self-check, whose measuring is done once more by hand."""
    from ds_gradfix import activation
    from ds_gradfix.engine import prove

    made = engine(config(comms_logger={"enabled": True, "verbose": False, "prof_all": True, "debug": False}))
    before = state(made)
    proof = prove(made, made._ds_gradfix, activation._state.plan, [], "once more")
    measured = [m.ratio for ms in proof.measurements.values() for m in ms]
    return {"unchanged": state(made) == before, "measured": measured, "wrong": proof.wrong}


def raising() -> str:
    """The measurement fails on one rank only: all must hear of it, and none must wait."""
    from ds_gradfix import activation

    patch = activation._state.plan.entry("zero3-scatter-scale").patch
    if os.environ["RANK"] == "1":

        def fail(engine: Any) -> Any:
            raise ValueError("a rank of its own")

        object.__setattr__(patch, "measure", fail)
    else:
        object.__setattr__(patch, "measure", lambda engine: [])
    return refused()


def late() -> dict[str, Any]:
    """enable() when an engine exists already, and disable()."""
    import ds_gradfix

    made = engine(config())
    ratios = [ratio(made)]
    ds_gradfix.enable()
    ratios.append(ratio(made))
    ds_gradfix.disable()
    ratios.append(ratio(made))
    return {"ratios": [round(r, 6) for r in ratios]}


def timed() -> dict[str, Any]:
    agreement.TIMEOUT, agreement.GRACE = timedelta(seconds=4), timedelta(seconds=2)
    started = time.monotonic()
    said = refused()
    return {"said": said, "seconds": time.monotonic() - started}


def reports() -> dict[str, Any]:
    """ds_gradfix.report of an engine with each op, and of an engine from before ds-gradfix was on."""
    import ds_gradfix

    old = engine(config())
    try:
        ds_gradfix.report(old)
        refusal = "none"
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    ds_gradfix.enable()
    made = {op: ds_gradfix.report(engine(config(gradient_allreduce_op=op))) for op in ("mean", "SUM")}
    ds_gradfix.disable()
    return {"refusal": refusal, **made}


def launching() -> str:
    """One rank has imported DeepSpeed's launcher, where we have a place too: that makes no job differ."""
    import ds_gradfix

    ds_gradfix.enable()
    if os.environ["RANK"] == "0":
        importlib.import_module("deepspeed.launcher.multinode_runner")
    said = attempt(config())
    ds_gradfix.disable()
    return said


def plain() -> dict[str, Any]:
    return {"ratio": round(ratio(engine(config())), 6)}


def tell(scenarios: Mapping[str, Callable[[], Any]]) -> None:
    """Meet the other ranks, play what the arguments name, one line each, and end the process."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=ranks, timeout=timedelta(seconds=90)
    )
    deepspeed.init_distributed("gloo", verbose=False)
    parallel_state_sp.initialize_sequence_parallel(SHARDS)
    for name in sys.argv[1:]:
        print("RESULT " + json.dumps([name, scenarios[name]()]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    tell(
        {
            "forms": lambda: forms(Path(os.environ["RENDEZVOUS"].removeprefix("file://")).parent),
            "bad key": lambda: refused(self_chek="off"),
            "bad value": lambda: refused(self_check="loud"),
            "bad section": lambda: attempt(config(ds_gradfix=["strict"])),
            "trace": trace,
            "raising": raising,
            "late": late,
            "reports": reports,
            "launching": launching,
            "timed": timed,
            "plain": plain,
        }
    )
