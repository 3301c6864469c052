"""One engine: its facts, which patches are in force for it, and the proof that they work there."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

from ds_gradfix import agreement
from ds_gradfix.agreement import Agreement, exchange, name_ranks, post
from ds_gradfix.errors import GradfixError, SelfCheckError, SettingsError
from ds_gradfix.facts import STOCK_PARTITION_SIZE, Facts, dense_partition_groups, is_autoep_expert
from ds_gradfix.plugins import in_words, tell
from ds_gradfix.registry import Check, Effect, Entry, Measurement, Patch, Plan, Steer, Verdict, checks
from ds_gradfix.reduction import gradient_scale
from ds_gradfix.settings import Settings

ATTRIBUTE = "_ds_gradfix"
"""Where an engine and its optimizer carry their Engagement; a slot asks there."""

AUDIT = "_ds_gradfix_audit"
"""Where an engine carries the audit of its first step, and afterwards what it found."""

log = logging.getLogger("ds_gradfix")


@dataclass(frozen=True)
class Engagement:
    """The patches in force for one engine, with what each defect would do to it, and the patches
    that would be if they were not left out, with the reason. ``because`` says what decided the
    convention over sequence shards; ``steered`` are the engine's attributes as they were before; ``late`` says that
    the engine is older than ds-gradfix."""

    facts: Facts
    settings: Settings
    because: str
    effects: Mapping[str, Effect]
    left_out: Mapping[str, str]
    steered: Mapping[str, Any]
    late: bool = False

    @property
    def patches(self) -> frozenset[str]:
        return frozenset(self.effects)


def facts_of(engine: Any, convention: str = "sum") -> Facts:
    """Read a live engine. One without an optimizer reduces nothing: ZeRO stage 0, alone."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "param_groups"):  # none, or the parameter offload of ZeRO-3 inference
        return Facts(zero_stage=0, group_size=1)
    dist = sys.modules["deepspeed.comm"]
    config = engine._config
    group = getattr(optimizer, "dp_process_group", None) or engine.seq_data_parallel_group
    groups = {id(g): g for g in getattr(optimizer, "sub_group_process_groups", ())}
    return Facts(
        zero_stage=int(config.zero_optimization_stage),
        group_size=dist.get_world_size(group=group),
        sequence_parallel_size=int(engine.sequence_parallel_size),
        reduce_scatter=bool(config.zero_config.reduce_scatter),
        contiguous_gradients=bool(config.zero_config.contiguous_gradients),
        reduce_bucket_size=int(config.zero_config.reduce_bucket_size),
        predivide_factor=float(config.gradient_predivide_factor),
        prescale_gradients=bool(config.prescale_gradients),
        reduction_op=_reduction_op(config),
        convention=convention,
        partition_sizes=tuple(sorted({dist.get_world_size(group=g) for g in groups.values()})),
        largest_parameter=max(map(numel_of, engine.module.parameters()), default=0),
        dtype=_dtype(engine),
        gradient_accumulation_steps=int(engine.gradient_accumulation_steps()),
        gradient_clipping=float(engine.gradient_clipping()),
        grad_accum_dtype=getattr(config, "grad_accum_dtype", None),
        dynamic_loss_scale=bool(engine.fp16_enabled() and engine.dynamic_loss_scale()),
        fused_half=type(optimizer).__name__ == "FP16_Optimizer",
        check_grad_overflow=_checks_overflow(config),
        own_step=_own_step(config.zero_config),
        offload_optimizer=bool(engine.zero_cpu_offload()),
        experts=bool(engine.has_moe_layers),
        folded_experts=_folds(engine),
        expert_parallel_size=_expert_parallel_size(engine),
        model_parallel_size=int(engine.mp_world_size),
        pipeline_stages=int(getattr(engine, "num_stages", 1)),
        sparse_gradients=any(getattr(module, "sparse", False) for module in engine.module.modules()),
        dense_partition_size=_dense_partition_size(engine, dist),
        sequence_mesh=getattr(engine, "mesh_device", None) is not None,
        immediate_grad_update=_immediate_grad_update(config),
        wrapper=type(optimizer).__name__,
        basic_optimizer=_kind(getattr(engine, "basic_optimizer", None)),
        multi_rank_buckets=bool(getattr(config.zero_config, "use_multi_rank_bucket_allreduce", True)),
        pipeline=bool(engine.pipeline_parallelism),
        compressed_embeddings=bool(getattr(engine, "sparse_tensor_module_names", ())),
    )


