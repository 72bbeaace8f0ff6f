"""The whole engine: one loop that turns requests into tokens.

                pure Python                    |              tensors
    Engine -> Scheduler <-> KVAllocator        |  batcher -> Transformer <-> KV cache -> Sampler

    one step:   plan    = scheduler.schedule()              who runs, which tokens
                batch   = pack(plan)                        flat ids, positions, slots
                hidden  = model(ids, positions, cache.bind(batch))
                samples = sampler(logits of the rows that need a token)
                scheduler.commit(plan, samples)             state moves only here

An engine belongs to one thread. It survives bad requests: they are refused before they cost
anything, or end with an error of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer_lab.allocator import BlockUsage
from infer_lab.batcher import pack
from infer_lab.engine_trace import EngineStep, record_step
from infer_lab.intake import Intake, Prompt
from infer_lab.kv_memory import KVMemory, plan_kv_memory
from infer_lab.model.load import load_model
from infer_lab.model.transformer import Transformer
from infer_lab.request import Completion, Delta, FinishReason, Request
from infer_lab.sampler import Sampler, SamplingParams
from infer_lab.scheduler import Scheduler, StepPlan
from infer_lab.tokenize import Message, Tokenizer


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done and holds; counts since it was made."""

    num_waiting: int
    num_running: int
    num_steps: int
    num_preemptions: int
    computed_tokens: int  # that went through the model
    cached_tokens: int  # of prompts, that did not have to
    generated_tokens: int
    blocks: BlockUsage
    kv_cache_bytes: int


