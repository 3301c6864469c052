"""The global gradient norm of ZeRO-1 and ZeRO-2, by invariant 2, and its measurement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.errors import GradfixError
from ds_gradfix.facts import is_autoep_expert
from ds_gradfix.patches._known_norm import in_place, known_gradients
from ds_gradfix.patches._norm import global_norm
from ds_gradfix.registry import Measurement, Rewrite, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.zero.stage_1_and_2"
CLASS = "DeepSpeedZeroOptimizer"


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
    folded = set(map(is_autoep_expert, optimizer.bit16_groups[index]))
    if len(folded) > 1:
        raise GradfixError(
            f"the optimizer's parameter group {index} has AutoEP experts, which differ on tensor-parallel peers, and"
            " other parameters: their gradient norm has no one set of ranks to be summed over. Give the experts"
            " parameter groups of their own"
        )
    return folded == {True}


def _folded_norm(optimizer: Any, index: int, tensors: Sequence[Any]) -> Any:
    """Each element is on one rank of these two groups, which cross and together are all ranks."""
    name = optimizer.bit16_groups[index][0].group_name
    groups = (optimizer.real_dp_process_group[index], optimizer.ep_process_group[name])
    return global_norm([reduction.NormPart(tensors, groups)]).to(optimizer.device)


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
    """Known gradients in place of the optimizer's own through its norm, whoever made it."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm") or not hasattr(optimizer, "params_in_partition"):
        return []  # not ZeRO-1 or ZeRO-2
    if not getattr(optimizer, "compute_grad_norm", True):
        return []  # this job has asked for none
    torch, dist = sys.modules["torch"], sys.modules["deepspeed.comm"]
    groups = optimizer.params_in_partition

    def copies(index: int, param: Any) -> tuple[int, bool]:
        # Those on tensor-parallel peers have the same partitions.
        return dist.get_rank(group=optimizer.real_dp_process_group[index]), optimizer.model_parallel_rank == 0

    known, square = known_gradients(optimizer, groups, copies)
    device = sys.modules["deepspeed.accelerator"].get_accelerator().current_device_name()
    right = torch.tensor([float(square)], device=device)
    dist.all_reduce(right, group=optimizer.dp_process_group)
    if optimizer.model_parallel_group is not None:
        dist.all_reduce(right, group=optimizer.model_parallel_group)
    with in_place(optimizer, groups, known, optimizer.cpu_offload):
        got = torch.as_tensor(optimizer.scaled_global_norm()).double().cpu().reshape(1)
    measured = reduction.compare(got, right.double().cpu().sqrt())
    # Each group's norm is rounded, squared and rounded again.
    return [Measurement("ZeRO-1/2 gradient norm", *measured, 4 * reduction.probe_tolerance(torch.float32))]
