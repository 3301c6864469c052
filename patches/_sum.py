"""``gradient_allreduce_op: "sum"``: reading the key, what can't be summed, what DeepSpeed is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_gradfix.errors import SettingsError
from ds_gradfix.registry import Option

KEY = "gradient_allreduce_op"


def reduction_op(config: Mapping[str, Any]) -> str:
    """``"mean"`` or ``"sum"``, in any letter case; raises SettingsError for anything else."""
    value = config.get(KEY, "mean")
    if isinstance(value, str) and value.lower() in ("mean", "sum"):
        return value.lower()
    raise SettingsError(f'"{KEY}": {value!r} is not allowed; allowed are "mean" and "sum"')


def zero_stage(config: Mapping[str, Any]) -> Any:
    zero = config.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0


def refuse(config: Mapping[str, Any]) -> str | None:
    """What averages outside the reductions that can be made to sum, on any release."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    compile_ = config.get("compile")
    offload = zero.get("offload_optimizer")
    optimizer = config.get("optimizer")
    kind = str(optimizer.get("type", "")) if isinstance(optimizer, Mapping) else ""
    reasons = {
        '"compile": {"deepcompile": true}': (
            isinstance(compile_, Mapping) and bool(compile_.get("deepcompile")),
            "its compiled reducer divides by the group size and has no switch",
        ),
        '"zero_optimization": {"zenflow": ...}': (
            zero.get("zenflow") is not None,
            "its own optimizer averages, apart from ZeRO's reductions",
        ),
        '"zero_optimization": {"zero_quantized_gradients": true}': (
            bool(zero.get("zero_quantized_gradients")),
            "its quantized all-to-all reduction averages over nodes, and falls back to an average for some parameters",
        ),
        '"zero_optimization": {"zeropp_loco_param": ...}': (
            zero.get("zeropp_loco_param") is not None,
            "its quantized reduction averages over nodes and feeds its errors back at that scale",
        ),
        '"zero_optimization": {"mics_shard_size": ...}': (
            isinstance(zero.get("mics_shard_size"), int) and zero["mics_shard_size"] > 0,
            "MiCS averages a second time, over its replica groups",
        ),
        '"offload_optimizer": {"super_offload": true}': (
            isinstance(offload, Mapping) and bool(offload.get("super_offload")),
            "it takes optimizer steps inside the backward pass, where a sum has not been proved right",
        ),
        f'"optimizer": {{"type": "{kind}"}}': (
            kind.lower() in ONE_BIT,
            "1-bit optimizers average compressed momentum inside the optimizer once their warm-up is over",
        ),
    }
    for key, (found, why) in reasons.items():
        if found:
            return f'"{KEY}": "sum" can\'t be combined with {key}: {why}'
    return None


ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def refuse_engine(engine: Any) -> str | None:
    """The same for a live engine, with what a configuration does not show: the client's own optimizer, and the model.

    An engine older than ds-gradfix has a configuration that nobody has asked about yet.
    """
    config = engine._config
    refusal = refuse(config._param_dict)
    if refusal:
        return refusal
    for optimizer in (engine.client_optimizer, engine.basic_optimizer, engine.optimizer):
        if type(optimizer).__name__.lower() in ONE_BIT:
            return (
                f'"{KEY}": "sum" can\'t be combined with the optimizer {type(optimizer).__name__}:'
                " it averages compressed momentum inside the optimizer once its warm-up is over"
            )
    if config.zero_optimization_stage == 1 and engine.has_moe_layers and not config.zero_config.contiguous_gradients:
        return (
            f'"{KEY}": "sum" can\'t be combined with "contiguous_gradients": false and expert layers under ZeRO-1:'
            " DeepSpeed reduces different experts together there"
        )
    return None


def prepare(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key is ours, and how to pre-divide is no longer a question: a sum divides nothing.

    DeepSpeed reads the last two where it builds its optimizers, and asserts on some combinations.
    """
    left = {key: value for key, value in config.items() if key != KEY}
    return {**left, "gradient_predivide_factor": 1.0, "prescale_gradients": False}


def option(stages: tuple[int, ...]) -> Option:
    """The option for these ZeRO stages."""
    return Option(
        key=KEY,
        asked=lambda config: reduction_op(config) == "sum" and zero_stage(config) in stages,
        refuse=refuse,
        refuse_engine=refuse_engine,
        prepare=prepare,
        record={"gradient_allreduce_op": "sum"},
    )
