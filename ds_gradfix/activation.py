"""Turning ds-gradfix on and off in this process: hooks on DeepSpeed's own submodules, late or early.

The street: settings -> plan -> hooks -> slots -> engine init (engage, prove, say) -> first step (audit) -> training.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakSet

import wrapt

from ds_gradfix import _boot, older, slots
from ds_gradfix.engine import (
    ATTRIBUTE,
    AUDIT,
    Engagement,
    disengage,
    engage,
    insist_on,
    leave_together,
    prove,
    refused_option,
    report,
    settle,
    withdraw,
)
from ds_gradfix.errors import GradfixError, PlanError, SettingsError, SlotError
from ds_gradfix.installed import find_installed
from ds_gradfix.launcher import RUNNER_INIT, wrap_runner_init
from ds_gradfix.preprocess import read_config, section_of
from ds_gradfix.registry import (
    Finding,
    Known,
    Option,
    Plan,
    Replace,
    Rewrite,
    Steer,
    Target,
    Verdict,
    check_names,
    discover,
    insist,
    make_plan,
)
from ds_gradfix.settings import ARGUMENT, Settings, read_values, resolve
from ds_gradfix.source import recompile, rewrite

log = logging.getLogger("ds_gradfix")

__all__ = ["disable", "enable", "enable_from_environment", "report", "status"]

ENGINE_INIT = Target("deepspeed.runtime.engine", "DeepSpeedEngine.__init__")
CONFIG_INIT = Target("deepspeed.runtime.config", "DeepSpeedConfig.__init__")


@dataclass
class _State:
    """What is on in this process."""

    enabled: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    last_settings: Settings = field(default_factory=Settings)
    """The same under the section of the configuration that was read last: the one of an engine in the making."""
    plan: Plan | None = None
    outlived: list[slots.Slot] = field(default_factory=list)
    """Slots in classes that importlib.reload has replaced, and whose objects may live on."""
    slots: dict[Target, slots.Slot] = field(default_factory=dict)
    problems: dict[Target, str] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)
    engines: WeakSet[Any] = field(default_factory=WeakSet)
    engines_seen: int = 0
    looks_back: int = 0


_state = _State()
_lock = threading.RLock()


def enable(
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    force: Iterable[str] | None = None,
    plugins: bool | None = None,
    strict: bool | None = None,
    self_check: str | None = None,
    sequence_parallel_reduction: str | None = None,
    audit: bool | None = None,
) -> None:
    """Correct DeepSpeed in this process, from now on; before or after it is imported.

    An argument left at None is decided by its variable, the configuration or its default; see
    ds_gradfix.settings for what each means and for the rule. Calling it again with the same
    arguments does nothing; with others, they take effect. Engines that exist already are engaged and
    proved at once, which all ranks must then do together.

    Raises SettingsError for a name or value that is not allowed, PlanError where a patch that was
    asked for by name, or any in strict mode, can't act here, and SelfCheckError and AuditError as engine init does.
    """
    given = {
        "only": only,
        "exclude": exclude,
        "force": force,
        "plugins": plugins,
        "strict": strict,
        "self_check": self_check,
        "sequence_parallel_reduction": sequence_parallel_reduction,
        "audit": audit,
    }
    _enable({key: value for key, value in given.items() if value is not None})


def enable_from_environment() -> None:
    """What start-up activation calls: :func:`enable` without arguments, unless it is on already."""
    if not _state.enabled:
        _enable({})


def _enable(arguments: dict[str, Any]) -> None:
    with _lock:
        arguments = read_values(arguments, ARGUMENT)  # read once: an iterator is empty the second time
        settings = resolve(arguments, os.environ)
        if _state.enabled and (settings, arguments) == (_state.settings, _state.arguments):
            return
        plan = make_plan(find_installed(), discover(settings.plugins), settings)
        _corrections(plan)  # refuses what can't be in force together, before anything changes
        if _state.enabled:
            disable()
        _state.enabled, _state.arguments, _state.settings, _state.plan = True, arguments, settings, plan
        _state.last_settings = settings
        _show_log()
        _say_what_is_left_alone(plan, settings)
        _say_what_plugins_bring(plan)
        modules = sorted({target.module for target in _makers()})
        late = [module for module in modules if module in sys.modules]
        _reach_out([slot for module in late for slot in _install(sys.modules[module])])
        for module in modules:
            if module not in late and module not in _state.hooked:
                _state.hooked.add(module)
                wrapt.register_post_import_hook(_on_import, module)
        if ENGINE_INIT.module in late:
            _on_older_engines()


def disable() -> None:
    """Put back every object that was there before. Does nothing if ds-gradfix is off.

    Raises SlotError, leaving everything as it is, if another tool has taken one of our places since.
    """
    with _lock:
        _retire_outlived()
        foreign = [slot for slot in _state.slots.values() if not slot.in_place]
        if foreign:
            slots.remove(foreign[0])  # raises, and says whose it is
        for slot in _state.slots.values():
            slots.remove(slot)
        for slot in _state.outlived:
            slots.leave(slot)
        for engine in _state.engines:
            if AUDIT in vars(engine):
                _audit().detach(engine)
            disengage(engine)
        _state.slots.clear()
        _state.outlived.clear()
        _state.problems.clear()
        _state.engines.clear()
        _state.enabled = False
        _boot.cancel()  # start-up activation must not turn on again what was turned off before DeepSpeed came


def status() -> dict[str, Any]:
    """The plan and what is in place, as plain data that ``json.dumps`` takes."""
    with _lock:
        settings = _state.settings if _state.enabled else resolve({}, os.environ)
        plan = _state.plan if _state.enabled else None
        plan = plan or make_plan(find_installed(), discover(settings.plugins), settings)
        return {
            "enabled": _state.enabled,
            "settings": asdict(settings),
            "deepspeed": plan.installed.deepspeed,
            "plan": [
                {
                    "patch": entry.patch.id,
                    "plugin": entry.patch.plugin,
                    "verdict": entry.verdict.value,
                    "action": "correct" if entry.act else "leave",
                    "reason": entry.reason,
                    "targets": [
                        {"target": str(f.target), "verdict": f.verdict.value, "fingerprint": f.fingerprint}
                        for f in entry.findings
                    ],
                }
                for entry in plan.entries
            ],
            "slots": [
                {
                    "target": str(target),
                    "in_place": slot.in_place,
                    "aliases": [f"{module.__name__}.{name}" for module, name, _ in slot.aliases],
                    "held_elsewhere": list(slot.held_elsewhere),
                }
                for target, slot in sorted(_state.slots.items())
            ],
            "problems": {str(target): text for target, text in _state.problems.items()},
            "engines": [_engine_status(engine) for engine in _state.engines],
        }


def _engine_status(engine: Any) -> dict[str, Any]:
    engagement = getattr(engine, ATTRIBUTE)
    return {
        "facts": asdict(engagement.facts),
        "patches": sorted(engagement.patches),
        "effects": {patch_id: effect.words for patch_id, effect in engagement.effects.items()},
    }


# ------------------------------------------------------------------------------------- slots

Maker = Callable[[types.ModuleType], Callable[[Callable[..., Any]], Callable[..., Any]]]


def _makers() -> dict[Target, Maker]:
    """Every place to occupy, with what makes its occupant from the live module and the original."""
    makers: dict[Target, Maker] = {
        CONFIG_INIT: lambda module: _wrap_config_init,
        ENGINE_INIT: lambda module: _wrap_engine_init,
        RUNNER_INIT: lambda module: wrap_runner_init,
    }
    assert _state.plan is not None
    for target, (correction, finding, ids) in _corrections(_state.plan).items():
        makers[target] = _maker(correction, finding, ids)
    return makers


def _corrections(plan: Plan) -> dict[Target, tuple[Replace | Rewrite, Finding, frozenset[str]]]:
    """What the plan puts in, by target, with the patches that share each correction.

    Raises PlanError if two patches have different corrections for one target.
    """
    wanted: dict[Target, tuple[Replace | Rewrite, Finding, frozenset[str]]] = {}
    for entry in plan.entries:
        for correction, finding in entry.corrections():
            if isinstance(correction, Steer):
                continue  # no code goes in: see ds_gradfix.engine
            other, _, ids = wanted.get(correction.target, (correction, finding, frozenset()))
            if other is not correction:
                raise PlanError(
                    f"{entry.patch.id} and {', '.join(sorted(ids))} both correct {correction.target},"
                    " each in its own way: exclude one of them"
                )
            wanted[correction.target] = (correction, finding, ids | {entry.patch.id})
    return wanted


def _maker(correction: Replace | Rewrite, finding: Finding, ids: frozenset[str]) -> Maker:
    def with_module(module: types.ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        dispatcher = _early_dispatcher if correction.early else _dispatcher
        if isinstance(correction, Replace):
            return lambda original: dispatcher(ids, original, correction.body)
        label = f"{'+'.join(sorted(ids))} {correction.target}"

        @functools.cache
        def corrected() -> Callable[..., Any]:
            return recompile(rewrite(finding.source(), correction.rules), module, correction.helper, label)

        if not isinstance(finding.function, Known):
            corrected()  # what fails is said now; of a release's own file it is known not to, and most jobs need few
        return lambda original: dispatcher(ids, original, lambda _, __, *args, **kwargs: corrected()(*args, **kwargs))

    return with_module


def _dispatcher(ids: frozenset[str], original: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """Runs DeepSpeed's own function unless a patch that shares this correction is in force for ``self``."""

    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        engagement = getattr(self, ATTRIBUTE, None)
        if engagement is None or ids.isdisjoint(engagement.effects):
            return original(self, *args, **kwargs)
        return body(engagement, original, self, *args, **kwargs)

    return dispatch


