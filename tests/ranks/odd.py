"""What jobs and other tools do beside training, with ds-gradfix on, and says what came of it; errors on stock too.

    odd.py SCENARIO...        one JSON line for each on every rank
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import wrapt
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from engines import attempted, config, engine, ratio, tell
from older_engines import RANK, alone, enabled

import ds_gradfix
from ds_gradfix import slots

NAME = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")


def optimizer_class() -> Any:
    return stage3.DeepSpeedZeroOptimizer_Stage3


def in_place() -> bool:
    (slot,) = (slot for slot in ds_gradfix.status()["slots"] if slot["target"].endswith("Stage3.__avg_scatter_grads"))
    return bool(slot["in_place"])


def disabled() -> str:
    return attempted(ds_gradfix.disable)


# ------------------------------------------------------------------------------------- engines


def two_configurations() -> dict[str, Any]:
    """Two engines of one process, one of which leaves the patch out; steps by turns. Then a third, in their place."""
    ds_gradfix.enable()
    left_out = engine(config(ds_gradfix={"exclude": ["zero3-scatter-scale"], "self_check": "warn"}))
    corrected = engine(config())
    turns = [ratio(one) for one in (left_out, corrected, left_out, corrected)]
    corrected.destroy()
    rebuilt = engine(config(ds_gradfix={"sequence_parallel_reduction": "mean"}))
    return {"turns": turns, "rebuilt": ratio(rebuilt), "other": ratio(left_out)}


def initialized_twice() -> dict[str, Any]:
    """The same model given to deepspeed.initialize again, after the first engine was destroyed."""
    ds_gradfix.enable()
    first = engine(config(zero_optimization={"stage": 2}, ds_gradfix={"sequence_parallel_reduction": "mean"}))
    before = ratio(first)
    first.destroy()
    optimizer = torch.optim.SGD(first.module.parameters(), lr=1.0)
    again = config(zero_optimization={"stage": 2})
    second, *_ = deepspeed.initialize(model=first.module, optimizer=optimizer, config=again, mpu=parallel_state_sp)
    return {"ratios": [before, ratio(second)]}


def compiled() -> dict[str, Any]:
    torch._dynamo.config.disable = False
    ds_gradfix.enable()
    torch.manual_seed(0)
    net = torch.compile(torch.nn.Linear(4, 3, bias=False), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    asked = config(zero_optimization={"stage": 2}, ds_gradfix={"sequence_parallel_reduction": "mean"})
    module, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=asked, mpu=parallel_state_sp)
    itself = engine(config())
    itself.compile(backend="eager")
    ratios = [ratio(module), ratio(itself)]
    torch._dynamo.config.disable = True
    return {"ratios": ratios, "compiled": [torch._dynamo.utils.counters["frames"]["ok"] > 0, itself.is_compiled]}


# ------------------------------------------------------------------------- copies, and errors of the job's own


def on_and_off(scenario: Callable[[], Any]) -> dict[str, Any]:
    """What a scenario returns under ds-gradfix and on stock DeepSpeed."""
    ds_gradfix.enable()
    corrected = scenario()
    ds_gradfix.disable()
    return {"corrected": corrected, "stock": scenario()}


def copies() -> dict[str, Any]:
    """Models after a step, and what ZeRO has hooked to them, are copied and pickled as on stock."""
    found = {}
    for stage in (2, 3):
        made = engine(config(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 10**6}))
        ratio(made)
        for name, thing in (
            ("model", made.module),
            ("bound method", made.optimizer.zero_grad),
            ("class", type(made.optimizer)),
            ("config", made._config._param_dict),
        ):
            found[f"{name}, deepcopy, {stage}"] = outcome(lambda thing=thing: copy.deepcopy(thing))
            found[f"{name}, pickle, {stage}"] = outcome(lambda thing=thing: pickle.loads(pickle.dumps(thing)))
        made.destroy()
    return found


def outcome(make: Callable[[], Any]) -> Any:
    try:
        made = make()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0].partition(" at 0x")[0]
    if isinstance(made, torch.nn.Module):
        return [parameter.tolist() for parameter in made.parameters()]
    return type(made).__qualname__


def failing() -> dict[str, Any]:
    """The job's own errors: type, first line, and the source line that raised."""
    made = engine(config())
    whole = engine(config(zero_optimization={"stage": 2}, ds_gradfix={"sequence_parallel_reduction": "mean"}))
    x = torch.ones(1, 4)

    def in_forward() -> None:
        handle = made.module.register_forward_hook(lambda *_: 1 / 0)
        try:
            made(x)
        finally:
            handle.remove()

    found = {
        "no such file": blame(lambda: engine("/nonexistent.json")),
        "a folder": blame(lambda: engine(os.sep)),
        "no JSON": blame(lambda: engine("{")),
        "no text": blame(lambda: engine(sys.executable)),
        "batch sizes": blame(lambda: engine(config(train_batch_size=7, gradient_accumulation_steps=2))),
        "an optimizer that is not tested": blame(lambda: engine(config(zero_allow_untested_optimizer=False))),
        "in the forward pass": blame(in_forward),
        "the wrong shape": blame(lambda: made(torch.ones(1, 5))),
        "a loss without a graph": blame(lambda: made.backward(torch.ones(1))),
        "inside a rewritten function": blame(lambda: whole.optimizer.average_tensor(None, None)),
        "inside a replaced function": blame(lambda: getattr(made.optimizer, NAME)([None], None)),
    }
    for one in (made, whole):
        one.destroy()
    return found


