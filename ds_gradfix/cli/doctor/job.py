"""The checks of one job: its configuration, and whether it is affected and will be corrected."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ds_gradfix import _boot
from ds_gradfix.cli._job import CannotLook, job_size
from ds_gradfix.cli.doctor.look import Look
from ds_gradfix.cli.doctor.outcome import ACT, OK, Outcome
from ds_gradfix.engine import LOSSES, check_convention, change, convention_of
from ds_gradfix.errors import GradfixError, SettingsError
from ds_gradfix.facts import Facts, facts_from_config
from ds_gradfix.preprocess import section_of
from ds_gradfix.registry import Effect, Entry, Verdict, check_names
from ds_gradfix.settings import SECTION, VARIABLE_PREFIX, Settings, read_environment, resolve, variable

_TURN_ON = f"export {_boot.VARIABLE}=1"


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
    if entry.verdict is Verdict.UNRECOGNISED and not entry.act:
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
    if not look.probe.starts:
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
