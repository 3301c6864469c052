"""What a DeepSpeed release needs to run two small ranks on a CPU, or at all with today's torch. For the oracle only.

These are not corrections of a gradient: they keep another known fault of a release from being taken for one.
"""

from __future__ import annotations

import importlib
from typing import Any


def prepare(version: str, *, on_cpu: bool) -> None:
    """Adapt the imported DeepSpeed `version`; before `init_distributed`."""
    release = _release(version)
    if on_cpu:
        _no_shared_memory_op()
        _fp16_on_cpu()
    if release < (0, 19, 8):
        _wait_for_every_gather()
    if (0, 18, 7) <= release <= (0, 18, 9):
        _detach_flat_tensors()


def forget_last_engine() -> None:
    """Put back what an engine leaves behind in DeepSpeed's modules, where the next one in the process would find it."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups.mpu = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    try:
        autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    except ImportError:  # before 0.17.2
        return
    autocast.TORCH_AUTOCAST_INITIALIZED = False


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split("+")[0].split(".")[:3]
    return tuple(int(number) if number.isdigit() else 0 for number in numbers)


def _no_shared_memory_op() -> None:
    """The optional all-reduce through shared memory would be compiled first, for a minute, and needs a compiler."""
    # `import deepspeed.comm.torch as ...` can bind the real torch: the package has an attribute of that name.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def _fp16_on_cpu() -> None:
    """DeepSpeed asks for fast fp16; torch computes it on every CPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    supported = accelerator.supported_dtypes  # of the gradients that an engine without ZeRO reduces
    accelerator.supported_dtypes = lambda: list(dict.fromkeys([*supported(), torch.float16]))


def _wait_for_every_gather() -> None:
    """Before 0.19.8 ZeRO-3 waits for the last of several asynchronous gathers only (upstream #8539)."""
    comm: Any = importlib.import_module("deepspeed.comm")
    gather = comm.all_gather_into_tensor

    def waiting(output: Any, source: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        handle = gather(output, source, group=group, async_op=async_op, **options)
        if async_op and handle is not None:
            handle.wait()
        return handle

    comm.all_gather_into_tensor = waiting


def _detach_flat_tensors() -> None:
    """0.18.7 to 0.18.9 step on a view that torch forbids to change in place (fixed in 0.19.0)."""
    optimizer: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    flatten = optimizer.flatten_dense_tensors_aligned
    optimizer.flatten_dense_tensors_aligned = lambda self, *args, **options: flatten(self, *args, **options).detach()
