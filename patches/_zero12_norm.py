"""The global gradient norm of ZeRO-1 and ZeRO-2, by invariant 2, and its measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.errors import GradfixError
from ds_gradfix.registry import Measurement, Rewrite, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.zero.stage_1_and_2"
CLASS = "DeepSpeedZeroOptimizer"
FOLDED = "autoep_expert"


class _Norm:
    """What the rewritten norm calls for each of the optimizer's parameter groups."""

    @staticmethod
    def of_gradients(optimizer: Any, index: int) -> Any:
        gradients, params = optimizer.averaged_gradients[index], optimizer.params_in_partition[index]
        if not is_folded(optimizer, index):
            return optimizer.get_grad_norm_direct(gradients, params)
        # From 0.19.7 on the list also holds the padding between parameters, and the end of the last partition always.
        own = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        return _folded_norm(optimizer, index, [gradient for gradient, _ in zip(own, params, strict=False)])

    @staticmethod
    def of_offloaded(optimizer: Any, index: int) -> Any:
        params = optimizer.params_in_partition[index]
        if not is_folded(optimizer, index):
            return optimizer.complete_grad_norm_calculation_for_cpu_offload(params)
        known = optimizer.norm_for_param_grads
        identities = [optimizer.get_param_id(param) for param in params]
        return _folded_norm(optimizer, index, [known[one] for one in identities if one in known])

    @staticmethod
    def average(optimizer: Any, norms: Any) -> None:
        """DeepSpeed's own averaging, of native experts' norms only: a folded group has one norm on every rank."""
        kept = optimizer.is_moe_param_group
        native = [moe and not is_folded(optimizer, index) for index, moe in enumerate(kept)]
        if any(native):
            optimizer.is_moe_param_group = native
            try:
                optimizer._average_expert_grad_norms(norms)
            finally:
                optimizer.is_moe_param_group = kept

    @staticmethod
    def combine(norms: Any) -> Any:
        """What releases before 0.19.8 lack: their mark of a norm that is not finite, -1, must not be squared."""
        torch = sys.modules["torch"]
        stacked = torch.stack(norms)
        sound = (torch.isfinite(stacked) & (stacked >= 0)).all()
        return torch.where(sound, torch.linalg.vector_norm(stacked), torch.full_like(stacked[0], torch.nan))


def is_folded(optimizer: Any, index: int) -> bool:
    """Whether a parameter group's experts are all different ones on tensor-parallel peers. By the whole group: what a
    rank holds of it may be padding alone."""
    families = {getattr(param, "ds_zero_placement_family", None) for param in optimizer.bit16_groups[index]}
    if FOLDED in families and len(families) > 1:
        raise GradfixError(
            f"the optimizer's parameter group {index} has AutoEP experts, which differ on tensor-parallel peers, and"
            " other parameters: their gradient norm has no one set of ranks to be summed over. Give the experts"
            " parameter groups of their own"
        )
    return families == {FOLDED}


def _folded_norm(optimizer: Any, index: int, tensors: Sequence[Any]) -> Any:
    """Each element is on one rank of these two groups, which cross and together are all ranks."""
    module = sys.modules[MODULE]
    name = optimizer.bit16_groups[index][0].group_name
    groups = (optimizer.real_dp_process_group[index], optimizer.ep_process_group[name])
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    norm_dtype = getattr(module, "get_norm_dtype", None)  # from 0.19.6 on: not every device has float64
    dtype = norm_dtype() if norm_dtype else sys.modules["torch"].float64
    part = reduction.NormPart(tensors, groups)
    return reduction.sharded_norm([part], device, dtype, all_reduce=_all_reduce).to(optimizer.device)


def _all_reduce(tensor: Any, group: Any, op: str) -> None:
    dist = sys.modules["deepspeed.comm"]
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)