def _dense_partition_size(engine: Any, dist: Any) -> int | None:
    stock = getattr(getattr(engine.optimizer, "parameter_offload", None), STOCK_PARTITION_SIZE, None)
    if stock is not None:
        return int(stock)
    return min((dist.get_world_size(group=group) for group in dense_partition_groups(engine)), default=None)


def _immediate_grad_update(config: Any) -> bool:
    """Releases before 0.17.5 keep it in the configuration itself."""
    section = getattr(config, "bfloat16_config", config)
    for name in ("immediate_grad_update", "bfloat16_immediate_grad_update"):
        if hasattr(section, name):
            return bool(getattr(section, name))
    return False


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__name__}"


def _dtype(engine: Any) -> str:
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def _checks_overflow(config: Any) -> bool | None:
    """What the job asked for, also from a release that ignores the key."""
    asked = getattr(config, "_param_dict", {})
    section = asked.get("bf16") or asked.get("bfloat16") or {}
    wanted: bool | None = section.get("check_grad_overflow")
    return wanted


def _own_step(zero: Any) -> bool:
    offload = getattr(zero, "offload_optimizer", None)
    return getattr(zero, "zenflow", None) is not None or bool(getattr(offload, "super_offload", False))


def _folds(engine: Any) -> bool:
    """Whether tensor-parallel peers own different routed experts (AutoEP folded with AutoTP)."""
    return int(engine.mp_world_size) > 1 and any(map(is_autoep_expert, engine.module.parameters()))


def _expert_parallel_size(engine: Any) -> int:
    """The largest of the groups whose ranks own different experts of this model."""
    names = {getattr(p, "group_name", None) for p in engine.module.parameters() if not getattr(p, "allreduce", True)}
    groups = [group for name, group in (engine.expert_parallel_group or {}).items() if name in names]
    return max((int(sys.modules["deepspeed.comm"].get_world_size(group=group)) for group in groups), default=1)


def _reduction_op(config: Any) -> str:
    """What the job asked for, also from a release that ignores the key."""
    known = getattr(config, "gradient_allreduce_op", None)
    return str(known or getattr(config, "_param_dict", {}).get("gradient_allreduce_op", "mean")).lower()


def numel_of(param: Any) -> int:
    """Of the whole parameter, also where ZeRO-3 has partitioned it."""
    return int(getattr(param, "ds_numel", param.numel()))


def convention_of(settings: Settings, sequence_parallel_size: int) -> tuple[str, str]:
    """What a mean does over sequence shards, and what decided it: the user, else the evidence of a
    framework whose own loss is known and that made this job's shards, else DeepSpeed's own convention."""
    if settings.sequence_parallel_reduction is not None:
        return settings.sequence_parallel_reduction, "set by sequence_parallel_reduction"
    parallelism = _accelerate_parallelism()
    if getattr(parallelism, "sp_backend", None) == "deepspeed" and parallelism.sp_size == sequence_parallel_size > 1:
        return "mean", (
            f"Accelerate's parallelism config has sp_size={parallelism.sp_size}: the loss of Transformers' Trainer and"
            " of Accelerate's recipe is combined over the shards"
        )
    return "sum", "DeepSpeed's own convention, by default"