def blame(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        # What is built into the interpreter has no lines.
        frame = next(frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.line)
        return [type(error).__name__, str(error).partition("\n")[0], frame.name, str(frame.line)]
    return ["nothing"]


# --------------------------------------------------------------------------------------- other tools


def plain(function: Any) -> Any:
    @functools.wraps(function)
    def another_tool(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return another_tool


def pass_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def proxy(function: Any) -> Any:
    return wrapt.FunctionWrapper(function, pass_on)


def wrapped_before(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    owner = optimizer_class()
    stock = vars(owner)[NAME]
    theirs = wrap(stock)
    setattr(owner, NAME, theirs)
    said = enabled()
    measured = ratio(engine(config()))
    ended = disabled()
    kept = vars(owner)[NAME] is theirs
    setattr(owner, NAME, stock)
    return {"log": said["log"], "ratio": measured, "disabled": ended, "kept": kept}


def wrapped_after(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    ds_gradfix.enable()
    owner = optimizer_class()
    ours = vars(owner)[NAME]
    setattr(owner, NAME, wrap(ours))
    found = {"ratio": ratio(engine(config())), "in_place": in_place(), "disabled": disabled()}
    setattr(owner, NAME, ours)
    return {**found, "at last": disabled()}


def replaced(on: tuple[int, ...], **section: Any) -> dict[str, Any]:
    """Another tool puts the uncorrected function in our place, on some ranks."""
    owner = optimizer_class()
    stock = vars(owner)[NAME]
    ds_gradfix.enable()
    ours = vars(owner)[NAME]
    if RANK in on:
        setattr(owner, NAME, plain(stock))
    found = {"outcome": attempted(lambda: engine(config(ds_gradfix=section))), "disabled": disabled()}
    if RANK in on:
        setattr(owner, NAME, ours)
    return found


def reloaded() -> dict[str, Any]:
    """importlib.reload of a module that holds a target: engines from before and after it are corrected, then stock."""
    ds_gradfix.enable()
    before = engine(config())
    old_class = optimizer_class()
    importlib.reload(stage3)
    after = engine(config())
    assert type(after.optimizer) is optimizer_class() is not old_class
    ratios = [ratio(before), ratio(after)]
    ended = disabled()
    stock = [ratio(before), ratio(after)]
    left = [hasattr(vars(owner)[NAME], slots.MARK) for owner in (old_class, optimizer_class())]
    return {"ratios": ratios, "disabled": ended, "stock": stock, "left": left, "enabled": enabled()["outcome"]}


if __name__ == "__main__":
    tell(
        {
            "two configurations": alone(two_configurations),
            "initialized twice": alone(initialized_twice),
            "compiled": alone(compiled),
            "copies": alone(lambda: on_and_off(copies)),
            "failing": alone(lambda: on_and_off(failing)),
            "wrapped before, plain": alone(lambda: wrapped_before(plain)),
            "wrapped before, wrapt": alone(lambda: wrapped_before(proxy)),
            "wrapped after, plain": alone(lambda: wrapped_after(plain)),
            "wrapped after, wrapt": alone(lambda: wrapped_after(proxy)),
            "replaced": alone(lambda: replaced((0, 1))),
            "replaced, warn": alone(lambda: replaced((0, 1), self_check="warn")),
            "replaced on one rank": alone(lambda: replaced((1,))),
            "reloaded": alone(reloaded),
        }
    )
