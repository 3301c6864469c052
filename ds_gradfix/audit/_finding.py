"""The float64 reduction of what was kept, the tolerance that the dtypes explain, and the verdict in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ds_gradfix.audit._places import Places, loss_scale_of
from ds_gradfix.audit._samples import Sample, tied_over_stages
from ds_gradfix.facts import Facts, is_autoep_expert
from ds_gradfix.reduction import gradient_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUMS_TOLERANCE = 1e-3
"""Of a norm or a clip coefficient, at least: sums over a whole model are exact to far less."""


@dataclass
class PathSums:
    """What one rank, or all of them, found for one reduction path: sums over elements of the used gradient times the
    right one and of the right one's square, the largest error in multiples of the tolerance, and how many elements of
    how many parameters. ``held`` counts elements that this rank's optimizer has, ``wanted`` those that all ranks
    together must have, in shares of this rank."""

    product: float = 0.0
    square: float = 0.0
    worst: float = 0.0
    finite: bool = True
    held: float = 0.0
    wanted: float = 0.0
    parameters: int = 0
    micro_batches: int = 0

    def join(self, other: PathSums) -> None:
        self.product += other.product
        self.square += other.square
        self.worst = max(self.worst, other.worst)
        self.finite &= other.finite
        self.held += other.held
        self.wanted += other.wanted
        self.parameters = max(self.parameters, other.parameters)
        self.micro_batches = max(self.micro_batches, other.micro_batches)


@dataclass(frozen=True)
class Finding:
    """One line of an audit: ``ratio`` is what was measured over what is right, None where that is zero or unknown;
    ``error`` the largest error in multiples of what rounding explains, None where nothing was compared."""

    what: str
    ratio: float | None
    error: float | None
    right: bool
    words: str

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def joined(said: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, PathSums]:
    """The ranks' sums, put together by path."""
    together: dict[str, PathSums] = {}
    for one in said:
        for path, sums in one.items():
            together.setdefault(path, PathSums()).join(PathSums(**sums))
    return together


def judged(path: str, sums: PathSums) -> Finding:
    """What can't be judged is not called wrong; it is said."""
    count = f"{sums.wanted:.0f} elements, {sums.parameters} parameter{'s' * (sums.parameters != 1)}"
    if sums.held < sums.wanted - 0.5:
        count = f"{sums.held:.0f} of {count}: the others were not found"
    reason = None
    if not sums.micro_batches:
        reason = "no gradient was seen on its way there"
    elif not sums.held:
        reason = "the optimizer has no gradient"
    elif sums.square == 0 and sums.worst <= 1:
        reason = "every sampled gradient is zero"
    if reason:
        return Finding(path, None, None, True, f"{path} is not audited: {reason} ({count})")
    ratio = sums.product / sums.square if sums.square else math.inf
    if sums.worst <= 1:
        return Finding(path, ratio, sums.worst, True, f"{path} ratio {ratio:.3f} ({count})")
    return Finding(
        path,
        ratio,
        sums.worst,
        False,
        f"{path} gives {ratio:.6g} times the right gradient ({count}; an element is off by {sums.worst:.3g} times what"
        " rounding explains)",
    )


# ---------------------------------------------------------------------------------- the reduction


def dense_group(engine: Any) -> Any:
    """The ranks whose gradients make a dense parameter's: all, but for tensor parallelism and pipelines."""
    if engine.pipeline_parallelism:
        return engine.mpu.get_data_parallel_group()
    if engine.mp_world_size > 1:
        return engine.seq_data_parallel_group
    return sys.modules["torch.distributed"].group.WORLD


def _group(engine: Any, name: str) -> Any:
    if not name:
        return dense_group(engine)
    return sys.modules["deepspeed.utils.groups"]._get_expert_data_parallel_group(name)


@dataclass(frozen=True)
class Used:
    """Of one sample, what this rank's optimizer is about to use, without the loss scale: the elements in float64, which
    of them it has, and the dtypes that they and their reduction are in."""

    elements: Tensor
    held: Tensor
    dtypes: frozenset[torch.dtype]


