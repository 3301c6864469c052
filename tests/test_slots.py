"""Slots in live modules: what is put in, what is put back, and who is told."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_gradfix import slots
from ds_gradfix.errors import GradfixError, SlotError
from ds_gradfix.slots import Slot, remove

SOURCE = """
import functools

def function(x=1, *, y: int = 2) -> int:
    "Docstring."
    return x + y

class Base:
    def inherited(self):
        return "inherited"

class A(Base):
    attribute = 3

    def __init__(self, n=0):
        self.n = n

    def method(self, x):
        return self.n + x

    def __private(self):
        return "private"

    def call_private(self):
        return self.__private()

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return cls.__name__, x

    @property
    def shown(self):
        return 1

    class Inner:
        def method(self):
            return "inner"

class Sub(A):
    pass
"""

Replacing = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A live module, importable by its name."""
    yield from living("ds_gradfix_test_subject", SOURCE)


@pytest.fixture
def other() -> Iterator[types.ModuleType]:
    yield from living("ds_gradfix_test_other", "")


def living(name: str, source: str) -> Iterator[types.ModuleType]:
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), vars(made))
    yield made
    del sys.modules[name]


def instead(value: Any) -> Replacing:
    return lambda original: lambda *args, **kwargs: value


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    """A correction that asks the original."""
    return lambda *args, **kwargs: ("corrected", original(*args, **kwargs))


def install(module: types.ModuleType, qualname: str, make: Replacing, late: bool) -> Slot:
    slot = slots.install(module, qualname, make)
    if late:
        slots.reach_out([slot])
    return slot


def owner_of(module: types.ModuleType, qualname: str) -> tuple[Any, str]:
    *path, name = qualname.split(".")
    owner: Any = module
    for part in path:
        owner = vars(owner)[part]
    return owner, f"_{path[-1]}{name}" if name.startswith("__") and not name.endswith("__") else name


PLACES = ["function", "A.method", "A.__init__", "A.__private", "A.static", "A.of_class", "A.Inner.method"]


# -------------------------------------------------------------------------- in, and out again


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("qualname", PLACES)
def test_the_very_object_is_put_back(module: types.ModuleType, qualname: str, late: bool) -> None:
    owner, name = owner_of(module, qualname)
    before = dict(vars(owner))
    everything = {key: dict(vars(value)) for key, value in vars(module).items() if isinstance(value, type)}
    for _ in range(3):
        slot = install(module, qualname, instead(0), late)
        assert slot.in_place
        assert (slot.owner, slot.name, slot.raw) == (owner, name, before[name])
        assert vars(owner)[name] is slot.installed is not before[name]
        changed = {key for key in vars(owner) if vars(owner)[key] is not before.get(key)}
        assert changed == {name}, "nothing else is touched"
        remove(slot)
        assert not slot.in_place
        assert vars(owner).keys() == before.keys()
        assert all(vars(owner)[key] is before[key] for key in before)
    for key, content in everything.items():
        assert all(vars(vars(module)[key])[k] is v for k, v in content.items())


@pytest.mark.parametrize("qualname", PLACES)
def test_the_original_that_a_correction_gets_is_the_plain_function(module: types.ModuleType, qualname: str) -> None:
    owner, name = owner_of(module, qualname)
    raw = vars(owner)[name]
    got: list[Any] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        got.append(original)
        return lambda *args: None

    install(module, qualname, make, late=False)
    assert got == [raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw]
    assert isinstance(got[0], types.FunctionType)


def test_kinds_of_methods_stay_what_they_are(module: types.ModuleType) -> None:
    for qualname, kind in (("A.static", staticmethod), ("A.of_class", classmethod), ("A.method", types.FunctionType)):
        slot = install(module, qualname, around, late=False)
        assert type(slot.installed) is kind
    assert module.A.static(5) == module.A().static(5) == ("corrected", 5)
    assert module.A.of_class(5) == ("corrected", ("A", 5))
    assert module.Sub.of_class(5) == ("corrected", ("Sub", 5))
    assert module.Sub(2).method(5) == ("corrected", 7)


def test_a_private_method_is_reached_by_its_mangled_name(module: types.ModuleType) -> None:
    slot = install(module, "A.__private", around, late=False)
    assert slot.name == "_A__private"
    assert module.A().call_private() == ("corrected", "private")
    assert module.Sub().call_private() == ("corrected", "private")


def test_a_correction_looks_like_what_it_stands_for(module: types.ModuleType) -> None:
    original = module.function
    original.note = "kept"
    install(module, "function", around, late=False)
    made = module.function
    assert (made.__name__, made.__qualname__, made.__doc__, made.__module__, made.note) == (
        *(original.__name__, original.__qualname__, original.__doc__, original.__module__),
        "kept",
    )
    assert inspect.signature(made) == inspect.signature(original)
    assert made.__wrapped__ is original
    assert made(2, y=3) == ("corrected", 5)
    assert not hasattr(original, "__ds_gradfix__"), "the original is not marked"


