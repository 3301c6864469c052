"""One rank: ZeRO-1/2's gradient norm with routed experts that differ on tensor-parallel peers, by numbers known in
advance. Started by tests/test_folded_expert_norm.py; see scenario.py.

The two ranks are tensor-parallel peers. Each gradient is a constant: a parameter's loss is its product with one. What a
parameter loses in a step of SGD with rate 1 is its clipped gradient.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from scenario import play
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_gradfix import older
from ds_gradfix.errors import GradfixError
from ds_gradfix.patches import _zero12_norm
from ds_gradfix.verify import _compat

RANK = int(os.environ["RANK"])
NATIVE = [[1.8, 2.4], [2.4, 3.2]][RANK]
FOLDED = [[0.0, 0.0, 0.0], [4.0, 8.0, 8.0]][RANK]
NOT_FINITE = [[0.0, 0.0, 0.0], [4.0, float("inf"), 8.0]][RANK]
CLIP = 1.0


@cache
def groups() -> tuple[Any, Any]:
    """The group of both ranks, and this rank alone."""
    comm = deepspeed.comm
    alone = [comm.new_group([rank]) for rank in (0, 1)]
    return comm.new_group([0, 1]), alone[RANK]


class Unit:
    """A Megatron-style mpu: two tensor-parallel ranks, one data-parallel replica."""

    def get_model_parallel_group(self) -> Any:
        return groups()[0]

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return RANK

    def get_data_parallel_group(self) -> Any:
        return groups()[1]

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0


class Products(nn.Module):
    """Native experts with tensor parallelism, parameters with copies, and, if asked for, a folded expert."""

    def __init__(self, native: list[float], folded: list[float] | None, dense: float) -> None:
        super().__init__()
        expert = nn.Linear(2, 1, bias=False)
        self.moe = MoE(2, expert, num_experts=1, ep_size=1, enable_expert_tensor_parallelism=True)
        for parameter in self.moe.deepspeed_moe.gate.parameters():
            parameter.requires_grad = False
        self.native = self.moe.deepspeed_moe.experts.deepspeed_experts[0].weight
        self.native.model_parallel = True
        self.dense = nn.Parameter(torch.zeros(2))
        self.gradients = {"native": torch.tensor([native]), "dense": torch.tensor([dense, 0.0])}
        if folded is not None:
            self.folded = nn.Parameter(torch.zeros(3))
            self.folded.allreduce, self.folded.group_name = False, "ep_size_2"
            self.folded.ds_zero_placement_family = "autoep_expert"
            self.folded.ds_zero_partition_group_name = "ep_size_2"
            self.gradients["folded"] = torch.tensor(folded)
        with torch.no_grad():
            self.native.zero_()

    def forward(self, unit: Tensor) -> Tensor:
        return unit * sum((getattr(self, name) * gradient).sum() for name, gradient in self.gradients.items())


def folding_groups() -> None:
    """As AutoEP makes them for two tensor-parallel ranks with one expert each."""
    folding: Any = importlib.import_module("deepspeed.module_inject.auto_ep_folding")
    made: Any = importlib.import_module("deepspeed.utils.groups")
    spec = folding.build_folding_spec(world_size=2, pp_size=1, tp_size=2, ep_size=2)
    made._create_expert_and_data_parallel(2, mp_size=2, pp_size=1, mp_mode="tp", folding_spec=spec)


def engine_of(
    stage: int,
    folded: list[float] | None = None,
    native: list[float] = NATIVE,
    dense: float = 0.0,
    together: bool = False,
    **more: Any,
) -> Any:
    """An engine over the model, each kind of parameter in a group of its own; ``together`` all experts in one."""
    if folded is not None:
        folding_groups()
    model = Products(native, folded, dense)
    experts = {"ep_size_1": [model.native]}
    if together:
        experts = {"ep_size_2": [model.native, model.folded]}
    elif folded is not None:
        experts["ep_size_2"] = [model.folded]
    # Their order must be the same on all ranks, which DeepSpeed's own way to split groups does not see to.
    split = [{"params": params, "name": name, "moe": True} for name, params in experts.items()]
    zero = {"stage": stage, **more.pop("zero", {})}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([{"params": [model.dense], "name": "dense"}, *split], lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            **more,
        },
        mpu=Unit(),
    )
    return engine


def weights(engine: Any) -> dict[str, list[float]]:
    return {name: getattr(engine.module, name).detach().flatten().tolist() for name in engine.module.gradients}


def backward(engine: Any) -> None:
    engine.backward(engine(torch.ones(())))


def step(make: Callable[[], Any]) -> dict[str, Any]:
    """One step: its norm, what each parameter lost, and how often the host waited for a number while it was taken."""
    engine = make()
    backward(engine)
    with Waits() as waits:
        engine.optimizer.scaled_global_norm()
    engine.step()
    lost = {name: [0.0 - value for value in values] for name, values in weights(engine).items()}
    found = {
        "norm": float(engine.get_global_grad_norm()),
        "lost": lost,
        "waits": waits.number,
        "in force": sorted(getattr(getattr(engine, "_ds_gradfix", None), "effects", ())),
    }
    ended(engine)
    return found


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: a tensor that becomes a number."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def ended(engine: Any) -> None:
    engine.destroy()
    gc.collect()  # ds_gradfix, coming on late, must find it gone on both ranks alike
    _compat.forget_last_engine()


def every_group_folded(stage: int) -> dict[str, Any]:
    """A wrong correction: experts of any kind as if they were folded. What it gives, and what the self-check says."""
    right = _zero12_norm.is_folded
    _zero12_norm.is_folded = lambda optimizer, index: optimizer.is_moe_param_group[index]
    try:
        make = partial(engine_of, stage, FOLDED, ds_gradfix={"self_check": "off"})
        return {**step(make), "measured": measured(make)}
    finally:
        _zero12_norm.is_folded = right


def measured(make: Callable[[], Any]) -> dict[str, Any]:
    """The self-check's measurement on an engine between backward and step, and what it leaves behind."""
    engine = make()
    backward(engine)
    optimizer = engine.optimizer
    before = held(optimizer)
    [one] = _zero12_norm.measure_norm(engine)
    found = {"ratio": one.ratio, "right": one.right, "untouched": before == held(optimizer)}
    ended(engine)
    return found