def _accelerate_parallelism() -> Any:
    """The parallelism config of this process's Accelerator, which is Transformers' Trainer's too; else None.

    Accelerate (from 1.12 on, the first with sequence parallelism) keeps it in a state that all its Accelerators share,
    filled before it calls ``deepspeed.initialize``. It is read where it lies: ``AcceleratorState()`` would make one.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return (getattr(state, "_shared_state", None) or {}).get("parallelism_config")


TOO_LATE = "this engine was made before ds-gradfix was on: make it again"


def engage(engine: Any, plan: Plan, settings: Settings, late: bool = False) -> Engagement:
    """Decide which patches are in force for an engine, and let its slots know. ``late``: the engine is older than
    ds-gradfix, and what acts while one is made has not.

    Raises SettingsError where the job asks for an option that can't be had here, and for a convention
    over sequence shards that would mean nothing.
    """
    convention, because = convention_of(settings, int(engine.sequence_parallel_size))
    facts = facts_of(engine, convention)
    check_convention(facts, settings)
    effects: dict[str, Effect] = {}
    left_out: dict[str, str] = {}
    for entry in plan.entries:
        effect = entry.patch.affects(facts)
        if effect is None:
            continue
        option = entry.patch.option
        refusal = option.refuse_engine(engine) if option else None
        if refusal:
            raise SettingsError(refusal)
        reason = entry.why_not(settings) or (TOO_LATE if late and entry.patch.early else None)
        refusal = entry.patch.refuse(engine) if entry.patch.refuse and settings.selects(entry.patch.id) else None
        if refusal:
            if settings.self_check == "error" and not late:  # of an older engine nobody knows whether it still trains
                raise SelfCheckError(f"{effect.words}: {refusal} To go on all the same: self_check 'warn', or exclude")
            left_out[entry.patch.id] = f"{effect.words}: {refusal}"
        elif reason is None:
            effects[entry.patch.id] = effect
        elif entry.verdict in (Verdict.DEFECTIVE, Verdict.UNRECOGNISED):
            if option:
                raise SettingsError(refused_option(option.key, entry.patch.id, reason))
            left_out[entry.patch.id] = _not_corrected(entry, effect, reason)
    steered = _steer(engine, plan, effects)
    engagement = Engagement(facts, settings, because, effects, left_out, steered, late)
    for holder in (engine, engine.optimizer):
        if holder is not None:
            setattr(holder, ATTRIBUTE, engagement)
    return engagement


def _not_corrected(entry: Entry, effect: Effect, reason: str) -> str:
    if entry.verdict is Verdict.UNRECOGNISED:
        return f"{entry.patch.id} is out of force: {reason}. If this build has the defect, {effect.words}"
    return f"{effect.words}, and {entry.patch.id} does not correct it: {reason}"


def refused_option(key: str, patch_id: str, reason: str) -> str:
    """The error text for an option that a job asked for and that can't be given."""
    return f'"{key}": this DeepSpeed does not do what it asks for, and {patch_id}, which would, does not act: {reason}'


def check_convention(facts: Facts, settings: Settings) -> None:
    if facts.reduction_op == "sum" and settings.sequence_parallel_reduction is not None:
        raise SettingsError(
            f"sequence_parallel_reduction: {settings.sequence_parallel_reduction!r} has no meaning with"
            ' "gradient_allreduce_op": "sum", which adds up all ranks: leave one of the two out'
        )


def _steer(engine: Any, plan: Plan, effects: dict[str, Effect]) -> dict[str, Any]:
    """Set the attributes that patches in force steer by; returns what they were. A plug-in's patch that can't is no
    longer in force."""
    before: dict[str, Any] = {}
    for patch_id in list(effects):
        patch, own = plan.entry(patch_id).patch, dict(before)
        try:
            for correction, _ in plan.entry(patch_id).corrections():
                if isinstance(correction, Steer):
                    for name, value in correction.values.items():
                        own.setdefault(name, attrgetter(name)(engine))
                        _set(engine, name, value(engine) if callable(value) else value)
        except Exception as error:
            if patch.plugin is None:
                raise
            for name in own.keys() - before.keys():
                _set(engine, name, own[name])
            del effects[patch_id]
            tell(f"{patch.plugin}, {patch_id}: {in_words(error)}; the patch is left out")
        else:
            before = own
    return before


def _set(engine: Any, dotted: str, value: Any) -> None:
    *path, name = dotted.split(".")
    setattr(attrgetter(".".join(path))(engine) if path else engine, name, value)


