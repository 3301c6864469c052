"""One rank: summed gradients where the oracle's model does not reach. Started by tests/test_sum_beyond_the_oracle.py.

    python beyond_the_oracle.py stock|corrected [PART OF A SCENARIO'S NAME ...]

Two ranks run every scenario, three those whose name begins with "exact". Each trains one step of SGD with rate 1, so
that what a parameter loses is its reduced gradient, and holds it against the sum of the ranks' own gradients, computed
in this process, in float64, by autograd alone. The last line of output is JSON: DeepSpeed's version, and for each
scenario its parameters' gradients, got and expected, or the traceback.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

CORRECTED = sys.argv[1] == "corrected"
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if CORRECTED:
    import ds_gradfix

    ds_gradfix.enable()

import deepspeed  # noqa: E402  (what a corrected job does: ds-gradfix first)

from ds_gradfix.verify import _compat  # noqa: E402

ROWS = 6
SECONDS = 180
"""For all scenarios; after that each rank says where it stands, and ends."""
Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By parameter: got and expected."""


def config(stage: int = 0, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "gradient_allreduce_op": "sum",
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **more,
    }


def data(rank: int, width: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank; float32 numbers, so that every dtype sees the same ones."""
    draw = torch.Generator().manual_seed(17 + rank)
    inputs, targets = torch.randn(ROWS, width, generator=draw), 1 + rank + torch.randn(ROWS, 1, generator=draw) / 4
    return inputs.to(dtype), targets.to(dtype)


def tokens(rank: int) -> torch.Tensor:
    """Rows of a table of ten: some for one rank only, one twice."""
    return torch.tensor([[0, 1, 1, 2, 7, 3], [2, 9, 4, 4, 8, 3]][rank])


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def summed(model: torch.nn.Module, loss: Callable[[torch.nn.Module, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sum over all ranks of the gradients of ``loss(model, rank)``, float64."""
    exact = copy.deepcopy(model).double()
    total = {name: torch.zeros_like(parameter) for name, parameter in exact.named_parameters()}
    for rank in range(RANKS):
        exact.zero_grad()
        loss(exact, rank).backward()
        for name, parameter in exact.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return total


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as they are, whole, float64."""
    found = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            found[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).double().clone()
        else:
            found[name] = parameter.detach().double().clone()
    return found


def initialized(model: torch.nn.Module, settings: dict[str, Any], parameters: Any = None) -> Any:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    engines.append(engine)
    return engine


engines: list[Any] = []
"""Of the running scenario. Enabled late, ds-gradfix looks at every engine that is alive."""


def taken(engine: Any, loss: Callable[[Any, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one step takes off every parameter."""
    before = values(engine.module)
    engine.backward(loss(engine, RANK))
    engine.step()
    return {name: before[name] - after for name, after in values(engine.module).items()}


def paired(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Gradients:
    return {name: (gradient, expected[name]) for name, gradient in got.items()}


# ------------------------------------------------------------------------------------- scenarios


class Lookup(torch.nn.Module):
    """A table with sparse gradients, and a dense layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.table(rows))
        return outputs


def sparse(**more: Any) -> Gradients:
    model = Lookup()

    def loss(net: Any, rank: int) -> torch.Tensor:
        return mean_square(net(tokens(rank)), torch.ones(ROWS, 1))

    expected = summed(model, loss)
    return paired(taken(initialized(model, config(0, **more)), loss), expected)


class Routed(torch.nn.Module):
    """A dense layer, then two experts of which each row goes to one. ``plain`` is the same without DeepSpeed."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        expert = torch.nn.Linear(4, 4, bias=False)
        # Capacity for all rows at one expert: nothing is dropped.
        self.moe = MoE(4, expert, num_experts=2, ep_size=ep_size, k=1, capacity_factor=2.0, use_rts=False)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.moe(self.inner(inputs))[0])
        return outputs


class PlainRouted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.out = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(inputs)
        share, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
        assert len(chosen.unique()) == 2, "both experts must have rows"
        every = torch.stack([expert(hidden) for expert in self.experts])
        outputs: torch.Tensor = self.out(share[:, None] * every[chosen, torch.arange(len(chosen))])
        return outputs


def apart() -> Gradients:
    """Refused: DeepSpeed reduces different experts together there. Something went on if this returns."""
    try:
        experts(1, 2, {"contiguous_gradients": False})
    except Exception as error:
        assert type(error).__name__ == "SettingsError" and '"contiguous_gradients": false' in str(error), error
        return {}
    raise AssertionError("not refused")


def experts(stage: int, ep_size: int, zero: dict[str, Any] | None = None, **more: Any) -> Gradients:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    plain, model = PlainRouted(), Routed(ep_size)
    first = RANK * (2 // ep_size) if ep_size > 1 else 0

    def name_there(name: str) -> str:
        """The plain model's name of a parameter."""
        if "deepspeed_experts" in name:
            return f"experts.{first + int(name.split('.')[4])}.weight"
        return {"moe.deepspeed_moe.gate.wg.weight": "gate.weight"}.get(name, name)

    weights = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name_there(name)].data)

    def loss(net: Any, rank: int) -> torch.Tensor:
        dtype = torch.float64 if net is not engine else torch.float32
        inputs, targets = data(rank, dtype=dtype)
        return mean_square(net(inputs), targets)

    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all parameters"}
    )
    engine = None
    expected = summed(plain, loss)
    engine = initialized(model, config(stage, zero, **more), groups)
    return {name: (g, expected[name_there(name)]) for name, g in taken(engine, loss).items()}


