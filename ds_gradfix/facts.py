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
    releases. ``fused_half``: fp16 or bf16 without ZeRO, with the optimizer whose parameters DeepSpeed flattens
    (FusedAdam); ``check_grad_overflow`` is what the bf16 section says, None where it leaves it to the default, which
    differs too; ``own_step``: ZenFlow or SuperOffload, which take their steps in code of their own. What only a
    model shows (experts, pipeline stages, sparse gradients) is at its default without one.
    ``dense_partition_size`` is the number of ranks that DeepSpeed by itself spreads a dense parameter of ZeRO-3 over,
    None where it partitions none; ``sequence_mesh`` says that the sequence shards come from a device mesh
    (``mesh_param``, or the keys ``data_parallel_size`` and ``sequence_parallel_size``) instead of an mpu;
    ``immediate_grad_update`` is bf16's own key of that name, ``multi_rank_buckets`` ZeRO's
    ``use_multi_rank_bucket_allreduce``; ``expert_parallel_size`` is the largest number of ranks that hold different
    experts. ``wrapper`` is the class of the engine's optimizer, ``basic_optimizer`` module and class of the one in it;
    both are empty without an engine.
    ``pipeline`` is True for a pipeline of one stage, too; ``compressed_embeddings`` where DeepSpeed sends the rows of
    dense embedding gradients (the key ``sparse_gradients``), ``sparse_gradients`` where a layer makes sparse ones.
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
    fused_half: bool = False
    check_grad_overflow: bool | None = None
    own_step: bool = False
    offload_optimizer: bool = False
    experts: bool = False
    folded_experts: bool = False
    model_parallel_size: int = 1
    pipeline_stages: int = 1
    sparse_gradients: bool = False
    dense_partition_size: int | None = None
    sequence_mesh: bool = False
    immediate_grad_update: bool = False
    expert_parallel_size: int = 1
    multi_rank_buckets: bool = True
    wrapper: str = ""
    basic_optimizer: str = ""
    pipeline: bool = False
    compressed_embeddings: bool = False

    @property
    def all_group_sizes(self) -> frozenset[int]:
        """Every number of ranks that one of this job's reductions may average over."""
        return frozenset((self.group_size, *self.partition_sizes))


STOCK_PARTITION_SIZE = "_ds_gradfix_stock_partition_size"
"""Where ZeRO-3's parameter offload says over how many ranks DeepSpeed by itself would have partitioned."""


def is_autoep_expert(param: Any) -> bool:
    """As AutoEP marks routed experts: ranks own different ones, folded with AutoTP tensor-parallel peers too."""
    return getattr(param, "ds_zero_placement_family", None) == "autoep_expert"


def dense_partition_groups(engine: Any) -> list[Any]:
    """The distinct process groups that a live engine's dense parameters lie partitioned over: not those of experts."""
    found: dict[int, Any] = {}
    for param in engine.module.parameters():
        if hasattr(param, "ds_process_group") and not is_autoep_expert(param):
            found[id(param.ds_process_group)] = param.ds_process_group
    return list(found.values())


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
        found: Any = next((parent[key] for key in keys if parent.get(key) is not None), {})
        return found if isinstance(found, Mapping) else {}

    stage = value(zero, "stage", 0)
    fp16, bf16 = section(config, "fp16"), section(config, "bf16", "bfloat16")
    half = "fp16" if value(fp16, "enabled", False) else "bf16" if value(bf16, "enabled", False) else "fp32"
    optimizer = section(config, "optimizer")
    adam = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
    torch_adam = value(section(optimizer, "params"), "torch_adam", False)
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
        fused_half=half != "fp32" and stage == 0 and adam and not torch_adam,
        check_grad_overflow=bf16.get("check_grad_overflow"),
        own_step=zero.get("zenflow") is not None or bool(section(zero, "offload_optimizer").get("super_offload")),
        offload_optimizer=section(zero, "offload_optimizer").get("device") in ("cpu", "nvme"),
        experts=experts,
        folded_experts=experts and tensor_parallel > 1,
        expert_parallel_size=value(section(config, "expert_parallel"), "autoep_size", 1) if experts else 1,
        model_parallel_size=max(1, tensor_parallel),
        sequence_mesh="data_parallel_size" in config and "sequence_parallel_size" in config,
        immediate_grad_update=value(bf16, "immediate_grad_update", False),
        multi_rank_buckets=value(zero, "use_multi_rank_bucket_allreduce", True),
        compressed_embeddings=value(config, "sparse_gradients", False),
    )
