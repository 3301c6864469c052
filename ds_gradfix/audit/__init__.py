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
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ds_gradfix.agreement import Agreement, exchange, name_ranks
from ds_gradfix.audit import _finding
from ds_gradfix.audit._finding import Finding
from ds_gradfix.audit._places import Places, loss_scale_of, places_of, why_not_audited
from ds_gradfix.audit._samples import Sample, choose, digest, listen
from ds_gradfix.engine import AUDIT, place_among_ranks
from ds_gradfix.errors import AuditError
from ds_gradfix.facts import Facts

log = logging.getLogger("ds_gradfix")

FIRST_STEP = "ds-gradfix: audit of the first step"


def attach(engine: Any, facts: Facts, strict: bool, topic: str, late: bool = False) -> None:
    """Follow the gradients of this engine's next whole step, and take off everything after it.

    ``topic`` names the engine among the ranks, once in a job. ``late``: the engine is older than ds-gradfix, and what it has
    accumulated so far was not seen; the step after that is audited. Raises AuditError, in strict mode, for an engine
    that can't be audited.
    """
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
    if _rank() == 0:
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
        at_loss = any(math.isclose(self._root * steps, scale) for scale in (1.0, loss_scale_of(self._engine)))
        return 1 / self._root / (steps if at_loss or not at_output else 1)

    # ------------------------------------------------------------------------------ at the step

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._whole:
            self._start_again()
            return original(*args, **kwargs)
        self._attempt += 1
        judgeable = self._before()
        skipped = self._engine.skipped_steps
        result = original(*args, **kwargs)
        if judgeable is not None:
            self._after(judgeable and self._engine.skipped_steps == skipped)
        return result

    def _start_again(self) -> None:
        self._whole = True
        for sample in self._samples:
            sample.forget()

    def _before(self) -> bool | None:
        """Compare; False where something is not finite, and so nothing can be said, None where the audit is over.

        Raises AuditError on all ranks, in strict mode, if a gradient is wrong.
        """
        ready = self._exchange("ready", digest(self._samples))
        if ready.missing:
            return self._end(f"{name_ranks(ready.missing)} did not answer")
        try:
            alike = _finding.common_groups(self._engine, self._samples, ready.said)
            own: Any = {"differ": True} if not alike else self._measured()
        except Exception as error:  # one rank's failure must be heard by all, not end one rank
            log.exception("%s failed", FIRST_STEP)
            own = {"failed": f"{type(error).__name__}: {error}"}
        heard = self._exchange("found", json.dumps(own))
        if heard.missing:
            return self._end(f"{name_ranks(heard.missing)} did not answer")
        said = [(json.loads(text), ranks) for text, ranks in heard.said.items()]
        differ = [rank for one, ranks in said if "differ" in one for rank in ranks]
        if differ:
            return self._end(f"{name_ranks(differ)} and others of the same group have different parameters")
        for one, ranks in said:
            if "failed" in one:
                return self._end(f"{name_ranks(ranks)}: {one['failed']}")
        every = [one for one, ranks in said for _ in ranks]
        self._square = None if any(one["square"] is None for one in every) else sum(one["square"] for one in every)
        paths = _finding.joined(one["paths"] for one in every)
        self._findings = [_finding.judged(path, sums) for path, sums in sorted(paths.items())]
        finite = all(sums.finite for sums in paths.values())
        if finite:
            self._stop_if_wrong("Stopped before the update, because strict is set.")
        return finite

    def _measured(self) -> dict[str, Any]:
        paths = _finding.measure(self._engine, self._facts, self._samples, self._places)
        square = None
        if _finding.can_take_norm(self._engine):
            square = _finding.square_of_norm(self._engine, self._facts, self._places)
        return {"paths": {path: asdict(sums) for path, sums in paths.items()}, "square": square}

    def _after(self, taken: bool) -> None:
        """Report, if the step was really taken. Raises AuditError on all ranks, in strict mode, for a wrong norm."""
        reported = self._engine.get_global_grad_norm()
        text = json.dumps({"taken": taken, "norm": None if reported is None else float(reported)})
        heard = self._exchange("norm", text)
        said = [json.loads(each) for each in heard.said]
        if not all(one["taken"] for one in said):
            if not self._waited and _rank() == 0:
                log.info("%s waits for one that is taken: a gradient is not finite, or the step was skipped", FIRST_STEP)
            self._waited = True
            self._start_again()
            return
        norms = [one["norm"] for one in said if one["norm"] is not None]
        if self._square is not None and norms:
            right = math.sqrt(self._square)
            worst = max(norms, key=lambda norm: abs(norm - right))
            self._findings.append(_finding.judged_norm(worst, right, _finding.norm_tolerance(self._engine)))
        self._stop_if_wrong("The update is taken: what is wrong shows only after it.")
        self._report()

    def _exchange(self, what: str, text: str) -> Agreement:
        place = place_among_ranks()
        if place is None:
            return Agreement({text: (0,)})
        return exchange(place.store, f"{self._topic}/{self._attempt}/{what}", place.rank, place.ranks, text)

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
        believed = "; the loss was not seen, and is taken to be scaled as the engine says" if self._believed else ""
        self.detach()
        if _rank() == 0:
            for finding in self._findings:
                say = log.info if finding.right else log.warning
                say("%s: %s%s", FIRST_STEP, finding.words, believed)


def _rank() -> int:
    dist = sys.modules["torch.distributed"]
    return int(dist.get_rank()) if dist.is_initialized() else 0

