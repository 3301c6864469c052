"""What interpreter start-up calls: waits for the first import of DeepSpeed, and activates ds-gradfix just before it.

Runs in every process that has `DS_GRADFIX` set, most of which never import DeepSpeed. So it imports nothing that the
interpreter has not loaded already, and whatever goes wrong here is one line on stderr, never a broken interpreter.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own would cost an import of typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object

VARIABLE = "DS_GRADFIX"
ALIAS = "PYTHON_DS_GRADFIX"
"""Reaches remote ranks, as `DS_GRADFIX` does not: DeepSpeed's launchers forward what starts with PYTHON."""

OFF = ("", "0", "off", "false", "no")
MARKER = "_ds_gradfix_boot"
"""The attribute of sys that says how ds-gradfix was started in this process, for the doctor."""


def main() -> None:
    """Start ds-gradfix if the environment asks for it; called by the start-up files."""
    try:
        if requested():
            install("start-up file")
    except Exception as error:
        _report("could not start", error)


def requested() -> bool:
    """Whether the environment asks for ds-gradfix. `DS_GRADFIX` decides wherever it is set, then its alias."""
    value = os.environ.get(VARIABLE)
    if value is None:
        value = os.environ.get(ALIAS, "")
    return value.strip().lower() not in OFF


def install(started_by: str) -> None:
    """Activate ds-gradfix when DeepSpeed is imported, at once if it already is. The first call of a process counts."""
    if hasattr(sys, MARKER):
        return
    setattr(sys, MARKER, started_by)
    if DeepSpeedFinder.name in sys.modules:
        _activate()
    else:
        sys.meta_path.insert(0, DeepSpeedFinder())


def cancel() -> None:
    """Stop waiting for DeepSpeed, so that importing it activates nothing."""
    for finder in sys.meta_path:
        if isinstance(finder, DeepSpeedFinder):
            finder.waiting = False


class DeepSpeedFinder:
    """A `sys.meta_path` entry that gives DeepSpeed, wherever it is found, a loader that activates ds-gradfix first.

    When its work is done it stays where it is, idle: to take it out could make another thread that is walking through
    the list skip its successor.
    """

    name = "deepspeed"

    def __init__(self) -> None:
        self.waiting = True

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """What the other finders find, if it is DeepSpeed that is sought and we still wait for it."""
        if fullname != self.name or not self.waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):  # until Python 3.11 a finder may do without
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:  # it has none where a mere folder of that name is found
                    spec.loader = ActivatingLoader(self, spec.loader)
                return spec
        return None


class ActivatingLoader(Loader):
    """DeepSpeed's own loader, but for one moment: just before it makes the module, ds-gradfix is activated.

    Not when DeepSpeed is found, for two reasons. Libraries look for it to see whether it is installed, and never import
    it. And importlib holds its global lock while it asks finders: to import anything then can deadlock with a thread
    that is in the middle of importing the same.
    """

    def __init__(self, finder: DeepSpeedFinder, loader: Loader) -> None:
        self._finder = finder
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Activate ds-gradfix, leave the scene to the loader we stood in for, and let it make the module."""
        if self._finder.waiting:
            _activate()
            # Not before: after a refusal, another attempt to import DeepSpeed must not slip through uncorrected.
            self._finder.waiting = False
        if spec.loader is self:  # else another tool has put its own around us
            spec.loader = self._loader
        return self._loader.create_module(spec)


def _activate() -> None:
    try:
        from ds_gradfix.activation import enable_from_environment

        enable_from_environment()
    except Exception as error:
        if _is_refusal(error):
            raise
        _report("could not be activated; DeepSpeed is imported uncorrected", error)


def _is_refusal(error: Exception) -> bool:
    """Whether the user asked for something that we refuse, which must reach the user."""
    errors = sys.modules.get("ds_gradfix.errors")
    return errors is not None and isinstance(error, errors.GradfixError)


def _report(what: str, error: Exception) -> None:
    try:
        sys.stderr.write(f"ds-gradfix: {what}: {type(error).__name__}: {error}\n")
    except (AttributeError, OSError, ValueError):
        pass  # there is none, its disk is full, or it is closed
