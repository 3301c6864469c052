"""`ds-gradfix doctor`: looks at this installation, and at one job's configuration, and says what to do.

Every check stands alone: it looks at what it needs, and one that fails says so in its own place and stops no other.
None imports torch or DeepSpeed. The slow one, which starts an interpreter, comes behind the others, before the job,
which needs its answer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from ds_gradfix import __version__, _boot
from ds_gradfix.cli._job import CannotLook, add_size_arguments, job_size, read_config_file
from ds_gradfix.cli._screen import console, print_hanging, print_json
from ds_gradfix.engine import LOSSES, check_convention, change, convention_of
from ds_gradfix.errors import GradfixError, SettingsError
from ds_gradfix.facts import Facts, facts_from_config
from ds_gradfix.installed import Installed, distribution_version, find_installed
from ds_gradfix.preprocess import section_of
from ds_gradfix.registry import Effect, Entry, Patch, Plan, Verdict, check_names, discover, make_plan
from ds_gradfix.settings import SECTION, VARIABLE_PREFIX, Settings, read_environment, resolve, variable

OK, ACT, UNKNOWN = "ok", "act", "unknown"
EXIT_STATUS = {OK: 0, ACT: 1, UNKNOWN: 2}
_COLOURS = {OK: "green", ACT: "bold red", UNKNOWN: "bold magenta"}
_TURN_ON = f"export {_boot.VARIABLE}=1"
_PROBE_SECONDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `doctor` accepts."""
    parser.description = (
        "Look at this installation and, given a DeepSpeed configuration, at that job. Exit status: 0 all is well,"
        " 1 there is something to act on, 2 something could not be looked at. Needs no GPU; imports neither torch nor"
        " DeepSpeed."
    )
    parser.add_argument("--config", metavar="CONFIG.json", help="the DeepSpeed configuration of a job")
    add_size_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of words")


def run(args: argparse.Namespace) -> int:
    """Run every check, show the outcomes, and return the exit status of the worst."""
    if args.config is None and (args.ranks or args.sequence_parallel):
        raise GradfixError("--ranks and --sequence-parallel describe a job: give its configuration too, with --config")
    look = Look(args.config, args.ranks, args.sequence_parallel)
    checks = CHECKS if args.config else {name: check for name, check in CHECKS.items() if name not in OF_A_JOB}
    outcomes = {name: examine(check, look) for name, check in checks.items()}
    worst = max((outcome.status for outcome in outcomes.values()), key=EXIT_STATUS.__getitem__)
    if args.json:
        found = [{"name": name, **asdict(outcome)} for name, outcome in outcomes.items()]
        print_json({"status": worst, "checks": found})
    else:
        _show(outcomes)
    return EXIT_STATUS[worst]


# ------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """What a check found: in one sentence, in more lines, what to do about it, and the same as plain data."""

    status: str
    summary: str
    details: Sequence[str] = ()
    to_do: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def examine(check: Callable[[Look], Outcome], look: Look) -> Outcome:
    """Run one check. Whatever it raises is its finding: what ds-gradfix refuses is to be acted on."""
    try:
        return check(look)
    except CannotLook as reason:
        return Outcome(UNKNOWN, str(reason))
    except GradfixError as refusal:
        return Outcome(ACT, str(refusal))
    except Exception as error:
        return Outcome(UNKNOWN, f"This check failed: {type(error).__name__}: {error}")


