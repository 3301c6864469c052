"""Settings and their precedence: the one place that knows either.

The rule: an argument of ``enable()`` outranks a ``DS_GRADFIX_*`` variable, which outranks the
``"ds_gradfix"`` section of the DeepSpeed configuration, which outranks the default. Each setting
is decided by itself, by the highest place that gives it.

Patches go into the process once, before any configuration is read: ``only`` and ``exclude`` of the
first two places decide what goes in, those of a configuration what is in force for its engine, and
``force`` and ``plugins`` can't stand in a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ds_gradfix.errors import SettingsError

SECTION = "ds_gradfix"
VARIABLE_PREFIX = "DS_GRADFIX_"
ARGUMENT = "enable() argument "
OFF_WORDS = ("", "0", "off", "false", "no")
ON_WORDS = ("1", "on", "true", "yes")
FOR_THE_PROCESS = ("force", "plugins")
"""Settings that are too late in a configuration."""


LONGEST = 200
"""How many characters of a value an error shows."""


def _shown(value: object) -> str:
    """A value in an error: one line, not longer than it helps."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, lists nested too deep
        text = f"<{type(value).__name__}>"
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def _names(key: str, value: Any) -> tuple[str, ...]:
    """A patch id, several separated by commas, or a list of them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        names = list(value)
        if all(isinstance(part, str) for part in names):
            # A set's order differs from process to process, and the ranks compare their settings.
            return tuple(sorted(names) if isinstance(value, Set) else names)
    raise SettingsError(f"{key}: {_shown(value)} is neither a patch id nor a list of patch ids (see 'ds-gradfix list')")


def _switch(key: str, value: Any) -> bool:
    """true or false; as a word also 1, on, yes, 0, off, no."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if word in ON_WORDS:
        return True
    if word in OFF_WORDS:
        return False
    raise SettingsError(f"{key}: {_shown(value)} is not allowed; allowed are true and false")


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def read(key: str, value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word in allowed:
            return str(word)
        raise SettingsError(f"{key}: {_shown(value)} is not allowed; allowed are {', '.join(map(repr, allowed))}")

    read.__doc__ = f"{' or '.join(map(repr, allowed))}."
    return read


def _setting(read: Callable[[str, Any], Any], default: Any, doc: str) -> Any:
    """``read(key, value)`` returns what a value means; its docstring says in words what is allowed."""
    return field(default=default, metadata={"read": read, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Every setting, decided."""

    only: tuple[str, ...] | None = _setting(
        _names, None, "Correct only with these patches; source of theirs that is not recognised is an error."
    )
    exclude: tuple[str, ...] = _setting(_names, (), "Leave these patches out.")
    force: tuple[str, ...] = _setting(
        _names, (), "Let these patches act on source that is not recognised. The self-check still decides."
    )
    plugins: bool = _setting(
        _switch, True, "Use the patches that other installed distributions offer; off, nothing of theirs is loaded."
    )
    strict: bool = _setting(_switch, False, "Raise where ds-gradfix would otherwise leave something alone and say so.")
    self_check: str = _setting(
        _one_of("error", "warn", "off"),
        "error",
        "At engine init: 'error' stops the job when a correction does not measure right or the ranks"
        " differ, 'warn' says so and goes on, 'off' measures nothing.",
    )
    sequence_parallel_reduction: str | None = _setting(
        _one_of("sum", "mean"),
        None,
        "What a mean does over the shards of a sequence, on every ZeRO stage alike. 'sum', DeepSpeed's own, is right"
        " where each rank's backward yields only its own shard's part of the gradient (Megatron-DeepSpeed); 'mean'"
        " where the loss is the mean of the rank's own shard, or combined over shards by a differentiable all-gather"
        " (Transformers, the ALST recipe). By default a known framework's own loss decides, else 'sum'.",
    )
    audit: bool = _setting(
        _switch,
        False,
        "At the first step that is taken, compare the gradients that the optimizer is about to use, and their norm,"
        " with ones reduced independently in float64. What is wrong is said; with strict it stops the job.",
    )

    def selects(self, patch_id: str) -> bool:
        return patch_id not in self.exclude and (self.only is None or patch_id in self.only)

    def why_not_selected(self, patch_id: str) -> str:
        return "exclude" if patch_id in self.exclude else "only"


def read_values(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Check names and values of one place; ``prefix`` stands before a key in an error.

    Raises SettingsError naming the key, the value, what is allowed, and the near miss if one.
    """
    known = {setting.name: setting for setting in fields(Settings)}
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(prefix + _no_such(key, known, "setting"))
        if value is not None:
            read[key] = known[key].metadata["read"](f"{prefix}{key}", value)
    return read


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"{VARIABLE_PREFIX}{name.upper()}"


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that variables give; an empty one gives nothing.

    Raises SettingsError for a variable with our prefix that is no setting: a typing error there
    would otherwise be a silent no-op.
    """
    read: dict[str, Any] = {}
    known = {variable(setting.name): setting for setting in fields(Settings)}
    for name, raw in environ.items():
        if not name.startswith(VARIABLE_PREFIX):
            continue
        if name not in known:
            raise SettingsError(_no_such(name, known, "variable"))
        if raw.strip():
            read[known[name].name] = known[name].metadata["read"](name, raw)
    return read


def plugins_allowed(environ: Mapping[str, str]) -> bool:
    """The setting ``plugins`` where there are no arguments, whatever other variables say."""
    name = variable("plugins")
    allowed: bool = read_environment({name: environ.get(name, "")}).get("plugins", Settings.plugins)
    return allowed


def resolve(
    arguments: Mapping[str, Any], environ: Mapping[str, str], section: Mapping[str, Any] | None = None
) -> Settings:
    """Decide every setting by the rule above. Raises SettingsError as the readers do."""
    return Settings(
        **{
            **read_section(section or {}),
            **read_environment(environ),
            **read_values(arguments, ARGUMENT),
        }
    )


def _no_such(name: object, known: Iterable[str], what: str) -> str:
    known = list(known)
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > LONGEST:
        name = _shown(name)
    # Without the common prefix, which would make every variable look near.
    suffixes = {key.removeprefix(VARIABLE_PREFIX): key for key in known}
    near = [suffixes[key] for key in get_close_matches(name.removeprefix(VARIABLE_PREFIX), suffixes, n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name}: there is no such {what}{hint} Allowed are: {', '.join(known)}"


def read_section(section: Any) -> dict[str, Any]:
    """Check a configuration's ``"ds_gradfix"`` section."""
    if not isinstance(section, Mapping):
        example = '{"self_check": "warn"}'
        raise SettingsError(f'"{SECTION}": {_shown(section)} is not allowed; it is an object, such as {example}')
    for key in FOR_THE_PROCESS:
        if key in section:
            raise SettingsError(
                f'"{SECTION}": {key}: not allowed in a configuration, which is read when the patches are in place'
                f" already; set {variable(key)} or enable({key}=...)"
            )
    return read_values(section, f'"{SECTION}": ')