def used_by(engine: Any, samples: Sequence[Sample], places: Places) -> list[Used]:
    """In the order of the samples; no collective."""
    found = []
    for sample in samples:
        fragments = list(places.held(sample.param))
        elements, held = sample.pick(fragments)
        if not places.partitioned:
            held[:] = True  # an optimizer passes over what has no gradient
        own = {fragment.dtype for _, fragment in fragments}
        dtypes = frozenset({sample.param.dtype, _communicated(engine, sample.param), *own})
        found.append(Used(elements / loss_scale_of(engine), held, dtypes))
    return found


def measure(
    engine: Any, facts: Facts, samples: Sequence[Sample], used: Sequence[Used], partitioned: bool
) -> dict[str, PathSums]:
    """Reduce what the ranks kept, and compare with what this rank's optimizer is about to use. A collective of each
    group that samples are reduced over."""
    import torch

    dist = sys.modules["torch.distributed"]
    replicas = dist.get_world_size(dense_group(engine))
    scale = gradient_scale(facts.reduction_op, replicas, facts.sequence_parallel_size, facts.convention)
    found: dict[str, PathSums] = {}
    for name in sorted({sample.group for sample in samples}):
        group = _group(engine, name)
        ranks = dist.get_world_size(group)
        own = [(sample, theirs) for sample, theirs in zip(samples, used, strict=True) if sample.group == name]
        kept = torch.cat([sample.kept for sample, _ in own]), torch.cat([sample.magnitude for sample, _ in own])
        together = torch.stack(kept)
        dist.all_reduce(together, group=group)
        start = 0
        for sample, theirs in own:
            right, magnitude = (together * scale)[:, start : start + len(sample.indices)]
            start += len(sample.indices)
            sums = _compared(sample, theirs, right, magnitude, ranks, loss_scale_of(engine))
            if not partitioned:  # every rank has all of it
                sums.held /= ranks
            found.setdefault(sample.path, PathSums()).join(sums)
            found[sample.path].parameters += 1
    return found


def _compared(
    sample: Sample, theirs: Used, right: Tensor, magnitude: Tensor, ranks: int, loss_scale: float
) -> PathSums:
    import torch

    used, right, magnitude = (tensor[theirs.held].cpu() for tensor in (theirs.elements, right, magnitude))
    additions = ranks + sample.micro_batches
    tolerance = _relative(theirs.dtypes, additions) * magnitude + _absolute(theirs.dtypes) * additions / loss_scale
    finite = bool(torch.isfinite(used).all() and torch.isfinite(right).all())
    return PathSums(
        product=float(used @ right) if finite else 0.0,
        square=float(right @ right) if finite else 0.0,
        worst=float(((used - right).abs() / tolerance).max()) if finite and len(used) else 0.0,
        finite=finite,
        held=float(theirs.held.sum()),
        wanted=len(sample.indices) / ranks,
        micro_batches=sample.micro_batches,
    )


def _communicated(engine: Any, param: Any) -> torch.dtype:
    """With autocast a parameter says by itself in which dtype its gradient travels."""
    dtype: torch.dtype = getattr(param, "comm_dtype", None) or engine.communication_data_type
    return dtype


def _relative(dtypes: Iterable[torch.dtype], additions: int) -> float:
    """The error of a sum of so many numbers, over the sum of their sizes: half an epsilon for each addition and a few
    more operations; of many, their square root, as roundings go both ways."""
    import torch

    return 2 * math.sqrt(additions + 4) * max(torch.finfo(dtype).eps for dtype in dtypes)


def _absolute(dtypes: Iterable[torch.dtype]) -> float:
    """What is lost of a number that is too small for the dtype."""
    import torch

    infos = [torch.finfo(dtype) for dtype in dtypes]
    return max(info.tiny * info.eps for info in infos)


# ---------------------------------------------------------------------------------------- the norm