def _early_dispatcher(
    ids: frozenset[str], original: Callable[..., Any], body: Callable[..., Any]
) -> Callable[..., Any]:
    """Runs DeepSpeed's own function unless the configuration that was read last lets one of the patches act."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not _state.enabled or not any(map(_state.last_settings.selects, ids)):
            return original(*args, **kwargs)
        return body(None, original, *args, **kwargs)

    return dispatch


def _on_import(module: types.ModuleType) -> None:
    with _lock:
        if _state.enabled:
            _install(module)


def _install(module: types.ModuleType) -> list[slots.Slot]:
    """Occupy every place of one module. A failure is kept and told, and harms nobody's import."""
    installed = []
    for target, make in _makers().items():
        if target.module != module.__name__ or target in _state.slots:
            continue
        try:
            slot = slots.install(module, target.qualname, make(module))
        except Exception as error:
            _state.problems[target] = f"{type(error).__name__}: {error}"
            log.warning("ds-gradfix: %s could not be corrected: %s", target, _state.problems[target])
            continue
        _state.slots[target] = slot
        before = slots.wrapped_by(slot)
        if before is not None and target not in (CONFIG_INIT, ENGINE_INIT):
            log.warning(
                "ds-gradfix: %s was wrapped by %s before, which stays and is called where DeepSpeed's own function is,"
                " not where a correction is in force",
                target,
                before,
            )
        installed.append(slot)
    return installed


