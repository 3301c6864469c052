"""Slots: the places in live modules that our functions occupy. Nothing else writes to DeepSpeed.

A slot keeps the very object that was there and puts it back, and refuses to touch a place that
somebody else has taken in the meantime.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds_gradfix.errors import SlotError
from ds_gradfix.source import mangled

MARK = "__ds_gradfix__"


@dataclass
class Slot:
    """One occupied place. ``aliases`` are further names, in other modules, that held the same
    object and were changed with it; ``held_elsewhere`` says in words who still holds the old one."""

    module: str
    qualname: str
    owner: Any
    name: str
    raw: Any
    installed: Any
    aliases: list[tuple[types.ModuleType, str]] = field(default_factory=list)
    held_elsewhere: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.installed


def install(
    module: types.ModuleType, qualname: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], late: bool
) -> Slot:
    """Put ``make(original)`` where ``qualname`` stands in a live module.

    ``late`` says that others may have captured the original since its module was imported: their
    module-level names are changed too, and other holders are named. Raises SlotError if the place
    is not there or is ours already.
    """
    owner: Any = module
    *path, _ = qualname.split(".")
    for part in path:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            raise SlotError(f"{module.__name__}:{qualname}: there is no class {part!r} in it")
    name = mangled(qualname)
    raw = vars(owner).get(name)
    function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if not callable(function):
        raise SlotError(f"{module.__name__}:{qualname}: there is no such function in it")
    if getattr(function, MARK, None):
        raise SlotError(f"{module.__name__}:{qualname} is corrected already, by {getattr(function, MARK)}")
    made = functools.wraps(function)(make(function))
    setattr(made, MARK, f"ds-gradfix, {module.__name__}:{qualname}")
    installed: Any = type(raw)(made) if isinstance(raw, staticmethod | classmethod) else made
    slot = Slot(module.__name__, qualname, owner, name, raw, installed)
    setattr(owner, name, installed)
    if late:
        slot.aliases = _module_aliases(raw, owner)
        for holder, alias in slot.aliases:
            setattr(holder, alias, installed)
        slot.held_elsewhere = _other_holders(raw, slot)
    return slot


def remove(slot: Slot) -> None:
    """Put the original back, in the slot and its aliases. Raises SlotError, having changed
    nothing, if somebody else's object is there now."""
    current = vars(slot.owner).get(slot.name)
    if current is not slot.installed:
        whose = f"{getattr(current, '__module__', None)}.{getattr(current, '__qualname__', type(current).__name__)}"
        raise SlotError(f"{slot} now holds {whose}, which is not ours to undo: remove that first")
    setattr(slot.owner, slot.name, slot.raw)
    for holder, alias in slot.aliases:
        if vars(holder).get(alias) is slot.installed:
            setattr(holder, alias, slot.raw)


def _module_aliases(raw: object, owner: object) -> list[tuple[types.ModuleType, str]]:
    found = []
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or module is owner:
            continue
        found += [(module, name) for name, value in list(vars(module).items()) if value is raw]
    return found


def _other_holders(raw: object, slot: Slot) -> list[str]:
    """In words: what still refers to the original and cannot be changed from here."""
    ours = {id(vars(slot)), id(slot.installed), id(vars(slot.installed))}
    said = []
    for holder in gc.get_referrers(raw):
        if id(holder) in ours or isinstance(holder, types.FrameType | types.CellType):
            continue
        if isinstance(holder, types.MethodType):
            said.append(f"a bound method of {type(holder.__self__).__name__}")
        elif isinstance(holder, dict) and holder.get("__wrapped__") is not raw:
            owners = [o for o in gc.get_referrers(holder) if getattr(o, "__dict__", None) is holder]
            name = next((key for key, value in holder.items() if value is raw), "?")
            said.append(f"{owners[0]!r}, as {name!r}" if owners else f"a dictionary, under {name!r}")
        elif isinstance(holder, functools.partial | list | tuple | set):
            said.append(f"a {type(holder).__name__}")
    return said
