"""How a request wants its tokens chosen: `SamplingParams`, frozen and checked when made.

Names and meanings follow vLLM, so that what is learned here carries over. `sampler` applies them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's wishes. Raises ValueError (name, value, what is allowed) when made wrong.

    max_tokens: at most so many new tokens.       min_tokens: no end before so many.
    temperature: 0 is exactly argmax; above, divides the logits: higher is more even.
    top_k: only the k likeliest (0: all).         top_p: only the likeliest that make up p.
    min_p: only tokens with at least min_p times the probability of the likeliest.
    repetition_penalty: divides (or multiplies) the logits of tokens seen in prompt or output.
    presence_penalty, frequency_penalty: subtracted for output tokens, once or once per use.
    logit_bias: token id -> added to its logit.   seed: same seed, same tokens (None: random).
    n: samples of the same prompt.                stop: strings that end the text, left out of it.
    stop_token_ids: tokens that end it.           ignore_eos: go on after end-of-sequence tokens.
    logprobs: also report the chosen token's log-probability and the k likeliest (None: nothing).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Plain ints and floats, and copies that can't change: the caller's lists stay theirs.
        checked: dict[str, Any] = {
            "max_tokens": (most := _int("max_tokens", self.max_tokens, 1)),
            "min_tokens": _int("min_tokens", self.min_tokens, 0, most),
            "temperature": _float("temperature", self.temperature, 0.0),
            "top_p": _float("top_p", self.top_p, 0.0, 1.0, above_low=True),
            "top_k": _int("top_k", self.top_k, 0),
            "min_p": _float("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _float(
                "repetition_penalty", self.repetition_penalty, 0.0, above_low=True
            ),
            "presence_penalty": _float("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _logit_bias(self.logit_bias),
            "n": _int("n", self.n, 1, MAX_N),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_tokens(self.stop_token_ids),
        }
        if self.seed is not None:
            checked["seed"] = _int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            checked["logprobs"] = _int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {_shown(self.ignore_eos)}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def adjusts_logits(self) -> bool:
        """Whether some token's logit changes before temperature and filters see it."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class LogitBias(Mapping[int, float]):
    """A dict that can't change, so that params can be hashed and shared."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token_id: int) -> float:
        return self._bias[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(frozenset(self._bias.items()))

    def __repr__(self) -> str:
        return repr(self._bias)


def _int(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f">= {low}" if high is None else f"from {low} to {_shown(high)}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an int {allowed}, got {_shown(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {_shown(number)}")
    return number


def _float(
    name: str, value: Any, low: float, high: float | None = None, *, above_low: bool = False
) -> float:
    allowed = f"{'>' if above_low else '>='} {low:g}"
    allowed += "" if high is None else f" and <= {high:g}"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an int past the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number {allowed}, got {_shown(value)}")
    if number < low or (above_low and number == low) or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


class _Short(reprlib.Repr):
    """A repr short enough for an error message, whatever the value."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print the longest ints.
        return repr(x) if x.bit_length() <= 100 else f"an int of {x.bit_length()} bits"


_shown = _Short().repr


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        raise ValueError(f"stop must be a string or a list of strings, got {_shown(stop)}")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"stop must hold strings, got {_shown(string)}")
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"stop must hold strings of 1 to {MAX_STOP_LENGTH} characters, got {len(string)}"
            )
    return tuple(strings)


def _stop_tokens(token_ids: Any) -> tuple[int, ...]:
    ids = () if token_ids is None else token_ids
    if not isinstance(ids, list | tuple):
        raise ValueError(f"stop_token_ids must be a list of ids, got {_shown(ids)}")
    if len(ids) > MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids must hold at most {MAX_STOP_TOKENS} ids, got {len(ids)}")
    return tuple(_int("stop_token_ids", token_id, 0) for token_id in ids)


def _logit_bias(bias: Any) -> LogitBias:
    bias = {} if bias is None else bias
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map ids to numbers, got {_shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must hold at most {MAX_LOGIT_BIAS} ids, got {len(bias)}")
    items = ((_int("logit_bias", token_id, 0), value) for token_id, value in bias.items())
    return LogitBias(
        {i: _float(f"logit_bias[{_shown(i)}]", value, -100.0, 100.0) for i, value in items}
    )
