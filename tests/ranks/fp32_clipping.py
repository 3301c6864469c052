"""One rank: gradients as the optimizer gets them in fp32 at ZeRO stage 0, without clipping and with it.

Each scenario returns, by parameter, the sum of squares of the gradient that is not clipped, and the smallest and the
largest ratio of an element of the clipped one to it; the clipped gradients' bits, the norm that the engine reports, and
what is in force.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from scenario import forget_groups, play
from torch import Tensor, nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CLIP = 0.5


class Recording(torch.optim.SGD):
    """Keeps the gradients that it was given."""

    def step(self, closure: Any = None) -> Any:
        held = (param for group in self.param_groups for param in group["params"])
        self.given = [param.grad.to_dense().clone() for param in held]
        return super().step(closure)


def config(clip: float, **more: Any) -> dict[str, Any]:
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "steps_per_print": 1000}
    return {**given, "gradient_clipping": clip, "ds_gradfix": {"self_check": "error"}, **more}


def both(given: Callable[[float], tuple[Any, list[Tensor]]]) -> dict[str, Any]:
    """``given(clip)`` trains one step and returns the engine and the gradients that its optimizer got."""
    _, plain = given(0.0)
    engine, clipped = given(CLIP)
    names = [name for name, _ in engine.module.named_parameters()]
    ratios = [(after / before)[before != 0] for before, after in zip(plain, clipped, strict=True)]
    norm = engine.get_global_grad_norm()
    bits = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in clipped)).hexdigest()
    return {
        "squares": {name: float(grad.double().square().sum()) for name, grad in zip(names, plain, strict=True)},
        "ratios": {
            name: [float(ratio.min()), float(ratio.max())] for name, ratio in zip(names, ratios) if ratio.numel()
        },
        "bits": bits,
        "finite": [bool(grad.isfinite().all()) for grad in clipped],
        "norm": None if norm is None else float(norm).hex(),
        "in force": sorted(getattr(getattr(engine, "_ds_gradfix", None), "effects", ())),
        "left": all(param.grad is None for param in engine.module.parameters()),
    }


def trained(net: nn.Module, batch: Tensor, clip: float, mpu: Any = None) -> tuple[Any, list[Tensor]]:
    forget_groups()
    optimizer = Recording(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(clip), mpu=mpu)
    assert all(param.grad is None for param in net.parameters()), "the self-check leaves no gradient"
    assert engine.get_global_grad_norm() is None
    engine.backward(engine(batch))
    engine.step()
    return engine, optimizer.given


# ----------------------------------------------------------------------------------- experts


class Slopes(nn.Module):
    """The gradient of each weight is what ``slope(name, weight)`` says; the layers themselves are not run."""

    def __init__(self, slope: Callable[[str, nn.Parameter], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.slope = slope
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, batch: Tensor) -> Tensor:
        terms = [(weight * self.slope(name, weight)).sum() for name, weight in self.named_parameters()]
        return torch.stack(terms).sum() + 0 * batch.sum()


class Sliced(nn.Module):
    """A weight of which tensor-parallel peers hold different rows, and a bias that they all hold."""

    def __init__(self, sliced: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
        self.weight.tensor_model_parallel = sliced


def published() -> dict[str, Any]:
    """The gradients of the upstream report: experts' 2, 4 on one rank and 6, 8 on the other, nothing else."""

    def slope(name: str, weight: nn.Parameter) -> Tensor:
        own = torch.tensor([[2.0, 4.0], [6.0, 8.0]][RANK]) * RANKS
        return own if "deepspeed_experts" in name else torch.zeros_like(weight)

    def given(clip: float) -> Any:
        experts = MoE(2, nn.Linear(2, 1, bias=False), 2, ep_size=2)
        return trained(Slopes(slope, experts=experts), torch.ones(2, 2), clip)

    return both(given)


