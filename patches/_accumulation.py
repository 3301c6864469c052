"""Micro-batches under gradient accumulation: which of them survive until the step, and how often each is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ds_gradfix import reduction
from ds_gradfix.registry import Measurement, Replace, Rewrite, Target
from ds_gradfix.source import Rule

ENGINE = "deepspeed.runtime.engine"
ZERO = "deepspeed.runtime.zero.stage_1_and_2"

PIPELINE_UNDIVIDED = "pipeline-accumulation-undivided"
NO_SYNC = "no-sync-accumulation"


# ----------------------------------------------------------------------------- ZeRO-2: what survives


class _Epilogue:
    """What the rewritten end of a ZeRO-1/2 backward calls."""

    @staticmethod
    def added(earlier: list[Any] | None, partition: list[Any]) -> list[Any]:
        """A further backward before the step: its gradient is added to what waits for the step."""
        if earlier is None:
            return partition
        for total, gradient in zip(earlier, partition, strict=True):
            total.add_(gradient)
        return earlier


EPILOGUE = Rewrite(
    Target(ZERO, "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue"),
    (
        Rule(
            "not i in self.averaged_gradients or self.averaged_gradients[i] is None",
            "self.all_grad_tensors.get(i) is None",
        ),
        # With the condition right, a backward behind the boundary would replace what waits there.
        Rule(
            "self.averaged_gradients[i] = self.get_flat_partition($params, $offset, $size, dtype=$dtype,"
            " device=$device, param_group_idx=i, return_tensor_list=True)",
            "self.averaged_gradients[i] = _ds_gradfix.added(self.averaged_gradients.get(i), self.get_flat_partition("
            "$params, $offset, $size, dtype=$dtype, device=$device, param_group_idx=i, return_tensor_list=True))",
        ),
    ),
    _Epilogue,
)


class _Offload:
    """What the rewritten accumulation on the CPU calls."""

    @staticmethod
    def kept(optimizer: Any, number: int) -> bool:
        """Whether what the CPU keeps for a parameter is of this step: it is never cleared. From now on it will be."""
        step = optimizer.norm_for_param_grads  # a table that each step ends with a new one of
        marked = vars(optimizer).get("_ds_gradfix_kept")
        if marked is None or marked[0] is not step:
            marked = optimizer._ds_gradfix_kept = step, set()
        found = number in marked[1]
        marked[1].add(number)
        return found

    @classmethod
    def accumulate(cls, optimizer: Any, number: int, add: Callable[[], None], keep: Callable[[], None]) -> None:
        """The sum goes back to the CPU on every micro-batch, or the next one would add to the first only."""
        if cls.kept(optimizer, number):
            add()
        keep()


OFFLOAD = Rewrite(
    Target(ZERO, "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu"),
    (
        Rule(  # 0.15.2 to 0.18.9
            "if self.micro_step_id > 0:\n    accumulate_gradients()\nelse:\n    copy_gradients_to_cpu()",
            "_ds_gradfix.accumulate(self, param_id, accumulate_gradients, copy_gradients_to_cpu)",
            times=(0, 1),
        ),
        Rule(  # before and after that the sum is copied back as it should be
            "if self.micro_step_id > 0:\n    accumulate_gradients()",
            "if _ds_gradfix.kept(self, param_id):\n    accumulate_gradients()",
            times=(0, 1),
        ),
    ),
    _Offload,
)
BOUNDARY = Rewrite(
    Target(ZERO, "DeepSpeedZeroOptimizer.copy_grads_in_partition"),
    (
        Rule(
            "self.gradient_accumulation_steps > 1",
            "self.gradient_accumulation_steps > 1 or self.micro_step_id > 0"
            " or (not self.is_gradient_accumulation_boundary)",
        ),
    ),
    None,
)


def measure_offload(engine: Any) -> list[Measurement]:
    """Known gradients of three micro-batches, the first of a step not among them, for one parameter through the
    optimizer's accumulation on the CPU, where an earlier step has left another one.

    Where the sum is kept in the master weights' own gradients, nothing is measured: they must not see it.
    """
    torch = sys.modules["torch"]
    optimizer = engine.optimizer
    low = "fp16_master_weights_and_gradients", "low_precision_master_weights_and_grads"
    held = [param for group in optimizer.params_in_partition for param in group if param.requires_grad]
    if not held or any(getattr(optimizer, name, False) for name in low):
        return []
    param = min(held, key=lambda one: int(one.numel()))
    number, gradient = optimizer.get_param_id(param), "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
    on_cpu, state = optimizer.accumulated_grads_in_cpu, vars(optimizer)
    scratch = optimizer.temp_grad_buffer_for_gpu_offload.view(-1).narrow(0, 0, param.numel())
    before = getattr(param, gradient, None), scratch.clone(), on_cpu.get(number)
    names = "micro_step_id", "is_gradient_accumulation_boundary", "_ds_gradfix_kept"
    kept = {name: state.pop(name) for name in names if name in state}
    on_cpu[number] = torch.full((param.numel(),), 8.0, dtype=param.dtype, device=optimizer.device)
    try:
        for step, known in enumerate((1.0, 2.0, 4.0), start=1):
            optimizer.micro_step_id = step
            if "is_gradient_accumulation_boundary" in kept:  # from 0.19.5 on a method, which is not asked here
                optimizer.is_gradient_accumulation_boundary = known == 4.0
            setattr(param, gradient, torch.full_like(param, known))
            optimizer.async_accumulate_grad_in_cpu_via_gpu(param)
        got = getattr(param, gradient).double().flatten().cpu()
    finally:
        setattr(param, gradient, before[0])
        scratch.copy_(before[1])
        on_cpu.pop(number)
        if before[2] is not None:
            on_cpu[number] = before[2]
        state.pop("_ds_gradfix_kept", None)
        state.update(kept)
    right = torch.full_like(got, 7.0)
    return [Measurement("accumulation of three micro-batches on the CPU", *reduction.compare(got, right), 0.0)]


# ----------------------------------------------- 0.16.0 to 0.18.2: the loss is divided before its backward


class _Division:
    """What the rewritten beginning of ``engine.backward`` asks."""

    @staticmethod
    def divides(engine: Any, reduces: bool) -> bool:
        """Whether this micro-batch is one of an accumulation, whoever reduces its gradient, and when."""
        patches = engine._ds_gradfix.patches
        return (
            reduces
            or (PIPELINE_UNDIVIDED in patches and engine.pipeline_parallelism)
            or (NO_SYNC in patches and engine.inside_no_sync_ctxt)
        )


_DIVIDES = Rule(
    "do_gradient_reduction and self.gradient_accumulation_steps() > 1 and scale_wrt_gas",
    "_ds_gradfix.divides(self, do_gradient_reduction) and self.gradient_accumulation_steps() > 1 and scale_wrt_gas",
)
BACKWARD_DIVIDES = Rewrite(Target(ENGINE, "DeepSpeedEngine.backward"), (_DIVIDES,), _Division)  # up to 0.16.4
PROLOGUE_DIVIDES = Rewrite(Target(ENGINE, "DeepSpeedEngine._backward_prologue"), (_DIVIDES,), _Division)


# --------------------------------- from 0.18.3: hooks on the outputs of engine.forward divide their gradients


def _backward(
    engagement: Any, original: Any, engine: Any, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True
) -> Any:
    """The loss is divided at its root, once for every path through it, and the hooks leave the gradients alone: what
    DeepSpeed does from 0.19.6 on."""
    if scale_wrt_gas:
        loss = loss / engine.gradient_accumulation_steps()
    before = _hooks_divide(engine)
    engine._scale_wrt_gas = False  # from 0.18.4 on this is what backward() itself makes of its argument
    try:
        return original(engine, loss, retain_graph=retain_graph, scale_wrt_gas=False)
    finally:
        engine._scale_wrt_gas = before


def _hooks_divide(engine: Any) -> bool:
    return bool(getattr(engine, "_scale_wrt_gas", True))


def _per_tensor(engagement: Any, original: Any, engine: Any, grad: Any) -> Any:
    return original(engine, grad) if _hooks_divide(engine) else grad


BACKWARD_AT_ROOT = Replace(Target(ENGINE, "DeepSpeedEngine.backward"), _backward)
HOOK_OBEYS = Replace(Target(ENGINE, "DeepSpeedEngine._backward_prologue_per_tensor"), _per_tensor)


class _Stage:
    """What the rewritten forward of an engine asks for its outputs' hooks."""

    @staticmethod
    def hook(engine: Any) -> Callable[[Any], Any] | None:
        """A stage that is not the last gets its outputs' gradients from the next one, divided already."""
        hook: Callable[[Any], Any] = engine._backward_prologue_per_tensor
        return hook if engine.is_last_stage() else None


FORWARD = Rewrite(
    Target(ENGINE, "DeepSpeedEngine.forward"),
    (Rule("self._backward_prologue_per_tensor", "_ds_gradfix.hook(self)"),),
    _Stage,
)


def measure_nothing(engine: Any) -> list[Measurement]:
    """What goes wrong lies between the micro-batches of one step, with forward and backward of the model itself: no
    known numbers reach it without training."""
    return []
