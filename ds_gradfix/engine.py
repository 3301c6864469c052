"""One engine: its facts, which patches are in force for it, and the proof that they work there."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ds_gradfix.agreement import Agreement, exchange, name_ranks
from ds_gradfix.errors import SelfCheckError
from ds_gradfix.facts import Facts
from ds_gradfix.registry import Effect, Measurement, Plan, Verdict
from ds_gradfix.settings import Settings

ATTRIBUTE = "_ds_gradfix"
"""Where an engine and its optimizer carry their Engagement; a slot asks there."""

log = logging.getLogger("ds_gradfix")


@dataclass(frozen=True)
class Engagement:
    """The patches in force for one engine, with what each defect would do to it, and the patches
    that would be if they were not left out, with the reason."""

    facts: Facts
    settings: Settings
    effects: Mapping[str, Effect]
    left_out: Mapping[str, str]

    @property
    def patches(self) -> frozenset[str]:
        return frozenset(self.effects)


def facts_of(engine: Any) -> Facts:
    """Read a live engine. An engine without an optimizer reduces nothing: ZeRO stage 0, alone."""
    optimizer = engine.optimizer
    if optimizer is None:
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
        reduction_op=str(getattr(config, "gradient_allreduce_op", "mean")),
        partition_sizes=tuple(sorted({dist.get_world_size(group=g) for g in groups.values()})),
        largest_parameter=max(map(_numel, engine.module.parameters()), default=0),
    )


def _numel(param: Any) -> int:
    """Of the whole parameter, also where ZeRO-3 has partitioned it."""
    return int(getattr(param, "ds_numel", param.numel()))


def engage(engine: Any, plan: Plan, settings: Settings) -> Engagement:
    """Decide which patches are in force for an engine, and let its slots know."""
    facts = facts_of(engine)
    effects, left_out = {}, {}
    for entry in plan.entries:
        effect = entry.patch.affects(facts)
        if effect is None:
            continue
        if entry.act and settings.selects(entry.patch.id):
            effects[entry.patch.id] = effect
        elif entry.verdict in (Verdict.DEFECTIVE, Verdict.UNRECOGNISED):
            reason = entry.reason if not entry.act else f"left out by {settings.why_not_selected(entry.patch.id)}"
            left_out[entry.patch.id] = f"{effect.words}, and {entry.patch.id} does not correct it: {reason}"
    engagement = Engagement(facts, settings, effects, left_out)
    for holder in (engine, engine.optimizer):
        if holder is not None:
            setattr(holder, ATTRIBUTE, engagement)
    return engagement


def disengage(engine: Any) -> None:
    for holder in (engine, engine.optimizer):
        if holder is not None:
            vars(holder).pop(ATTRIBUTE, None)


# ---------------------------------------------------------------------------------------- proof


@dataclass(frozen=True)
class Proof:
    """What was found out about one engine: measurements by patch, and everything that is wrong."""

    measurements: Mapping[str, tuple[Measurement, ...]]
    wrong: tuple[str, ...]


def prove(engine: Any, engagement: Engagement, plan: Plan, slots: Sequence[str], number: int) -> Proof:
    """Compare the ranks, measure every patch in force on the engine's own groups, judge together.

    ``number`` counts engines, the same on all ranks. Every rank gets the same list of wrong things,
    so that all raise or none does. Measuring needs all ranks: where they differ it is left out.
    """
    store = _store()
    if store is None:
        return _judge(_measure(engine, engagement, plan))
    dist = sys.modules["torch.distributed"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    topic = f"ds_gradfix/engine/{number}"
    ranks = exchange(store, f"{topic}/digest", rank, world_size, _digest(engagement, plan, slots))
    if not ranks.unanimous:
        return Proof({}, tuple(_differences(ranks)))
    measured = _measure(engine, engagement, plan)
    own = _judge(measured)
    heard = exchange(store, f"{topic}/result", rank, world_size, json.dumps(own.wrong))
    wrong = [f"{name_ranks(ranks)}: {line}" for text, ranks in heard.said.items() for line in json.loads(text)]
    if heard.missing:
        wrong.append(f"{name_ranks(heard.missing)} did not finish the self-check")
    return Proof(own.measurements, tuple(wrong))


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
            "reduction": engagement.facts.reduction_op,
            **{f"setting {name}": value for name, value in asdict(engagement.settings).items()},
        }
    )


def _differences(ranks: Agreement) -> Iterator[str]:
    if ranks.missing:
        yield (
            f"{name_ranks(ranks.missing)} did not answer: is ds-gradfix installed and on there?"
            " A correction on some ranks only makes the job hang or diverge"
        )
    digests = [(json.loads(text), who) for text, who in ranks.said.items()]
    for key in digests[0][0]:
        values: dict[str, list[int]] = {}
        for digest, who in digests:
            values.setdefault(json.dumps(digest.get(key)), []).extend(who)
        if len(values) > 1:
            said = "; ".join(f"{value} on {name_ranks(who)}" for value, who in values.items())
            yield f"the ranks differ in {key}: {said}"


def _measure(
    engine: Any, engagement: Engagement, plan: Plan
) -> dict[str, tuple[Measurement, ...] | str]:
    """Each patch's measurements, or the error that stopped them. The engine is left as it was."""
    found: dict[str, tuple[Measurement, ...] | str] = {}
    for patch_id in sorted(engagement.patches):
        patch = plan.entry(patch_id).patch
        try:
            with _unlogged_collectives():
                found[patch_id] = tuple(patch.measure(engine))
        except Exception as error:  # one rank's failure must be heard by all, not end one rank
            found[patch_id] = f"{type(error).__name__}: {error}"
            log.exception("ds-gradfix: the self-check of %s failed", patch_id)
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


