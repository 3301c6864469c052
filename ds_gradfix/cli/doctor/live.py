"""Run in an interpreter of its own: whose DeepSpeed's functions are once DeepSpeed is imported."""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from ds_gradfix.slots import MARK, comes_from
from ds_gradfix.source import mangled


def main() -> None:
    """Print what :func:`look` finds as the last line, whatever an import may still have to say."""
    found = look(json.loads(sys.argv[1]))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)


def look(targets: Iterable[str]) -> dict[str, list[Any]]:
    """Of the targets, as ``module:qualname``: the ``places`` that hold another tool's function, with whose it is and
    whether DeepSpeed's own is gone, and those whose module is ``not_importable`` here."""
    own_folders = (_folder("deepspeed"), _folder("torch"))  # DeepSpeed decorates with torch's own
    places, not_importable = [], []
    for target in targets:
        module, _, qualname = target.partition(":")
        try:
            function = _function(importlib.import_module(module), qualname)
        except ImportError:
            not_importable.append(target)
            continue
        outermost = getattr(function, "_self_wrapper", function)  # wrapt's, what it calls
        code = outermost.__code__ if isinstance(outermost, types.FunctionType) else None
        file = code.co_filename if code else ""
        if file.startswith(own_folders) or _standard(file) or getattr(function, MARK, None):
            continue
        by = f"{_module_of(file)} ({file}:{code.co_firstlineno})" if code else f"a {type(function).__qualname__}"
        places.append({"target": target, "by": by, "replaced": not comes_from(function, module)})
    return {"places": places, "not_importable": not_importable}


def _function(module: types.ModuleType, qualname: str) -> Any:
    owner: Any = module
    *path, _ = qualname.split(".")
    for part in path:
        owner = vars(owner).get(part)
    raw = vars(owner).get(mangled(qualname))
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _folder(package: str) -> str:
    return os.path.dirname(str(importlib.import_module(package).__file__)) + os.sep


def _standard(file: str) -> bool:
    """Whether it is the standard library's, whose decorators DeepSpeed uses."""
    return file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file


def _module_of(file: str) -> str:
    modules = list(sys.modules.items())
    return next((name for name, module in modules if getattr(module, "__file__", None) == file), "generated code")
