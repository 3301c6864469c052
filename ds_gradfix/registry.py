"""Patches as data, and the plan: what each of them does on this install, and why.

Neither needs an import of torch or DeepSpeed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_gradfix.errors import PlanError, RewriteError, SettingsError
from ds_gradfix.facts import Facts
from ds_gradfix.installed import Installed
from ds_gradfix.plugins import Misfit, Offer, attempt, guarded, in_words, offers, require, tell
from ds_gradfix.settings import Settings, plugins_allowed
from ds_gradfix.source import Function, Rule, find_functions, fingerprint, rewrite

ENTRY_POINTS = "ds_gradfix.patches"


class Verdict(str, Enum):
    """What an installed function is, as far as one patch is concerned."""

    DEFECTIVE = "defective"
    FIXED = "fixed upstream"
    ABSENT = "absent"
    UNRECOGNISED = "unrecognised"


@dataclass(frozen=True, order=True)
class Target:
    """One function of an installed DeepSpeed: its defining module and its name there."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Replace:
    """A correction that is a plain function.

    For an engaged object ``body(engagement, original, *args, **kwargs)`` runs in place of the
    installed function, and may call it. ``early``: see :data:`Correction`.
    """

    target: Target
    body: Callable[..., Any]
    early: bool = False


@dataclass(frozen=True)
class Rewrite:
    """A correction that edits the installed function's own syntax tree; see :class:`Rule`.

    The rewritten text sees ``helper`` as ``_ds_gradfix``. ``early``: see :data:`Correction`.
    """

    target: Target
    rules: tuple[Rule, ...]
    helper: object
    early: bool = False


@dataclass(frozen=True)
class Steer:
    """A correction that needs no code: attributes of a live engine that the target already obeys.

    ``values`` maps a dotted attribute name, from the engine, to its value while in force; a function is called with
    the engine, and returns the value. The target is the function that reads them; its fingerprint says that it does.
    """

    target: Target
    values: Mapping[str, Any]


Correction = Replace | Rewrite | Steer
"""An ``early`` one is for what runs before there is an engine to engage: while an engine is being made, or in a
plain function. It is in force for every caller as soon as it is in place and the settings let its patch act, gets
None as its engagement, and so decides by its arguments alone where the defect bites."""


@dataclass(frozen=True)
class Option:
    """The configuration key that a patch brings to releases without it.

    ``asked(config)`` says whether a configuration (a mapping) asks for the option, and raises
    SettingsError for a value that is not allowed. ``refuse(config)`` says why this configuration can't
    have it, in one sentence that names both keys, else None; ``refuse_engine(engine)`` the same for what
    only a live engine shows. ``prepare(config)`` returns the configuration that DeepSpeed is to see, and
    ``record`` holds the attributes that its config object gets afterwards.
    """

    key: str
    asked: Callable[[Mapping[str, Any]], bool]
    refuse: Callable[[Mapping[str, Any]], str | None]
    refuse_engine: Callable[[Any], str | None]
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Effect:
    """What a defect does to one job: gradients come out ``factor`` times what they should be
    (None where it is not one number), and the same in words."""

    factor: float | None
    words: str


@dataclass(frozen=True)
class Measurement:
    """One self-check on one rank: a known gradient put through one path of the engine.

    ``ratio`` is measured over right, ``error`` the largest relative deviation of an element,
    ``tolerance`` what rounding in the communication dtype explains.
    """

    path: str
    ratio: float
    error: float
    tolerance: float

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance  # false for nan


