"""The self-check of gradient norms: known gradients on the engine's own groups, the known norm back on every rank."""

from __future__ import annotations

from typing import Any

from ds_gradfix.patches import _zero3_norm, _zero12_norm
from ds_gradfix.registry import Check, Measurement


def _measure(engine: Any) -> list[Measurement]:
    return _zero3_norm.measure_norm(engine) + _zero12_norm.measure_norm(engine)


CHECK = Check("gradient-norm", "gradient norm", _measure)
