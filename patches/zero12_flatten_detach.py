"""Upstream #7948: ZeRO-1/2's flat parameters carry autograd history, 0.18.7 to 0.18.9 (fixed upstream)."""

from __future__ import annotations

from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Target, known_sources

ID = "zero12-flatten-detach"


def _init(engagement: Any, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor, with a flattening that leaves the history behind: the partitions are made from its result."""
    flatten = optimizer.flatten_dense_tensors_aligned
    optimizer.flatten_dense_tensors_aligned = lambda *tensors, **how: flatten(*tensors, **how).detach()
    try:
        original(optimizer, *args, **kwargs)
    finally:
        del optimizer.flatten_dense_tensors_aligned


INIT = Replace(Target("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.__init__"), _init, early=True)


def _affects(facts: Facts) -> Effect | None:
    if facts.zero_stage not in (1, 2):
        return None
    return Effect(
        None,
        f"ZeRO-{facts.zero_stage} keeps the autograd history of its flat parameters, and step() stops where the ranks'"
        " updates are gathered through them",
    )


def _measure(engine: Any) -> list[Measurement]:
    """There is no gradient to measure in this: what must not be there is seen on the flat parameters."""
    flat = getattr(engine.optimizer, "bit16_groups_flat", [])
    share = sum(not tensor.requires_grad for tensor in flat) / len(flat) if flat else 1.0
    return [Measurement("share of ZeRO-1/2's flat parameters without autograd history", share, 1.0 - share, 0.0)]


PATCH = Patch(
    id=ID,
    title="ZeRO-1/2 flatten parameters together with their autograd history",
    symptom="In 0.18.7 to 0.18.9 step() raises 'Output 0 of Split is a view and is being modified inplace', on a CPU"
    " always, elsewhere where the collective is seen by autograd; all of the graph's memory is kept.",
    cause="Where there is memory for it, the flat buffer is made on the accelerator from the parameters themselves, and"
    " not detached; before, it was made from copies on the CPU.",
    fix="The flat buffer is detached before it is cut into partitions, as from 0.19.0 on.",
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7948",),
    retire="When the oldest supported DeepSpeed is 0.19.0.",
    corrections=(INIT,),
    affects=_affects,
    measure=_measure,
    fingerprints=known_sources(ID),
)
