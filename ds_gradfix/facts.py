"""What a job is, as far as its gradients are concerned: the input of every patch's predicate.

The same record comes from a configuration file (the doctor, before the job) and from a live
engine (engine init), so that a patch decides once, in one function, whether it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_gradfix.errors import SettingsError


@dataclass(frozen=True)
class Facts:
    """One job.

    ``group_size`` is D, the number of ranks over which a parameter's gradient is reduced
    (data-parallel replicas times sequence shards); ``partition_sizes`` are the sizes of all the
    groups that hold partitions (several with expert parallelism); ``largest_parameter`` is in
    elements, None where no model is at hand. ``convention`` says what a mean does over sequence
    shards: see :func:`ds_gradfix.reduction.gradient_scale`. ``dtype`` is ``"fp32"``, ``"fp16"`` or ``"bf16"``;
    ``gradient_clipping`` is None where the configuration leaves it to DeepSpeed's default, which differs between
    releases. What only a model shows (experts, pipeline stages, sparse gradients) is at its default without one.
    """

    zero_stage: int
    group_size: int
    sequence_parallel_size: int = 1
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    reduce_bucket_size: int = 500_000_000
    predivide_factor: float = 1.0
    prescale_gradients: bool = False
    reduction_op: str = "mean"
    convention: str = "sum"
    partition_sizes: tuple[int, ...] = ()
    largest_parameter: int | None = None
    dtype: str = "fp32"
    gradient_accumulation_steps: int = 1
    gradient_clipping: float | None = None
    grad_accum_dtype: str | None = None
    dynamic_loss_scale: bool = False
    offload_optimizer: bool = False
    experts: bool = False
    folded_experts: bool = False
    model_parallel_size: int = 1
    pipeline_stages: int = 1
    sparse_gradients: bool = False

    @property
    def all_group_sizes(self) -> frozenset[int]:
        """Every number of ranks that one of this job's reductions may average over."""
        return frozenset((self.group_size, *self.partition_sizes))


def facts_from_config(
    config: Mapping[str, Any], ranks: int, sequence_parallel_size: int, convention: str = "sum"
) -> Facts:
    """Read a DeepSpeed configuration; ``ranks`` is the world size, without model parallelism.

    Values that a framework fills in later (``"auto"``) count as DeepSpeed's default. Raises
    SettingsError naming a key whose value has the wrong type.
    """
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise SettingsError(f'"zero_optimization": {zero!r} is not allowed; it is an object, such as {{"stage": 3}}')

    def value(section: Mapping[str, Any], key: str, default: Any) -> Any:
        found = section.get(key, default)
        if found is None or found == "auto":
            return default
        try:
            return type(default)(float(found) if isinstance(default, int) else found)
        except (TypeError, ValueError, OverflowError) as error:
            raise SettingsError(f'"{key}": {found!r} is not allowed; it is a {type(default).__name__}') from error

    def section(parent: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
        found = next((parent[key] for key in keys if parent.get(key) is not None), {})
        return found if isinstance(found, Mapping) else {}

    stage = value(zero, "stage", 0)
    fp16, bf16 = section(config, "fp16"), section(config, "bf16", "bfloat16")
    half = "fp16" if value(fp16, "enabled", False) else "bf16" if value(bf16, "enabled", False) else "fp32"
    experts = value(section(config, "expert_parallel"), "enabled", False)
    tensor_parallel = value(section(config, "tensor_parallel"), "autotp_size", 1)
    clipping = config.get("gradient_clipping")
    return Facts(
        zero_stage=stage,
        group_size=ranks,
        sequence_parallel_size=sequence_parallel_size,
        reduce_scatter=value(zero, "reduce_scatter", True),
        contiguous_gradients=value(zero, "contiguous_gradients", True),
        reduce_bucket_size=value(zero, "reduce_bucket_size", 500_000_000),
        predivide_factor=value(config, "gradient_predivide_factor", 1.0),
        prescale_gradients=value(config, "prescale_gradients", False),
        reduction_op=value(config, "gradient_allreduce_op", "mean").lower(),
        convention=convention,
        dtype=half,
        gradient_accumulation_steps=value(config, "gradient_accumulation_steps", 1),
        gradient_clipping=None if clipping in (None, "auto") else value(config, "gradient_clipping", 0.0),
        grad_accum_dtype=section(config, "data_types").get("grad_accum_dtype"),
        dynamic_loss_scale=half == "fp16" and value(fp16, "loss_scale", 0.0) == 0.0,
        offload_optimizer=section(zero, "offload_optimizer").get("device") in ("cpu", "nvme"),
        experts=experts,
        folded_experts=experts and tensor_parallel > 1,
        model_parallel_size=max(1, tensor_parallel),
    )
