"""What can't be summed is refused by name, where DeepSpeed reads its configuration: who asks for a sum gets no mean."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ds_gradfix.errors import SettingsError
from ds_gradfix.patches import _sum
from ds_gradfix.patches.sum_reduction import PATCH as ZERO_0_TO_2
from ds_gradfix.patches.zero3_sum_reduction import PATCH as ZERO_3
from ds_gradfix.registry import Option
from ds_gradfix.verify import Case, measure

KEY = '"gradient_allreduce_op": "sum"'


def option(patch: Any) -> Option:
    assert isinstance(patch.option, Option)
    return patch.option


def stage(number: int, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **zero}}


LOCO = {"err_beta": 0.8, "reset_T": 1024}
# By what must be named: the other key, as it is written in a configuration.
REFUSED: dict[str, dict[str, Any]] = {
    '"compile": {"deepcompile": true}': {**stage(1), "compile": {"deepcompile": True}},
    '"zero_optimization": {"zenflow": ...}': stage(2, zenflow={"topk_ratio": 0.1}),
    '"zero_optimization": {"zero_quantized_gradients": true}': stage(3, zero_quantized_gradients=True),
    '"zero_optimization": {"zeropp_loco_param": ...}': stage(3, zeropp_loco_param=LOCO),
    '"zero_optimization": {"mics_shard_size": ...}': stage(3, mics_shard_size=1),
    '"offload_optimizer": {"super_offload": true}': stage(
        3, offload_optimizer={"device": "cpu", "super_offload": True}
    ),
    '"optimizer": {"type": "OneBitAdam"}': {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
    '"optimizer": {"type": "ZeroOneAdam"}': {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.1}}},
    '"optimizer": {"type": "OneBitLamb"}': {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1}}},
}
BAD_VALUES = ("avg", "", " sum", 1, True, None, ["sum"])

# Every configuration through DeepSpeed's own class, as deepspeed.initialize and deepspeed.zero.Init build it.
BUILD = """
import json, sys
import ds_gradfix
ds_gradfix.enable()
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
told = []
for config in json.load(sys.stdin):
    try:
        built = DeepSpeedConfig({"train_batch_size": 4, **config})
        told.append(["built", built.gradient_allreduce_op])
    except Exception as error:
        told.append([type(error).__name__, str(error)])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, tuple[str, str]]:
    """By configuration, as JSON: the error's name and text, or "built" and the op in force."""
    configs = [{"gradient_allreduce_op": "sum", **config} for config in REFUSED.values()]
    configs += [{"gradient_allreduce_op": value} for value in BAD_VALUES]
    configs += [{"gradient_allreduce_op": word, **stage(n)} for word in ("sum", "SUM", "Sum", "Mean") for n in range(4)]
    configs += [config for config in REFUSED.values() if "optimizer" not in config]  # under a mean they are no matter
    # Stock asserts on these, or reads them where a sum has nothing to divide.
    configs += [{"gradient_allreduce_op": "sum", **stage(3), "prescale_gradients": True}]
    command = [sys.executable, "-c", BUILD]
    ran = subprocess.run(
        command, input=json.dumps(configs), capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    return {json.dumps(config): (name, text) for config, (name, text) in zip(configs, told, strict=True)}


@pytest.mark.parametrize("other", REFUSED)
def test_a_combination_that_averages_elsewhere_is_refused_naming_both_keys(
    built: dict[str, tuple[str, str]], other: str
) -> None:
    name, text = built[json.dumps({"gradient_allreduce_op": "sum", **REFUSED[other]})]
    assert name == "SettingsError", text
    assert KEY in text and other in text
    assert len(text) > len(KEY) + len(other) + 40, "and why"


@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_value_that_is_no_op_is_refused_naming_the_allowed_ones(
    built: dict[str, tuple[str, str]], value: Any
) -> None:
    name, text = built[json.dumps({"gradient_allreduce_op": value})]
    assert name == "SettingsError", text
    assert '"gradient_allreduce_op"' in text and repr(value) in text
    assert '"mean"' in text and '"sum"' in text


@pytest.mark.parametrize("word", ["sum", "SUM", "Sum", "Mean"])
@pytest.mark.parametrize("number", range(4))
def test_any_letter_case_on_any_stage(built: dict[str, tuple[str, str]], word: str, number: int) -> None:
    assert built[json.dumps({"gradient_allreduce_op": word, **stage(number)})] == ("built", word.lower())


def test_under_a_mean_nothing_of_this_is_refused_by_us(built: dict[str, tuple[str, str]]) -> None:
    for config in REFUSED.values():
        if "optimizer" not in config:
            assert built[json.dumps(config)][0] != "SettingsError"


def test_every_rank_refuses() -> None:
    """The oracle tells of an error only if all ranks had it; one that goes on alone is a failure of the launch."""
    cases = [Case({"gradient_allreduce_op": "sum", **c}, name=o) for o, c in REFUSED.items() if "optimizer" not in c]
    cases.append(Case({"gradient_allreduce_op": "sum", "ds_gradfix": {"exclude": "zero3-sum-reduction"}, **stage(3)}))
    cases.append(Case(stage(3), name="and the ranks can go on"))
    *refused, excluded, fine = measure(cases, corrected=True)
    for result in refused:
        assert result.error is not None
        assert f"SettingsError: {KEY} can't be combined with {result.case.name}" in result.error
    assert excluded.error is not None and "zero3-sum-reduction" in excluded.error and "exclude" in excluded.error
    assert fine.right


class OneBitAdam:
    """Stands for the client's own optimizer: a class of this name went with 0.19.7."""


def engine(**more: Any) -> Any:
    config = SimpleNamespace(
        zero_optimization_stage=0, zero_config=SimpleNamespace(contiguous_gradients=True), _param_dict={}
    )
    given = {"client_optimizer": None, "basic_optimizer": None, "optimizer": None, "has_moe_layers": False}
    return SimpleNamespace(_config=config, **{**given, **more})


@pytest.mark.parametrize("place", ["client_optimizer", "basic_optimizer", "optimizer"])
def test_the_client_s_own_1_bit_optimizer_is_refused(place: str) -> None:
    refusal = _sum.refuse_engine(engine(**{place: OneBitAdam()}))
    assert refusal is not None and KEY in refusal and "OneBitAdam" in refusal


@pytest.mark.parametrize(
    ("zero", "contiguous", "moe", "refused"),
    [(1, False, True, True), (1, True, True, False), (1, False, False, False), (0, False, True, False)],
)
def test_experts_reduced_together_are_refused(zero: int, contiguous: bool, moe: bool, refused: bool) -> None:
    made = engine(has_moe_layers=moe)
    made._config.zero_optimization_stage = zero
    made._config.zero_config.contiguous_gradients = contiguous
    refusal = _sum.refuse_engine(made)
    assert (refusal is not None) == refused
    if refusal:
        assert KEY in refusal and '"contiguous_gradients": false' in refusal


def test_an_engine_older_than_ds_gradfix_is_held_to_the_same_refusals() -> None:
    made = engine()
    made._config._param_dict = {"gradient_allreduce_op": "sum", **stage(2, zenflow={"topk_ratio": 0.1})}
    refusal = _sum.refuse_engine(made)
    assert refusal is not None and "zenflow" in refusal


def test_which_patch_a_configuration_asks() -> None:
    for number in range(4):
        config = {"gradient_allreduce_op": "sum", **stage(number)}
        asked = [option(patch).asked(config) for patch in (ZERO_0_TO_2, ZERO_3)]
        assert asked == [number < 3, number == 3]
        assert not any(option(patch).asked(stage(number)) for patch in (ZERO_0_TO_2, ZERO_3))
    with pytest.raises(SettingsError):
        option(ZERO_3).asked({"gradient_allreduce_op": "average"})


def test_a_sum_leaves_deepspeed_nothing_to_divide_and_the_rest_as_it_is() -> None:
    given = {"gradient_allreduce_op": "sum", "gradient_predivide_factor": 8.0, "prescale_gradients": True, **stage(2)}
    before = json.dumps(given)
    assert _sum.prepare(given) == {"gradient_predivide_factor": 1.0, "prescale_gradients": False, **stage(2)}
    assert json.dumps(given) == before
