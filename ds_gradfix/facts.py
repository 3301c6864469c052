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
    shards: see :func:`ds_gradfix.reduction.gradient_scale`.
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

    stage = value(zero, "stage", 0)
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
    )
