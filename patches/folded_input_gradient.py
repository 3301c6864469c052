"""The gradient that a folded layer of experts hands to the layers before it (put right in 0.19.8)."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Target, known_sources

ID = "folded-input-gradient"


def _forward(_: None, original: Any, layer: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    handles = getattr(layer, "folding_group_handles", None)
    size = handles.spec.tp_size if handles is not None else 1
    if size > 1 and hidden_states.requires_grad:
        hidden_states = hidden_states.view_as(hidden_states)
        hidden_states.register_hook(lambda gradient: _averaged(gradient, layer.tp_group, size))
    return original(layer, hidden_states, *args, **kwargs)


def _averaged(gradient: Any, group: Any, size: int) -> Any:
    torch = sys.modules["torch"]
    whole = gradient.clone(memory_format=torch.contiguous_format)
    sys.modules["deepspeed.comm"].all_reduce(whole, group=group)
    return whole.div_(size)


def _affects(facts: Facts) -> Effect | None:
    if not facts.folded_experts:
        return None
    return Effect(
        None,
        "the input of a folded layer of experts gets another gradient on each tensor-parallel peer, and tensor-parallel"
        " layers before it are trained on it",
    )


def _measure(engine: Any) -> list[Measurement]:
    """Nothing is measured before training: it would take a pass through the model's own layers, which keep count."""
    return []


PATCH = Patch(
    id=ID,
    title="Gradients of the layers before experts folded over tensor-parallel ranks",
    symptom="With AutoEP and AutoTP together gradients of attention and of every layer before a layer of experts are"
    " wrong by tens of percent, each element differently, and copies on tensor-parallel peers agree all the same.",
    cause="Each peer computes the experts of its own share of the tokens, and hands on as its input's gradient the"
    " tensor-parallel size times that share, with nothing of the others'. A tensor-parallel layer mixes it with its own"
    " shards' parts, where no later average can put it right.",
    fix="The gradient of a folded layer's input is averaged over its tensor-parallel peers before it goes on.",
    upstream=(),
    retire="When the oldest supported DeepSpeed is 0.19.8.",
    corrections=(
        Replace(Target("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer.forward"), _forward, early=True),
    ),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
