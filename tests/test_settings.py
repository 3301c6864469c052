"""The rule of precedence, and what every bad setting is answered with."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from ds_gradfix.errors import GradfixError, SettingsError
from ds_gradfix.preprocess import section_of
from ds_gradfix.settings import (
    FOR_THE_PROCESS,
    OFF_WORDS,
    ON_WORDS,
    Settings,
    read_environment,
    read_section,
    read_values,
    resolve,
    variable,
)

NAMES = tuple(setting.name for setting in fields(Settings))
SECTION_NAMES = tuple(name for name in NAMES if name not in FOR_THE_PROCESS)
SELF_CHECK_LEVELS = ("error", "warn", "off")

# For each setting: its default, and as (written, read) a value for each place, highest first, all different where the
# setting has that many values.
VALUES: dict[str, tuple[Any, tuple[tuple[Any, Any], tuple[str, Any], tuple[Any, Any]]]] = {
    "only": (None, ((["a"], ("a",)), ("b", ("b",)), (["c"], ("c",)))),
    "exclude": ((), ((["a"], ("a",)), ("b", ("b",)), (["c"], ("c",)))),
    "force": ((), ((["a"], ("a",)), ("b", ("b",)), (["c"], ("c",)))),
    "plugins": (True, ((False, False), ("on", True), (False, False))),
    "strict": (False, ((True, True), ("off", False), (True, True))),
    "self_check": ("error", (("off", "off"), ("warn", "warn"), ("error", "error"))),
    "sequence_parallel_reduction": (None, (("sum", "sum"), ("mean", "mean"), ("sum", "sum"))),
    "audit": (False, ((True, True), ("off", False), (True, True))),
}


def test_the_table_of_values_covers_every_setting() -> None:
    assert set(VALUES) == set(NAMES)
    assert {name: getattr(Settings(), name) for name in NAMES} == {name: VALUES[name][0] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("places", list(itertools.product((False, True), repeat=3)), ids=str)
def test_the_highest_place_that_gives_a_setting_decides_it(name: str, places: tuple[bool, bool, bool]) -> None:
    default, (argument, in_environment, in_section) = VALUES[name]
    by_argument, by_environment, by_section = places
    if by_section and name in FOR_THE_PROCESS:
        pytest.skip("see test_what_is_for_the_whole_process_is_refused_in_a_section")
    settings = resolve(
        {name: argument[0]} if by_argument else {},
        {variable(name): in_environment[0]} if by_environment else {},
        {name: in_section[0]} if by_section else {},
    )
    if by_argument:
        expected = argument[1]
    elif by_environment:
        expected = in_environment[1]
    elif by_section:
        expected = in_section[1]
    else:
        expected = default
    assert getattr(settings, name) == expected
    others = {other: getattr(settings, other) for other in NAMES if other != name}
    assert others == {other: getattr(Settings(), other) for other in others}, "a setting is decided by itself"


def test_each_setting_is_decided_by_itself_when_all_places_speak() -> None:
    """Any assignment of settings to places, against the rule written out again."""
    rng = random.Random(20)
    for _ in range(300):
        given: list[dict[str, Any]] = [
            {name: VALUES[name][1][place][0] for name in names if rng.random() < 0.5}
            for place, names in enumerate((NAMES, NAMES, SECTION_NAMES))
        ]
        environ = {variable(name): value for name, value in given[1].items()}
        settings = resolve(given[0], environ, given[2])
        for name in NAMES:
            default, values = VALUES[name]
            expected = next((values[place][1] for place in range(3) if name in given[place]), default)
            assert getattr(settings, name) == expected, (name, given)


def test_an_argument_that_turns_something_off_still_outranks() -> None:
    """False, an empty list and 'off' are values, not absences."""
    settings = resolve(
        {"strict": False, "exclude": [], "self_check": "off"},
        {"DS_GRADFIX_STRICT": "1", "DS_GRADFIX_EXCLUDE": "x", "DS_GRADFIX_SELF_CHECK": "error"},
        {"strict": True},
    )
    assert (settings.strict, settings.exclude, settings.self_check) == (False, (), "off")


@pytest.mark.parametrize("place", ["argument", "section"])
def test_none_gives_nothing(place: str) -> None:
    nothing = dict.fromkeys(NAMES if place == "argument" else SECTION_NAMES)
    environ = {"DS_GRADFIX_STRICT": "yes"}
    settings = resolve(nothing, environ) if place == "argument" else resolve({}, environ, nothing)
    assert settings == Settings(strict=True)


@pytest.mark.parametrize("raw", ["", " ", "\t\n"])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_variable_gives_nothing(name: str, raw: str) -> None:
    assert read_environment({variable(name): raw}) == {}


def test_foreign_variables_are_not_ours() -> None:
    foreign = {"DS_GRADFIX": "1", "PYTHON_DS_GRADFIX": "1", "DS_ACCELERATOR": "cpu", "MY_DS_GRADFIX_STRICT": "maybe"}
    assert read_environment(foreign) == {}


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("word", [w for word in ON_WORDS for w in (word, word.upper(), f" {word.title()}\n")])
def test_words_for_on(word: str) -> None:
    assert read_values({"strict": word}, "") == {"strict": True}


@pytest.mark.parametrize("word", [w for word in OFF_WORDS for w in (word, word.upper(), f" {word.title()}\n")])
def test_words_for_off(word: str) -> None:
    assert read_values({"strict": word}, "") == {"strict": False}


@pytest.mark.parametrize("level", SELF_CHECK_LEVELS)
def test_levels(level: str) -> None:
    assert read_environment({"DS_GRADFIX_SELF_CHECK": f" {level.upper()} "}) == {"self_check": level}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        (" a , b ,", ("a", "b")),
        (",", ()),
        ("", ()),
        (["a", "b"], ("a", "b")),
        (("a", "b"), ("a", "b")),
        ({"a"}, ("a",)),
        (frozenset({"a"}), ("a",)),
        ([], ()),
    ],
)
@pytest.mark.parametrize("key", ["only", "exclude", "force"])
def test_lists_of_patches(key: str, written: Any, read: tuple[str, ...]) -> None:
    assert read_values({key: written}, "") == {key: read}


def test_every_iterable_of_ids_is_taken_as_enable_promises() -> None:
    """``enable(only: Iterable[str])``: a generator and the keys of a dict are iterables too."""
    assert read_values({"only": (name for name in ("a", "b"))}, "") == {"only": ("a", "b")}
    assert read_values({"only": {"a": 1}.keys()}, "") == {"only": ("a",)}


def test_a_set_reads_the_same_on_every_rank() -> None:
    """Ranks compare their settings; the order of a set differs between processes."""
    script = "from ds_gradfix.settings import resolve; print(resolve({'exclude': set('abcdefgh')}, {}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1, said


def test_selection() -> None:
    assert Settings().selects("x")
    assert not Settings(exclude=("x",)).selects("x")
    assert Settings(only=("x",)).selects("x")
    assert not Settings(only=("y",)).selects("x")
    assert not Settings(only=()).selects("x")
    assert not Settings(only=("x",), exclude=("x",)).selects("x")
    assert Settings(exclude=("x",)).why_not_selected("x") == "exclude"
    assert Settings(only=("y",)).why_not_selected("x") == "only"


# ------------------------------------------------------------------------------------ errors


def refusal(place: str, key: str, value: Any) -> str:
    """The message that a value is refused with in one place."""
    with pytest.raises(SettingsError) as caught:
        if place == "argument":
            resolve({key: value}, {})
        elif place == "variable":
            resolve({}, {variable(key): value})
        else:
            resolve({}, {}, {key: value})
    assert isinstance(caught.value, GradfixError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


KEY_AS_WRITTEN = {
    "argument": "enable() argument {}",
    "section": '"ds_gradfix": {}',
    "variable": "DS_GRADFIX_{}",
}


def key_as_written(place: str, key: str) -> str:
    return KEY_AS_WRITTEN[place].format(key.upper() if place == "variable" else key)


BAD_SWITCHES = ["maybe", "2", 2, -1, 1.0, 0.0, "tru", "nope", [], {}, [True], b"true", object()]
BAD_LEVELS = ["eror", "errors", "", True, False, 0, 1, ["error"], {"error": 1}, b"error", "error,warn"]
BAD_LISTS = [1, True, False, 1.5, {"a": 1}, [1], ["a", None], ("a", b"b"), b"a", object(), [["a"]]]


@pytest.mark.parametrize("place", ["argument", "section"])
@pytest.mark.parametrize("value", BAD_SWITCHES, ids=lambda value: f"{type(value).__name__} {value}"[:20])
def test_a_bad_switch_is_refused_with_key_value_and_what_is_allowed(place: str, value: Any) -> None:
    text = refusal(place, "strict", value)
    assert text.startswith(key_as_written(place, "strict"))
    assert repr(value) in text
    assert "true" in text and "false" in text


@pytest.mark.parametrize("place", ["argument", "section"])
@pytest.mark.parametrize("value", BAD_LEVELS, ids=repr)
def test_a_bad_level_is_refused_with_key_value_and_what_is_allowed(place: str, value: Any) -> None:
    text = refusal(place, "self_check", value)
    assert text.startswith(key_as_written(place, "self_check"))
    assert repr(value) in text
    assert all(repr(level) in text for level in SELF_CHECK_LEVELS)


@pytest.mark.parametrize(
    ("place", "key"),
    [("argument", "only"), ("argument", "exclude"), ("argument", "force"), ("section", "only"), ("section", "exclude")],
)
@pytest.mark.parametrize("value", BAD_LISTS, ids=lambda value: type(value).__name__)
def test_a_bad_list_is_refused_with_key_value_and_what_is_allowed(place: str, key: str, value: Any) -> None:
    text = refusal(place, key, value)
    assert text.startswith(key_as_written(place, key))
    assert repr(value) in text
    assert "patch id" in text


@pytest.mark.parametrize("key", FOR_THE_PROCESS)
def test_what_is_for_the_whole_process_is_refused_in_a_section(key: str) -> None:
    """It is decided before a configuration is read: never silently not."""
    text = refusal("section", key, VALUES[key][1][0][0])
    assert text.startswith(f'"ds_gradfix": {key}: not allowed in a configuration') and variable(key) in text


@pytest.mark.parametrize("key, raw", [("strict", "maybe"), ("self_check", "eror")])
def test_a_bad_variable_is_refused_under_its_own_name(key: str, raw: str) -> None:
    text = refusal("variable", key, raw)
    assert text.startswith(variable(key))
    assert repr(raw) in text


@pytest.mark.parametrize(
    ("place", "key", "near"),
    [
        ("argument", "onyl", "only"),
        ("argument", "self_chek", "self_check"),
        ("section", "self-check", "self_check"),
        ("section", "excludes", "exclude"),
        ("section", "Strict", "strict"),
        ("variable", "stric", "DS_GRADFIX_STRICT"),
        ("variable", "self_check_", "DS_GRADFIX_SELF_CHECK"),
    ],
)
def test_an_unknown_name_is_refused_with_its_near_miss(place: str, key: str, near: str) -> None:
    text = refusal(place, key, "1")
    assert text.startswith(key_as_written(place, key) + ":")
    assert f"did you mean {near!r}?" in text
    allowed = text.partition("Allowed are: ")[2].split(", ")
    assert allowed == [variable(name) if place == "variable" else name for name in NAMES]


@pytest.mark.parametrize("place", ["argument", "section", "variable"])
def test_a_name_that_is_near_nothing_gets_no_near_miss(place: str) -> None:
    text = refusal(place, "zzqq", "1")
    assert key_as_written(place, "zzqq") in text
    assert "did you mean" not in text


def test_an_unknown_name_is_refused_even_without_a_value() -> None:
    assert "self_chek" in refusal("section", "self_chek", None)
    assert "DS_GRADFIX_ONYL" in refusal("variable", "onyl", "")


@pytest.mark.parametrize("key", [1, None, True, ("only",), 1.5], ids=repr)
def test_a_name_that_is_no_text_is_refused(key: Any) -> None:
    with pytest.raises(SettingsError, match="there is no such setting"):
        read_section({key: "x"})


@pytest.mark.parametrize("section", [None, True, 0, "off", [], ["only"], 1.5, b"{}"], ids=repr)
def test_a_section_that_is_no_object_is_refused(section: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        read_section(section)
    assert '"ds_gradfix"' in str(caught.value)
    assert repr(section) in str(caught.value)


# --------------------------------------------------------------------------------------- fuzz

CANARY = "ds_gradfix_canary"
CODE = (
    f"__import__('sys').modules.setdefault('{CANARY}', 1)",
    f"');__import__('sys').modules.setdefault('{CANARY}', 1)#",
    f"!!python/object/apply:os.putenv ['{CANARY}', '1']",
    f"$(touch {CANARY})",
    "{0.__class__.__mro__}",
    "%s%n%(name)s",
)
PLAIN = ("", " ", "x", "off", "1", "a,b", ",,", "é")
TEXTS = (*PLAIN, "\x00", "\n\r\u2028", "\ud800", "\udcff", "\x1b[31m", "x" * 5000, *CODE)
ATOMS = (None, True, False, 0, 1, -3, 2**63, 2.5, -0.0, float("nan"), float("inf"), *TEXTS)
BEYOND_JSON = (10**5000, b"x", ..., int, {"a"}, object())
KEYS = (*NAMES, *(name.upper() for name in NAMES), "self-check", *TEXTS)


def odd(rng: random.Random, atoms: tuple[Any, ...] = ATOMS, depth: int = 3) -> Any:
    """A value of any JSON type, some of them odd."""
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return [odd(rng, atoms, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return {rng.choice(KEYS): odd(rng, atoms, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice(atoms)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def is_one_line_of(text: str, names: list[str]) -> bool:
    """Whether it can be logged anywhere, is short, and names one of these keys, as it is or as a literal."""
    named = any(name in text or repr(name)[:100] in text for name in names)
    return text.isprintable() and len(text) < 1000 and len(text.encode()) > 0 and named


def test_whatever_stands_in_a_section_is_read_or_refused() -> None:
    """A checked value of the setting's type, or a SettingsError in one line that names the key; nothing is run."""
    rng = random.Random(5)
    types = {name: type(VALUES[name][1][0][1]) for name in NAMES}
    read = refused = 0
    for turn in range(4000):
        atoms = (*ATOMS, *BEYOND_JSON) if turn % 2 else ATOMS
        key = rng.choice(NAMES if rng.random() < 0.7 else KEYS)
        value = nested(50_000) if turn == 9 else odd(rng, atoms)
        section = value if rng.random() < 0.1 else {key: value}
        names = list(section) if isinstance(section, dict) else []
        try:
            settings = resolve({}, {}, read_section(section))
        except SettingsError as error:
            refused += 1
            assert is_one_line_of(str(error), [*names, "ds_gradfix"] if not names else names), (section, str(error))
        else:
            read += 1
            for name in names:
                assert section[name] is None or isinstance(getattr(settings, name), types[name]), section
    assert read > 200 and refused > 2000
    assert CANARY not in sys.modules and not os.path.exists(CANARY) and CANARY not in os.environ


