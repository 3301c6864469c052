"""The same training without DeepSpeed: one process, float64, the three invariants written down.

Nothing here is shared with the corrections, so that an error in their arithmetic cannot hide in its own mirror.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_gradfix.verify import model as reference_model
from ds_gradfix.verify.cases import Case
from ds_gradfix.verify.config import accumulation_steps, clipping, precision


@dataclass(frozen=True)
class ReferenceStep:
    """One optimizer step, everything float64 on the CPU."""

    gradients: dict[str, torch.Tensor]
    """Of every trainable parameter, reduced, before clipping; zeros for one that no loss reads."""
    norm: float
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    """Every parameter, frozen ones too, before and after the step."""
    update_tolerance: dict[str, float]
    """By parameter: the relative error of `after - before` that a tolerable error of the gradients may cause."""
    loss: float
    """Mean over ranks and micro-batches."""


def train(case: Case, ranks: int, follow: Sequence[Mapping[str, torch.Tensor]] = ()) -> list[ReferenceStep]:
    """Train the case as `ranks` ranks would, by the invariants.

    With `follow`, the parameters that another run had after each step, every step but the first starts from those.
    Half-precision training needs it: there a rounding in step 1 flips the sign of some AdamW updates, and by step 5 two
    right runs have parted.
    """
    dtypes = precision(case)
    forward = getattr(torch, dtypes.forward)
    net = reference_model.Stack(case.model)
    exact = _Masters(case, net, getattr(torch, dtypes.master))
    inexact = _Masters(case, net, getattr(torch, dtypes.master))
    steps = []
    for step in range(case.steps):
        if follow and step:
            exact.load(follow[step - 1])
        before = exact.values()
        inexact.load(before)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(_rounded(before[name], forward))
        gradients, loss = _reduced_gradients(case, net, ranks, step, forward)
        norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
        clip = clipping(case.config)
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        clipped = {name: gradient * coefficient for name, gradient in gradients.items()}
        after = exact.step(clipped)
        other = inexact.step({name: _perturbed(gradient, dtypes.tolerance) for name, gradient in clipped.items()})
        tolerance = {
            name: max(dtypes.tolerance, _relative(other[name] - after[name], after[name] - before[name]))
            for name in after
        }
        steps.append(ReferenceStep(gradients, norm, before, after, tolerance, loss))
    return steps


class _Masters:
    """float64 parameters and the case's optimizer over them."""

    def __init__(self, case: Case, net: reference_model.Stack, dtype: torch.dtype) -> None:
        self._parameters = {
            name: torch.nn.Parameter(_rounded(parameter, dtype), parameter.requires_grad)
            for name, parameter in net.named_parameters()
        }
        self._optimizer = reference_model.optimizer(case, self._parameters.values())

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def step(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters after one optimizer step with these gradients."""
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        self._optimizer.step()
        return self.values()


def _perturbed(gradient: torch.Tensor, tolerance: float) -> torch.Tensor:
    """The gradient with an error of `tolerance` times its size, spread evenly and against each element's sign."""
    return gradient - torch.sign(gradient) * tolerance * gradient.square().mean().sqrt()


def _relative(difference: torch.Tensor, whole: torch.Tensor) -> float:
    size = float(whole.norm())
    return float(difference.norm()) / size if size else 0.0


def _reduced_gradients(
    case: Case, net: reference_model.Stack, ranks: int, step: int, forward: torch.dtype
) -> tuple[dict[str, torch.Tensor], float]:
    """Invariant 1: (S / D) sum_r g_r, or sum_r g_r; and the mean loss."""
    accumulation = accumulation_steps(case.config)
    summed = case.config.get("gradient_allreduce_op", "mean").lower() == "sum"
    replicas = ranks if case.convention == "mean" else ranks // case.sequence_parallel
    scale = 1.0 if summed else 1 / replicas
    trainable = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in trainable.items()}
    losses = []
    for rank in range(ranks):
        for micro_batch in range(accumulation):
            inputs, targets = reference_model.batch(case.model, rank=rank, step=step, micro_batch=micro_batch)
            loss = reference_model.loss(net(_rounded(inputs, forward)), targets)
            gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
            for name, gradient in zip(trainable, gradients):
                if gradient is not None:
                    total[name] += gradient * (scale / accumulation)
            losses.append(float(loss.detach()))
    return total, sum(losses) / len(losses)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype).to(torch.float64)