def disengage(engine: Any) -> None:
    """Take every patch out of force for an engine, and put its attributes back."""
    engagement = vars(engine).get(ATTRIBUTE)
    if engagement is not None:
        for name, value in engagement.steered.items():
            _set(engine, name, value)
    for holder in (engine, engine.optimizer):
        if holder is not None:
            vars(holder).pop(ATTRIBUTE, None)


# ---------------------------------------------------------------------------------------- proof


@dataclass(frozen=True)
class Proof:
    """What was found out about one engine: measurements by patch, those that are left out among them, and everything
    that is wrong and should not be."""

    measurements: Mapping[str, tuple[Measurement, ...]]
    wrong: tuple[str, ...]


def prove(engine: Any, engagement: Engagement, plan: Plan, slots: Sequence[str], topic: str) -> Proof:
    """Compare the ranks, measure every patch that matters on the engine's own groups, judge together.

    ``topic`` names the engine, the same on all ranks and once in a job. Every rank gets the same list of wrong
    things, so that all raise or none does. Measuring needs all ranks: where they differ it is left out.
    Raises SelfCheckError where another rank has stopped, and where the ranks can't hear each other any more.
    """
    place = place_among_ranks()
    if place is None:
        return _judge(_measure(engine, engagement, plan), engagement)
    ranks = exchange(place.store, f"{topic}/digest", place.rank, place.ranks, _digest(engagement, plan, slots))
    if not ranks.unanimous:
        return Proof({}, tuple(_differences(ranks)))
    measured = _measure(engine, engagement, plan)
    own = _judge(measured, engagement)
    # Measuring is done together: who has not finished soon after the others will not.
    patience = min(MEASURING, agreement.TIMEOUT)
    heard = exchange(place.store, f"{topic}/result", place.rank, place.ranks, json.dumps(own.wrong), patience)
    wrong = [f"{name_ranks(ranks)}: {line}" for text, ranks in heard.said.items() for line in json.loads(text)]
    if heard.missing:
        wrong.append(f"{name_ranks(heard.missing)} did not finish the self-check")
    return Proof(own.measurements, tuple(wrong))


MEASURING = timedelta(seconds=30)
"""How long the first rank that has measured an engine waits for the others."""

STOPPED, UNREADABLE = "stopped", "unreadable"
"""What a rank says instead of its digest: it has raised, or it can't read its engine and leaves it alone."""


def withdraw(topic: str, error: Exception) -> None:
    """Let the other ranks know that this one raises ``error`` instead of proving the engine of that topic."""
    place = place_among_ranks()
    if place is None:
        return
    with suppress(SelfCheckError):  # of a store that is gone; the error at hand is the one to raise
        post(place.store, f"{topic}/digest", place.rank, json.dumps({STOPPED: f"{type(error).__name__}: {error}"}))


def leave_together(topic: str, error: Exception) -> Proof:
    """For an engine that can't be read here: what is wrong if the other ranks do not leave it alone as well."""
    place = place_among_ranks()
    if place is None:
        return Proof({}, ())
    said = json.dumps({UNREADABLE: repr(error)})
    ranks = exchange(place.store, f"{topic}/digest", place.rank, place.ranks, said)
    alone = not ranks.missing and all(UNREADABLE in json.loads(text) for text in ranks.said)
    return Proof({}, () if alone else tuple(_differences(ranks)))


@dataclass(frozen=True)
class Place:
    """This process among the job's ranks, and the store through which they hear each other."""

    store: Any
    rank: int
    ranks: int


def place_among_ranks() -> Place | None:
    """None without a process group."""
    store = _store()
    if store is None:
        return None
    dist = sys.modules["torch.distributed"]
    return Place(store, dist.get_rank(), dist.get_world_size())


