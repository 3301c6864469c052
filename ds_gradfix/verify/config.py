"""From a DeepSpeed configuration to what the oracle runs: `prepared` for a case, `case_from_config` for a user's file.

The oracle brings its own model, data, batch size and torch optimizer, so some keys of a job's configuration cannot be
honoured. What decides a gradient, a norm or an update is kept as it is.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

from ds_gradfix.errors import GradfixError
from ds_gradfix.preprocess import section_of
from ds_gradfix.settings import resolve
from ds_gradfix.verify.cases import ROWS, Case

FP16_LOSS_SCALE = 128
"""Static, so that no step is skipped; small enough for the reference model's gradients in fp16."""

TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
"""Relative error of a gradient that rounding alone may cause, by the coarsest dtype it passes through.

A gradient of the reference model is the end of some ten roundings: 16 units of roundoff (2^-11 in fp16, 2^-8 in bf16)
for the half types; fp32 has room to spare. The smallest wrong scale worth finding is W / (W - 1), 1.14 for 8 ranks.
"""

_OWN_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "sequence_parallel_size", "data_parallel_size")
_SIDE_EFFECTS = (
    "autotuning",
    "csv_monitor",
    "dump_state",
    "elasticity",
    "flops_profiler",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
)
_DTYPES = {"fp32": "float32", "float32": "float32", "float": "float32", "fp16": "float16", "float16": "float16",
           "half": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}  # fmt: skip