def test_whatever_a_variable_holds_is_read_or_refused() -> None:
    rng = random.Random(6)
    words = (*TEXTS, *ON_WORDS, *OFF_WORDS, *SELF_CHECK_LEVELS, "sum", "zero3-scatter-scale")
    read = refused = 0
    for _ in range(4000):
        name = variable(rng.choice(NAMES)) if rng.random() < 0.7 else f"DS_GRADFIX_{rng.choice(KEYS)}"
        value = "".join(rng.choice(words) for _ in range(rng.randrange(1, 3)))
        try:
            settings = resolve({}, {name: value})
        except SettingsError as error:
            refused += 1
            assert is_one_line_of(str(error), [name]), (name, value, str(error))
        else:
            read += 1
            assert not value.strip() or name in map(variable, NAMES), name
            assert isinstance(settings, Settings)
    assert read > 1000 and refused > 1000
    assert CANARY not in sys.modules and not os.path.exists(CANARY) and CANARY not in os.environ


def test_a_whole_configuration_of_nonsense_is_read_or_refused() -> None:
    """In each form that DeepSpeed takes; what is no configuration at all is left for DeepSpeed to say."""
    rng = random.Random(7)
    for turn in range(1000):
        config = {"ds_gradfix": odd(rng)} if turn % 2 else odd(rng)
        text = json.dumps(config, default=str) if turn % 3 else "".join(rng.choices('[]{}":,\\ \x00é0', k=30))
        for form in (config, text, base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()):
            try:
                assert isinstance(section_of(form), dict)
            except SettingsError as error:
                assert is_one_line_of(str(error), ["ds_gradfix"])
    assert section_of(base64.urlsafe_b64encode(b"[" * 100_000).decode()) == {}
    assert CANARY not in sys.modules and not os.path.exists(CANARY) and CANARY not in os.environ
