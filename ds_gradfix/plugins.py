"""What other distributions offer as entry points: found, loaded, checked and called. Knows nothing of patches.

Whatever a plug-in does meanwhile, leaving the interpreter included, is told once and goes no further.
"""

from __future__ import annotations

import collections.abc
import functools
import logging
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TypeVar

log = logging.getLogger("ds_gradfix")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Offer:
    """One entry point, and the distribution that has it, by name and version."""

    point: EntryPoint
    distribution: str

    def __str__(self) -> str:
        return f"the plug-in {self.point.name!r} ({self.point.value}) of {self.distribution}"


class Misfit(Exception):
    """Something that a plug-in gave is not what it must be."""


def offers(group: str) -> Iterator[Offer]:
    """The entry points of a group. Of two distributions with one name the first on the path counts, as for imports.

    Read file by file: ``importlib.metadata.entry_points`` fails for all if one distribution's file is broken.
    """
    seen = set()
    for distribution in distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or "") or distribution.name in seen:
                continue
            points = [point for point in distribution.entry_points if point.group == group]
            name = f"{distribution.name} {distribution.version}"
        except Exception as error:
            tell(f"the entry points of {_where(distribution)} can't be read, and are left out: {in_words(error)}")
            continue
        seen.add(distribution.name)
        yield from (Offer(point, name) for point in points)


def _where(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", "a distribution"))


def attempt(
    action: Callable[[], Result], passing: tuple[type[BaseException], ...] = ()
) -> tuple[Result | None, str | None]:
    """What a plug-in's code gives, or what it raised, in words. ``passing`` errors are the user's to see."""
    try:
        return action(), None
    except BaseException as error:  # SystemExit among them: a plug-in does not decide when a job ends
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        return None, in_words(error)


def in_words(error: BaseException) -> str:
    """An error as one line, whatever its own text does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "no text"
    return f"{type(error).__name__}: {text}"


@functools.cache
def tell(text: str) -> None:
    """Warn, once in a process for each text."""
    log.warning("ds-gradfix: %s", text)


def require(value: object, hint: Any, name: str) -> None:
    """Raise Misfit, naming the place, unless a value is what a type says, all the way down through tuples, mappings and
    dataclasses. Of a function only that it is one can be said."""
    inner = _hints(hint)
    if inner is not None:
        _require(isinstance(value, hint), value, hint, name)
        for field, field_hint in inner.items():
            require(getattr(value, field), field_hint, f"{name}.{field}")
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        fitting = [one for one in arguments if _is(value, typing.get_origin(one) or one)]
        _require(bool(fitting), value, hint, name)
        require(value, fitting[0], name)
    elif origin in (tuple, collections.abc.Sequence):
        _require(isinstance(value, origin) and not isinstance(value, str), value, hint, name)
        assert isinstance(value, Sequence)
        endless = origin is not tuple or arguments[1:] == (...,)
        _require(endless or len(value) == len(arguments), value, hint, name)
        for place, item in enumerate(value):
            require(item, arguments[0 if endless else place], f"{name}[{place}]")
    elif origin is collections.abc.Mapping:
        _require(isinstance(value, Mapping), value, hint, name)
        assert isinstance(value, Mapping)
        for key, item in value.items():
            require(key, arguments[0], f"a key of {name}")
            require(item, arguments[1], f"{name}[{key!r}]")
    elif origin is collections.abc.Callable:
        _require(callable(value), value, hint, name)
    elif hint is not Any:
        _require(_is(value, hint), value, hint, name)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, (int, float) if kind is float else kind)


@functools.cache
def _hints(hint: Any) -> dict[str, Any] | None:
    """The fields of a dataclass with their types, None for any other type."""
    return typing.get_type_hints(hint) if isinstance(hint, type) and is_dataclass(hint) else None


def _require(fits: bool, value: object, hint: Any, name: str) -> None:
    if not fits:
        wanted = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        plain = wanted.replace("collections.abc.", "").replace("ds_gradfix.registry.", "").replace("typing.", "")
        raise Misfit(f"{name} is of type {type(value).__name__}; allowed is {plain}")


def guarded(
    function: Callable[..., Any],
    hint: Any,
    name: str,
    otherwise: Callable[[str], object],
    passing: tuple[type[BaseException], ...] = (),
) -> Callable[..., Any]:
    """A plug-in's function; gives ``otherwise(problem)`` where it raises, or returns what the type does not allow."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        result, problem = attempt(lambda: function(*arguments), passing)
        if problem is None:
            _, problem = attempt(lambda: require(result, hint, "what it returns"))
        return result if problem is None else otherwise(f"{name}: {problem}")

    return call