NORM = Rewrite(
    Target(MODULE, f"{CLASS}.scaled_global_norm"),
    (
        Rule(
            "self.get_grad_norm_direct(self.averaged_gradients[i], self.params_in_partition[i])",
            "_ds_gradfix.of_gradients(self, i)",
        ),
        Rule(
            "self.complete_grad_norm_calculation_for_cpu_offload(self.params_in_partition[i])",
            "_ds_gradfix.of_offloaded(self, i)",
        ),
        Rule("self._average_expert_grad_norms(norm_groups)", "_ds_gradfix.average(self, norm_groups)"),
        Rule(
            "torch.linalg.vector_norm(torch.stack(norm_groups), ord=norm_type)",
            "_ds_gradfix.combine(norm_groups)",
            times=(0, 1),  # 0.19.8 combines so that a norm that is not finite stays one
        ),
    ),
    _Norm,
)

# ------------------------------------------------------------------------------------ measurement


def measure_norm(engine: Any) -> list[Measurement]:
    """Known gradients in place of the optimizer's own through its norm, whoever made it.

    Each parameter's gradient is one whole number, made of the rank that it belongs to, so that the sum of squares is
    exact and no rank's part looks like another's.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm") or not hasattr(optimizer, "params_in_partition"):
        return []  # not ZeRO-1 or ZeRO-2
    if not getattr(optimizer, "compute_grad_norm", True):
        return []  # this job has asked for none
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    known, square = _known(optimizer, device)
    right = torch.tensor([float(square)], device=device)
    dist.all_reduce(right, group=optimizer.dp_process_group)
    if optimizer.model_parallel_group is not None:
        dist.all_reduce(right, group=optimizer.model_parallel_group)
    with _in_place(optimizer, known):
        got = torch.as_tensor(optimizer.scaled_global_norm()).double().cpu().reshape(1)
    measured = reduction.compare(got, right.double().cpu().sqrt())
    # Each group's norm is rounded, squared and rounded again.
    return [Measurement("ZeRO-1/2 gradient norm", *measured, 4 * reduction.probe_tolerance(torch.float32))]


def _known(optimizer: Any, device: Any) -> tuple[list[list[Any]], int]:
    """For each group the gradients of the parameters of this rank's partition, and the sum of the squares of those that
    no other rank counts."""
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]
    known, square = [], 0
    for index, params in enumerate(optimizer.params_in_partition):
        lacks_scale = getattr(optimizer, "_muon_update_lacks_loss_scale", None)
        scale = float(optimizer.loss_scale) if lacks_scale and lacks_scale(index) else 1.0
        gradients = []
        for place, param in enumerate(params):
            own = _sharded(param) or getattr(param, "ds_zero_placement_family", None) == FOLDED
            # Copies on tensor-parallel peers have the same partitions, and so the same number.
            holder = dist.get_rank() if own else dist.get_rank(group=optimizer.real_dp_process_group[index])
            value = 1 + (holder + index + place) % 4
            if (own or optimizer.model_parallel_rank == 0) and not getattr(param, "ds_pipe_replicated", False):
                square += value * value
            gradients.append(torch.full((1,), value / scale, device=device))
        known.append(gradients)
    return known, square


def _sharded(param: Any) -> bool:
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


@contextmanager
def _in_place(optimizer: Any, known: list[list[Any]]) -> Iterator[None]:
    """The optimizer reads its gradients, or with offload their norms, from a dictionary: another one, for a while."""
    if optimizer.cpu_offload:
        name, content = "norm_for_param_grads", {
            optimizer.get_param_id(param): gradient.norm()
            for params, gradients in zip(optimizer.params_in_partition, known, strict=True)
            for param, gradient in zip(params, gradients, strict=True)
        }
    else:
        name, content = "averaged_gradients", dict(enumerate(known))
    kept = getattr(optimizer, name)
    setattr(optimizer, name, content)
    try:
        yield
    finally:
        setattr(optimizer, name, kept)