def _renew() -> None:
    """Occupy the places of modules that were reloaded: importlib tells nobody, so it is seen when an engine is made."""
    with _lock:
        for module in _retire_outlived():
            _reach_out(_install(module))


def _retire_outlived() -> list[types.ModuleType]:
    outlived = {target: slot for target, slot in _state.slots.items() if slots.is_outlived(slot)}
    for target, slot in outlived.items():
        _state.outlived.append(slot)
        del _state.slots[target]
    return [sys.modules[name] for name in sorted({target.module for target in outlived}) if name in sys.modules]


def _reach_out(installed: Sequence[slots.Slot]) -> None:
    """Follow the originals to those who have captured them, and name the ones who keep them."""
    slots.reach_out(installed)
    for slot in installed:
        for holder in slot.held_elsewhere:
            log.warning("ds-gradfix: %s was captured before it was on and stays as it was in %s", slot, holder)


# ---------------------------------------------------------------------- configuration and engines


def _wrap_config_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not _state.enabled:  # whoever captured this function before disable() keeps calling it
            original(self, config, *args, **kwargs)
            return
        _renew()
        parsed = read_config(config)
        section = section_of(parsed)
        options = _options(parsed, section)
        if options:
            config = functools.reduce(lambda prepared, option: option.prepare(prepared), options, parsed)
        original(self, config, *args, **kwargs)
        for option in options:
            for name, value in option.record.items():
                setattr(self, name, value)
        setattr(self, ATTRIBUTE, section)

    return init


def _options(parsed: Mapping[str, Any], section: Mapping[str, Any]) -> list[Option]:
    """The options that a configuration asks for and a patch brings. Raises SettingsError for one that
    it can't have, before DeepSpeed reads it: the same on all ranks, since the configuration is."""
    assert _state.plan is not None
    settings = _state.last_settings = resolve(_state.arguments, os.environ, section)
    _raise_problems(settings)
    wanted = []
    for entry in _state.plan.entries:
        option = entry.patch.option
        if option is None or not option.asked(parsed):
            continue
        refusal = option.refuse(parsed)
        if refusal:
            raise SettingsError(refusal)
        if entry.verdict is Verdict.FIXED:
            continue  # DeepSpeed has it by itself
        reason = entry.why_not(settings)
        if reason is not None:
            raise SettingsError(refused_option(option.key, entry.patch.id, reason))
        wanted.append(option)
    return wanted


def _wrap_engine_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _state.enabled:
            _renew()
        original(self, *args, **kwargs)
        if _state.enabled:
            _state.engines_seen += 1
            _on_engine(self, f"ds_gradfix/engine/{_state.engines_seen}")

    return init


