"""Embedding gradients that are reduced row by row (ZeRO stage 0): which rows, divided by what; their measurement."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.patches._zero0 import CLASS, MODULE, measured, probe_of
from ds_gradfix.registry import Measurement, Rewrite, Target
from ds_gradfix.source import Rule


class _Rows:
    """What the rewritten collection of gradients calls for an embedding."""

    @staticmethod
    def compressed(sparse: Any) -> Any:
        """``sparse`` with every row that has an element: DeepSpeed takes those whose elements don't sum to zero."""
        if not sparse.is_sparse:
            dense = sparse.orig_dense_tensor
            sparse.indices = dense.ne(0).any(dim=1).nonzero().flatten()
            sparse.values = dense[sparse.indices]
        return sparse


ROWS = Rewrite(
    Target(MODULE, f"{CLASS}._get_gradients_for_reduction"),
    (Rule("SparseTensor(param.grad)", "_ds_gradfix.compressed(SparseTensor(param.grad))"),),
    _Rows,
)

# Nothing was divided before: the rows are scaled once, on their way into the gather.
DIVISOR = Rewrite(
    Target(MODULE, f"{CLASS}.sparse_allreduce"),
    (Rule("self.gradient_predivide_factor() / $replicas", "1.0 / $replicas"),),
    None,
)


class _Lookalike:
    """An engine to DeepSpeed's own functions, except that its model is one embedding of ours."""

    def __init__(self, engine: Any, module: Any) -> None:
        self._engine, self.module, self.sparse_tensor_module_names = engine, module, {"weight"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def measure_rows(engine: Any) -> list[Measurement]:
    """A dense embedding gradient, some of whose rows sum to zero, through its collection and its reduction."""
    torch = sys.modules["torch"]
    probe = probe_of(engine)
    dense = torch.stack([probe, -probe], dim=1)
    embedding = torch.nn.Embedding(*dense.shape, _weight=torch.zeros_like(dense))
    embedding.weight.grad = dense
    gradients, _ = type(engine)._get_gradients_for_reduction(_Lookalike(engine, embedding))
    engine._reduce_non_expert_gradients(gradients, dense.numel())
    return measured(engine, "compressed rows of an embedding", embedding.weight.grad[:, 0])


def measure_divisor(engine: Any) -> list[Measurement]:
    """A known sparse gradient through the engine's reduction of sparse gradients."""
    torch = sys.modules["torch"]
    probe = probe_of(engine)
    indices = torch.arange(len(probe), device=probe.device)
    gradient = torch.sparse_coo_tensor(indices[None], probe[:, None], (len(probe), 1))
    engine._reduce_non_expert_gradients([sys.modules[MODULE].SparseTensor(gradient)], len(probe))
    return measured(engine, "engine's reduction of sparse gradients", gradient.to_dense()[:, 0])