def _store() -> Any:
    """The default process group's store: torch offers no public way to it."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    except (ImportError, ValueError, RuntimeError):
        return None


def _digest(engagement: Engagement, plan: Plan, slots: Sequence[str]) -> str:
    """What must be the same on all ranks, as one line of JSON."""
    installed = plan.installed
    return json.dumps(
        {
            "ds-gradfix": installed.ds_gradfix,
            "DeepSpeed": installed.deepspeed,
            "torch": installed.torch,
            "slots": sorted(slots),
            "patches in force": sorted(engagement.patches),
            "patches left out": sorted(engagement.left_out),
            "reduction": engagement.facts.reduction_op,
            "convention over sequence shards": engagement.facts.convention,
            **{f"setting {name}": value for name, value in asdict(engagement.settings).items()},
        }
    )


NO_ANSWER = (
    "did not answer: is ds-gradfix installed and on there?"
    " A correction on some ranks only makes the job hang or diverge"
)


def _differences(ranks: Agreement) -> Iterator[str]:
    if ranks.missing:
        yield f"{name_ranks(ranks.missing)} {NO_ANSWER}"
    digests = [(json.loads(text), who) for text, who in ranks.said.items()]
    for digest, who in digests:
        if STOPPED in digest:
            raise SelfCheckError(f"ds-gradfix: {name_ranks(who)} stopped, and so must all: {digest[STOPPED]}")
        if UNREADABLE in digest:
            yield f"{name_ranks(who)} can't read the engine, and nothing is corrected there: {digest[UNREADABLE]}"
    digests = [(digest, who) for digest, who in digests if UNREADABLE not in digest]
    for key in digests[0][0] if digests else ():
        values = [(digest.get(key), who) for digest, who in digests]
        if all(value == values[0][0] for value, _ in values):
            continue
        if all(isinstance(value, list) for value, _ in values):
            common = set.intersection(*(set(value) for value, _ in values))
            values = [([item for item in value if item not in common], who) for value, who in values]
        who_has: dict[str, list[int]] = {}
        for value, who in values:
            who_has.setdefault(json.dumps(value), []).extend(who)
        said = "; ".join(f"{value} on {name_ranks(who)}" for value, who in who_has.items())
        yield f"the ranks differ in {key}: {said}"


def _measure(
    engine: Any, engagement: Engagement, plan: Plan
) -> dict[str, tuple[Measurement, ...] | str]:
    """Each patch's and check's measurements, or the error that stopped them. The engine is left as it was."""
    found: dict[str, tuple[Measurement, ...] | str] = {}
    known: dict[Any, tuple[Measurement, ...] | str] = {}  # patches that share a correction share its measurement
    patches = [plan.entry(patch_id).patch for patch_id in sorted({*engagement.effects, *engagement.left_out})]
    everything: list[Patch | Check] = [*patches, *checks()]
    for one in everything:
        try:
            if one.measure not in known:
                with _unlogged_collectives():
                    known[one.measure] = tuple(one.measure(engine))
        except Exception as error:  # one rank's failure must be heard by all, not end one rank
            known[one.measure] = f"{type(error).__name__}: {error}"
            log.exception("ds-gradfix: the self-check of %s failed", one.id)
        found[one.id] = known[one.measure]
    return found


@contextmanager
def _unlogged_collectives() -> Iterator[None]:
    """DeepSpeed's own count and timing of collectives must not show ours."""
    logger = getattr(sys.modules.get("deepspeed.comm.comm"), "comms_logger", None)
    if logger is None or not logger.enabled:
        yield
        return
    logger.enabled = False
    try:
        yield
    finally:
        logger.enabled = True


def _judge(measured: Mapping[str, tuple[Measurement, ...] | str], engagement: Engagement) -> Proof:
    wrong = []
    for patch_id, result in measured.items():
        if patch_id in engagement.left_out:
            continue  # it is known, and said
        if isinstance(result, str) and patch_id not in engagement.effects:
            continue  # a check that can't tell must not stop a job in which nothing is known to be wrong; it is logged
        if isinstance(result, str):
            wrong.append(f"{patch_id} could not be measured: {result}")
            continue
        for m in result:
            if not m.right:
                wrong.append(
                    f"{patch_id}: the {m.path} gives {m.ratio:.6g} times the right value (an element is off by"
                    f" {m.error:.2g} of its value, rounding explains {m.tolerance:.2g})"
                )
    kept = {patch_id: result for patch_id, result in measured.items() if not isinstance(result, str)}
    return Proof(kept, tuple(wrong))