def random_slope(*coordinates: int) -> Callable[[str, nn.Parameter], Tensor]:
    """Of one rank, the same for ranks with the same coordinates."""

    def slope(name: str, weight: nn.Parameter) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(repr((name, coordinates)).encode()).digest()[:4], "big")
        return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))

    return slope


def experts(ep_size: int) -> dict[str, Any]:
    def given(clip: float) -> Any:
        layer = MoE(2, nn.Linear(2, 3), 4, ep_size=ep_size)
        return trained(Slopes(random_slope(RANK), experts=layer, dense=nn.Linear(3, 4)), torch.ones(2, 2), clip)

    return both(given)


class Unit:
    """Tensor-parallel pairs of neighbours, as Megatron describes them."""

    def __init__(self) -> None:
        comm = deepspeed.comm
        pairs = [comm.new_group([first, first + 1]) for first in range(0, RANKS, 2)]
        columns = [comm.new_group(list(range(place, RANKS, 2))) for place in range(2)]
        self.tensor, self.data = pairs[RANK // 2], columns[RANK % 2]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return RANK % 2

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return RANK // 2

    def get_data_parallel_world_size(self) -> int:
        return RANKS // 2


def tensor_parallel(sliced_experts: bool) -> dict[str, Any]:
    """Experts of which tensor-parallel peers hold slices, or each its own."""

    def slope(name: str, weight: nn.Parameter) -> Tensor:
        different = getattr(weight, "tensor_model_parallel", False)
        if "deepspeed_experts" in name and not sliced_experts:
            different = True
        return random_slope(RANK // 2, RANK % 2 if different else 0)(name, weight)

    def given(clip: float) -> Any:
        layer = MoE(2, Sliced(sliced_experts), 2, ep_size=2, enable_expert_tensor_parallelism=sliced_experts)
        for name, weight in layer.named_parameters():
            if sliced_experts and "deepspeed_experts" in name and name.endswith("weight"):
                weight.tensor_model_parallel = True  # DeepSpeed copies the experts, and copies lose the mark
        return trained(Slopes(slope, experts=layer, dense=Sliced()), torch.ones(2, 2), clip, mpu=Unit())

    return both(given)


# ----------------------------------------------------------------------- pipelines, sparse, plain


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def pipeline(*layers: Any) -> dict[str, Any]:
    def given(clip: float) -> Any:
        forget_groups()
        torch.manual_seed(0)
        net = PipelineModule(
            layers=list(layers),
            num_stages=2,
            loss_fn=lambda out, label: (out - label).square().sum(),
            partition_method="uniform",
        )
        optimizer = Recording(net.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(clip))
        generator = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
        batch = torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
        engine.train_batch(iter([batch] * 2))
        return engine, optimizer.given

    return both(given)


class Rows(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.rows, self.out, self.factor = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2), factor

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.rows(batch)).square().sum() * self.factor


def sparse(factor: float) -> dict[str, Any]:
    """Ranks that share a row, and use it twice."""

    def given(clip: float) -> Any:
        torch.manual_seed(0)
        return trained(Rows(factor), torch.tensor([[0, 1 + RANK, 5, 5]]), clip)

    return both(given)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().sum()


def dense() -> dict[str, Any]:
    def given(clip: float) -> Any:
        torch.manual_seed(0)
        return trained(Dense(), torch.randn(3, 4, generator=torch.Generator().manual_seed(RANK)), clip)

    return both(given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    line, tied = LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("scale", Scaled, 4)
    play(
        {
            "published": published,
            "experts": lambda: experts(2),
            "every expert everywhere": lambda: experts(1),
            "slices of experts": lambda: tensor_parallel(True),
            "experts on tensor-parallel peers": lambda: tensor_parallel(False),
            "pipeline": lambda: pipeline(line, line, line),
            "tied": lambda: pipeline(tied, line, line, tied),
            "sparse": lambda: sparse(1.0),
            "lost": lambda: sparse(1e38),
            "dense": dense,
        }
    )