def _judge(measured: Mapping[str, tuple[Measurement, ...] | str]) -> Proof:
    wrong = []
    for patch_id, result in measured.items():
        if isinstance(result, str):
            wrong.append(f"{patch_id} could not be measured: {result}")
            continue
        for m in result:
            if not m.right:
                wrong.append(
                    f"{patch_id}: the {m.path} gives {m.ratio:.6g} times the right gradient (an element is off by"
                    f" {m.error:.2g} of its value, rounding explains {m.tolerance:.2g})"
                )
    kept = {patch_id: result for patch_id, result in measured.items() if not isinstance(result, str)}
    return Proof(kept, tuple(wrong))


# --------------------------------------------------------------------------------------- report


def settle(engine: Any, engagement: Engagement, proof: Proof | None, plan: Plan) -> None:
    """Say on rank 0, in one line, what is corrected and what was measured; raise or warn if wrong.

    Raises SelfCheckError, on every rank alike, at level ``error``.
    """
    first = _rank() == 0
    if first:
        for line in engagement.left_out.values():
            log.warning("ds-gradfix: %s", line)
    if proof is not None and proof.wrong:
        text = "ds-gradfix: " + "; ".join(proof.wrong)
        if engagement.settings.self_check == "error":
            raise SelfCheckError(
                f"{text}. Training would go on with wrong gradients. To look closer: 'ds-gradfix verify CONFIG';"
                f" to leave a patch out: exclude; to go on all the same: self_check 'warn'"
            )
        if first:
            log.warning("%s", text)
    if first:
        log.info("%s", summary(engagement, proof, plan))


def summary(engagement: Engagement, proof: Proof | None, plan: Plan) -> str:
    """The one line of log for an engine."""
    facts = engagement.facts
    job = f"ZeRO-{facts.zero_stage}, {facts.group_size} ranks"
    if facts.sequence_parallel_size > 1:
        job += f", sequence parallel {facts.sequence_parallel_size}"
    if not engagement.effects:
        what = "nothing is corrected" if engagement.left_out else "nothing to correct"
        return f"ds-gradfix: {job}: {what}, DeepSpeed {plan.installed.deepspeed} runs as it is"
    parts = []
    for patch_id, effect in engagement.effects.items():
        part = f"{patch_id} is on ({effect.words}; corrected"
        if proof is not None and proof.measurements.get(patch_id):
            ratios = {f"{m.ratio:.6g}" for m in proof.measurements[patch_id]}
            part += f", measured {' and '.join(sorted(ratios))} of the right value"
        elif engagement.settings.self_check == "off":
            part += ", not measured: self_check is off"
        parts.append(part + ")")
    return f"ds-gradfix: {job}: " + "; ".join(parts)


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
