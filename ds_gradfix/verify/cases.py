"""What the oracle trains: one case is a DeepSpeed configuration and a small reference model. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

ROWS = 4
"""Samples in one micro-batch of one rank."""


@dataclass(frozen=True)
class Model:
    """The reference model: linear layers with tanh between them, and parameters that no loss reads.

    The default is the model of the published measurements: weights of 64, 256 and 32 elements, named
    `layers.0.weight` to `layers.2.weight`.
    """

    widths: tuple[int, ...] = (8, 8, 32, 1)
    """Features before, between and after the layers; layer i has `widths[i] * widths[i + 1]` weights."""
    bias: bool = False
    frozen: tuple[str, ...] = ()
    """Names of parameters that do not require a gradient."""
    unused: tuple[int, ...] = ()
    """Sizes, in elements, of the trainable parameters `unused.0`, `unused.1`, ... that take no part in the loss."""


@dataclass(frozen=True)
class Case:
    """One training to be compared with the float64 reference."""

    config: dict[str, Any]
    """The DeepSpeed configuration. Batch sizes, optimizer and scheduler sections are the oracle's (see `config.py`)."""
    name: str = ""
    steps: int = 1
    """Optimizer steps; each takes the configuration's `gradient_accumulation_steps` micro-batches on every rank."""
    sequence_parallel: int = 1
    """Ranks that share one sequence (S of invariant 1); divides the number of ranks."""
    convention: str = "sum"
    """What a mean does over the shards of a sequence, for the loss that this case stands for: `sum` or `mean`."""
    model: Model = field(default_factory=Model)
    optimizer: str = "sgd"
    """`sgd`, `adam` or `adamw`: the torch.optim class, given to DeepSpeed as the client's own optimizer."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class, but for the learning rate."""
    learning_rates: tuple[float, ...] = (0.1,)
    """One parameter group for each; trainable parameters are dealt to the groups in turn."""
    enable: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `ds_gradfix.enable` in a corrected run; of no meaning in a stock run."""

    def as_json(self) -> dict[str, Any]:
        """The case as plain JSON data; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Case:
        """The case that `as_json` wrote, also after a journey through a JSON file (which turns tuples into lists)."""
        model: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data["model"].items()
        }
        rest = {key: value for key, value in data.items() if key not in ("model", "learning_rates")}
        return Case(model=Model(**model), learning_rates=tuple(data["learning_rates"]), **rest)
