"""One rank: steps of several micro-batches, and what each parameter loses in one, with rate 1.

A scenario gives, over all parameters and steps, ``ratio`` (of the update to the right one, least squares), ``error``
(the largest deviation, relative to the largest right element), ``updates``, and the ratio of each layer. What is right
is computed here in float64, without DeepSpeed, from the weights as they are before each step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, ROWS, STEPS = 4, 3, 2
Loss = Callable[[Any, int, int], Tensor]
clock = {"step": 0}


class Network(nn.Sequential):
    def forward(self, inputs: Tensor, layers: int = 3) -> Tensor:
        for layer in list(self)[:layers]:
            inputs = layer(inputs)
        return inputs


def network() -> Network:
    torch.manual_seed(3)
    return Network(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + micro)
    weight = 1 + rank + 2 * micro
    return torch.randn(ROWS, WIDTH, generator=draw), weight * torch.randn(ROWS, WIDTH, generator=draw)


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.to(outputs.dtype)).square().mean()


def data_of(net: Any, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(rank, micro)
    return inputs.to(next(net.parameters()).dtype), targets


def plain(net: Any, rank: int, micro: int) -> Tensor:
    inputs, targets = data_of(net, rank, micro)
    return mean_square(net(inputs), targets)


def regularised(net: Any, rank: int, micro: int) -> Tensor:
    """With a term that no output of the engine is part of."""
    module = getattr(net, "module", net)
    return plain(net, rank, micro) + sum(parameter.square().sum() for parameter in module.parameters())


def around(net: Any, rank: int, micro: int) -> Tensor:
    """The module is called, not the engine."""
    return plain(getattr(net, "module", net), rank, micro)


def fed_back(net: Any, rank: int, micro: int) -> Tensor:
    inputs, targets = data_of(net, rank, micro)
    return mean_square(net(net(inputs)), targets)


def used_late(net: Any, rank: int, micro: int) -> Tensor:
    """In the second step the last layer takes no part in the first micro-batch."""
    inputs, targets = data_of(net, rank, micro)
    return mean_square(net(inputs, 2 if clock["step"] and not micro else 3), targets)


def used_early(net: Any, rank: int, micro: int) -> Tensor:
    """In the second step the last layer takes part in the first micro-batch only."""
    inputs, targets = data_of(net, rank, micro)
    return mean_square(net(inputs, 2 if clock["step"] and micro else 3), targets)


def expected(net: nn.Module, loss: Loss, micros: int, replicas: int) -> dict[str, Tensor]:
    net = copy.deepcopy(net).double()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for rank in range(replicas):
        for micro in range(micros):
            (loss(net, rank, micro) / (micros * replicas)).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def compared(pairs: dict[str, list[tuple[Tensor, Tensor]]]) -> dict[str, Any]:
    """By parameter, for each step: got and right."""

    def flat(which: int, name: str = "") -> Tensor:
        return torch.cat([pair[which].flatten() for key in pairs for pair in pairs[key] if key.startswith(name)])

    got, right = flat(0), flat(1)
    return {
        "ratio": float(got @ right / (right @ right)),
        "error": float((got - right).abs().max() / right.abs().max()),
        "updates": got.tolist(),
        "layers": {
            name: float(flat(0, name) @ flat(1, name) / flat(1, name).square().sum())
            for name in sorted({key.split(".")[0] for key in pairs})
        },
    }


def settings(stage: int, micros: int, offload: bool, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **more,
    }


engines: list[Any] = []
"""Of the running scenario. Enabled late, ds-gradfix looks at every engine that is alive."""


def initialized(module: nn.Module, optimizer: Any, config: dict[str, Any]) -> Any:
    engines.append(deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0])
    return engines[-1]


def destroying(scenario: Callable[[], Any]) -> Callable[[], Any]:
    def then_destroyed() -> Any:
        try:
            return scenario()
        finally:
            while engines:
                # The hooks of outputs that a pipeline's last stage keeps would keep its engine, on that rank only.
                engines[-1].loss, engines[-1].pipe_buffers = None, {}
                engines.pop().destroy()

    return then_destroyed


def values(module: nn.Module) -> dict[str, Tensor]:
    """The weights that the optimizer keeps, whole."""
    found = {}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            found[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).double().clone()
        else:
            found[name] = parameter.detach().double().clone()
    return found


def by_engine(engine: Any, loss: Loss, micros: int) -> None:
    for micro in range(micros):
        engine.backward(loss(engine, RANK, micro))
        engine.step()


def by_caller(engine: Any, loss: Loss, micros: int) -> None:
    """Who divides the loss itself, and says so."""
    for micro in range(micros):
        engine.backward(loss(engine, RANK, micro) / micros, scale_wrt_gas=False)
        engine.step()


def by_boundary(engine: Any, loss: Loss, micros: int) -> None:
    """Who says when a step is complete, with gradient_accumulation_steps 1 in the configuration."""
    for micro in range(micros):
        engine.set_gradient_accumulation_boundary(micro == micros - 1)
        engine.backward(loss(engine, RANK, micro) / micros)
    engine.step()


def one_after_another(engine: Any, loss: Loss, micros: int) -> None:
    """Several backward passes, then a step, with gradient_accumulation_steps 1 in the configuration."""
    for micro in range(micros):
        engine.backward(loss(engine, RANK, micro) / micros)
    engine.step()


def without_sync(engine: Any, loss: Loss, micros: int) -> None:
    """What Accelerate's accumulate() does."""
    for micro in range(micros - 1):
        engine.set_gradient_accumulation_boundary(False)
        with engine.no_sync():
            engine.backward(loss(engine, RANK, micro))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss(engine, RANK, micros - 1))
    engine.step()


