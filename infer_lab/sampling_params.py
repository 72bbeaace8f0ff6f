"""How a request wants its tokens chosen: `SamplingParams`, frozen and checked when made.

Names and meanings follow vLLM, so that what is learned here carries over. `sampler` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("temperature", self.temperature, 0.0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, None, above_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        # Copies in immutable form: the caller's lists stay the caller's.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

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


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    allowed = f">= {low}" if high is None else f"from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an int {allowed}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _check_float(
    name: str, value: Any, low: float, high: float | None, *, above_low: bool = False
) -> None:
    allowed = f"{'>' if above_low else '>='} {low:g}"
    allowed += "" if high is None else f" and <= {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number {allowed}, got {value!r}")
    if value < low or (above_low and value == low) or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"stop must hold strings of 1 to {MAX_STOP_LENGTH} characters, got {len(string)}"
            )
    return tuple(strings)


def _stop_tokens(token_ids: Any) -> tuple[int, ...]:
    ids = () if token_ids is None else token_ids
    if not isinstance(ids, list | tuple) or len(ids) > MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids must list at most {MAX_STOP_TOKENS} ids, got {ids!r}")
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, None)
    return tuple(ids)


def _logit_bias(bias: Any) -> dict[int, float]:
    bias = {} if bias is None else bias
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must map at most {MAX_LOGIT_BIAS} ids, got {bias!r:.200}")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, 0, None)
        _check_float(f"logit_bias[{token_id}]", value, -100.0, 100.0)
    return dict(bias)
