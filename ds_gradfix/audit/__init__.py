"""The audit of the first step: on the real job's own gradients, is what the optimizer is about to use what is right?

Of a few hundred elements each rank keeps its local gradients, as the user's loss gives them, over all micro-batches of
the first step. Just before the optimizer's update they are reduced in float64 and compared with what the optimizer has;
after it, the norm that it reports with one of all its gradients. No patch is needed. When the step is done, nothing is
left in the engine but the findings.

What a gradient is on its way from the loss is taken as autograd gives it: a division inside the model's own backward
pass is part of it. Between the loss and there the audit sees the factor that the engine really put on, if the job
calls ``engine.backward``; elsewhere (pipelines, ``loss.backward()``) it believes the engine's loss scale, and says so.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ds_gradfix.agreement import exchange, name_ranks
from ds_gradfix.audit import _finding
from ds_gradfix.audit._finding import Finding, Used
from ds_gradfix.audit._places import Places, loss_scale_of, places_of, why_not_audited
from ds_gradfix.audit._samples import Sample, choose, digest, listen
from ds_gradfix.engine import AUDIT, own_rank, place_among_ranks
from ds_gradfix.errors import AuditError
from ds_gradfix.facts import Facts

log = logging.getLogger("ds_gradfix")

FIRST_STEP = "ds-gradfix: audit of the first step"
BEFORE = "Stopped before the update, because strict is set."

LOSS_ROUNDING = 0.02
"""A division by 3 in the dtype of the loss is off by no more."""


def attach(engine: Any, facts: Facts, strict: bool, topic: str, late: bool = False) -> None:
    """Follow the gradients of this engine's next whole step, and take off everything after it.

    ``topic`` names the engine among the ranks, once in a job. ``late``: the engine is older than ds-gradfix, and what
    it has accumulated so far was not seen; the step after that is audited. Raises AuditError, in strict mode, for an
    engine that can't be audited though it takes steps.
    """
    if not hasattr(engine.optimizer, "param_groups"):  # a model that only infers beside the one that trains
        _give_up(engine, False, "this engine is not audited: it has no optimizer that takes steps")
        return
    reason = why_not_audited(engine, facts)
    if reason is not None:
        _give_up(engine, strict, f"this engine is not audited: {reason}")
        return
    places = places_of(engine)
    assert places is not None
    Audit(engine, facts, places, strict, topic, whole=not late).attach()


def detach(engine: Any) -> None:
    """Take off what an audit that has not come to its end has put on; does nothing otherwise."""
    audit = vars(engine).get(AUDIT)
    if isinstance(audit, Audit):
        audit.detach()
        vars(engine).pop(AUDIT)


def _give_up(engine: Any, strict: bool, reason: str) -> None:
    setattr(engine, AUDIT, {"done": False, "reason": reason, "findings": [], "kept_bytes": 0})
    if strict:
        raise AuditError(f"{FIRST_STEP}: {reason}. To go on all the same: leave out audit or strict")
    if own_rank() == 0:
        log.warning("%s: %s", FIRST_STEP, reason)


class Audit:
    """One engine's audit, from attach to report."""

    def __init__(self, engine: Any, facts: Facts, places: Places, strict: bool, topic: str, whole: bool) -> None:
        self._engine, self._facts, self._places, self._strict = engine, facts, places, strict
        self._topic, self._attempt, self._whole = f"{topic}/audit", 0, whole
        self._samples: list[Sample] = []
        self._handles: list[Any] = []
        self._occupied: dict[str, tuple[Any, Any]] = {}
        self._root: float | None = None
        self._divided = True
        """Of the backward pass under way: the factor that the engine put on the loss, None while it is not known, and
        whether the loss counts as one of gradient_accumulation_steps."""
        self._believed = False
        self._findings: list[Finding] = []
        self._square: float | None = None
        self._waited = False

    def attach(self) -> None:
        self._samples = choose(self._engine, self._facts)
        self._handles = listen(self._samples, self._weight)
        self._occupy("backward", self._backward)
        self._occupy("_take_model_step", self._take_model_step)
        setattr(self._engine, AUDIT, self)

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for name, (ours, before) in self._occupied.items():
            if vars(self._engine).get(name) is ours:
                delattr(self._engine, name)
                if before is not None:
                    setattr(self._engine, name, before)
        self._samples = []

    def _occupy(self, name: str, body: Callable[..., Any]) -> None:
        """Put a function in front of one of the engine's methods, in the engine itself and no other."""
        original = getattr(self._engine, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self._samples:  # whoever captured it keeps calling it
                return original(*args, **kwargs)
            return body(original, *args, **kwargs)

        self._occupied[name] = ours, vars(self._engine).get(name)
        setattr(self._engine, name, ours)

    # ------------------------------------------------------------------------------ on the way

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        def seen(factor: Any) -> None:
            self._root = float(factor)

        self._divided = bool(kwargs.get("scale_wrt_gas", True))
        hook = loss.register_hook(seen) if getattr(loss, "requires_grad", False) else None
        try:
            return original(loss, *args, **kwargs)
        finally:
            self._root = None
            if hook is not None:
                hook.remove()

    def _weight(self) -> float:
        """What a gradient must be multiplied by to be the user's loss's, over the accumulation steps."""
        steps = self._engine.gradient_accumulation_steps()
        if self._root is None:
            self._believed = True
            return 1 / loss_scale_of(self._engine)
        if not self._divided:
            return 1 / self._root
        # From 0.18.3 to 0.19.5 the engine divides where the model's output is, instead of at the loss.
        at_output = hasattr(self._engine, "_backward_prologue_per_tensor")
        scales = (1.0, loss_scale_of(self._engine))
        at_loss = any(math.isclose(self._root * steps, scale, rel_tol=LOSS_ROUNDING) for scale in scales)
        return 1 / self._root / (steps if at_loss or not at_output else 1)

    # ------------------------------------------------------------------------------ at the step

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._whole:
            self._start_again()
            return original(*args, **kwargs)
        self._attempt += 1
        finite = self._before()
        if not self._samples:
            return original(*args, **kwargs)
        skipped = self._engine.skipped_steps
        with self._clipping_watched(finite):
            result = original(*args, **kwargs)
        if self._samples:
            self._after(finite and self._engine.skipped_steps == skipped)
        return result

    def _start_again(self) -> None:
        self._whole = True
        for sample in self._samples:
            sample.forget()

    def _before(self) -> bool:
        """Compare; whether all is finite, so that it can be judged. What can't be compared ends the audit.

        Raises AuditError on all ranks, in strict mode, if a gradient is wrong.
        """
        used, square, failure = self._taken_up()
        stage = self._engine.grid.get_stage_id() if self._engine.pipeline_parallelism else 0
        ready = {"stage": stage, "digest": digest(self._samples), "square": square, "failure": failure}
        said = self._heard("ready", ready)
        if said is None:
            return False
        failures = [one["failure"] for one in said if one["failure"]]
        digests = {(one["stage"], one["digest"]) for one in said}
        if failures or len(digests) > len({stage for stage, _ in digests}):
            self._end(failures[0] if failures else "the ranks have different parameters")
            return False
        own = _finding.measure(self._engine, self._facts, self._samples, used, self._places.partitioned)
        found = self._heard("found", {path: asdict(sums) for path, sums in own.items()})
        if found is None:
            return False
        self._square = None if any(one["square"] is None for one in said) else sum(one["square"] for one in said)
        paths = _finding.joined(found)
        self._findings = [_finding.judged(path, sums) for path, sums in sorted(paths.items())]
        finite = all(sums.finite for sums in paths.values()) and math.isfinite(self._square or 0.0)
        if finite:
            self._stop_if_wrong(BEFORE)
        return finite

    def _taken_up(self) -> tuple[list[Used], float | None, str | None]:
        """What can fail on one rank, before the others wait for it in a collective: what the optimizer is about to use,
        this rank's part of the square of its norm, and what went wrong."""
        try:
            used = _finding.used_by(self._engine, self._samples, self._places)
            square = None
            if not _finding.has_autoep(self._engine):
                square = _finding.square_of_norm(self._engine, self._places)
            return used, square, None
        except Exception as error:
            log.exception("%s failed", FIRST_STEP)
            return [], None, f"rank {own_rank()}: {type(error).__name__}: {error}"

    @contextmanager
    def _clipping_watched(self, finite: bool) -> Iterator[None]:
        """Where the engine clips the very gradients that were compared, compare them with what they were once more."""
        if not (finite and self._places.clipped_there):
            yield
            return
        before = _finding.picked(self._samples, self._places)

        def clipped(*_: Any) -> None:
            after = _finding.picked(self._samples, self._places)
            said = self._heard("clipped", _finding.clipped(self._samples, before, after))
            if said is not None and self._square is not None:
                clip = float(self._engine.gradient_clipping())
                self._findings += _finding.judged_clipping(said, clip, self._square)
                self._stop_if_wrong(BEFORE)

        handle = self._engine.optimizer.register_step_pre_hook(clipped)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, taken: bool) -> None:
        """Report, if the step was really taken. Raises AuditError on all ranks, in strict mode, for a wrong norm."""
        reported = self._engine.get_global_grad_norm()
        said = self._heard("norm", {"taken": taken, "norm": None if reported is None else float(reported)})
        if said is None:
            return
        if not all(one["taken"] for one in said):
            if not self._waited and own_rank() == 0:
                log.info("%s waits for one that is taken: this one is skipped, or a gradient is not finite", FIRST_STEP)
            self._waited = True
            self._start_again()
            return
        right = math.sqrt(self._square or 0.0)
        norms = [one["norm"] for one in said if one["norm"] is not None]
        worst = max(norms, key=lambda norm: abs(norm - right), default=None)
        self._findings.append(_finding.judged_norm(self._engine, worst, self._square))
        self._findings += _finding.left_out(self._engine)
        self._stop_if_wrong("Stopped after the update: what is wrong shows only then.")
        self._report()

    def _heard(self, what: str, own: Any) -> list[Any] | None:
        """What the ranks said, one for each; None, and the end of the audit, where one of them said nothing."""
        place = place_among_ranks()
        if place is None:
            return [own]
        heard = exchange(place.store, f"{self._topic}/{self._attempt}/{what}", place.rank, place.ranks, json.dumps(own))
        if heard.missing:
            self._end(f"{name_ranks(heard.missing)} did not answer")
            return None
        return [json.loads(text) for text, ranks in heard.said.items() for _ in ranks]

    # ------------------------------------------------------------------------------ what is said

    def _stop_if_wrong(self, when: str) -> None:
        wrong = [finding.words for finding in self._findings if not finding.right]
        if wrong and self._strict:
            self._report()
            raise AuditError(
                f"{FIRST_STEP}: {'; '.join(wrong)}. {when} To look closer: 'ds-gradfix verify CONFIG'; to go on all the"
                " same: leave out audit or strict"
            )

    def _end(self, reason: str) -> None:
        self.detach()
        _give_up(self._engine, self._strict, f"nothing can be said: {reason}")

    def _report(self) -> None:
        kept = sum(sample.kept_bytes for sample in self._samples)
        findings = [finding.as_data() for finding in self._findings]
        setattr(self._engine, AUDIT, {"done": True, "reason": None, "findings": findings, "kept_bytes": kept})
        self.detach()
        if own_rank() == 0:
            for finding in self._findings:
                (log.info if finding.right else log.warning)("%s: %s", FIRST_STEP, finding.words)
            if self._believed:
                log.info("%s did not see the loss, and took it to be scaled as the engine says", FIRST_STEP)
