"""The model-parallel unit that tells DeepSpeed about sequence parallelism, one for each size in a process.

The configuration keys and `mesh_param` are no way in: there DeepSpeed reduces over the data-parallel dimension only.
"""

from __future__ import annotations

from typing import Any

_groups: dict[int, tuple[Any, Any]] = {}
"""Size -> (sequence group, sequence-data group) of this rank. Groups are made once: each takes threads and sockets."""


def for_size(size: int, *, stage: int) -> Any:
    """An mpu for `size` ranks in each sequence group, None for 1. Collective: every rank asks in the same order."""
    if size == 1:
        return None
    try:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
    except ImportError:  # before 0.17.0
        return _Unit(size, data_over_all_ranks=stage == 3)
    module: Any = parallel_state_sp
    sequence, every = _groups_of(size)
    module._SEQUENCE_PARALLEL_GROUP, module._SEQUENCE_DATA_PARALLEL_GROUP = sequence, every
    return module


def _groups_of(size: int) -> tuple[Any, Any]:
    from deepspeed import comm

    if size not in _groups:
        ranks, own = range(comm.get_world_size()), comm.get_rank()
        sequence = None
        for first in range(0, len(ranks), size):
            group = comm.new_group(list(ranks[first : first + size]))
            if first <= own < first + size:
                sequence = group
        _groups[size] = sequence, comm.new_group(list(ranks))
    return _groups[size]


class _Unit:
    """Megatron-style getters for releases without `parallel_state_sp`.

    ZeRO-3 partitions parameters over the data-parallel group, so that group must span the sequence shards there.
    """

    def __init__(self, size: int, *, data_over_all_ranks: bool) -> None:
        from deepspeed import comm

        self._sequence, self._every = _groups_of(size)
        if data_over_all_ranks:
            self._data = self._every
        else:
            self._data = _peers_at_the_same_place(size)
        self._alone = _own_group()
        self._comm: Any = comm

    def get_sequence_parallel_group(self) -> Any:
        return self._sequence

    def get_sequence_parallel_world_size(self) -> int:
        return int(self._comm.get_world_size(self._sequence))

    def get_sequence_parallel_rank(self) -> int:
        return int(self._comm.get_rank(self._sequence))

    def get_sequence_data_parallel_group(self) -> Any:
        return self._every

    def get_sequence_data_parallel_world_size(self) -> int:
        return int(self._comm.get_world_size(self._every))

    def get_sequence_data_parallel_rank(self) -> int:
        return int(self._comm.get_rank(self._every))

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return int(self._comm.get_world_size(self._data))

    def get_data_parallel_rank(self) -> int:
        return int(self._comm.get_rank(self._data))

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def _peers_at_the_same_place(size: int) -> Any:
    from deepspeed import comm

    ranks, own = range(comm.get_world_size()), comm.get_rank()
    made = [comm.new_group(list(ranks[place::size])) for place in range(size)]
    return made[own % size]


def _own_group() -> Any:
    from deepspeed import comm

    made = [comm.new_group([rank]) for rank in range(comm.get_world_size())]
    return made[comm.get_rank()]
