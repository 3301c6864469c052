"""Compare what the ranks read from DeepSpeed with the float64 reference, and say in words what is wrong."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_gradfix.verify.cases import Case
from ds_gradfix.verify.config import precision
from ds_gradfix.verify.reference import ReferenceStep, train


@dataclass(frozen=True)
class Comparison:
    """One parameter's gradient (before clipping) or update (value after the step minus value before it)."""

    name: str
    numel: int
    ratio: float | None
    """<got, expected> / <expected, expected>; None where the expected one is zero."""
    error: float
    """||got - expected|| / ||expected||; where the expected one is zero, 0 if the other is zero too, else infinite."""
    tolerance: float
    got: tuple[float, ...]
    expected: tuple[float, ...]
    """Flat values: of the gradient; for an update, of the whole parameter after the step."""

    @property
    def right(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Number:
    """A number that the engine reports (None: it reports none) and the reference's."""

    got: float | None
    expected: float

    @property
    def ratio(self) -> float | None:
        """got / expected, None where there is no answer."""
        return None if self.got is None or self.expected == 0 else self.got / self.expected

    @property
    def error(self) -> float | None:
        """Relative error, None where nothing is reported; infinite when it is not finite."""
        if self.got is None:
            return None
        difference = abs(self.got - self.expected)
        if difference == 0:
            return 0.0
        return difference / abs(self.expected) if self.expected and math.isfinite(difference) else math.inf


@dataclass(frozen=True)
class Step:
    """One optimizer step, as rank 0 sees it."""

    gradients: tuple[Comparison, ...]
    norm: Number
    updates: tuple[Comparison, ...]
    loss: Number
    """Mean over ranks and micro-batches."""
    ranks_differ: tuple[str, ...]
    """Which of `gradient`, `norm` and `update` are not the same, bit for bit, on every rank."""


@dataclass(frozen=True)
class Verdict:
    """One invariant: right, wrong, or (None) not reported by the engine; and that in words."""

    right: bool | None
    words: str


@dataclass(frozen=True)
class Result:
    """One case, stock or corrected."""

    case: Case
    corrected: bool
    steps: tuple[Step, ...]
    gradient: Verdict
    norm: Verdict
    update: Verdict
    digest: str
    """sha256 of every rank's gradients, norms, parameters and losses in all steps: equal for bit-for-bit equal runs."""
    versions: dict[str, str]
    """Of deepspeed and torch in the ranks; `backend` is that of torch.distributed."""
    error: str | None = None
    """The traceback when DeepSpeed refused the case, alike on all ranks; then there are no steps."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By invariant, in their order."""
        return {"gradient": self.gradient, "norm": self.norm, "update": self.update}

    @property
    def right(self) -> bool:
        """Whether no invariant is broken."""
        return self.error is None and all(verdict.right is not False for verdict in self.verdicts.values())

    @property
    def ratios(self) -> dict[str, float | None]:
        """Of the first step's gradients, by parameter; when these are wrong, later steps start from other weights."""
        return {comparison.name: comparison.ratio for comparison in self.steps[0].gradients} if self.steps else {}


def compared(case: Case, *, corrected: bool, outcomes: Sequence[dict[str, Any]]) -> Result:
    """The result of a case from what each rank saved, in rank order."""
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        refused = Verdict(None, "could not run")
        return Result(case, corrected, (), refused, refused, refused, "", {}, error=errors[0])
    dtypes = precision(case)
    follow = [step["parameters"] for step in outcomes[0]["steps"]] if dtypes.reduction != "float32" else []
    reference = train(case, len(outcomes), follow)
    steps = tuple(
        _step(case, [outcome["steps"][index] for outcome in outcomes], expected, dtypes.tolerance)
        for index, expected in enumerate(reference)
    )
    return Result(
        case=case,
        corrected=corrected,
        steps=steps,
        gradient=_verdict([step.gradients for step in steps], ["gradient" in step.ranks_differ for step in steps]),
        norm=_norm_verdict(steps, dtypes.tolerance),
        update=_verdict([step.updates for step in steps], ["update" in step.ranks_differ for step in steps]),
        digest=_digest(outcomes),
        versions={**outcomes[0]["versions"], "backend": outcomes[0]["backend"]},
    )


def _step(case: Case, seen: list[dict[str, Any]], expected: ReferenceStep, tolerance: float) -> Step:
    first = seen[0]
    gradients = tuple(
        _comparison(name, first["gradients"][name], gradient, tolerance=tolerance)
        for name, gradient in expected.gradients.items()
    )
    updates = tuple(
        _comparison(
            name,
            first["parameters"][name],
            after,
            start=expected.before[name],
            tolerance=expected.update_tolerance[name] + _rounding(case, after, after - expected.before[name]),
        )
        for name, after in expected.after.items()
    )
    losses = [step["loss"] for step in seen]
    return Step(
        gradients=gradients,
        norm=Number(first["norm"], expected.norm),
        updates=updates,
        loss=Number(sum(losses) / len(losses), expected.loss),
        ranks_differ=tuple(
            invariant
            for invariant, key in (("gradient", "gradients"), ("norm", "norm"), ("update", "parameters"))
            if any(_bits(step[key]) != _bits(first[key]) for step in seen)
        ),
    )


def _comparison(
    name: str, got: torch.Tensor, expected: torch.Tensor, *, tolerance: float, start: torch.Tensor | None = None
) -> Comparison:
    origin = torch.zeros_like(expected) if start is None else start
    difference, wanted = got.double() - expected, expected - origin
    size, error = float(wanted.norm()), float(difference.norm())
    if size:
        ratio = float(((got.double() - origin) * wanted).sum()) / size**2
        error = error / size if math.isfinite(error) else math.inf
    else:
        ratio, error = None, 0.0 if error == 0 else math.inf
    return Comparison(
        name=name,
        numel=expected.numel(),
        ratio=ratio,
        error=error,
        tolerance=tolerance,
        got=tuple(got.flatten().tolist()),
        expected=tuple(expected.flatten().tolist()),
    )


def _rounding(case: Case, after: torch.Tensor, update: torch.Tensor) -> float:
    """Relative error of an update through fp32 rounding of the parameter, which changes by far less than its size."""
    change = float(update.norm())
    return 4 * 2.0**-24 * case.steps * float(after.norm()) / change if change else 0.0


def _bits(value: dict[str, torch.Tensor] | float | None) -> bytes:
    """What a rank read, as bytes (of which NaN equals NaN)."""
    if isinstance(value, dict):
        return b"".join(tensor.numpy().tobytes() for tensor in value.values())
    return repr(value).encode()


def _digest(outcomes: Sequence[dict[str, Any]]) -> str:
    digest = hashlib.sha256()
    for outcome in outcomes:
        for step in outcome["steps"]:
            for key in ("gradients", "norm", "parameters", "loss"):
                digest.update(_bits(step[key]))
    return digest.hexdigest()


def _verdict(steps: list[tuple[Comparison, ...]], ranks_differ: list[bool]) -> Verdict:
    """Over all steps; the words are those of the first step that is wrong."""
    for index, comparisons in enumerate(steps):
        wrong = [comparison for comparison in comparisons if not comparison.right]
        if wrong:
            return _wrong(_scale_words(wrong, len(comparisons)), index)
        if ranks_differ[index]:
            return _wrong("ranks differ", index)
    return Verdict(True, "right")


def _norm_verdict(steps: Sequence[Step], tolerance: float) -> Verdict:
    for index, step in enumerate(steps):
        if step.norm.error is not None and step.norm.error > tolerance:
            return _wrong(_factor(step.norm.ratio) or "wrong", index)
        if "norm" in step.ranks_differ:
            return _wrong("ranks differ", index)
    if all(step.norm.got is None for step in steps):
        return Verdict(None, "not reported")
    return Verdict(True, "right")


def _wrong(words: str, index: int) -> Verdict:
    return Verdict(False, words if index == 0 else f"{words}, from step {index + 1} on")


def _scale_words(wrong: list[Comparison], total: int) -> str:
    """`2x too small`, with how many parameters when not all; how far off when it is no common scale."""
    where = "" if len(wrong) == total else f" in {len(wrong)} of {total} parameters"
    factors = {_factor(comparison.ratio) if _is_scaled(comparison) else None for comparison in wrong}
    if None in factors:
        return f"wrong by {max(comparison.error for comparison in wrong):.2g} of its size{where}"
    if len(factors) == 1:
        return f"{factors.pop()}{where}"
    return f"{' and '.join(sorted(str(factor) for factor in factors))}{where}"


def _is_scaled(comparison: Comparison) -> bool:
    """Whether the ratio explains the whole error: a wrong scale, nothing else."""
    if comparison.ratio is None or not math.isfinite(comparison.error):
        return False
    rest = comparison.error**2 - (comparison.ratio - 1) ** 2
    return math.sqrt(max(rest, 0.0)) <= max(comparison.tolerance, 1e-3)


def _factor(ratio: float | None) -> str | None:
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return None
    factor = max(ratio, 1 / ratio)
    digits = 3 if factor > 1.01 else 6
    return f"{factor:.{digits}g}x too {'small' if ratio < 1 else 'large'}"
