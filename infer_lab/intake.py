"""The boundary: what callers ask for is checked here, before it costs anything.

Prompts become token ids, and a request with `n` samples becomes n `Request`s. Whatever is wrong
raises ValueError that names the argument, its value and what is allowed; the engine's state has
not changed by then.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Sequence
from itertools import count
from typing import Any

from infer_lab.model.config import ModelConfig
from infer_lab.prefill import check_token_ids
from infer_lab.request import Metrics, Request
from infer_lab.sampling_params import SamplingParams
from infer_lab.text_stream import TextStream
from infer_lab.tokenize import Detokenizer, Message, Tokenizer

Prompt = str | Sequence[int]
MAX_NAME_LENGTH = 256  # characters of a request id or a cache salt


class Intake:
    """Makes requests for one engine."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        taken: Container[str],
    ) -> None:
        """taken: the ids of unfinished requests, always as they are now."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._taken = taken
        self._numbers = count()

    def make_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[list[Request]]:
        """The samples of each of one or many prompts; params are one for all or one for each."""
        if not isinstance(prompts, str | list | tuple):
            kind = type(prompts).__name__
            raise ValueError(f"prompts must be a str, a list of ids or a list of those, got {kind}")
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts
        each: Sequence[Any] = params if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"params must be one or {len(many)}, one a prompt, got {len(each)}")
        return [self.make(prompt, p) for prompt, p in zip(many, each, strict=True)]

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """The n samples of one prompt."""
        params = SamplingParams() if params is None else params
        self._check_params(params)
        _check_name("request_id", request_id)
        _check_name("cache_salt", cache_salt)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority must be an int, got {priority!r}")
        token_ids = self._token_ids(prompt)
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if name not in self._taken)
        elif request_id in self._taken:
            raise ValueError(f"request_id must not be that of an unfinished one: {request_id!r}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        arrival = time.monotonic()
        samples: list[Request] = []
        for index in range(params.n):
            samples.append(
                Request(
                    id=request_id,
                    prompt_token_ids=token_ids,
                    params=params,
                    seed=seed,
                    index=index,
                    parent=samples[0] if samples else None,
                    priority=priority,
                    cache_salt=cache_salt,
                    eos_token_ids=self._config.eos_token_ids,
                    max_model_len=self._max_model_len,
                    text_stream=self._text_stream(params),
                    metrics=Metrics(arrival=arrival),
                )
            )
        return samples

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages as the model's chat format writes them."""
        if self._tokenizer is None:
            raise ValueError("messages need a tokenizer, and this engine has none")
        return self._tokenizer.encode_chat(messages)

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt must be token ids: this engine has no tokenizer")
            longest = self._max_model_len * self._tokenizer.longest_token
            if len(prompt) > longest:  # not worth encoding
                raise ValueError(
                    f"prompt must be at most {longest} characters (max_model_len"
                    f" {self._max_model_len} tokens), got {len(prompt)}"
                )
            token_ids: Sequence[int] = self._tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple):
            token_ids = prompt
        else:
            kind = type(prompt).__name__
            raise ValueError(f"prompt must be a str or a list of token ids, got {kind}")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"prompt must be at most {self._max_model_len - 1} tokens (max_model_len"
                f" {self._max_model_len} less one to generate), got {len(token_ids)}"
            )
        check_token_ids("prompt", token_ids, self._config.vocab_size)
        return tuple(token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise ValueError(f"params must be SamplingParams or None, got {kind}")
        vocab_size = self._config.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            outside = [i for i in getattr(params, name) if i >= vocab_size]
            if outside:
                raise ValueError(f"{name} must be ids below {vocab_size}, got {outside[0]}")
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this engine has none")

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(Detokenizer(self._tokenizer), params.stop_strings)


def _check_name(argument: str, value: str | None) -> None:
    if value is None:
        return
    if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH:
        raise ValueError(
            f"{argument} must be a str of at most {MAX_NAME_LENGTH} characters, got {value!r:.300}"
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{argument} must be valid Unicode, got {value!r}")
