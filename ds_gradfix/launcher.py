"""What reaches other nodes: the runners of DeepSpeed's launcher hand over only the variables on their export list.

Ours are put on it as a runner is made. The `deepspeed` script and `python -m deepspeed.launcher.runner` both make one,
while the launcher's own list can't be had in the second, where the launcher is `__main__`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ds_gradfix._boot import ALIAS, VARIABLE, requested
from ds_gradfix.errors import SettingsError
from ds_gradfix.registry import Target
from ds_gradfix.settings import VARIABLE_PREFIX

RUNNER_INIT = Target("deepspeed.launcher.multinode_runner", "MultiNodeRunner.__init__")

# What no shell, pdsh (which replaces %h, %n, %u) or mpirun on the way reads anything into.
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def exported() -> dict[str, str]:
    """The variables that the launcher hands to every node: `DS_GRADFIX` and its siblings as this process has them, none
    where ds-gradfix is off. An empty variable gives nothing and stays here.

    Raises SettingsError for a value that would not arrive as it is.
    """
    if not requested():
        return {}
    ours = (name for name in os.environ if name in (VARIABLE, ALIAS) or name.startswith(VARIABLE_PREFIX))
    return {name: _plain(name, os.environ[name]) for name in sorted(ours) if os.environ[name].strip()}


def _plain(name: str, value: str) -> str:
    """The value without blanks around its commas, which mean nothing to any setting."""
    plain = ",".join(part.strip() for part in value.split(","))
    if not _PLAIN.fullmatch(plain):
        raise SettingsError(
            f"{name}: {value!r} would not arrive at other nodes as it is; allowed in what DeepSpeed's launcher hands"
            " over are letters, digits and _ @ + = : , . / -. Change the value, or use an argument of enable()"
        )
    return plain


def wrap_runner_init(original: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed's own constructor of a runner, and then our variables on its export list."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.name != "slurm":  # carries the whole environment, and would split a value at its commas
            self.exports.update(exported())  # 0.15's add_export puts quotes around values, which mpirun would hand on

    return init
