"""Slots: the places in live modules that our functions occupy. Nothing else writes to DeepSpeed.

A slot keeps the very object that was there and puts it back, and refuses to touch a place that
somebody else has taken in the meantime.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Mapping, Sequence
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
    aliases: list[tuple[types.ModuleType, str, object]] = field(default_factory=list)
    held_elsewhere: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.installed

    @property
    def whose_now(self) -> str:
        """In words: where that is from which is there now."""
        return whose(vars(self.owner).get(self.name))


def install(
    module: types.ModuleType, qualname: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Slot:
    """Put ``make(original)`` where ``qualname`` stands in a live module, and under its other names there.

    Raises SlotError if the place is not there or is ours already.
    """
    owner = _owner(module, qualname)
    name = mangled(qualname)
    raw = vars(owner).get(name)
    function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if not callable(function):
        raise SlotError(f"{module.__name__}:{qualname}: there is no such function in it")
    if getattr(function, MARK, None):
        raise SlotError(f"{module.__name__}:{qualname} is corrected already, by {getattr(function, MARK)}")
    if not comes_from(function, module.__name__):
        raise SlotError(f"{module.__name__}:{qualname} is not its module's own any more: it holds {whose(function)}")
    made = functools.wraps(function)(make(function))
    setattr(made, MARK, f"ds-gradfix, {module.__name__}:{qualname}")
    installed: Any = type(raw)(made) if isinstance(raw, staticmethod | classmethod) else made
    slot = Slot(module.__name__, qualname, owner, name, raw, installed)
    setattr(owner, name, installed)
    _take_aliases([slot], [module])
    return slot


def _owner(module: types.ModuleType, qualname: str) -> Any:
    owner: Any = module
    *path, _ = qualname.split(".")
    for part in path:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            raise SlotError(f"{module.__name__}:{qualname}: there is no class {part!r} in it")
    return owner


def is_outlived(slot: Slot) -> bool:
    """Whether its module was reloaded since: then its class is another one, or the module's own function is new."""
    module = sys.modules.get(slot.module)
    if module is None:
        return True
    if slot.owner is not module:
        return _owner(module, slot.qualname) is not slot.owner
    now = vars(module).get(slot.name)
    return now is not slot.raw and not hasattr(now, MARK) and _home(now).partition(".")[0] in _own_homes(slot)


def reach_out(slots: Sequence[Slot]) -> None:
    """For places that were occupied late: others may have captured the originals since their module was imported.

    Module-level names of theirs are changed too, and other holders are named in ``held_elsewhere``. All slots at once,
    since each look at every object of the process takes its time.
    """
    _take_aliases(slots, list(sys.modules.values()))
    _name_other_holders(slots)


def comes_from(function: Any, module: str, depth: int = 4) -> bool:
    """Whether a function, or one that it wraps, is defined in ``module``: decorators of DeepSpeed's keep
    what they wrap in a closure, those of other tools often in ``__wrapped__``."""
    if getattr(function, "__module__", None) == module:
        return True
    if depth == 0:
        return False
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
    inner.append(getattr(function, "__wrapped__", None))
    return any(callable(thing) and comes_from(thing, module, depth - 1) for thing in inner)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def whose(thing: Any) -> str:
    """In words: where a function is from. Its code says it: what it wraps has often lent it ``__module__`` and name."""
    inner = _code_of(thing)
    if inner is not None:
        code = inner.__code__
        return f"{inner.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _code_of(thing: Any) -> types.FunctionType | None:
    """The function that runs when ``thing`` is called, as far as that can be seen: of wrapt's proxy, what was given
    to wrap with."""
    inner = getattr(thing, "__func__", thing)
    if type(inner) is not types.FunctionType and type(inner).__name__.endswith("FunctionWrapper"):
        inner = getattr(inner, "_self_wrapper", None)
    return inner if type(inner) is types.FunctionType else None


def wrapped_by(slot: Slot) -> str | None:
    """In words: which other tool had wrapped the function before a slot was occupied, None if nobody had."""
    return None if _home(slot.raw).partition(".")[0] in _own_homes(slot) else whose(slot.raw)


