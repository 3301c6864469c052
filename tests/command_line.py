"""The command line as its tests use it."""

import os
import subprocess
import sys

AFFECTED = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}
STRANGE = """
class DeepSpeedZeroOptimizer_Stage3:
    def __avg_scatter_grads(self, params_to_reduce):
        return "strange"  # a comment

    def __avg_scatter_contiguous_grads(self, buffer):
        return buffer
"""


def python(*arguments, cwd=None, **environment):
    """Run this interpreter, in 80 columns and without any DS_GRADFIX variable but those given."""
    inherited = {name: value for name, value in os.environ.items() if "DS_GRADFIX" not in name and "COLOR" not in name}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**inherited, "COLUMNS": "80", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(*arguments, **options):
    return python("-m", "ds_gradfix", *arguments, **options)