def held(optimizer: Any) -> Any:
    """What an optimizer's norm is made of: which objects, and the norm."""
    gradients = {index: list(map(id, own)) for index, own in optimizer.averaged_gradients.items() if own is not None}
    return gradients, dict(getattr(optimizer, "norm_for_param_grads", {})), float(optimizer.scaled_global_norm())


def refused(make: Callable[[], Any]) -> dict[str, Any]:
    """What a group of folded experts and others does: at engine init, and in a step where the self-check is off."""
    said = {}
    for self_check in ("error", "off"):
        try:
            engine = make(ds_gradfix={"self_check": self_check})
            backward(engine)
            engine.step()
            said[self_check] = "nothing"
        except GradfixError as error:
            said[self_check] = f"{type(error).__name__}: {error}"
        engine = None
        for left in older.look(deepspeed.DeepSpeedEngine):  # one that never came into being holds on to its parameters
            left.destroy()
        gc.collect()
        _compat.forget_last_engine()
    return said


def routed(stage: int) -> Any:
    """Native experts apart on two data-parallel ranks, without an mpu."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.moe = MoE(4, nn.Linear(4, 4, bias=False), num_experts=2, ep_size=2, k=1, use_rts=False)
            self.gradients: dict[str, Tensor] = {}

        def forward(self, unit: Tensor) -> Tensor:
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(RANK))
            output: Tensor = self.moe(self.inner(rows))[0]
            return unit * output.square().mean()

    importlib.import_module("deepspeed.utils.groups")._EXPERT_PARALLEL_GROUP.clear()
    importlib.import_module("deepspeed.utils.groups")._EXPERT_DATA_PARALLEL_GROUP.clear()
    model = Routed()
    with torch.no_grad():
        for parameter in model.moe.deepspeed_moe.experts.parameters():
            parameter.mul_(1 + RANK)
    parameters = split({"params": list(model.parameters()), "name": "all parameters"})
    return plain(model, parameters, stage)


def dense(stage: int, **more: Any) -> Any:
    class Dense(nn.Sequential):
        gradients: dict[str, Tensor] = {}

        def forward(self, unit: Tensor) -> Tensor:
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(RANK))
            output: Tensor = super().forward(rows)
            return unit * output.square().mean()

    model = Dense(nn.Linear(4, 7), nn.Linear(7, 3))
    return plain(model, model.parameters(), stage, **more)


def plain(model: nn.Module, parameters: Any, stage: int, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.01,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **zero},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=1.0), config=config)[0]


def trained(make: Callable[[], Any]) -> dict[str, Any]:
    """Two clipped steps: every bit of the norms and weights."""
    engine = make()
    norms = []
    for _ in range(2):
        backward(engine)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()).hex())
    own = [[float(value).hex() for value in parameter.flatten()] for parameter in engine.module.parameters()]
    found = {
        "norms": norms,
        "weights": own,
        "in force": sorted(getattr(getattr(engine, "_ds_gradfix", None), "effects", ())),
    }
    ended(engine)
    return found


def cases_of(stage: int) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """What every release is to be asked, and what one is enough for."""
    both = partial(engine_of, stage, FOLDED)
    offloaded = partial(both, zero={"offload_optimizer": {"device": "cpu"}})
    return {
        f"native {stage}": partial(step, partial(engine_of, stage)),
        f"native and folded {stage}": partial(step, both),
        f"with copies {stage}": partial(step, partial(both, dense=84.0)),
        f"not finite {stage}": partial(step, partial(engine_of, stage, NOT_FINITE)),
        f"measured folded {stage}": partial(measured, both),
        f"measured native {stage}": partial(measured, partial(engine_of, stage)),
        f"trained native {stage}": partial(trained, partial(engine_of, stage, dense=84.0)),
    }, {
        f"every group folded {stage}": partial(every_group_folded, stage),
        f"offloaded {stage}": partial(step, offloaded),
        f"one group {stage}": partial(refused, partial(both, together=True)),
        f"measured offloaded {stage}": partial(measured, offloaded),
        f"measured routed {stage}": partial(measured, partial(routed, stage)),
        f"measured dense {stage}": partial(measured, partial(dense, stage)),
        f"trained routed {stage}": partial(trained, partial(routed, stage)),
        f"trained dense {stage}": partial(trained, partial(dense, stage)),
    }


def run(part: int) -> dict[str, Any]:
    """Together, since turning ds_gradfix on takes a while."""
    found = {}
    for stage in (1, 2):
        for name, case in cases_of(stage)[part].items():
            torch.manual_seed(0)
            found[name] = case()
    return found


if __name__ == "__main__":
    play({"every release": partial(run, 0), "one release": partial(run, 1)})