# --------------------------------------------------------------------------------------- report


def settle(engagement: Engagement, proof: Proof | None, plan: Plan) -> None:
    """Say on rank 0, in one line, what is corrected and what was measured; raise or warn if wrong.

    Raises SelfCheckError, on every rank alike, at level ``error``.
    """
    first = own_rank() == 0
    if first:
        for patch_id, line in engagement.left_out.items():
            log.warning("ds-gradfix: %s%s", line, _shown(proof, patch_id))
    if proof is not None:
        insist_on(proof, engagement.settings)
    if first:
        log.info("%s", summary(engagement, proof, plan))


def insist_on(proof: Proof, settings: Settings) -> None:
    """Raise SelfCheckError for what is wrong at level ``error``, say it on rank 0 at ``warn``."""
    if not proof.wrong:
        return
    text = "ds-gradfix: " + "; ".join(proof.wrong)
    if settings.self_check == "error":
        raise SelfCheckError(
            f"{text}. Training would go on with wrong gradients. To look closer: 'ds-gradfix verify CONFIG';"
            f" to leave a patch out: exclude; to go on all the same: self_check 'warn'"
        )
    if own_rank() == 0:
        log.warning("%s", text)


def summary(engagement: Engagement, proof: Proof | None, plan: Plan) -> str:
    """The one line of log for an engine."""
    facts = engagement.facts
    job = "an engine from before, from now on: " if engagement.late else ""
    job += f"ZeRO-{facts.zero_stage}, {facts.group_size} ranks"
    if facts.sequence_parallel_size > 1:
        job += f", sequence parallel {facts.sequence_parallel_size}"
    parts = [_patch_summary(engagement, proof, patch_id) for patch_id in engagement.effects]
    if facts.reduction_op == "sum" and not parts:
        parts.append("gradient_allreduce_op is sum, which this DeepSpeed does by itself")
    if not parts:
        what = "nothing is corrected" if engagement.left_out else "nothing to correct"
        parts.append(f"{what}, DeepSpeed {plan.installed.deepspeed} runs as it is")
    parts += [
        f"{check.title} measured {_ratios(proof.measurements[check.id])} of the right value"
        for check in checks()
        if proof is not None and proof.measurements.get(check.id)
    ]
    if facts.sequence_parallel_size > 1 and facts.reduction_op == "mean":
        parts.append(_convention_summary(engagement))
    return f"ds-gradfix: {job}: " + "; ".join(parts)


def _patch_summary(engagement: Engagement, proof: Proof | None, patch_id: str) -> str:
    part = f"{patch_id} is on ({engagement.effects[patch_id].words}; corrected"
    if proof is not None and proof.measurements.get(patch_id):
        part += f", measured {_ratios(proof.measurements[patch_id])} of the right value"
    elif engagement.settings.self_check == "off":
        part += ", not measured: self_check is off"
    return part + ")"


def _ratios(measured: Sequence[Measurement]) -> str:
    return " and ".join(sorted({f"{m.ratio:.6g}" for m in measured}))


def _shown(proof: Proof | None, patch_id: str) -> str:
    """In words: what this engine does where a patch is left out."""
    measured = proof.measurements.get(patch_id) if proof is not None else None
    if not measured:
        return ""
    wrong = [f"the {m.path} gives {m.ratio:.6g} times the right value" for m in measured if not m.right]
    return f". Measured on this engine: {'; '.join(wrong) or 'nothing is wrong'}"


LOSSES = {
    "sum": "right where a rank's backward yields its own shard's part only (Megatron-DeepSpeed)",
    "mean": "right where the loss is the mean of the rank's own shard, or is combined over the shards by a"
    " differentiable all-gather (Transformers, the ALST recipe)",
}


def _convention_summary(engagement: Engagement) -> str:
    """Which convention is in force, why, what it changes against stock, and who wants the other."""
    convention = engagement.facts.convention
    other = "mean" if convention == "sum" else "sum"
    return (
        f"over sequence shards gradients are reduced by {convention} ({engagement.because}),"
        f" {change(engagement.facts)}: {LOSSES[convention]}; sequence_parallel_reduction={other!r} is {LOSSES[other]}"
    )


