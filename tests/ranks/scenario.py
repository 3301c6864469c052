"""Run named scenarios on one rank, each with ds-gradfix on and again on stock DeepSpeed, and print what each gave.

A rank script defines functions without arguments that return JSON data and ends with ``play({name: function, ...})``.
The ranks meet through a file. See ``played`` in tests/launching.py for the other end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import torch

import ds_gradfix
from ds_gradfix.verify import _compat


def play(scenarios: Mapping[str, Callable[[], Any]], detach: bool = True) -> None:
    """Run those that the arguments name (all, if none) and print one JSON line; ends the process.

    ``detach=False`` leaves out the oracle's own workaround for 0.18.7 to 0.18.9.
    """
    if not detach:
        _compat._detach_flat_tensors = lambda: None
    _compat.prepare(deepspeed.__version__, on_cpu=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = os.environ["RENDEZVOUS"]
    timeout = timedelta(seconds=75)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    deepspeed.init_distributed()
    wanted = [name for name in scenarios if name in sys.argv[1:] or len(sys.argv) == 1]
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    ds_gradfix.enable()  # once, while there is no engine that it would have to look at
    gc.collect()
    gc.freeze()  # older DeepSpeed collects garbage hundreds of times for each engine, and nothing by now is any
    for name in wanted:
        found[name]["corrected"] = _outcome(scenarios[name])
    ds_gradfix.disable()
    _modes.append("stock")
    for name in wanted:
        found[name]["stock"] = _outcome(scenarios[name])
    print(json.dumps({"deepspeed": deepspeed.__version__, "scenarios": found}))
    sys.stdout.flush()
    os._exit(0)


_modes = ["corrected"]


def on_stock() -> bool:
    """Whether the running scenario is on stock DeepSpeed."""
    return _modes[-1] == "stock"


def _outcome(scenario: Callable[[], Any]) -> Any:
    _compat.forget_last_engine()
    torch.manual_seed(0)
    try:
        return scenario()
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        gc.collect()


def forget_groups() -> None:
    """Let the next engine make its expert and model-parallel groups anew."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    for name in list(vars(groups)):
        if name.startswith("_") and name.isupper() and isinstance(getattr(groups, name), dict):
            getattr(groups, name).clear()
        elif name.startswith("_") and name.isupper() and name.endswith("GROUP"):
            setattr(groups, name, None)
    groups.mpu = None
    groups.mesh_device = None