def _on_engine(engine: Any, topic: str, measured: bool = True, late: bool = False) -> None:
    """Engage and prove one engine. ``topic`` names it among the ranks; ``measured`` is False for one that they do not
    share. Whatever is raised here reaches the other ranks, which must not wait for this one."""
    assert _state.plan is not None
    try:
        settings = _engine_settings(engine)
        _raise_problems(settings)
        engagement = _engagement(engine, _state.plan, settings, topic, late)
    except Exception as error:
        withdraw(topic, error)
        raise
    if engagement is None:
        return
    _state.engines.add(engine)
    proof = None
    if settings.self_check != "off" and measured:
        # One rank may have imported the launcher and others not: that is no difference.
        places = [_in_words(slot) for target, slot in _state.slots.items() if target != RUNNER_INIT]
        proof = prove(engine, engagement, _state.plan, places, topic)
    settle(engagement, proof, _state.plan)
    if settings.audit and measured:
        _audit().attach(engine, engagement.facts, settings.strict, topic, late)
    elif settings.audit:
        log.warning("ds-gradfix: this engine is not audited: the ranks can't tell it from others. Make it again")


def _audit() -> types.ModuleType:
    """Most jobs have none, and need not import it."""
    from ds_gradfix import audit

    return audit


def _engagement(engine: Any, plan: Plan, settings: Settings, topic: str, late: bool) -> Engagement | None:
    """None for an engine that can't be read, on this rank or on all of them."""
    try:
        return engage(engine, plan, settings, late)
    except GradfixError:
        raise
    except Exception as error:
        if settings.strict or settings.only is not None:
            raise
        log.warning("ds-gradfix: this engine can't be read, and nothing is corrected or audited for it: %r", error)
        if settings.self_check != "off":
            insist_on(leave_together(topic, error), settings)
        return None


def _in_words(slot: slots.Slot) -> str:
    """A slot as ranks compare it: with who has come between, if somebody has."""
    return str(slot) if slot.in_place else f"{slot}, where {slot.whose_now} is now"


def _on_older_engines() -> None:
    """Correct the engines that exist already from now on. Every rank takes part, also one that has none."""
    _state.looks_back += 1
    found = older.look(sys.modules[ENGINE_INIT.module].DeepSpeedEngine)
    if _state.settings.self_check == "off" and not _state.settings.audit:
        shared = [older.Older(engine, "", False) for engine in found]
    else:
        shared = older.share(found, f"ds_gradfix/older/{_state.looks_back}", _state.settings)
    for number, one in enumerate(shared):
        try:
            _on_engine(one.engine, one.topic, one.shared, late=True)
        except Exception as error:
            for other in shared[number + 1 :]:
                withdraw(other.topic, error)
            raise


def _engine_settings(engine: Any) -> Settings:
    """The configuration's section under the process's settings. An engine older than ds-gradfix has
    a configuration that we have not seen: it is read now."""
    config = engine._config
    section = getattr(config, ATTRIBUTE, None)
    if section is None:
        section = section_of(getattr(config, "_param_dict", {}))
    settings = resolve(_state.arguments, os.environ, section)
    assert _state.plan is not None
    check_names(settings, [entry.patch for entry in _state.plan.entries])
    insist(_state.plan, settings)
    return settings


def _raise_problems(settings: Settings) -> None:
    """What could not be put in place must stop a job that asked for it by name, or strictly."""
    assert _state.plan is not None
    if ENGINE_INIT in _state.problems and (settings.strict or settings.only is not None):
        raise SlotError(f"nothing can be in force: {ENGINE_INIT}: {_state.problems[ENGINE_INIT]}")
    for entry in _state.plan.entries:
        if settings.strict or entry.patch.id in (settings.only or ()):
            for target in entry.patch.targets:
                if target in _state.problems:
                    raise SlotError(f"{entry.patch.id} can't act: {target}: {_state.problems[target]}")


# --------------------------------------------------------------------------------------- report


def _show_log() -> None:
    """Our lines reach the screen as DeepSpeed's own do, unless the application has decided otherwise."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def _say_what_is_left_alone(plan: Plan, settings: Settings) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    for entry in plan.entries:
        if entry.verdict.value == "unrecognised" and settings.selects(entry.patch.id):
            log.warning("ds-gradfix: %s: %s", entry.patch.id, entry.reason)


def _say_what_plugins_bring(plan: Plan) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    for entry in plan.entries:
        if entry.patch.plugin is not None and entry.act:
            log.info("ds-gradfix: %s is a patch of %s, not of ds-gradfix", entry.patch.id, entry.patch.plugin)