def change(facts: Facts) -> str:
    """What the convention in force does to this job's gradients, compared with stock."""
    shards = facts.sequence_parallel_size
    summed, averaged = ("as in stock", f"x{shards} of stock") if facts.convention == "sum" else (
        f"x1/{shards} of stock",
        "as in stock",
    )
    if facts.zero_stage != 3:
        return summed
    if facts.reduce_scatter or not facts.contiguous_gradients:
        return averaged
    if facts.largest_parameter is not None and facts.largest_parameter <= facts.reduce_bucket_size:
        return summed
    return f"{averaged} for parameters larger than reduce_bucket_size, {summed} for the others"


def report(engine: Any) -> dict[str, Any]:
    """Which reduction an engine has and where it is applied, as plain data.

    ``op``, ``divisor`` (what the sum of the ranks' gradients is divided by), ``group_size``,
    ``sequence_parallel_size``, ``convention`` with ``because``, ``patches`` in force with what each
    corrects, ``left_out``, ``by`` (whose code reduces), ``where`` (the functions that do), ``audit``
    (what the audit of the first step found: ``done``, ``reason`` where it could not, ``findings`` with
    ratios, and ``kept_bytes``; None before it or without one), and
    ``param_groups``: of each of the optimizer's groups its number of parameters, its elements and the
    sizes of the process groups that its gradients are reduced over. Raises GradfixError for an engine
    that was made without ds-gradfix.
    """
    engagement: Engagement | None = getattr(engine, ATTRIBUTE, None)
    if engagement is None:
        raise GradfixError("this engine is not under ds-gradfix: call enable() before this, or before it is made")
    facts = engagement.facts
    scale = gradient_scale(facts.reduction_op, facts.group_size, facts.sequence_parallel_size, facts.convention)
    audit = vars(engine).get(AUDIT)
    return {
        "op": facts.reduction_op,
        "divisor": 1 / scale,
        "group_size": facts.group_size,
        "sequence_parallel_size": facts.sequence_parallel_size,
        "convention": facts.convention if facts.reduction_op == "mean" else None,
        "because": engagement.because,
        "by": "ds-gradfix" if engagement.effects else "DeepSpeed",
        "where": list(WHERE[facts.zero_stage]),
        "patches": {patch_id: effect.words for patch_id, effect in engagement.effects.items()},
        "left_out": dict(engagement.left_out),
        "audit": audit if isinstance(audit, dict) else None,
        "param_groups": [_param_group(engine, params) for params in _param_groups(engine)],
    }


WHERE = {
    0: ("DeepSpeedEngine.allreduce_bucket", "DeepSpeedEngine.sparse_allreduce"),
    1: ("average_tensor", "gradient_reduction_w_predivide", "allreduce_bucket"),
    2: ("average_tensor", "gradient_reduction_w_predivide", "allreduce_bucket"),
    3: ("__avg_scatter_grads", "__avg_scatter_contiguous_grads"),
}


def _param_groups(engine: Any) -> list[list[Any]]:
    """The parameters that reduce, as the optimizer groups them: ZeRO keeps its own lists."""
    optimizer = engine.optimizer
    for name in ("bit16_groups", "fp16_groups"):
        groups = getattr(optimizer, name, None)
        if groups:
            return [list(group) for group in groups]
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", ())]


def _param_group(engine: Any, params: Sequence[Any]) -> dict[str, Any]:
    dist = sys.modules["deepspeed.comm"]
    default = getattr(engine.optimizer, "dp_process_group", None) or engine.seq_data_parallel_group
    groups = {id(g): g for g in (getattr(param, "ds_process_group", default) for param in params)}
    return {
        "parameters": len(params),
        "elements": sum(map(numel_of, params)),
        "reduced_over": sorted({dist.get_world_size(group=g) for g in groups.values()}),
    }


def own_rank() -> int:
    """Of this process in the job."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