def _home(thing: Any) -> str:
    """The module in which what runs is defined."""
    inner = _code_of(thing)
    return str(inner.__globals__.get("__name__")) if inner is not None else type(thing).__module__


def _own_homes(slot: Slot) -> tuple[str, ...]:
    """Packages whose functions stand there by themselves: its own, and those its decorators are from."""
    return slot.module.partition(".")[0], "torch", "contextlib"


def remove(slot: Slot) -> None:
    """Put the original back, in the slot and its aliases. Raises SlotError, having changed
    nothing, if somebody else's object is there now."""
    if not slot.in_place:
        raise SlotError(f"{slot} now holds {slot.whose_now}, which is not ours to undo: remove that first")
    leave(slot)


def leave(slot: Slot) -> None:
    """Put the original back wherever ours still is."""
    if slot.in_place:
        setattr(slot.owner, slot.name, slot.raw)
    for holder, alias, value in slot.aliases:
        if getattr(vars(holder).get(alias), MARK, None) == getattr(slot.installed, MARK, None):
            setattr(holder, alias, value)


def _originals(slot: Slot) -> dict[int, tuple[object, Any]]:
    """What was there and what is in its place, by the identity of what was there: the raw object, and the function in
    it where a static or class method wraps one."""
    found = {id(slot.raw): (slot.raw, slot.installed)}
    if isinstance(slot.raw, staticmethod | classmethod):
        found[id(slot.raw.__func__)] = (slot.raw.__func__, slot.installed.__func__)
    return found


def _take_aliases(slots: Sequence[Slot], modules: Sequence[Any]) -> None:
    originals = {identity: (slot, *pair) for slot in slots for identity, pair in _originals(slot).items()}
    for module in modules:
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    slot, original, installed = originals[id(value)]
                    slot.aliases.append((module, name, original))
                    setattr(module, name, installed)


def _name_other_holders(slots: Sequence[Slot]) -> None:
    """In words: what still refers to the originals and cannot be changed from here.

    Only types are asked for their names: a stranger's ``__repr__`` may do anything.
    """
    originals = {identity: (slot, original) for slot in slots for identity, (original, _) in _originals(slot).items()}
    ours = {id(originals), *map(id, originals.values())}
    for slot in slots:
        made = getattr(slot.installed, "__func__", slot.installed)
        ours |= {*map(id, (vars(slot), made, vars(made), slot.raw, *slot.aliases, *(made.__closure__ or ())))}
    for holder in gc.get_referrers(*(original for _, original in originals.values())):
        if id(holder) in ours or type(holder) is types.FrameType:
            continue
        for held in gc.get_referents(holder):
            if id(held) in originals:
                slot, original = originals[id(held)]
                words = _holder_in_words(holder, original)
                if words:
                    slot.held_elsewhere.append(words)


def _holder_in_words(holder: Any, held: object) -> str | None:
    if type(holder) is types.MethodType:
        return f"a bound method of {type(holder.__self__).__name__}"
    if type(holder) is types.CellType:
        return "a closure"
    if type(holder) is dict:
        if holder.get("__wrapped__") is held:
            return None  # what functools.wraps leaves on a wrapper, which calls through its closure
        name = next((key for key, value in holder.items() if value is held), "?")
        owners = [o for o in gc.get_referrers(holder) if _namespace(o).get(name) is held]
        return f"{_named(owners[0])}, as {name!r}" if owners else f"a dictionary, under {name!r}"
    if type(holder) is types.FunctionType:
        return None  # its closure or its defaults hold it, and are named themselves
    return f"a {type(holder).__name__}"


def _named(thing: object) -> str:
    if isinstance(thing, types.ModuleType):
        return f"the module {thing.__name__}"
    if isinstance(thing, type):
        return f"the class {type.__dict__['__qualname__'].__get__(thing)}"
    return f"a {type(thing).__name__}"


def _namespace(thing: object) -> Mapping[str, object]:
    """An object's or a class's own attributes, without asking it."""
    if issubclass(type(thing), type):
        return type.__dict__["__dict__"].__get__(thing)  # type: ignore[no-any-return]
    try:
        return object.__getattribute__(thing, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}
