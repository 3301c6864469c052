"""ZeRO-1/2 on a release whose flat parameters carry autograd history."""

from __future__ import annotations

from typing import Any

from launching import played


def right(one: dict[str, Any]) -> bool:
    return max(one["errors"]) < 1e-5 and max(one["updates"]) < 1e-4 and all(abs(n - 1) < 1e-6 for n in one["norms"])


def test_stock_stops_in_step_and_corrected_trains() -> None:
    found = played("flat_parameters.py", release="0.18.8")
    for name in ("ZeRO-1", "ZeRO-2", "ZeRO-2, clipped"):
        for stock, corrected in zip(found[name]["stock"], found[name]["corrected"], strict=True):
            assert "is a view and is being modified inplace" in stock["error"], name
            assert right(corrected), (name, corrected)
    assert found["ZeRO-3"]["stock"] == found["ZeRO-3"]["corrected"]
