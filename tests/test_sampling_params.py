"""SamplingParams refuses what makes no sense, and what it accepts can't change afterwards."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from infer_lab.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
)

INTS = {  # name -> (lowest, highest) allowed
    "max_tokens": (1, None),
    "min_tokens": (0, 16),  # at most max_tokens, whose default is 16
    "top_k": (0, None),
    "n": (1, MAX_N),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
FLOATS = {  # name -> (lowest, highest) allowed, and whether the lowest itself is
    "temperature": (0.0, None, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, None, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
NO_INT = ["3", 3.0, 3.5, math.nan, math.inf, True, False, [3], {}, 3j, Decimal(3), b"3", object()]
NO_INT += [np.float32(3), np.bool_(True), np.array(3), np.array([3]), torch.tensor(3)]
NO_FLOAT = ["0.5", True, False, math.nan, math.inf, -math.inf, [0.5], {}, 0.5j, Decimal("0.5")]
NO_FLOAT += [10**400, -(10**400), 10**5000, np.float32("nan"), np.float64("inf"), np.bool_(True)]
NO_FLOAT += [np.array(0.5), torch.tensor(0.5), b"0.5", object()]


def refuse(name: str, value: Any, shown: str | None = None, allowed: str = "must") -> None:
    """The value is refused by a short message with the name, what is allowed and the value."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith((f"{name} must ", f"{name}["))
    assert allowed in message
    assert ", got " in message
    assert len(message) < 200
    if shown is not None:
        assert message.endswith(f", got {shown}")


@pytest.mark.parametrize("name", INTS)
def test_ints_are_accepted_up_to_their_limits_and_refused_beyond(name: str) -> None:
    low, high = INTS[name]
    assert getattr(SamplingParams(**{name: low}), name) == low
    refuse(name, low - 1, str(low - 1), str(low))
    refuse(name, -(10**5000))  # an int that Python itself won't print
    if high is None:
        assert getattr(SamplingParams(**{name: 10**5000}), name) == 10**5000
    else:
        assert getattr(SamplingParams(**{name: high}), name) == high
        refuse(name, high + 1, str(high + 1), str(high))
        refuse(name, 10**5000)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_accepted_up_to_their_limits_and_refused_beyond(name: str) -> None:
    low, high, closed = FLOATS[name]
    above = math.nextafter(low, math.inf)
    assert getattr(SamplingParams(**{name: above}), name) == above
    assert getattr(SamplingParams(**{name: 1}), name) == 1.0  # an int is a number too
    if closed:
        assert getattr(SamplingParams(**{name: low}), name) == low
    else:
        refuse(name, low, "0.0", "> 0")
    below = math.nextafter(low, -math.inf)
    refuse(name, below, str(below), f"{low:g}")
    refuse(name, low - 1, None, f"{low:g}")
    if high is None:
        assert getattr(SamplingParams(**{name: 1e308}), name) == 1e308
    else:
        assert getattr(SamplingParams(**{name: high}), name) == high
        over = math.nextafter(high, math.inf)
        refuse(name, over, str(over), f"<= {high:g}")


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", NO_INT, ids=lambda value: type(value).__name__)
def test_only_ints_are_ints(name: str, value: Any) -> None:
    refuse(name, value, allowed="must be an int ")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", NO_FLOAT, ids=lambda value: type(value).__name__)
def test_only_finite_numbers_are_floats(name: str, value: Any) -> None:
    refuse(name, value, allowed="must be a finite number ")


@pytest.mark.parametrize("name", [*INTS, *FLOATS])
def test_none_is_for_seed_and_logprobs_only(name: str) -> None:
    if name in ("seed", "logprobs"):
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        refuse(name, None, "None")


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.bool_(True)])
def test_ignore_eos_is_true_or_false(value: Any) -> None:
    refuse("ignore_eos", value, repr(value), "True or False")


def test_min_tokens_can_be_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=40, max_tokens=40).min_tokens == 40
    with pytest.raises(ValueError, match="min_tokens must be from 0 to 40, got 41"):
        SamplingParams(min_tokens=41, max_tokens=40)


NO_STOP = [5, True, b"end", {"end"}, {"end": 1}, iter(["end"]), ["end", 5], [None], [["end"]]]
NO_STOP += ["", ["end", ""], "x" * (MAX_STOP_LENGTH + 1), ["x"] * (MAX_STOP_STRINGS + 1)]
NO_STOP += [[7] * 10**6]


@pytest.mark.parametrize("stop", NO_STOP, ids=lambda value: type(value).__name__)
def test_stop_is_a_few_short_strings(stop: Any) -> None:
    refuse("stop", stop)


def test_stop_at_its_limits() -> None:
    longest = ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS
    assert SamplingParams(stop=longest).stop_strings == tuple(longest)
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=()).stop_strings == SamplingParams().stop_strings == ()


NO_IDS = [5, "5", {5}, iter([5]), range(5), {5: 1}, ["5"], [5.0], [True], [-1], [None], [[5]]]
NO_IDS += [[1] * (MAX_STOP_TOKENS + 1), ["x"] * 10**6, [-(10**5000)], [[10**5000]]]
NO_IDS += [np.arange(10**5)]