def test_objects_that_exist_already_are_corrected_and_uncorrected(module: types.ModuleType) -> None:
    a = module.A(1)
    slot = install(module, "A.method", around, late=True)
    assert a.method(1) == ("corrected", 2)
    remove(slot)
    assert a.method(1) == 2


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("qualname", "named"),
    [
        ("absent", "no such function"),
        ("A.absent", "no such function"),
        ("A.inherited", "no such function"),
        ("A.attribute", "no such function"),
        ("A.shown", "no such function"),
        ("Absent.method", "no class 'Absent'"),
        ("A.Absent.method", "no class 'Absent'"),
        ("function.method", "no class 'function'"),
        ("A.__absent", "no such function"),
    ],
)
def test_a_place_that_is_not_there_is_refused_by_name(module: types.ModuleType, qualname: str, named: str) -> None:
    before = {key: dict(vars(value)) for key, value in vars(module).items() if isinstance(value, type)}
    with pytest.raises(SlotError, match=named) as caught:
        install(module, qualname, instead(0), late=True)
    assert f"{module.__name__}:{qualname}" in str(caught.value)
    assert isinstance(caught.value, GradfixError)
    assert before == {key: dict(vars(value)) for key, value in vars(module).items() if isinstance(value, type)}


@pytest.mark.parametrize("qualname", PLACES)
def test_a_second_owner_is_told_the_first(module: types.ModuleType, qualname: str) -> None:
    slot = install(module, qualname, instead(1), late=False)
    with pytest.raises(SlotError) as caught:
        install(module, qualname, instead(2), late=False)
    text = str(caught.value)
    assert f"{module.__name__}:{qualname} is corrected already, by ds-gradfix" in text
    assert slot.in_place, "the first owner stays"


def test_a_maker_that_fails_leaves_the_place_as_it_was(module: types.ModuleType) -> None:
    before = module.A.__dict__["method"]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        install(module, "A.method", make, late=True)
    assert module.A.__dict__["method"] is before


@pytest.mark.parametrize("qualname", ["function", "A.method", "A.static"])
def test_a_foreign_replacement_is_left_alone_and_named(module: types.ModuleType, qualname: str) -> None:
    owner, name = owner_of(module, qualname)
    slot = install(module, qualname, instead(1), late=False)

    def foreign_tool(*args: Any) -> str:
        return "foreign"

    setattr(owner, name, foreign_tool)
    assert not slot.in_place
    with pytest.raises(SlotError) as caught:
        remove(slot)
    text = str(caught.value)
    assert str(slot) in text and "foreign_tool" in text and __name__ in text
    assert vars(owner)[name] is foreign_tool
    setattr(owner, name, slot.installed)
    remove(slot)
    assert vars(owner)[name] is slot.raw


def test_a_place_that_has_been_deleted_or_holds_an_oddity_is_refused_too(module: types.ModuleType) -> None:
    slot = install(module, "A.method", instead(1), late=False)
    del module.A.method
    with pytest.raises(SlotError, match="not ours to undo"):
        remove(slot)
    module.A.method = 3
    with pytest.raises(SlotError, match="not ours to undo"):
        remove(slot)
    assert module.A.method == 3


def test_removing_changes_no_alias_when_it_refuses(module: types.ModuleType, other: types.ModuleType) -> None:
    other.alias = module.function
    slot = install(module, "function", instead(1), late=True)
    module.function = print
    with pytest.raises(SlotError):
        remove(slot)
    assert other.alias is slot.installed


def test_a_place_that_a_foreign_tool_holds_is_refused_when_installing(module: types.ModuleType) -> None:
    """The plan has recognised the source in the file. What stands there is something else: correcting it is a guess."""

    def foreign_tool(self: Any, x: Any) -> str:
        return "foreign"

    module.A.method = foreign_tool
    with pytest.raises(SlotError, match="foreign_tool"):
        install(module, "A.method", instead(1), late=True)
    assert module.A.method is foreign_tool


# --------------------------------------------------------------------------------- aliases


def test_names_in_other_modules_are_corrected_and_undone(module: types.ModuleType, other: types.ModuleType) -> None:
    """``from module import function`` and ``as`` another name, before we came."""
    original = other.function = other.renamed = module.function
    other.unrelated = print
    slot = install(module, "function", instead("corrected"), late=True)
    assert sorted((holder.__name__, name) for holder, name, _ in slot.aliases) == [
        (other.__name__, "function"),
        (other.__name__, "renamed"),
    ]
    assert other.function() == other.renamed() == module.function() == "corrected"
    assert other.unrelated is print
    remove(slot)
    assert other.function is other.renamed is module.function is original


def test_a_method_taken_out_of_its_class_is_corrected_and_undone(
    module: types.ModuleType, other: types.ModuleType
) -> None:
    original = other.taken = module.A.method
    slot = install(module, "A.method", instead("corrected"), late=True)
    assert other.taken() == "corrected"
    remove(slot)
    assert other.taken is original


def test_a_static_method_taken_out_of_its_class_is_corrected_or_named(
    module: types.ModuleType, other: types.ModuleType
) -> None:
    other.taken = module.A.static
    slot = install(module, "A.static", instead("corrected"), late=True)
    assert other.taken(1) == "corrected" or slot.held_elsewhere