def trained(
    stage: int,
    micros: int,
    loss: Loss = plain,
    drive: Callable[[Any, Loss, int], None] = by_engine,
    offload: bool = False,
    configured: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    net = network()
    config = settings(stage, micros if configured is None else configured, offload, **more)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine = initialized(net, optimizer, config)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for clock["step"] in range(STEPS):
        before = values(engine.module)
        twin = network().double()
        twin.load_state_dict(before)
        right = expected(twin, loss, micros, RANKS)
        drive(engine, loss, micros)
        for name, after in values(engine.module).items():
            pairs.setdefault(name, []).append((before[name] - after, right[name]))
    return compared(pairs)


def piped(stages: int, stage: int, micros: int, **more: Any) -> dict[str, Any]:
    from deepspeed.pipe import PipelineModule

    layers = network()
    module = PipelineModule(list(copy.deepcopy(layers)), num_stages=stages, loss_fn=mean_square)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    config = settings(stage, micros, False, **more)
    engine = initialized(module, optimizer, config)
    replicas = RANKS // stages
    right = expected(layers, plain, micros, replicas)
    before = values(engine.module)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        replica = RANK if stages == 1 else 0
        return (batch(replica, micro) for micro in range(micros))

    engine.train_batch(data_iter=batches())
    return compared({name: [(before[name] - after, right[name])] for name, after in values(engine.module).items()})


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"zero{stage} x{micros}": partial(trained, stage, micros) for stage in range(4) for micros in (1, 2, 3, 4)
}
SCENARIOS |= {
    f"offload{stage} x{micros}": partial(trained, stage, micros, offload=True)
    for stage in (1, 2, 3)
    for micros in (1, 2, 3, 4)
}
SCENARIOS |= {
    "zero2 used late x2": partial(trained, 2, 2, loss=used_late),
    "offload2 used late x2": partial(trained, 2, 2, loss=used_late, offload=True),
    "zero2 used late x1": partial(trained, 2, 1, loss=used_late),
    "offload2 used late x1": partial(trained, 2, 1, loss=used_late, offload=True),
    "offload1 used late x1": partial(trained, 1, 1, loss=used_late, offload=True),
    "zero2 used early x2": partial(trained, 2, 2, loss=used_early),
    "offload2 used early x2": partial(trained, 2, 2, loss=used_early, offload=True),
    "offload2 used late x3": partial(trained, 2, 3, loss=used_late, offload=True),
    "offload2 boundary x3": partial(trained, 2, 3, drive=by_boundary, configured=1, offload=True),
    "offload2 one after another x3": partial(trained, 2, 3, drive=one_after_another, configured=1, offload=True),
    "zero2 x3 bf16": partial(trained, 2, 3, bf16={"enabled": True}),
    "offload2 x3 bf16": partial(trained, 2, 3, offload=True, bf16={"enabled": True}),
    "zero2 boundary x3": partial(trained, 2, 3, drive=by_boundary, configured=1),
    "zero1 boundary x3": partial(trained, 1, 3, drive=by_boundary, configured=1),
    "zero2 one after another x3": partial(trained, 2, 3, drive=one_after_another, configured=1),
    "zero1 one after another x3": partial(trained, 1, 3, drive=one_after_another, configured=1),
    "zero0 no_sync x4": partial(trained, 0, 4, drive=without_sync),
    "zero1 no_sync x4": partial(trained, 1, 4, drive=without_sync),
    "pipeline 2 x4": partial(piped, 2, 0, 4),
    "pipeline 2 x4, ZeRO-1": partial(piped, 2, 1, 4),
    "pipeline 2 x1": partial(piped, 2, 0, 1),
    "pipeline 2 x1, ZeRO-1": partial(piped, 2, 1, 1),
    "pipeline 1 x4": partial(piped, 1, 0, 4),
}
for _stage in range(4):
    SCENARIOS |= {
        f"zero{_stage} caller x4": partial(trained, _stage, 4, drive=by_caller),
        f"zero{_stage} fed back x2": partial(trained, _stage, 2, loss=fed_back),
        f"zero{_stage} fed back x2 by caller": partial(trained, _stage, 2, loss=fed_back, drive=by_caller),
    }
    if _stage < 3:
        SCENARIOS |= {
            f"zero{_stage} regularised x4": partial(trained, _stage, 4, loss=regularised),
            f"zero{_stage} around x2": partial(trained, _stage, 2, loss=around),
        }


if __name__ == "__main__":
    from scenario import play

    play({name: destroying(scenario) for name, scenario in SCENARIOS.items()})