_OPTIMIZER_OPTIONS = {
    "sgd": ("momentum", "dampening", "nesterov", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay", "amsgrad"),
    "adamw": ("betas", "eps", "weight_decay", "amsgrad"),
}
_OPTIMIZER_NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


class ConfigError(GradfixError, ValueError):
    """A configuration that the oracle cannot run; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Precision:
    """The torch dtype names that decide how exact a right gradient can be."""

    master: str
    """To which the first weights are rounded: the model's dtype, from which DeepSpeed copies its fp32 masters."""
    forward: str
    """To which weights and activations are rounded in forward and backward."""
    reduction: str
    """The coarsest dtype that a gradient passes through: forward, accumulation or communication."""

    @property
    def tolerance(self) -> float:
        """Relative error of a gradient that rounding explains."""
        return TOLERANCE[self.reduction]


def check_ranks(ranks: int, sequence_parallel: int) -> None:
    """Raise ConfigError unless so many ranks can share sequences in groups of that size."""
    if ranks < 1 or sequence_parallel < 1 or ranks % sequence_parallel:
        raise ConfigError(
            f"{ranks} ranks cannot share sequences in groups of {sequence_parallel}:"
            " the sequence-parallel size must divide the number of ranks"
        )


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, empty when absent or switched to something that is not an object."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def accumulation_steps(config: dict[str, Any]) -> int:
    """Micro-batches for one optimizer step."""
    return int(config.get("gradient_accumulation_steps") or 1)


def clipping(config: dict[str, Any]) -> float:
    """The clip threshold; 0 is none, and the oracle's default: DeepSpeed's moved from 0 to 1 in 0.19.3."""
    return float(config.get("gradient_clipping") or 0.0)


def precision(case: Case) -> Precision:
    """The dtypes of a case, read from its configuration."""
    config = case.config
    forward = master = "float32"
    for key, name in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")):
        if section(config, key).get("enabled"):
            forward = master = name
    autocast = section(config, "torch_autocast")
    if autocast.get("enabled"):
        forward = _dtype(autocast.get("dtype") or "bfloat16")
    key = "communication_data_type" if case.sequence_parallel == 1 else "seq_parallel_communication_data_type"
    passed = [forward, _dtype(config.get(key) or "float32"),
              _dtype(section(config, "data_types").get("grad_accum_dtype") or "float32")]  # fmt: skip
    return Precision(master, forward, max(passed, key=["float32", "float16", "bfloat16"].index))


def prepared(case: Case) -> dict[str, Any]:
    """The configuration that the ranks give to `deepspeed.initialize`: the case's, with what the oracle needs."""
    config = copy.deepcopy(case.config)
    for key in (*_OWN_KEYS, *_SIDE_EFFECTS, "optimizer", "scheduler", "managed_gradient_accumulation"):
        config.pop(key, None)
    config["train_micro_batch_size_per_gpu"] = ROWS
    config["gradient_accumulation_steps"] = accumulation_steps(case.config)
    config["gradient_clipping"] = clipping(case.config)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config["steps_per_print"] = 1_000_000
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        # A model this small would otherwise be persistent, hence never partitioned.
        zero.setdefault("stage3_param_persistence_threshold", 0)
    if section(config, "fp16").get("enabled"):
        config["fp16"]["loss_scale"] = FP16_LOSS_SCALE
    return config


def case_from_config(
    config: dict[str, Any], *, name: str, ranks: int, sequence_parallel: int, steps: int
) -> tuple[Case, list[str]]:
    """The case for a job's own configuration, and one sentence for each thing that the oracle does differently.

    Raises ConfigError for a value that cannot be checked.
    """
    notes: list[str] = []
    config = _without_auto(config, notes)
    if not isinstance(config.get("zero_optimization", {}), dict):
        raise ConfigError('"zero_optimization" must be an object')
    check_ranks(ranks, sequence_parallel)
    config["gradient_accumulation_steps"] = _accumulation(config, ranks // sequence_parallel, notes)
    if config.get("gradient_clipping") is None:
        notes.append(
            'no "gradient_clipping" in the configuration: none is applied (DeepSpeed 0.19.3 and later clip at 1.0)'
        )
    elif isinstance(config["gradient_clipping"], bool) or not isinstance(config["gradient_clipping"], (int, float)):
        raise ConfigError(f'"gradient_clipping" is {config["gradient_clipping"]!r}; it must be a number, 0 for none')
    if section(config, "fp16").get("enabled") and section(config, "fp16").get("loss_scale") != FP16_LOSS_SCALE:
        notes.append(f"fp16 runs with a static loss scale of {FP16_LOSS_SCALE}")
    if config.get("managed_gradient_accumulation") is False:
        notes.append(
            '"managed_gradient_accumulation" is left true: the oracle reads the reduced gradients before the step'
        )
    optimizer, options, rate = _optimizer(config, notes)
    if "scheduler" in config:
        notes.append("the learning rate is constant: the scheduler is left out")
    settings = resolve({}, os.environ, section_of(config))
    case = Case(
        config=config,
        name=name,
        steps=steps,
        sequence_parallel=sequence_parallel,
        convention=settings.sequence_parallel_reduction or "sum",
        optimizer=optimizer,
        optimizer_options=options,
        learning_rates=(rate,),
    )
    try:
        precision(case)
    except KeyError as unknown:
        raise ConfigError(f"data type {unknown} is not known; allowed: {', '.join(sorted(_DTYPES))}") from None
    return case, notes


def _dtype(name: Any) -> str:
    return _DTYPES[str(name).removeprefix("torch.").lower()]


def _without_auto(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """A deep copy without the values `"auto"`, which only a trainer can fill in."""
    left_out = []

    def copied(node: Any, path: str) -> Any:
        if not isinstance(node, dict):
            return copy.deepcopy(node)
        kept = {}
        for key, value in node.items():
            if value == "auto":
                left_out.append(path + key)
            else:
                kept[key] = copied(value, f"{path}{key}.")
        return kept

    result: dict[str, Any] = copied(config, "")
    if left_out:
        notes.append(f'what is "auto" is left out, as if the key were absent: {", ".join(left_out)}')
    return result


def _accumulation(config: dict[str, Any], replicas: int, notes: list[str]) -> int:
    """The configuration's gradient accumulation steps, for this number of data-parallel replicas."""
    given = config.get("gradient_accumulation_steps")
    total, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if given is None and isinstance(total, int) and isinstance(micro, int) and micro * replicas:
        given = max(1, total // (micro * replicas))
        notes.append(
            f"gradient accumulation steps: {given}, from the batch sizes and {replicas} data-parallel replicas"
        )
    if given is None:
        given = 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f'"gradient_accumulation_steps" is {given!r}; it must be a whole number, 1 or more')
    return given


def _optimizer(config: dict[str, Any], notes: list[str]) -> tuple[str, dict[str, Any], float]:
    """The torch optimizer for the configuration's own, its options and learning rate; plain SGD when it names none."""
    if not section(config, "optimizer"):
        return "sgd", {}, 0.1
    kind = str(config["optimizer"].get("type", "")).lower()
    params = section(config["optimizer"], "params")
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"  # DeepSpeed's reading of "Adam"
    if kind not in _OPTIMIZER_OPTIONS:
        raise ConfigError(
            f'"optimizer.type" is {config["optimizer"].get("type")!r}; the oracle can check Adam, AdamW and SGD'
        )
    options = {key: params[key] for key in _OPTIMIZER_OPTIONS[kind] if key in params}
    if kind != "sgd":
        options.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has another
    notes.append(f"the optimizer is torch's own {_OPTIMIZER_NAMES[kind]}, as DeepSpeed's would have to be compiled")
    rate = params.get("lr", 1e-3)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ConfigError(f'"optimizer.params.lr" is {rate!r}; it must be a number')
    return kind, options, float(rate)