def stack() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Linear(6, 1))


def stack_loss(net: Any, rank: int) -> torch.Tensor:
    inputs, targets = data(rank, dtype=next(net.parameters()).dtype)
    return mean_square(net(inputs), targets)


def own_zero_init(zero: dict[str, Any] | None = None, **more: Any) -> Gradients:
    """The client partitions its model itself, with the configuration that asks for a sum."""
    settings = config(3, zero, **more)
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(settings)):
        model = stack()
    whole = stack()
    engine = initialized(model, settings)
    whole.load_state_dict({name: value.float() for name, value in values(engine.module).items()})
    return paired(taken(engine, stack_loss), summed(whole, stack_loss))


def pipeline(stages: int, stage: int, **more: Any) -> Gradients:
    from deepspeed.pipe import PipelineModule

    whole = stack()
    half = "bf16" in more
    if half:
        whole = whole.bfloat16()
    expected = summed(whole, stack_loss) if RANKS // stages > 1 else _alone(whole)
    module = PipelineModule(list(copy.deepcopy(whole)), num_stages=stages, loss_fn=mean_square)
    engine = initialized(module, config(stage, **more))
    before = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    replica = RANK if stages == 1 else 0
    batch = data(replica, dtype=torch.bfloat16 if half else torch.float32)
    engine.train_batch(data_iter=iter([batch]))
    return {
        name: (before[name].double() - parameter.detach().double(), expected[name])
        for name, parameter in engine.module.named_parameters()
    }