@dataclass(frozen=True)
class Patch:
    """A card: one upstream defect, or one missing option, and its correction.

    ``affects(facts)`` says what the defect does to a job, None if it does not bite there; the
    doctor and the engine ask the same function. ``measure(engine)`` puts known numbers through the
    engine's functions as they stand, whoever made them. Two patches may share a correction: then
    it is installed once, and is in force for an engine if either patch is. ``fingerprints`` gives
    for every target the known sources with their verdict. ``needs`` are functions without which the defect
    can't bite: a release that lacks one of them has the patch ``absent``. ``refuse(engine)`` is for what no
    correction can put right once the engine is there: why it must not train as it stands, with the way out, else
    None. It is asked where ``affects`` says that the defect bites, whether or not the patch acts.
    ``plugin`` is the distribution that a plug-in's patch is of, by name and version; discovery fills it in.
    """

    id: str
    title: str
    symptom: str
    cause: str
    fix: str
    upstream: tuple[str, ...]
    retire: str
    corrections: tuple[Correction, ...]
    affects: Callable[[Facts], Effect | None]
    measure: Callable[[Any], Sequence[Measurement]]
    fingerprints: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    option: Option | None = None
    needs: tuple[Target, ...] = ()
    refuse: Callable[[Any], str | None] | None = None
    plugin: str | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(correction.target for correction in self.corrections)

    @property
    def early(self) -> bool:
        """Whether it acts while an engine is being made: too late for one that exists already."""
        return any(not isinstance(correction, Steer) and correction.early for correction in self.corrections)


@dataclass(frozen=True)
class Check:
    """What is measured on every engine, whether a patch is in force there or not: a breach of an invariant that
    nobody has a patch for is found all the same. ``measure`` is as a patch's; no measurements where it can't tell."""

    id: str
    title: str
    measure: Callable[[Any], Sequence[Measurement]]


# ---------------------------------------------------------------------------------- discovery