class Engine:
    """Generates text for many requests at once. See `generate`, `stream`, `add` and `step`."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        prefix_caching: bool = True,
        attention_backend: str = "auto",
        kv_layout: str = "paged",
        policy: str = "fcfs",
        batching: str = "continuous",
        record_steps: bool = False,
    ) -> None:
        """
        tokenizer: None for token ids in, token ids out.
        max_num_seqs, max_batch_tokens, policy, batching: see `Scheduler`.
        max_model_len: longest prompt and output together, in tokens. None: as long as the model's
            context and KV memory allow.
        block_size: tokens in a block of KV memory.
        kv_cache_bytes, num_blocks: size of KV memory, one or the other. None: see `memory`.
        prefix_caching: keep computed blocks for requests that begin alike.
        attention_backend: see `kernels`.
        kv_layout: "paged", or "slots": a block as long as max_model_len for each request.
        record_steps: keep an `EngineStep` of every step in `steps`.

        Raises ValueError for arguments out of range or that do not fit together.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.kv: KVMemory = plan_kv_memory(
            model,
            layout=kv_layout,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            attention_backend=attention_backend,
        )
        self.scheduler = Scheduler(
            self.kv.allocator,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            policy=policy,
            batching=batching,
        )
        self.sampler = Sampler()
        self._intake = Intake(model.config, tokenizer, self.kv.max_model_len)
        self.steps: list[EngineStep] = []
        self._record_steps = record_steps
        self._samples: dict[str, list[Request]] = {}  # by request id, until the last one has ended
        self._num_steps = self._computed = self._generated = 0
        self._ended_outside: list[Request] = []  # aborted since the last step
        self._outbox: list[Delta] = []  # for the caller of `step`
        self._streams: dict[str, deque[Delta]] = {}  # for `stream`, by request id
        self._silent: set[str] = set()  # ids whose results `generate` collects itself

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        **options: Any,
    ) -> Engine:
        """An engine with a model's weights and tokenizer; see `load_model` and `Engine`."""
        if quantization is not None:
            raise ValueError(f"quantization must be None, got {quantization!r}")
        model = load_model(name_or_path, device=device, dtype=dtype)
        return cls(model, Tokenizer.from_pretrained(name_or_path), **options)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.kv.max_model_len

    # Whole results -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one or many prompts; all samples, in the prompts' order.

        A prompt is a text or a list of token ids. params: one for all, or one for each.
        Raises ValueError before anything is computed if any prompt or parameter is wrong.
        """
        groups = self._intake.make_many(prompts, params)
        try:
            for group in groups:
                self._silent.add(group[0].id)
                self._enqueue(group)
            while not all(request.is_finished for group in groups for request in group):
                self._advance()
        finally:  # also when interrupted: what this call began ends with it
            for group in groups:
                self._drop(group)
                self._silent.discard(group[0].id)
        return [request.completion() for group in groups for request in group]

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer a conversation ({"role", "content"} messages) in the model's chat format."""
        return self.generate(self._intake.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt and yield what each step adds. Closing the iterator aborts it."""
        group = self._intake.make(prompt, params)  # here: a bad argument raises at the call
        self._enqueue(group)
        self._streams[group[0].id] = deque()
        return self._stream(group)

    def _stream(self, group: list[Request]) -> Iterator[Delta]:
        queue = self._streams[group[0].id]
        unfinished = len(group)
        try:
            while unfinished:
                while not queue:
                    self._advance()
                delta = queue.popleft()
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._drop(group)
            del self._streams[group[0].id]

    # One step at a time ------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a request; returns sample 0 of it. `step` moves it on.

        request_id: None for a new one. Must not be that of an unfinished request.
        cache_salt: only requests with the same salt share cached prefixes.
        priority: lower goes first, if the policy is "priority".
        """
        group = self._intake.make(
            prompt, params, request_id=request_id, cache_salt=cache_salt, priority=priority
        )
        self._enqueue(group)
        return group[0]

    def abort(self, request_id: str) -> bool:
        """End all samples of a request; their last deltas come with the next step.

        Returns False, and does no harm, when no such request is unfinished.
        """
        ended = [
            request
            for request in self._samples.pop(request_id, ())
            if self.scheduler.finish(request, FinishReason.ABORT)
        ]
        self._ended_outside += ended
        return bool(ended)

    def step(self) -> list[Delta]:
        """Run one step; returns what it added, and what was not yet delivered."""
        self._advance()
        deltas, self._outbox = self._outbox, []
        return deltas

    def has_unfinished(self) -> bool:
        """Whether another `step` has anything to do or to deliver."""
        return self.scheduler.has_unfinished or bool(self._ended_outside or self._outbox)

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory does not hold."""
        self.scheduler.check()
        known = {request for group in self._samples.values() for request in group}
        assert known >= {*self.scheduler.running, *self.scheduler.waiting}, "a request is unknown"
        if not self.scheduler.has_unfinished:
            assert not self._samples, "a finished request is remembered"

    def stats(self) -> EngineStats:
        """Counts and memory at this moment."""
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_steps=self._num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            computed_tokens=self._computed,
            cached_tokens=self.scheduler.num_cached_tokens,
            generated_tokens=self._generated,
            blocks=self.kv.allocator.usage(),
            kv_cache_bytes=self.kv.cache.nbytes,
        )

    # The loop ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> None:
        began = time.monotonic()
        plan = self.scheduler.schedule()
        moved = self._run(plan) if plan.chunks else []
        ended, self._ended_outside = self._ended_outside, []
        now = time.monotonic()
        for request in (*moved, *ended):
            self._deliver(request, now)
        if plan.chunks:
            self._num_steps += 1
            self._computed += plan.num_tokens
            if self._record_steps:
                record = record_step(self._num_steps - 1, plan, self.scheduler, now - began)
                self.steps.append(record)

    def _run(self, plan: StepPlan) -> list[Request]:
        self.kv.cache.copy_blocks(plan.copies)
        batch = pack(plan, self.kv.allocator, self.model.device)
        hidden = self.model(batch.input_ids, batch.positions, self.kv.cache.bind(batch))
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows))
        return self.scheduler.commit(plan, self.sampler(logits, batch.sampling))

    def _deliver(self, request: Request, now: float) -> None:
        """Stamp the times, and hand what is new to whoever waits for it."""
        delta = request.take_delta()
        if delta is None:
            return
        self._generated += len(delta.token_ids)
        if delta.token_ids and request.metrics.first_token is None:
            request.metrics.first_token = now
        if request.is_finished:
            request.metrics.finished = now
            if all(sample.is_finished for sample in self._samples.get(request.id, ())):
                self._samples.pop(request.id, None)
        if request.id in self._streams:
            self._streams[request.id].append(delta)
        elif request.id not in self._silent:
            self._outbox.append(delta)

    def _enqueue(self, group: list[Request]) -> None:
        request_id = group[0].id
        if request_id in self._samples:
            raise ValueError(f"request_id {request_id!r} is that of an unfinished request")
        self.scheduler.add(group[0], group[1:])
        self._samples[request_id] = group

    def _drop(self, group: list[Request]) -> None:
        """Abort whatever of a group is unfinished, and let nobody hear of it."""
        self.abort(group[0].id)
        for request in group:
            request.take_delta()