def _alone(whole: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One replica: the gradient of the first rank's rows."""
    return {name: total for name, total in summed(whole, lambda net, rank: stack_loss(net, 0) / RANKS).items()}


def late(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> Gradients:
    """ds-gradfix comes on when the engine is there, and goes off again."""
    model = stack()
    expected = summed(model, stack_loss)
    ds_gradfix.disable()
    engine = initialized(model, config(stage, zero, **more))
    ds_gradfix.enable()
    found = {f"on {name}": pair for name, pair in paired(taken(engine, stack_loss), expected).items()}
    ds_gradfix.disable()
    whole = stack()
    whole.load_state_dict({name: value.float() for name, value in values(engine.module).items()})
    averaged = {name: total / RANKS for name, total in summed(whole, stack_loss).items()}
    engine.zero_grad()
    found.update((f"off {name}", pair) for name, pair in paired(taken(engine, stack_loss), averaged).items())
    ds_gradfix.enable()
    return found


class Weighed(torch.nn.Module):
    """A loss whose gradient is whatever it is given, to the bit. From zero, so is what a step of rate 1 leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(13, 17))
        self.small = torch.nn.Parameter(torch.zeros(5))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return (self.large * gradients[0]).sum() + (self.small * gradients[1]).sum()


def given(rank: int) -> list[torch.Tensor]:
    """Two ranks add in one order only. Three do so in several, which gives one result if every number is whole."""
    draw = torch.Generator().manual_seed(3 + rank)
    if RANKS == 2:
        return [torch.randn(13, 17, generator=draw), torch.randn(5, generator=draw)]
    return [torch.randint(1 << 20, size, generator=draw).float() for size in ((13, 17), (5,))]


def exact(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> Gradients:
    parts = [torch.stack(tensors) for tensors in zip(*map(given, range(RANKS)))]
    averaged = [(part / RANKS).sum(0) * RANKS for part in parts]
    wanted = [part.sum(0) for part in parts]
    assert RANKS == 2 or not torch.equal(averaged[0], wanted[0]), "these numbers do not show a division"
    engine = initialized(Weighed(), config(stage, zero, **more))
    got = taken(engine, lambda net, rank: net(given(rank)))
    return paired(got, {"large": wanted[0].double(), "small": wanted[1].double()})


def no_optimizer() -> Gradients:
    """ZeRO-3 inference reduces nothing; asking for a sum must not stop it."""
    settings = config(3)
    engine = deepspeed.initialize(model=stack(), config=settings)[0]
    engines.append(engine)
    outputs = engine(data(RANK)[0])
    return {"outputs": (outputs.detach().double(), outputs.detach().double())}


ALL_REDUCE: dict[str, Any] = {"reduce_scatter": False}
OWN_BUCKETS = {"use_multi_rank_bucket_allreduce": False}
SCENARIOS: dict[str, Callable[[], Gradients]] = {
    "sparse": sparse,
    "sparse, pre-divided": lambda: sparse(gradient_predivide_factor=4.0),
    "sparse, pre-scaled": lambda: sparse(prescale_gradients=True),
    "sparse, bf16 communication": lambda: sparse(communication_data_type="bf16"),
    **{
        f"experts, ZeRO-{stage}, ep_size {ep_size}": partial(experts, stage, ep_size)
        for stage in (0, 1, 2)
        for ep_size in (1, 2)
    },
    "experts, ZeRO-0, ep_size 2, pre-divided": lambda: experts(0, 2, gradient_predivide_factor=4.0),
    "experts, ZeRO-1, ep_size 2, each rank's own bucket": lambda: experts(1, 2, OWN_BUCKETS),
    **({"experts, ZeRO-1, apart": apart} if CORRECTED else {}),
    "own zero.Init": own_zero_init,
    "own zero.Init, all-reduce": lambda: own_zero_init({"reduce_scatter": False}, gradient_predivide_factor=2.0),
    "pipeline 2 x 1": lambda: pipeline(2, 0),
    "pipeline 2 x 1, ZeRO-1": lambda: pipeline(2, 1),
    "pipeline 1 x 2": lambda: pipeline(1, 0),
    "pipeline 1 x 2, pre-divided": lambda: pipeline(1, 0, gradient_predivide_factor=4.0),
    "pipeline 1 x 2, ZeRO-1": lambda: pipeline(1, 1),
    "pipeline 1 x 2, bf16": lambda: pipeline(1, 1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
    "no optimizer": no_optimizer,
}
EXACT_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", all-reduce": {"zero": ALL_REDUCE, "gradient_predivide_factor": 3.0},
    ", all-reduce, pre-scaled": {"zero": ALL_REDUCE, "prescale_gradients": True},
    ", extra-large": {"zero": {"reduce_bucket_size": 40}},
}
EXACT: dict[str, Callable[[], Gradients]] = {
    "exact, ZeRO-0": lambda: exact(0, gradient_predivide_factor=3.0),
    "exact, ZeRO-0, pre-scaled": lambda: exact(0, prescale_gradients=True),
    **{
        f"exact, ZeRO-{stage}{words}": partial(exact, stage, **options)
        for stage in (1, 2, 3)
        for words, options in EXACT_OPTIONS.items()
    },
    "exact, ZeRO-3, all-reduce, extra-large": lambda: exact(3, {**ALL_REDUCE, "reduce_bucket_size": 40}),
    "exact, ZeRO-3, apart": lambda: exact(3, {**ALL_REDUCE, "contiguous_gradients": False}),
}
LATE: dict[str, Callable[[], Gradients]] = {
    "late, ZeRO-0": lambda: late(0, prescale_gradients=True),
    "late, ZeRO-0, pre-divided": lambda: late(0, gradient_predivide_factor=4.0),
    "late, ZeRO-1": lambda: late(1, {"reduce_scatter": False}, gradient_predivide_factor=4.0),
    "late, ZeRO-2": lambda: late(2),
    "late, ZeRO-3": lambda: late(3, {"reduce_scatter": False}, gradient_predivide_factor=4.0),
}
"""Only where DeepSpeed ignores the key: elsewhere it sums, or refuses, without ds-gradfix."""


def outcome(scenario: Callable[[], Gradients]) -> dict[str, Any]:
    _compat.forget_last_engine()
    torch.manual_seed(5)
    try:
        return {"gradients": {name: [g.flatten().tolist() for g in pair] for name, pair in scenario().items()}}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        while engines:
            with suppress(AttributeError):  # 0.14.5 can't end ZeRO-3 without contiguous gradients
                engines.pop().destroy()
        gc.collect()


def chosen() -> Iterable[tuple[str, Callable[[], Gradients]]]:
    from packaging.version import Version

    found = {**SCENARIOS, **EXACT} if RANKS == 2 else dict(EXACT)
    if RANKS == 2 and CORRECTED and Version(deepspeed.__version__.split("+")[0]) < Version("0.19.6"):
        found = {**LATE, **found}  # first, while no other scenario's engine can be left alive on one rank only
    only = sys.argv[2:]
    return [(name, scenario) for name, scenario in found.items() if not only or any(part in name for part in only)]


def main() -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    _compat.prepare(deepspeed.__version__, on_cpu=True)
    torch.distributed.init_process_group(
        "gloo", os.environ["RENDEZVOUS"], timedelta(seconds=60), world_size=RANKS, rank=RANK
    )
    deepspeed.init_distributed()
    found = {name: outcome(scenario) for name, scenario in chosen()}
    print(f"\n{json.dumps({'deepspeed': deepspeed.__version__, 'scenarios': found})}", flush=True)
    os._exit(0)  # a normal exit would wait for ranks that died


if __name__ == "__main__":
    main()
