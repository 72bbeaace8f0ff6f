"""What an engine must remember about a request, and how a request ends.

                  admitted                 a stop condition, or an error
       WAITING ------------> RUNNING ------------------------> FINISHED
          ^                   |  ^                                 ^
          |         preempted v  | admitted again                  |
          |                 PREEMPTED                              |
          +---------------------+-------- abort, at any time ------+

`token_ids` is the prompt and everything generated; `num_computed` says how many of them have their
keys and values in the cache. All work is one statement: let `num_computed` catch up. A prompt not
yet seen, a decode step and a request that resumes after preemption differ in numbers only.

Pure Python: no tensors here.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infer_lab.sampling_params import SamplingParams
from infer_lab.text_stream import TextStream

if TYPE_CHECKING:
    from infer_lab.sampler import TokenLogprobs


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again: its cache was given to an older request
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"
    ERROR = "error"


CONTEXT_FULL = "max_model_len"  # the stop_reason of LENGTH when max_tokens was not reached

_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass
class Metrics:
    """Times in seconds of one monotonic clock; None: it has not happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens that needed no computing at first admission
    preemptions: int = 0


@dataclass(frozen=True)
class Delta:
    """What a step added to one sample of a request."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """The whole result of one sample. `token_ids` holds the stop token, `text` does not.

    stop_reason: the stop token or string; None for an end-of-sequence token or max_tokens;
        "max_model_len" for a full context; the message for an error.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    metrics: Metrics


@dataclass(eq=False)  # two requests are never the same one
class Request:
    """One sample of one prompt, and its state. `scheduler` and the allocators move it."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    index: int = 0  # which of the n samples
    parent: Request | None = None  # sample 0, for the others
    priority: int = 0  # lower goes first
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    eos_token_ids: Collection[int] = ()
    max_model_len: int = 2**31
    text_stream: TextStream | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics(arrival=0.0))

    def __post_init__(self) -> None:
        self.token_ids: list[int] = list(self.prompt_token_ids)
        self.num_computed = 0
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self._reported_text = 0
        self._reported_tokens = 0
        self._reported_end = False

    @property
    def name(self) -> str:
        """How logs and figures call this sample."""
        return self.id if self.params.n == 1 else f"{self.id}[{self.index}]"

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated, a copy."""
        return self.token_ids[self.num_prompt :]

    @property
    def max_length(self) -> int:
        """The most tokens that this request can come to, prompt included."""
        return min(self.num_prompt + self.params.max_tokens, self.max_model_len)

    @property
    def end_token_ids(self) -> set[int]:
        """Tokens that would end it; `min_tokens` forbids them for a while."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return {*eos, *(self.params.stop_token_ids or ())}

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status is Status.FINISHED

    def move(self, status: Status) -> None:
        """Change status along an arrow of the picture above; anything else is our own bug."""
        assert status in _MOVES[self.status], f"{self.id}: {self.status} -> {status}"
        self.status = status

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take a new token and find out whether it ends the request.

        When several reasons meet on one token the first of these counts: end-of-sequence, stop
        token, stop string, max_tokens, context.
        """
        may_end = self.num_output >= self.params.min_tokens
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if may_end and token_id in self.end_token_ids:
            is_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
            self._end(FinishReason.STOP, None if is_eos else token_id)
            return
        if self.text_stream is not None:
            self.text += self.text_stream.push(token_id, may_stop=may_end)
            if self.text_stream.stopped_by is not None:
                self._end(FinishReason.STOP, self.text_stream.stopped_by)
                return
        if self.num_output >= self.params.max_tokens:
            self._end(FinishReason.LENGTH, None)
        elif self.num_tokens >= self.max_model_len:
            self._end(FinishReason.LENGTH, CONTEXT_FULL)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End it from outside: an abort or an error. The text held back is given out."""
        self._end(reason, stop_reason)

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        assert self.finish_reason is None, f"{self.id} ends twice"
        if self.text_stream is not None:
            self.text += self.text_stream.finish()
            if reason is FinishReason.LENGTH and self.text_stream.stopped_by is not None:
                reason, stop_reason = FinishReason.STOP, self.text_stream.stopped_by
        self.finish_reason, self.stop_reason = reason, stop_reason

    def take_delta(self) -> Delta | None:
        """What is new since the last call; None when there is nothing to say."""
        tokens = tuple(self.token_ids[self.num_prompt + self._reported_tokens :])
        text = self.text[self._reported_text :]
        if self._reported_end or not (tokens or text or self.is_finished):
            return None
        first = self._reported_tokens
        self._reported_tokens, self._reported_text = self.num_output, len(self.text)
        self._reported_end = self.is_finished
        asked = self.params.logprobs is not None
        return Delta(
            request_id=self.id,
            index=self.index,
            text=text,
            token_ids=tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs[first:]) if asked else None,
        )

    def completion(self) -> Completion:
        """The whole result, once it has finished."""
        assert self.finish_reason is not None, f"{self.id} has not finished"
        return Completion(
            request_id=self.id,
            index=self.index,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.output_token_ids),
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            metrics=self.metrics,
        )
