"""The reference model, its data and its optimizer, as the ranks and the float64 reference both build them.

Weights and data come from seeded generators, in float64 on the CPU, so that every process draws the same numbers. Data
differs from rank to rank and from micro-batch to micro-batch: with the same data everywhere the mean of the ranks'
gradients is each rank's own, and a reduction that never happens looks right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_gradfix.verify.cases import ROWS, Case, Model

_WEIGHT_SEED = 20231
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Stack(torch.nn.Module):
    """Linear layers with tanh between them, in float64, initialised the same in every process."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        pairs = zip(shape.widths[:-1], shape.widths[1:])
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(fan_in, fan_out, bias=shape.bias, dtype=torch.float64) for fan_in, fan_out in pairs
        )
        self.unused = torch.nn.ParameterList(torch.empty(size, dtype=torch.float64) for size in shape.unused)
        generator = torch.Generator().manual_seed(_WEIGHT_SEED)
        for name, parameter in self.named_parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(draw / fan_in**0.5)
            parameter.requires_grad_(name not in shape.frozen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map `inputs`, [rows, widths[0]], to [rows, widths[-1]], in the dtype of the weights."""
        hidden = inputs
        for layer in self.layers[:-1]:
            hidden = torch.tanh(layer(hidden))
        outputs: torch.Tensor = self.layers[-1](hidden)
        return outputs


def batch(shape: Model, *, rank: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [ROWS, widths[0]] and targets [ROWS, widths[-1]] of one micro-batch of one rank, float64 on the CPU.

    The targets lean to one side, so that the ranks' gradients differ but do not cancel in their sum, which would blow
    up rounding errors. The rank's own factor makes their sizes differ too.
    """
    generator = torch.Generator().manual_seed(1 + rank + 1009 * micro_batch + 100_003 * step)
    inputs = torch.randn(ROWS, shape.widths[0], generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, shape.widths[-1], generator=generator, dtype=torch.float64)
    return inputs, (1 + 0.25 * targets) * (1 + rank % 4)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a micro-batch; a scalar in the dtype of `targets`, to which `outputs` are converted."""
    return (outputs.to(targets.dtype) - targets).square().mean()


def optimizer(case: Case, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The case's torch optimizer over the trainable ones of `parameters`, dealt in turn to its parameter groups."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    count = len(case.learning_rates)
    groups = [
        {"params": trainable[index::count], "lr": rate}
        for index, rate in enumerate(case.learning_rates)
        if trainable[index::count]
    ]
    return _OPTIMIZERS[case.optimizer](groups, **case.optimizer_options)
