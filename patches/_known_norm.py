"""Known gradients in place of a ZeRO optimizer's own, for the norm that it makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ds_gradfix.facts import is_autoep_expert
from ds_gradfix.patches._norm import is_sharded

Groups = Sequence[Sequence[Any]]
"""The parameters whose gradients, or a part of them, this rank holds, by the optimizer's groups."""


def known_gradients(
    optimizer: Any, groups: Groups, copies: Callable[[int, Any], tuple[int, bool]]
) -> tuple[list[list[Any]], int]:
    """A gradient of one element for each parameter, and the sum of the squares of those that this rank is the one to
    count.

    Each is one whole number, made of the rank that it belongs to, so that the sum of squares is exact and no rank's
    part looks like another's. ``copies(index, param)`` says, of a parameter whose part other ranks hold as well, which
    number they share (its rank among those that hold different parts) and whether this rank counts it.
    """
    torch = sys.modules["torch"]
    rank = sys.modules["torch.distributed"].get_rank()
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    lacks_scale = getattr(optimizer, "_muon_update_lacks_loss_scale", lambda index: False)
    known, square = [], 0
    for index, params in enumerate(groups):
        scale = float(optimizer.loss_scale) if lacks_scale(index) else 1.0
        gradients = []
        for place, param in enumerate(params):
            own = is_sharded(param) or is_autoep_expert(param)
            holder, counts = (rank, True) if own else copies(index, param)
            value = 1 + (holder + index + place) % 4
            if counts and not getattr(param, "ds_pipe_replicated", False):
                square += value * value
            gradients.append(torch.full((1,), value / scale, device=device))
        known.append(gradients)
    return known, square


@contextmanager
def in_place(optimizer: Any, groups: Groups, known: list[list[Any]], offloaded: bool) -> Iterator[None]:
    """The optimizer reads its gradients, or with offload their norms, from a dictionary: another one, for a while."""
    content: dict[Any, Any] = dict(enumerate(known))
    name = "averaged_gradients"
    if offloaded:
        name, content = "norm_for_param_grads", {
            optimizer.get_param_id(param): gradient.norm()
            for params, gradients in zip(groups, known, strict=True)
            for param, gradient in zip(params, gradients, strict=True)
        }
    kept = getattr(optimizer, name)
    setattr(optimizer, name, content)
    try:
        yield
    finally:
        setattr(optimizer, name, kept)
