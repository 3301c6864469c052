"""One rank: ZeRO-1/2 as they come from 0.18.7 to 0.18.9, without the oracle's own workaround."""

from __future__ import annotations

from typing import Any

from against_reference import trained
from scenario import play

from ds_gradfix.verify import Case


def job(stage: int, **more: Any) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2, **more}
    return trained(Case(config, steps=3, optimizer="adamw", learning_rates=(0.1, 0.01)))


SCENARIOS = {
    "ZeRO-1": lambda: job(1),
    "ZeRO-2": lambda: job(2),
    "ZeRO-2, clipped": lambda: job(2, gradient_clipping=0.05),
    "ZeRO-3": lambda: job(3),
}

if __name__ == "__main__":
    play(SCENARIOS, detach=False)