def _show(outcomes: Mapping[str, Outcome]) -> None:
    screen = console()
    indent = 2 + max(len(outcome.status) for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        summary = Text.assemble((f"{name}: ", "bold"), outcome.summary)
        print_hanging(screen, Text(outcome.status, _COLOURS[outcome.status]), summary, indent)
        for line in outcome.details:
            print_hanging(screen, Text(), Text(line), indent + 2)
        for line in outcome.to_do:
            print_hanging(screen, Text(), Text(f"To do: {line}", "bold"), indent + 2)
    screen.print()
    screen.print(_conclusion(outcomes))


def _conclusion(outcomes: Mapping[str, Outcome]) -> str:
    said = []
    for status, words in ((ACT, "Something to act on"), (UNKNOWN, "Could not be looked at")):
        names = [name for name, outcome in outcomes.items() if outcome.status == status]
        if names:
            said.append(f"{words}: {', '.join(names)}.")
    return " ".join(said) or "All is well: nothing to act on."


# ----------------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Probe:
    """A fresh interpreter with DS_GRADFIX=1: what started ds-gradfix in it, the module that did, the folders on its
    path that have a start-up file, and what it wrote to stderr."""

    started_by: str | None
    boot_file: str | None
    start_up_files: tuple[str, ...]
    stderr: str


class Look:
    """What the checks look at. Each thing is read once, when the first check asks for it."""

    def __init__(self, config: str | None, ranks: int | None, sequence_parallel: int | None) -> None:
        self.config_path = config
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    @cached_property
    def installed(self) -> Installed:
        return find_installed()

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        return discover()

    @cached_property
    def _decided(self) -> tuple[Settings, Plan, GradfixError | None]:
        patches = self.patches
        try:
            settings = resolve({}, os.environ)
            return settings, make_plan(self.installed, patches, settings), None
        except GradfixError as refusal:
            return Settings(), make_plan(self.installed, patches, Settings()), refusal

    @property
    def settings(self) -> Settings:
        """The settings of this environment; the default ones where it is refused."""
        return self._decided[0]

    @property
    def plan(self) -> Plan:
        """The plan under these settings."""
        return self._decided[1]

    @property
    def refusal(self) -> GradfixError | None:
        """Why ds-gradfix would not start under the settings of this environment, None if it would."""
        return self._decided[2]

    @cached_property
    def config(self) -> Mapping[str, Any]:
        assert self.config_path is not None
        return read_config_file(self.config_path)

    @cached_property
    def probe(self) -> Probe:
        return probe_start_up()


_PROBE = f"""
import json, os, sys
print(json.dumps([
    getattr(sys, {_boot.MARKER!r}, None),
    getattr(sys.modules.get({_boot.__name__!r}), "__file__", None),
    [folder for folder in sys.path if folder and os.path.isfile(os.path.join(folder, "ds_gradfix_startup.pth"))],
]))
"""


def probe_start_up() -> Probe:
    """Start an interpreter as a job would be, with DS_GRADFIX=1, and ask what has happened in it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, _boot.VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
        started_by, boot_file, start_up_files = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise CannotLook(f"A fresh interpreter did not answer in {_PROBE_SECONDS} seconds") from error
    except (OSError, ValueError, IndexError) as error:
        raise CannotLook(f"A fresh interpreter ({sys.executable}) could not be asked: {error}") from error
    return Probe(started_by, boot_file, tuple(start_up_files), done.stderr.strip())


# --------------------------------------------------------------------------------------- checks


def check_installed(look: Look) -> Outcome:
    """What is installed, and from where."""
    installed = look.installed
    own = Path(_boot.__file__).parent
    found: dict[str, tuple[str | None, Path | None]] = {
        "Python": (platform.python_version(), Path(sys.executable)),
        "ds-gradfix": (__version__, own),
        "DeepSpeed": (installed.deepspeed, installed.deepspeed_path),
        "torch": (installed.torch, _folder("torch")),
        "wrapt": (distribution_version("wrapt"), _folder("wrapt")),
    }
    details = [f"{name} {version or 'of no known version'}: {path}" for name, (version, path) in found.items() if path]
    data = {name: {"version": version, "path": path and str(path)} for name, (version, path) in found.items()}
    missing = [name for name, (_, path) in found.items() if path is None]
    if "DeepSpeed" in missing:
        return Outcome(UNKNOWN, "DeepSpeed is not installed in this environment", details, data=data)
    if missing:
        return Outcome(ACT, f"Missing: {' and '.join(missing)}", details, [f"install {' and '.join(missing)}"], data)
    return Outcome(OK, f"DeepSpeed {installed.deepspeed}, ds-gradfix {__version__}", details, data=data)


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # an importer that blocks it, or a stand-in without a spec
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def check_environment(look: Look) -> Outcome:
    """Whether DS_GRADFIX is on here, and whether every DS_GRADFIX_* variable means something."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIX)}
    data = {"on": _boot.requested(), "variables": {**_switches(), **ours}}
    details = [f"{name}={value}" for name, value in ours.items()]
    wrong = [text for name, value in ours.items() if (text := _refused({name: value}))]
    if not wrong and look.refusal is not None:
        wrong = [str(look.refusal)]
    if wrong:
        summary = f"{_on_or_off()} With these settings it refuses to start."
        return Outcome(ACT, summary, wrong, ["correct or unset the variable"], data)
    return Outcome(OK, _on_or_off(), details, data=data)


def _switches() -> dict[str, str]:
    return {name: os.environ[name] for name in (_boot.VARIABLE, _boot.ALIAS) if name in os.environ}


def _on_or_off() -> str:
    switches = _switches()
    if not switches:
        return f"{_boot.VARIABLE} is not set: ds-gradfix is off unless a job asks for it itself."
    name, value = next(iter(switches.items()))
    return f"{name}={value}: ds-gradfix is {'on' if _boot.requested() else 'off'}."


def _refused(variables: Mapping[str, str]) -> str | None:
    try:
        read_environment(variables)
    except GradfixError as error:
        return str(error)
    return None


def check_patches(look: Look) -> Outcome:
    """Each patch on this DeepSpeed: verdict, action and reason."""
    entries = look.plan.entries
    data = {"patches": [{"id": e.patch.id, "verdict": e.verdict.value, "action": _action(e), "reason": e.reason}
                        for e in entries]}  # fmt: skip
    if look.installed.deepspeed_path is None:
        return Outcome(UNKNOWN, "Without DeepSpeed there is nothing to correct", data=data)
    details = [f"{e.patch.id}: {e.verdict.value}; {_action(e)} it: {e.reason}" for e in entries]
    strange = [e for e in entries if _left_unrecognised(e)]
    if strange:
        return Outcome(
            ACT,
            f"{_patches(len(strange))} can't tell whether this DeepSpeed has the defect",
            details,
            ["look for a newer ds-gradfix, and measure your job: ds-gradfix verify CONFIG.json"],
            data,
        )
    acting = sum(e.act for e in entries)
    return Outcome(OK, f"{acting} of {_patches(len(entries))} would correct this DeepSpeed", details, data=data)


def _patches(count: int) -> str:
    return f"{count} patch" if count == 1 else f"{count} patches"


def _action(entry: Entry) -> str:
    return "correct" if entry.act else "leave"


def _left_unrecognised(entry: Entry) -> bool:
    return entry.verdict is Verdict.UNRECOGNISED and not entry.act


def check_config(look: Look) -> Outcome:
    """Whether the configuration can be read, and what its own section decides."""
    section = section_of(look.config)
    own = Settings(**section)
    check_names(own, look.patches)
    data = {"path": look.config_path, "section": section}
    if not section:
        return Outcome(OK, f'{look.config_path}: it has no "{SECTION}" settings, and needs none', data=data)
    outranking = {} if look.refusal else read_environment(os.environ)
    details = []
    for key in section:
        over = f", outranked by {variable(key)}={os.environ[variable(key)]}" if key in outranking else ""
        details.append(f"{key} = {json.dumps(getattr(own, key))}{over}")
    return Outcome(OK, f'{look.config_path}: its "{SECTION}" section is valid', details, data=data)


def check_start_up(look: Look) -> Outcome:
    """Whether DS_GRADFIX=1 really starts ds-gradfix in a fresh interpreter: an installation without its start-up file
    looks healthy and corrects nothing."""
    probe = look.probe
    data = asdict(probe)
    if _starts(probe):
        return Outcome(OK, f"{_boot.VARIABLE}=1 starts ds-gradfix in a fresh interpreter", data=data)
    details = [f"It wrote: {probe.stderr.splitlines()[-1]}"] if probe.stderr else []
    if probe.started_by:
        details.append(f"It starts another copy of ds-gradfix: {probe.boot_file}")
    elif probe.start_up_files:
        details += [f"Its start-up file is in {folder}" for folder in probe.start_up_files]
        details.append("Python reads start-up files in its site directories only, not in those of PYTHONPATH")
    else:
        details.append("No start-up file (ds_gradfix_startup.pth) is installed")
    to_do = "install ds-gradfix anew with pip into this environment, or start jobs with: ds-gradfix run"
    return Outcome(ACT, f"{_boot.VARIABLE}=1 does not start this ds-gradfix", details, [to_do], data)


def _starts(probe: Probe) -> bool:
    return probe.boot_file is not None and os.path.realpath(probe.boot_file) == os.path.realpath(_boot.__file__)


# -------------------------------------------------------------------------------------- the job


@dataclass(frozen=True)
class Bite:
    """One defect that bites in the job: what it does and what comes of that, in words, and what to do if anything."""

    patch: str
    effect: Effect
    words: str
    to_do: str | None


def check_job(look: Look) -> Outcome:
    """Whether the job is affected, by what factor, and whether it will be corrected."""
    if look.installed.deepspeed_path is None:
        raise CannotLook("Without DeepSpeed there is no telling whether this job is affected")
    settings = _job_settings(look)
    convention, because = convention_of(settings, job_size(look.config, look.ranks, look.sequence_parallel)[1])
    facts = job_facts(look, convention)
    check_convention(facts, settings)
    job = f"ZeRO-{facts.zero_stage}, {facts.group_size} ranks, sequence parallel {facts.sequence_parallel_size}"
    bites = [bite for entry in look.plan.entries if (bite := _bite(look, entry, facts))]
    details = [*_native_options(look), *(bite.words for bite in bites)]
    details += _convention_words(facts, because, settings)
    if look.ranks is None:
        details.append(f"Taken as a job of {facts.group_size} ranks; --ranks N says otherwise.")
    effects = [{"patch": bite.patch, "factor": bite.effect.factor, "effect": bite.effect.words,
                "corrected": bite.to_do is None, "words": bite.words} for bite in bites]  # fmt: skip
    data = {"facts": asdict(facts), "affected": bool(bites), "effects": effects, "convention_because": because}
    if not bites:
        return Outcome(OK, f"{job}: not affected by any known defect", details, data=data)
    to_do = list(dict.fromkeys(bite.to_do for bite in bites if bite.to_do))
    if to_do:
        return Outcome(ACT, f"{job}: affected, and not corrected", details, to_do, data)
    return Outcome(OK, f"{job}: affected, and corrected", details, data=data)


def _native_options(look: Look) -> list[str]:
    """The options that the job asks for and this DeepSpeed has by itself. Raises SettingsError for a value that is not
    allowed, and for an option that this configuration can't have."""
    native = []
    for entry in look.plan.entries:
        option = entry.patch.option
        if option is None or not option.asked(look.config):
            continue
        if refusal := option.refuse(look.config):
            raise SettingsError(refusal)
        if entry.verdict is Verdict.FIXED:
            native.append(f'"{option.key}": this DeepSpeed does what it asks for by itself; its code runs untouched.')
    return native


def _job_settings(look: Look) -> Settings:
    """The job's settings; where its section is refused, which is another check's finding, those without it."""
    try:
        return resolve({}, os.environ, section_of(look.config))
    except GradfixError:
        return look.settings


def _convention_words(facts: Facts, because: str, settings: Settings) -> list[str]:
    """Which convention over sequence shards is in force, why, what it changes, and which losses want the other."""
    if facts.sequence_parallel_size == 1 or facts.reduction_op == "sum":
        return []
    convention = facts.convention
    other = "mean" if convention == "sum" else "sum"
    words = [
        f"Over sequence shards ds-gradfix reduces by {convention!r} ({because}), {change(facts)}:"
        f" {LOSSES[convention]}.",
        f"sequence_parallel_reduction={other!r} is {LOSSES[other]}.",
    ]
    if settings.sequence_parallel_reduction is None:
        words.append(
            "Accelerate's parallelism config with sp_size > 1, Transformers' Trainer included, decides on 'mean'."
        )
    return words


def job_facts(look: Look, convention: str = "sum") -> Facts:
    """The job's facts, from its configuration and what was said on the command line."""
    try:
        config = look.config
    except CannotLook as reason:
        raise CannotLook("Without its configuration there is no telling whether this job is affected") from reason
    if not isinstance(config.get("zero_optimization") or {}, Mapping):
        raise CannotLook('"zero_optimization" must be an object, such as {"stage": 3}')
    ranks, shards = job_size(config, look.ranks, look.sequence_parallel)
    try:
        return facts_from_config(config, ranks, shards, convention)
    except (AttributeError, TypeError, ValueError) as error:
        raise CannotLook(f"{look.config_path} is not a configuration that DeepSpeed takes: {error}") from error


def _bite(look: Look, entry: Entry, facts: Facts) -> Bite | None:
    if entry.verdict in (Verdict.ABSENT, Verdict.FIXED):
        return None
    effect = entry.patch.affects(facts)
    if effect is None:
        return None
    patch_id = entry.patch.id
    if _left_unrecognised(entry):
        words = f"If this DeepSpeed has the defect, {effect.words}; {patch_id} can't tell: {entry.reason}."
        return Bite(patch_id, effect, words, f"ds-gradfix verify {look.config_path}")
    obstacle = _obstacle(look, entry)
    if obstacle is None:
        return Bite(patch_id, effect, f"{effect.words}; corrected by {patch_id}.", None)
    reason, to_do = obstacle
    return Bite(patch_id, effect, f"{effect.words}; not corrected by {patch_id}: {reason}.", to_do)


def _obstacle(look: Look, entry: Entry) -> tuple[str, str] | None:
    """Why a patch that knows this DeepSpeed will not correct the job, and what to do about it; None if it will."""
    patch_id = entry.patch.id
    if not entry.act:
        key = look.settings.why_not_selected(patch_id)
        return f"it is left out by {variable(key)}", _select(patch_id, key, variable(key))
    if not _boot.requested():
        return "ds-gradfix is off", _TURN_ON
    if look.refusal is not None:
        return "ds-gradfix refuses to start", f"correct the {VARIABLE_PREFIX}* variables"
    if not _starts(look.probe):
        return f"{_boot.VARIABLE}=1 does not start it here", "start the job with: ds-gradfix run"
    try:
        settings = resolve({}, os.environ, section_of(look.config))
    except GradfixError:
        return "the configuration is refused", f'correct its "{SECTION}" section'
    if settings.selects(patch_id):
        return None
    key = settings.why_not_selected(patch_id)
    place = f'"{key}" in the "{SECTION}" section'
    return f"it is left out by {place}", _select(patch_id, key, place)


def _select(patch_id: str, key: str, place: str) -> str:
    return f"take {patch_id} out of {place}" if key == "exclude" else f"add {patch_id} to {place}"


CHECKS: dict[str, Callable[[Look], Outcome]] = {
    "installed": check_installed,
    "environment": check_environment,
    "patches": check_patches,
    "config": check_config,
    "start-up": check_start_up,
    "job": check_job,
}
"""By their stable names, in the order in which they are shown."""

OF_A_JOB = ("config", "job")
"""Those that need a configuration."""