@pytest.mark.parametrize("ids", NO_IDS, ids=lambda value: type(value).__name__)
def test_stop_token_ids_are_a_list_of_ids(ids: Any) -> None:
    refuse("stop_token_ids", ids)


def test_stop_token_ids_at_their_limits() -> None:
    assert SamplingParams(stop_token_ids=[0] * MAX_STOP_TOKENS).stop_token_ids == (0,) * 128
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()


NO_BIAS = [5, "5", [5], [(5, 1.0)], [10**5000], [0] * 10**6, {"5": 1.0}, {5.0: 1.0}]
NO_BIAS += [{True: 1.0}, {-1: 1.0}, {None: 1.0}, {10**5000: "1"}, {-(10**5000): 1.0}]
NO_BIAS += [{5: v} for v in (None, "1", True, math.nan, math.inf, 100.5, -100.5, 10**400)]
NO_BIAS += [dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)]


@pytest.mark.parametrize("bias", NO_BIAS, ids=lambda value: type(value).__name__)
def test_logit_bias_maps_ids_to_numbers(bias: Any) -> None:
    refuse("logit_bias", bias)


def test_logit_bias_at_its_limits() -> None:
    bias = {i: 100.0 if i % 2 else -100.0 for i in range(MAX_LOGIT_BIAS)}
    assert SamplingParams(logit_bias=bias).logit_bias == bias
    assert SamplingParams(logit_bias={}).logit_bias == SamplingParams().logit_bias == {}
    message = re.escape("logit_bias[7] must be >= -100 and <= 100, got 101.0")
    with pytest.raises(ValueError, match=message):
        SamplingParams(logit_bias={7: 101})


def test_unknown_and_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[misc]


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),
        top_k=np.uint8(3),
        seed=np.uint64(2**64 - 1),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        min_p=np.float16(0.25),
        stop_token_ids=[np.int32(7)],
        logit_bias={np.int64(9): np.float32(-1)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(
        max_tokens=5,
        top_k=3,
        seed=2**64 - 1,
        temperature=0.5,
        top_p=0.5,
        min_p=0.25,
        stop_token_ids=[7],
        logit_bias={9: -1.0},
    )
    assert params == plain
    assert repr(params) == repr(plain)  # no np.int64(5) in it
    values = [*dataclasses.asdict(params).values(), *params.stop_token_ids, *params.logit_bias]
    assert not [value for value in values if isinstance(value, np.generic)]


def test_the_callers_lists_stay_the_callers() -> None:
    stop, ids, bias = ["end"], [7], {9: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("more")
    ids[0] = 8
    bias[9] = 2.0
    bias[10] = 3.0
    assert params == SamplingParams(stop=["end"], stop_token_ids=[7], logit_bias={9: 1.0})


def test_nothing_of_it_can_be_changed() -> None:
    params = SamplingParams(stop=["end"], stop_token_ids=[7], logit_bias={9: 1.0})
    for field in dataclasses.fields(params):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, getattr(params, field.name))
    assert isinstance(params.stop, tuple)
    assert isinstance(params.stop_token_ids, tuple)
    bias: Any = params.logit_bias
    with pytest.raises(TypeError):
        bias[9] = 2.0
    with pytest.raises(TypeError):
        del bias[9]
    for name in ("update", "pop", "clear", "setdefault"):
        assert not hasattr(bias, name)


def test_equal_params_hash_the_same_and_survive_every_way_of_copying() -> None:
    params = SamplingParams(stop="end", stop_token_ids=(7,), logit_bias={9: 1.0, 3: -1}, seed=-1)
    again = SamplingParams(stop=["end"], stop_token_ids=[7], logit_bias={3: -1.0, 9: 1}, seed=-1)
    assert params == again
    assert len({params, again, SamplingParams()}) == 2
    for twin in (
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
        SamplingParams(**dataclasses.asdict(params)),
    ):
        assert twin == params
        assert hash(twin) == hash(params)
    assert dataclasses.replace(params, seed=5).logit_bias == {9: 1.0, 3: -1.0}
    with pytest.raises(ValueError, match="top_p must be"):
        dataclasses.replace(params, top_p=2.0)


@pytest.mark.parametrize(
    ("wishes", "adjusts", "filters"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "seed": 3, "logprobs": 5, "stop_token_ids": [1]}, False, False),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}, False, False),
        ({"top_k": 1}, False, True),
        ({"top_p": 0.9999}, False, True),
        ({"min_p": 1e-9}, False, True),
        ({"logit_bias": {1: 0.5}}, True, False),
        ({"logit_bias": {}}, False, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"repetition_penalty": 0.9}, True, False),
        ({"presence_penalty": -0.1}, True, False),
        ({"frequency_penalty": 0.1}, True, False),
        ({"min_tokens": 1}, True, False),
    ],
    ids=str,
)
def test_params_know_which_work_they_ask_for(
    wishes: dict[str, Any], adjusts: bool, filters: bool
) -> None:
    params = SamplingParams(**wishes)
    assert (params.adjusts_logits, params.filters) == (adjusts, filters)