def square_of_norm(engine: Any, places: Places) -> float:
    """This rank's part of the square of the norm over every distinct element; the ranks' parts add up."""
    import torch

    dist = sys.modules["torch.distributed"]
    total = 0.0
    for param in engine.module.parameters():
        if not param.requires_grad or getattr(param, "ds_pipe_replicated", False):
            continue
        square = 0.0
        for _, fragment in places.held(param):
            dense = fragment.coalesce().values() if fragment.is_sparse else fragment
            square += float(torch.linalg.vector_norm(dense, dtype=torch.float64)) ** 2
        total += square / _holders(engine, param, places.partitioned, dist)
    return total / loss_scale_of(engine) ** 2


def _holders(engine: Any, param: Any, partitioned: bool, dist: Any) -> int:
    """How many ranks of this parameter's stage hold the same element."""
    expert = not getattr(param, "allreduce", True)
    sharded = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
    copies = 1 if partitioned else dist.get_world_size(_group(engine, param.group_name if expert else ""))
    return int(copies) * (1 if sharded or expert else _tensor_parallel_size(engine))


def _tensor_parallel_size(engine: Any) -> int:
    """A pipeline calls all ranks of one model model-parallel."""
    return int(engine.grid.get_slice_parallel_world_size() if engine.pipeline_parallelism else engine.mp_world_size)


def left_out(engine: Any) -> list[Finding]:
    """What of a model is not followed, in words."""
    reasons = []
    if has_autoep(engine):
        reasons.append("AutoEP's experts are not audited: they lie over groups of their own")
    if tied_over_stages(engine):
        reasons.append("weights that stages of a pipeline share are not audited: they are reduced between stages, too")
    return [Finding("left out", None, None, True, words) for words in reasons]


def has_autoep(engine: Any) -> bool:
    return any(map(is_autoep_expert, engine.module.parameters()))


def judged_norm(engine: Any, reported: float | None, square: float | None) -> Finding:
    """The norm that the engine reports against the square of the right one."""
    import torch

    if reported is None or square is None:
        reason = "the engine reports none" if reported is None else "AutoEP's experts lie over groups of their own"
        return Finding("norm", None, None, True, f"norm is not audited: {reason}")
    dtypes = {param.dtype for param in engine.module.parameters()}
    tolerance = max(SUMS_TOLERANCE, 4 * max(torch.finfo(dtype).eps for dtype in dtypes))
    right = math.sqrt(square)
    ratio = reported / right if right else (math.inf if reported else 1.0)
    error = abs(ratio - 1) / tolerance
    if error <= 1:
        return Finding("norm", ratio, error, True, f"norm ratio {ratio:.3f} ({reported:.6g} reported)")
    words = f"norm is reported as {ratio:.6g} times the right one: {reported:.6g}, not {right:.6g}"
    return Finding("norm", ratio, error, False, words)


# ------------------------------------------------------------------------------------ the clipping


def picked(samples: Sequence[Sample], places: Places) -> list[Tensor]:
    """What the optimizer is about to use of each sample."""
    return [sample.pick(places.held(sample.param))[0] for sample in samples]


def clipped(samples: Sequence[Sample], before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, list[float]]:
    """By path, the sums that the clip coefficient is the quotient of: after times before, and before squared."""
    sums: dict[str, list[float]] = {}
    for sample, was, now in zip(samples, before, after, strict=True):
        product, square = sums.setdefault(sample.path, [0.0, 0.0])
        sums[sample.path] = [product + float(was @ now), square + float(was @ was)]
    return sums


def judged_clipping(said: Sequence[Mapping[str, Sequence[float]]], clip: float, square: float) -> list[Finding]:
    """The ranks' sums from :func:`clipped`, against ``min(1, clip / (norm + 1e-6))``."""
    findings = []
    right = min(1.0, clip / (math.sqrt(square) + 1e-6))
    for path in sorted({path for one in said for path in one}):
        product, total = (sum(one.get(path, (0.0, 0.0))[which] for one in said) for which in (0, 1))
        if total:
            ratio = product / total / right
            error = abs(ratio - 1) / SUMS_TOLERANCE
            words = f"clipping ratio {ratio:.3f} ({path})"
            if error > 1:
                words = f"clipping is by {ratio:.6g} times the right coefficient ({path})"
            findings.append(Finding(f"clipping, {path}", ratio, error, error <= 1, words))
    return findings
