"""Engines that are older than ds-gradfix: finding them, and which of them the ranks share.

Ranks measure an engine together, and may not hold the same ones: a last pipeline stage often keeps an engine that
others have let go, a script makes one on rank 0 only. So they tell each other what they have before anybody waits.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_gradfix.agreement import exchange, name_ranks, post
from ds_gradfix.engine import NO_ANSWER, Proof, insist_on, place_among_ranks
from ds_gradfix.settings import Settings

log = logging.getLogger("ds_gradfix")


@dataclass(frozen=True)
class Older:
    """An engine, its name among the ranks, and whether it is known to be one engine on all of them."""

    engine: Any
    topic: str
    shared: bool


def look(engine_class: type) -> list[Any]:
    """The engines of this process that can still train, in no order."""
    gc.collect()  # a dead engine in a reference cycle is no engine
    # By type: asking a stranger for its class may run anything, and a dead weak proxy raises.
    engines = [e for e in gc.get_objects() if issubclass(type(e), engine_class) and "optimizer" in vars(e)]
    return [engine for engine in engines if not _is_destroyed(engine)]


def _is_destroyed(engine: Any) -> bool:
    """Whether ``engine.destroy()`` was called. It leaves no mark of its own, but takes ZeRO's hooks out."""
    optimizer = engine.optimizer
    of_gradients = getattr(optimizer, "_grad_acc_hooks", ())
    of_modules = getattr(getattr(optimizer, "parameter_offload", None), "forward_hooks", ())
    return any(handles and not any(map(_is_hooked, handles)) for handles in (of_gradients, of_modules))


def _is_hooked(handle: Any) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks


def share(engines: Sequence[Any], topic: str, settings: Settings) -> list[Older]:
    """The engines in an order that is the same on all ranks, those that all ranks share first.

    Every rank must call it, and one that has no engine does not wait. ``topic`` is used once. An engine that can't
    be told apart, or that is on some ranks only, is said by the first of its ranks. Where a rank does not answer it
    raises SelfCheckError at level ``error``.
    """
    place = place_among_ranks()
    if place is None:
        return [Older(engine, topic, True) for engine in engines]
    named = sorted(((_name(engine), engine) for engine in engines), key=lambda pair: pair[0])
    own = Counter(name for name, _ in named)
    if not engines:
        post(place.store, topic, place.rank, json.dumps(own))
        return []
    ranks = exchange(place.store, topic, place.rank, place.ranks, json.dumps(own))
    if ranks.missing:
        insist_on(Proof({}, (f"{name_ranks(ranks.missing)} {NO_ANSWER}",)), settings)
    everywhere: dict[int, dict[str, int]] = {rank: json.loads(text) for text, who in ranks.said.items() for rank in who}
    everywhere |= dict.fromkeys(ranks.missing, {})
    apart = {name: why for name in own if (why := _why_apart(name, everywhere))}
    for name, why in apart.items():
        if place.rank == min(rank for rank, names in everywhere.items() if name in names):
            log.warning(
                "ds-gradfix: an engine from before ds-gradfix was on is corrected without being measured: %s."
                " Make it again to have it measured",
                why,
            )
    found = [Older(engine, f"{topic}/{name}", name not in apart) for name, engine in named]
    return sorted(found, key=lambda one: not one.shared)


def _why_apart(name: str, everywhere: Mapping[int, Mapping[str, int]]) -> str | None:
    """Why an engine of that name can't be measured by all ranks together, if it can't."""
    without = [rank for rank, names in everywhere.items() if name not in names]
    if without:
        return f"{name_ranks(without)} {'has' if len(without) == 1 else 'have'} none like it"
    several = [rank for rank, names in everywhere.items() if names[name] > 1]
    return f"{name_ranks(several)} can't tell it from another one like it" if several else None


def _name(engine: Any) -> str:
    """The same on all ranks for one engine, and different for others as far as ranks can know without each other."""
    sharded = engine.pipeline_parallelism or engine.mp_world_size > 1 or engine.has_moe_layers
    parameters = () if sharded else _parameters(engine.module)
    config = engine._config
    job = [type(engine).__qualname__, int(config.zero_optimization_stage), engine.gradient_accumulation_steps()]
    job += [engine.train_micro_batch_size_per_gpu(), engine.global_steps, engine.micro_steps, *parameters]
    return hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16]


def _parameters(module: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in module.named_parameters():
        yield name, tuple(getattr(parameter, "ds_shape", parameter.shape))
