"""Which optimizer a bf16 job without ZeRO-2/3 gets, and how its gradients come into it."""

from __future__ import annotations

import sys
from typing import Any

from ds_gradfix.facts import Facts
from ds_gradfix.registry import Measurement, Replace, Rewrite, Target
from ds_gradfix.source import Rule

MODULE = "deepspeed.runtime.engine"
CLASS = "DeepSpeedEngine"


def _unscaled(engagement: Any, original: Any, engine: Any, optimizer: Any, dtype: Any, *args: Any) -> Any:
    """The half-precision optimizer without ZeRO; bf16 has the range of fp32, and no use for a loss scale."""
    import torch

    made = original(engine, optimizer, dtype, *args)
    if dtype is torch.bfloat16:
        made.dynamic_loss_scale, made.cur_scale = False, 1.0
    return made


UNSCALED = Replace(Target(MODULE, f"{CLASS}._configure_fp16_optimizer"), _unscaled, early=True)


def _cleared(engagement: Any, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """The step, and then what the next one must not find."""
    result = original(engine, *args, **kwargs)
    if hasattr(engine.optimizer, "fp16_groups"):
        engine.optimizer.zero_grad()
    return result


CLEARED = Replace(Target(MODULE, f"{CLASS}._take_model_step"), _cleared)


def _as_meant(engagement: Any, original: Any, engine: Any, basic_optimizer: Any) -> Any:
    """The choice of an optimizer's kind. Two kinds have one name there, and it is read as the other: so is the next
    call, which makes the optimizer, sent where it was meant to go."""
    import torch

    kind = original(engine, basic_optimizer)
    names = vars(sys.modules[MODULE])
    if kind == names["BFLOAT16"] == names["DDP_BFLOAT16"] and _wants_fp32_gradients(engine):

        def configure(optimizer: Any, dtype: Any) -> Any:
            del engine._configure_fp16_optimizer
            assert dtype is torch.bfloat16
            return _with_a_scale_of_one(engine._configure_bf16_optimizer(optimizer))

        engine._configure_fp16_optimizer = configure
    return kind


def _with_a_scale_of_one(optimizer: Any) -> Any:
    """0.18.3 and 0.18.4 ask every ZeRO optimizer to scale the loss, and BF16_Optimizer has nothing to do it with."""
    if hasattr(optimizer, "scale_if_loss") and not hasattr(optimizer, "custom_loss_scaler"):
        optimizer.custom_loss_scaler = False
        optimizer.external_loss_scale = optimizer.torch_autocast_gradscaler = None
        optimizer.loss_scaler = sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler(scale=1.0)
    return optimizer


def _wants_fp32_gradients(engine: Any) -> bool:
    """A pipeline gets BF16_Optimizer in any case, others where gradients accumulate in a dtype of their own."""
    model_dtype, accumulation_dtype = engine.get_data_types()
    return bool(engine.pipeline_parallelism or model_dtype != accumulation_dtype)


AS_MEANT = Replace(Target(MODULE, f"{CLASS}._do_optimizer_sanity_check"), _as_meant, early=True)


class _Epilogue:
    """What the rewritten end of a backward pass calls: BF16_Optimizer adds up its gradients before they are reduced."""

    @staticmethod
    def added(engine: Any) -> bool:
        if _adds_by_itself(engine):
            engine.optimizer.backward_epilogue()
        return True

    @staticmethod
    def rest(engine: Any) -> None:
        if not _adds_by_itself(engine):
            engine.optimizer.backward_epilogue()


def _adds_by_itself(engine: Any) -> bool:
    return type(engine.optimizer).__name__ == "BF16_Optimizer"


EPILOGUE = Rewrite(
    Target(MODULE, f"{CLASS}._backward_epilogue"),
    (
        Rule(
            "if self.enable_backward_allreduce and (not self.inside_no_sync_ctxt):\n    self.allreduce_gradients()",
            "if _ds_gradfix.added(self) and self.enable_backward_allreduce and (not self.inside_no_sync_ctxt):\n"
            "    self.allreduce_gradients()",
        ),
        Rule("self.optimizer.backward_epilogue()", "_ds_gradfix.rest(self)"),
    ),
    _Epilogue,
)


# ----------------------------------------------------------------------------- whom it concerns, and measuring


def accumulates_in_fp32(facts: Facts) -> bool:
    """Whether a bf16 job is one for BF16_Optimizer: it keeps gradients in fp32, under ZeRO-1 or none."""
    fp32 = str(facts.grad_accum_dtype).removeprefix("torch.") in ("fp32", "float32", "float")
    stage = facts.zero_stage == 0 or (facts.zero_stage == 1 and not facts.offload_optimizer)
    return facts.dtype == "bf16" and fp32 and stage


def steps_in_bf16_optimizer(facts: Facts) -> bool:
    """Whether a job is meant for BF16_Optimizer: those, and pipelines of any kind without ZeRO."""
    pipeline = facts.dtype == "bf16" and facts.zero_stage == 0 and facts.pipeline_stages > 1
    return pipeline or accumulates_in_fp32(facts)


def measure_scale(engine: Any) -> Measurement:
    """What a bf16 optimizer multiplies norms with; BF16_Optimizer has no such number."""
    scale = float(getattr(engine.optimizer, "cur_scale", 1.0))
    return Measurement("loss scale of the bf16 optimizer", scale, abs(scale - 1.0), 0.0)
