"""Which elements are followed, and what is kept of each rank's local gradients for them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_gradfix.audit._places import Fragment, is_audited
from ds_gradfix.engine import numel_of
from ds_gradfix.facts import Facts

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = 16
"""At most so many of each path are followed,"""
ELEMENTS = 16
"""and so many elements of each."""


@dataclass
class Sample:
    """Some elements of one parameter's gradient: flat indices, or, of a gradient whose rows are sparse and would be
    missed, the sums over all rows of the columns ``indices``.

    ``kept`` is the sum over micro-batches of what the user's loss gives on this rank, ``magnitude`` that of absolute
    values, float64, [len(indices)]; ``micro_batches`` counts the gradients that were seen.
    """

    name: str
    param: Any
    path: str
    group: str
    """The experts' group name, empty for dense parameters."""
    by_columns: bool
    indices: Tensor
    kept: Tensor = field(init=False)
    magnitude: Tensor = field(init=False)
    micro_batches: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        import torch

        self.kept = torch.zeros(len(self.indices), dtype=torch.float64, device=self.indices.device)
        self.magnitude = torch.zeros_like(self.kept)
        self.micro_batches = 0

    def keep(self, gradient: Tensor, weight: float) -> None:
        """Add one micro-batch's gradient of the whole parameter."""
        found = self.pick([(0, gradient)])[0] * weight
        self.kept += found
        self.magnitude += found.abs()
        self.micro_batches += 1

    def pick(self, fragments: Iterable[Fragment]) -> tuple[Tensor, Tensor]:
        """The followed elements in float64, and which of them are there."""
        import torch

        found, there = torch.zeros_like(self.kept), torch.zeros_like(self.kept, dtype=torch.bool)
        for start, fragment in fragments:
            if self.by_columns:
                found += _column_sums(fragment, self.param.shape[-1], self.indices)
                there[:] = True
                continue
            dense = fragment.to_dense() if fragment.is_sparse else fragment
            inside = (self.indices >= start) & (self.indices < start + dense.numel())
            chosen = dense.take((self.indices[inside] - start).to(dense.device))  # copies no gradient, however it lies
            found[inside] = chosen.to(found.device, torch.float64)
            there |= inside
        return found, there

    @property
    def kept_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.indices, self.kept, self.magnitude))


def _column_sums(gradient: Tensor, width: int, columns: Tensor) -> Tensor:
    import torch

    rows = gradient.coalesce().values() if gradient.is_sparse else gradient.reshape(-1, width)
    return rows[:, columns].to(torch.float64).sum(0)


def choose(engine: Any, facts: Facts) -> list[Sample]:
    """The same on all ranks that hold the same parameters."""
    import torch

    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    rows = _parameters_with_sparse_rows(engine)
    tied = tied_over_stages(engine)
    paths: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    for name, param in engine.module.named_parameters():
        if is_audited(param) and id(param) not in tied and numel_of(param):
            paths.setdefault((_path(param, facts, id(param) in rows), _group(param)), []).append((name, param))
    samples = []
    for (path, group), params in sorted(paths.items(), key=lambda item: item[0]):
        for name, param in _spread(params, PARAMETERS):
            columns = id(param) in rows
            size = int(param.shape[-1]) if columns else numel_of(param)
            indices = torch.tensor(_spread(range(size), ELEMENTS), device=device)
            samples.append(Sample(name, param, path, group, columns, indices))
    return samples


def _spread(things: Any, count: int) -> list[Any]:
    """``count`` of them, the first and the last among them and the others evenly between."""
    last = len(things) - 1
    if last < count:
        return list(things)
    return [things[index * last // (count - 1)] for index in range(count)]


def _path(param: Any, facts: Facts, sparse: bool) -> str:
    path = f"ZeRO-{facts.zero_stage} reduction"
    if sparse:
        path += " of sparse rows"
    elif _group(param):
        path += f" of experts {_group(param)}"
    elif facts.zero_stage and numel_of(param) > facts.reduce_bucket_size:
        path += " of parameters larger than reduce_bucket_size"
    return path


def _group(param: Any) -> str:
    return "" if getattr(param, "allreduce", True) else str(param.group_name)


def _parameters_with_sparse_rows(engine: Any) -> set[int]:
    """Of layers that make sparse gradients, and of those whose gradients are sent as rows (sparse_gradients)."""
    if engine.zero_optimization_stage() > 0:
        return set()
    compressed = getattr(engine, "sparse_tensor_module_names", ())
    return {
        id(module.weight)
        for name, module in engine.module.named_modules()
        if hasattr(module, "weight") and (getattr(module, "sparse", False) or f"{name}.weight" in compressed)
    }


def tied_over_stages(engine: Any) -> set[int]:
    """Weights that stages of a pipeline share: their gradients are added up between the stages as well."""
    tied = getattr(engine.module, "tied_comms", None) or {}
    return {id(param) for comm in tied.values() for param in comm["module"].parameters()}


def digest(samples: Iterable[Sample]) -> str:
    """What ranks of one pipeline stage must have alike to reduce their samples together."""
    text = repr([(sample.name, sample.path, sample.by_columns, sample.indices.tolist()) for sample in samples])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def listen(samples: Iterable[Sample], weight: Callable[[], float]) -> list[Any]:
    """Put a hook on each followed parameter; returns their handles. ``weight()`` is what a gradient of the backward
    pass that is under way must be multiplied by to be the user's loss's."""

    def hook_for(sample: Sample) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            sample.keep(gradient.detach(), weight())

        return hook

    return [sample.param.register_hook(hook_for(sample)) for sample in samples]