@pytest.mark.parametrize("late", [False, True])
def test_a_second_name_in_the_defining_module_is_corrected_or_named(late: bool) -> None:
    """``old_name = new_name`` at the end of a module is there before any hook can run."""
    for module in living("ds_gradfix_test_own_alias", "def function(): return 1\nold_name = function\n"):
        slot = install(module, "function", instead("corrected"), late)
        assert module.old_name() == "corrected" or any("old_name" in said for said in slot.held_elsewhere)


def test_a_name_that_somebody_has_changed_since_is_left_to_them(
    module: types.ModuleType, other: types.ModuleType
) -> None:
    other.alias = module.function
    slot = install(module, "function", instead(1), late=True)
    other.alias = print
    remove(slot)
    assert other.alias is print


def test_early_means_nobody_else_can_have_it(module: types.ModuleType, other: types.ModuleType) -> None:
    slot = install(module, "function", instead(1), late=False)
    assert (slot.aliases, slot.held_elsewhere) == ([], [])


# ----------------------------------------------------------------------------- other holders


class Plain:
    """Something with attributes."""


def held(module: types.ModuleType, qualname: str = "function") -> Slot:
    gc.collect()
    return install(module, qualname, instead("corrected"), late=True)


def test_nobody_is_named_where_nobody_holds_it(module: types.ModuleType) -> None:
    for qualname in PLACES:
        assert held(module, qualname).held_elsewhere == [], qualname


def test_a_bound_method_is_named(module: types.ModuleType) -> None:
    bound = module.A(1).method
    assert held(module, "A.method").held_elsewhere == ["a bound method of A"]
    assert bound(1) == 2


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, functools.partial])
def test_containers_are_named(module: types.ModuleType, kind: Any) -> None:
    holder = kind(module.function) if kind is functools.partial else kind([module.function])
    said = held(module).held_elsewhere
    assert len(said) == 1 and kind.__name__ in said[0], said
    assert holder


def test_a_dictionary_is_named_with_the_key(module: types.ModuleType) -> None:
    holder = {"hook": module.function}
    assert held(module).held_elsewhere == ["a dictionary, under 'hook'"]
    assert holder


@pytest.mark.parametrize("dictionary_was_asked_for", [False, True])
def test_an_object_that_keeps_it_as_an_attribute_is_named(
    module: types.ModuleType, dictionary_was_asked_for: bool
) -> None:
    """From Python 3.11 an object may keep its attributes without a dictionary."""
    holder = Plain()
    if dictionary_was_asked_for:
        assert holder.__dict__ == {}
    holder.hook = module.function
    (said,) = held(module).held_elsewhere
    assert "Plain" in said


def test_a_class_that_keeps_it_as_an_attribute_is_named(module: types.ModuleType) -> None:
    class Borrower:
        hook = module.function

    (said,) = held(module).held_elsewhere
    assert "Borrower" in said and "hook" in said


def test_a_closure_that_calls_it_is_named(module: types.ModuleType) -> None:
    """A foreign decorator: ``wrapped`` goes on calling the stock function."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped() -> Any:
            return function()

        return wrapped

    wrapped = decorate(module.function)
    slot = held(module)
    assert wrapped() == "corrected" or slot.held_elsewhere


def test_a_default_value_that_keeps_it_is_named(module: types.ModuleType) -> None:
    def caller(function: Callable[..., Any] = module.function) -> Any:
        return function()

    assert held(module).held_elsewhere
    assert caller() == 3


def test_holders_that_misbehave_harm_nobody(module: types.ModuleType) -> None:
    class NoRepr:
        def __repr__(self) -> str:
            raise ValueError("no repr for you")

    class NoAttributes:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no attributes either")

    first, second = NoRepr(), NoAttributes()
    assert first.__dict__ == {}
    first.hook = module.function
    object.__setattr__(second, "hook", module.function)
    slot = held(module)
    assert slot.in_place
    assert slot.held_elsewhere


# -------------------------------------------------------------------------- copies and pickles


class Holder:
    """An object whose attribute is a bound method, as optimizers and hooks have."""

    def __init__(self, bound: Any) -> None:
        self.bound = bound


@pytest.mark.parametrize("corrected", [False, True])
def test_objects_with_bound_methods_are_copied_and_pickled_as_before(module: types.ModuleType, corrected: bool) -> None:
    if corrected:
        install(module, "A.method", around, late=False)
    expected = ("corrected", 3) if corrected else 3
    holder = Holder(module.A(1).method)
    for again in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert again.bound(2) == expected
        assert again.bound.__self__ is not holder.bound.__self__
        again.bound.__self__.n = 10
        assert holder.bound(2) == expected


def test_a_corrected_function_is_pickled_by_its_name(module: types.ModuleType) -> None:
    slot = install(module, "function", around, late=False)
    data = pickle.dumps(module.function)
    assert pickle.loads(data) is slot.installed
    assert copy.deepcopy(module.function) is slot.installed
    remove(slot)
    assert pickle.loads(data) is slot.raw