@cache
def catalogue() -> tuple[dict[str, Any], ...]:
    """The known sources of built-in targets: one entry for each, from ``patches/fingerprints.json``."""
    text = resources.files("ds_gradfix.patches").joinpath("fingerprints.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def known_sources(patch_id: str) -> dict[str, dict[str, Verdict]]:
    """From the catalogue: target -> fingerprint -> verdict, for one built-in patch."""
    known: dict[str, dict[str, Verdict]] = {}
    for entry in catalogue():
        if patch_id in entry["verdicts"]:
            known.setdefault(entry["target"], {})[entry["fingerprint"]] = Verdict(entry["verdicts"][patch_id])
    return known


@cache
def _by_target() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in catalogue():
        found.setdefault(entry["target"], []).append(entry)
    return found


@cache
def _known_files() -> dict[str, dict[str, str]]:
    """Module -> :func:`file_mark` -> a release that has it, from ``patches/files.json``."""
    text = resources.files("ds_gradfix.patches").joinpath("files.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def file_mark(path: Path) -> str:
    """A hash of a file's bytes. Raises OSError if it can't be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


@cache
def releases_with(target: str) -> frozenset[str]:
    """The known releases that have a target, or what a patch needs, as they were published."""
    return frozenset(release for entry in _by_target().get(target, ()) for release in entry["releases"])


def newest_known_release() -> Version:
    return max(Version(release) for entry in catalogue() for release in entry["releases"])


def discover(plugins: bool | None = None) -> tuple[Patch, ...]:
    """All patches, by id: the built-in ones, and those that entry points offer.

    ``plugins`` says whether entry points are read; where it is not given, the variable of that setting does. A plug-in
    that can't be used is told and left out: it must not harm the job.
    """
    found: dict[str, Patch] = {patch.id: patch for patch in _built_in("PATCH")}
    if plugins_allowed(os.environ) if plugins is None else plugins:
        for offer in sorted(offers(ENTRY_POINTS), key=str):
            patch, problem = attempt(partial(_of_plugin, offer))
            if patch is not None and patch.id in found:
                problem = f"{patch.id!r} is the id of another patch"
            if problem is not None:
                tell(f"{offer} is left out: {problem}")
            elif patch is not None:
                found[patch.id] = patch
    return tuple(patch for _, patch in sorted(found.items()))


def _of_plugin(offer: Offer) -> Patch:
    """A plug-in's patch. Its functions can't harm a job: where one of them fails, the patch does not act."""
    patch: Patch = offer.point.load()
    require(patch, Patch, "PATCH")
    _require_sense(patch)

    def leave_out(problem: str) -> None:
        tell(f"{problem}; the patch is left out")

    def fail(problem: str) -> None:
        raise RuntimeError(problem)  # the self-check names the patch, on all ranks

    who = f"{offer.distribution}, {patch.id}"
    option = patch.option
    return replace(
        patch,
        plugin=offer.distribution,
        affects=guarded(patch.affects, Effect | None, f"{who}: affects()", leave_out),
        measure=guarded(patch.measure, Sequence[Measurement], f"{who}: measure()", fail),
        refuse=patch.refuse and guarded(patch.refuse, str | None, f"{who}: refuse()", leave_out),
        option=option
        and replace(
            option,
            asked=guarded(option.asked, bool, f"{who}: asked()", leave_out, passing=(SettingsError,)),
            refuse_engine=guarded(option.refuse_engine, str | None, f"{who}: refuse_engine()", leave_out),
        ),
    )


def _require_sense(patch: Patch) -> None:
    """Raise Misfit for a card whose types are right and which can't be used all the same."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", patch.id):
        raise Misfit(f"the id {patch.id!r} is not allowed; allowed are lower-case words and digits with - between them")
    for name in ("title", "symptom", "cause", "fix", "retire"):
        if not getattr(patch, name).strip():
            raise Misfit(f"{name} is empty; list and doctor show it")
    if not patch.corrections:
        raise Misfit("corrections is empty: it would do nothing")
    if len(set(patch.targets)) < len(patch.targets):
        raise Misfit("two of its corrections have the same target")
    for target in (*patch.targets, *patch.needs):
        names = [*target.module.split("."), *target.qualname.split(".")]
        if names[0] != "deepspeed" or not all(map(str.isidentifier, names)):
            raise Misfit(f"the target {str(target)!r} is not allowed; allowed are functions in modules of deepspeed")


@cache
def checks() -> tuple[Check, ...]:
    """What is measured on every engine."""
    return tuple(_built_in("CHECK"))


def _built_in(name: str) -> list[Any]:
    """What the modules of ``ds_gradfix.patches`` call by this name."""
    package = importlib.import_module("ds_gradfix.patches")
    public = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{package.__name__}.{module}") for module in public]
    return [getattr(module, name) for module in modules if hasattr(module, name)]


# --------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Known:
    """A function of a file that a release has byte for byte: its fingerprint, without reading it."""

    path: Path
    qualname: str
    fingerprint: str


@dataclass(frozen=True)
class Finding:
    """One target on this install: the function (None if it isn't there), its verdict, and why."""

    target: Target
    verdict: Verdict
    reason: str
    function: Function | Known | None = None
    fingerprint: str | None = None

    def source(self) -> Function:
        """The function as it stands in its file. Raises OSError if that can't be read, and as find_functions does."""
        if not isinstance(self.function, Known):
            assert self.function is not None
            return self.function
        function = find_functions(self.function.path, [self.function.qualname])[self.function.qualname]
        assert function is not None
        return function


@dataclass(frozen=True)
class Entry:
    """One patch on this install. ``act`` says whether its corrections go in; ``reason`` why."""

    patch: Patch
    findings: tuple[Finding, ...]
    verdict: Verdict
    act: bool
    reason: str

    def why_not(self, settings: Settings) -> str | None:
        """Why these settings leave the patch out of force, None if they let it act."""
        if not self.act:
            return self.reason
        return None if settings.selects(self.patch.id) else f"left out by {settings.why_not_selected(self.patch.id)}"

    def corrections(self) -> tuple[tuple[Correction, Finding], ...]:
        """What goes in, with what it goes into: nothing where the patch does not act."""
        pairs = zip(self.patch.corrections, self.findings, strict=True)
        wanted = (Verdict.DEFECTIVE, Verdict.UNRECOGNISED)
        return tuple((c, f) for c, f in pairs if self.act and f.verdict in wanted)


@dataclass(frozen=True)
class Plan:
    installed: Installed
    entries: tuple[Entry, ...]

    def entry(self, patch_id: str) -> Entry:
        for entry in self.entries:
            if entry.patch.id == patch_id:
                return entry
        raise SettingsError(unknown_patch(patch_id, [e.patch.id for e in self.entries], "patch"))


def unknown_patch(patch_id: str, known: Iterable[str], key: str) -> str:
    """The error text for a patch id that does not exist."""
    known = sorted(known)
    near = get_close_matches(patch_id, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{key}: there is no patch {patch_id!r}{hint} The patches are: {', '.join(known)}"


def check_names(settings: Settings, patches: Sequence[Patch]) -> None:
    """Raise SettingsError for an id in ``only``, ``exclude`` or ``force`` that no patch has."""
    ids = {patch.id for patch in patches}
    for key in ("only", "exclude", "force"):
        for patch_id in getattr(settings, key) or ():
            if patch_id not in ids:
                raise SettingsError(unknown_patch(patch_id, ids, key))


def make_plan(installed: Installed, patches: Sequence[Patch], settings: Settings) -> Plan:
    """Decide for each patch whether it acts on this install, by its targets' fingerprints.

    Raises SettingsError for an unknown patch id, and PlanError where a patch can't act that was
    asked for by name (``only``), or any patch in strict mode, because a source is unrecognised.
    """
    check_names(settings, patches)
    functions = look_up(installed, {t for patch in patches for t in (*patch.targets, *patch.needs)})
    plan = Plan(installed, tuple(_entry(installed, patch, settings, functions) for patch in patches))
    insist(plan, settings)
    return plan


def insist(plan: Plan, settings: Settings) -> None:
    """Raise PlanError for a selected patch with unrecognised source that was asked for by name (``only``,
    ``force``), or in strict mode."""
    for entry in plan.entries:
        named = settings.only is not None or entry.patch.id in settings.force
        asked = settings.selects(entry.patch.id) and (settings.strict or named)
        if asked and entry.verdict is Verdict.UNRECOGNISED and not entry.act:
            version = plan.installed.deepspeed
            raise PlanError(f"{entry.patch.id} can't act on this DeepSpeed ({version}): {entry.reason}")


Functions = Mapping[Target, "Function | str | None"]
FunctionsFound = Mapping[Target, "Function | Known | str | None"]


def look_up(installed: Installed, targets: Collection[Target]) -> FunctionsFound:
    """:func:`read_functions`, but for files that are a release's own, which need no reading."""
    owned = {module: _own_file(installed, module) for module in {target.module for target in targets}}
    known: dict[Target, Known | None] = {}
    for target in targets:
        path, release = owned[target.module] or (None, None)
        if path is not None and str(target) in _by_target():
            marks = [entry["fingerprint"] for entry in _by_target()[str(target)] if release in entry["releases"]]
            known[target] = Known(path, target.qualname, marks[0]) if marks else None
    return {**known, **read_functions(installed, [target for target in targets if target not in known])}


def _own_file(installed: Installed, module: str) -> tuple[Path, str] | None:
    """A module's file and a release that has the same, None if none has it."""
    path = installed.module_file(module)
    try:
        release = _known_files().get(module, {}).get(file_mark(path)) if path else None
    except OSError:
        return None
    return (path, release) if path and release else None


def read_functions(installed: Installed, targets: Iterable[Target]) -> Functions:
    """Each target's function, None if it isn't there, or why its file can't be read."""
    by_module: dict[str, list[Target]] = {}
    for target in sorted(targets):
        by_module.setdefault(target.module, []).append(target)
    found: dict[Target, Function | str | None] = {}
    for module, wanted in by_module.items():
        path = installed.module_file(module)
        if path is None and installed.has_bytecode(module):
            found.update(dict.fromkeys(wanted, "only its bytecode is installed, and no source to read"))
            continue
        try:
            functions = find_functions(path, [t.qualname for t in wanted]) if path else {}
        except (OSError, SyntaxError, ValueError) as error:
            found.update(dict.fromkeys(wanted, f"its source file can't be read ({error})"))
            continue
        for target in wanted:
            found[target] = functions.get(target.qualname)
    return found


def _finding(installed: Installed, patch: Patch, target: Target, function: Function | Known | str | None) -> Finding:
    if isinstance(function, str):
        return Finding(target, Verdict.UNRECOGNISED, function)
    if function is None:
        if installed.deepspeed_path is None:
            return Finding(target, Verdict.ABSENT, "DeepSpeed is not installed")
        if _known(installed):
            if str(installed.release) not in releases_with(str(target)):
                return Finding(target, Verdict.ABSENT, "this release does not have it")
            reason = f"this build does not have it where DeepSpeed {installed.release} has"
            return Finding(target, Verdict.UNRECOGNISED, reason)
        return Finding(target, Verdict.UNRECOGNISED, "it is not where every known release that has it keeps it")
    mark = function.fingerprint if isinstance(function, Known) else fingerprint(function.node)
    verdict = patch.fingerprints.get(str(target), {}).get(mark, Verdict.UNRECOGNISED)
    reason = f"source {mark}"
    if verdict is Verdict.ABSENT:
        reason = "this release does not have what goes wrong"
    elif verdict is Verdict.UNRECOGNISED:
        reason = f"its source ({mark}) is not one we know"
    return Finding(target, verdict, reason, function, mark)


def _known(installed: Installed) -> bool:
    return installed.release is not None and installed.release <= newest_known_release()


def _entry(installed: Installed, patch: Patch, settings: Settings, functions: FunctionsFound) -> Entry:
    findings = tuple(_finding(installed, patch, target, functions[target]) for target in patch.targets)
    order = (Verdict.UNRECOGNISED, Verdict.DEFECTIVE, Verdict.FIXED, Verdict.ABSENT)
    verdict = min((finding.verdict for finding in findings), key=order.index)
    missing = [needed for needed in patch.needs if functions[needed] is None]
    if missing and settings.selects(patch.id) and _known(installed):
        return Entry(patch, findings, Verdict.ABSENT, False, f"this release does not have {missing[0]}")
    act, reason = _decide(patch, settings, verdict, findings)
    if act:
        try:
            for correction, finding in zip(patch.corrections, findings, strict=True):
                wanted = finding.verdict in (Verdict.DEFECTIVE, Verdict.UNRECOGNISED)
                # That ours match in every release is tested; to see it again would take a tenth of a second.
                tested = isinstance(finding.function, Known) and patch.plugin is None
                if isinstance(correction, Rewrite) and finding.function is not None and wanted and not tested:
                    rewrite(finding.source(), correction.rules)
        except Exception as error:
            if patch.plugin is None and not isinstance(error, RewriteError):
                raise
            reason = str(error) if isinstance(error, RewriteError) else f"its rules can't be applied: {in_words(error)}"
            act, verdict = False, Verdict.UNRECOGNISED
    return Entry(patch, findings, verdict, act, reason)


def _decide(
    patch: Patch, settings: Settings, verdict: Verdict, findings: Sequence[Finding]
) -> tuple[bool, str]:
    if not settings.selects(patch.id):
        return False, f"left out by {settings.why_not_selected(patch.id)}"
    if verdict is Verdict.ABSENT:
        return False, findings[0].reason
    if verdict is Verdict.FIXED:
        return False, "this release has the fix"
    if verdict is Verdict.DEFECTIVE:
        return True, "the installed source is known to have this defect"
    strange = [finding for finding in findings if finding.verdict is Verdict.UNRECOGNISED]
    said = "; ".join(f"{finding.target.qualname}: {finding.reason}" for finding in strange)
    if not all(finding.function for finding in strange):
        return False, f"{said}. Left alone"
    if patch.id in settings.force:
        return True, f"forced, although {said}"
    return False, f"{said}. Left alone; force={patch.id!r} would correct it all the same"
