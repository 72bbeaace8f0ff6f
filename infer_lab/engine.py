"""The whole engine: one loop that turns requests into tokens.

                pure Python                    |              tensors
    Engine -> Scheduler <-> KVAllocator        |  batcher -> Transformer <-> KV cache -> Sampler

    one step:   plan    = scheduler.schedule()              who runs, which tokens
                batch   = pack(plan)                        flat ids, positions, slots
                hidden  = model(ids, positions, cache.bind(batch))
                samples = sampler(logits of the rows that need a token)
                scheduler.commit(plan, samples)             state moves only here

An engine belongs to one thread. Bad requests are refused, or end with an error of their own.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer_lab.batcher import pack
from infer_lab.engine_trace import EngineStats, EngineStep, record_step
from infer_lab.intake import Intake, Prompt
from infer_lab.kv_memory import KVMemory, plan_kv_memory
from infer_lab.model.load import load_model
from infer_lab.model.packed import pack_linears
from infer_lab.model.transformer import Transformer
from infer_lab.request import Completion, Delta, FinishReason, Request
from infer_lab.sampler import Sampler, SamplingParams
from infer_lab.scheduler import Scheduler, StepPlan
from infer_lab.tokenize import Message, Tokenizer


@dataclass
class _Group:
    """The samples of one request, and where their deltas go."""

    samples: list[Request]
    sink: deque[Delta]
    unreported: int  # samples whose end has not been delivered


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
        max_model_len: most tokens of prompt and output. None: what context and memory allow.
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
        self._groups: dict[str, _Group] = {}  # by request id, until all samples have ended
        self._outbox: deque[Delta] = deque()  # for the caller of `step`
        self._intake = Intake(model.config, tokenizer, self.kv.max_model_len, self._groups)
        self.steps: list[EngineStep] = []
        self._record_steps = record_steps
        self._num_steps = self._computed = self._generated = 0

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
        """An engine with weights of its own and tokenizer; see `load_model` and `Engine`."""
        inspect.signature(cls).bind(None, **options)  # an unknown option raises TypeError now
        if quantization is not None:
            raise ValueError(f"quantization must be None, got {quantization!r}")
        model = load_model(name_or_path, device=device, dtype=dtype)
        pack_linears(model)  # faster on a CPU
        return cls(model, Tokenizer.from_pretrained(name_or_path), **options)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.kv.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one or many prompts; all samples, in the prompts' order.

        A prompt is a text or a list of token ids. params: one for all, or one for each.
        Raises ValueError before anything is computed if any prompt or parameter is wrong.
        """
        many = self._intake.make_many(prompts, params)
        groups: list[_Group] = []
        try:
            for samples in many:
                groups.append(self._enqueue(samples, deque(maxlen=0)))  # nobody reads the deltas
            while not all(request.is_finished for samples in many for request in samples):
                self._advance()
        finally:  # also when interrupted: what this call began ends with it
            for group in groups:
                self._abort(group)
        return [request.completion() for samples in many for request in samples]

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer a conversation ({"role", "content"} messages) in the model's chat format."""
        return self.generate(self._intake.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt and yield what each step adds. Closing the iterator aborts it."""
        # Here and not in the generator: a bad argument raises at the call.
        stream = self._stream(self._enqueue(self._intake.make(prompt, params), deque()))
        next(stream)  # into its try block: closing aborts even before the first delta
        return stream

    def _stream(self, group: _Group) -> Iterator[Delta]:
        unfinished = len(group.samples)
        try:
            yield Delta(group.samples[0].id, 0, "", ())  # for `stream` alone
            while unfinished:
                while not group.sink:
                    self._advance()
                delta = group.sink.popleft()
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._abort(group)

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
        samples = self._intake.make(
            prompt, params, request_id=request_id, cache_salt=cache_salt, priority=priority
        )
        self._enqueue(samples, self._outbox)
        return samples[0]

    def abort(self, request_id: str) -> bool:
        """End all samples of a request; last deltas come with the next step. False: none was."""
        group = self._groups.get(request_id)
        return group is not None and self._abort(group)

    def step(self) -> list[Delta]:
        """Run one step; returns what it added, and what was not yet delivered."""
        self._advance()
        deltas = list(self._outbox)
        self._outbox.clear()
        return deltas

    def has_unfinished(self) -> bool:
        """Whether another `step` has anything to do or to deliver."""
        return self.scheduler.has_unfinished or bool(self._outbox)

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory does not hold."""
        self.scheduler.check()
        unfinished = {*self.scheduler.running, *self.scheduler.waiting}
        for request_id, group in self._groups.items():
            assert not all(sample.is_finished for sample in group.samples), f"{request_id} stays"
            unfinished -= {*group.samples}
        assert not unfinished, "a request is unknown"
        if not self.scheduler.has_unfinished:
            assert not self._groups and self.kv.allocator.usage().live == 0, "something is left"

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
        if not plan.chunks:
            return
        sampled = tuple(chunk.samples for chunk in plan.chunks)
        moved = self._run(plan)  # if it raises nothing has moved, and the next step tries again
        now = time.monotonic()
        for request in moved:
            self._deliver(request, now)
        self._num_steps += 1
        self._computed += plan.num_tokens
        if self._record_steps:
            record = record_step(len(self.steps), plan, sampled, self.scheduler, now - began)
            self.steps.append(record)

    def _run(self, plan: StepPlan) -> list[Request]:
        self.kv.cache.copy_blocks(plan.copies)
        batch = pack(plan, self.kv.allocator, self.model.device)
        hidden = self.model(batch.input_ids, batch.positions, self.kv.cache.bind(batch))
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows))
        return self.scheduler.commit(plan, self.sampler(logits, batch.sampling))

    def _enqueue(self, samples: list[Request], sink: deque[Delta]) -> _Group:
        self.scheduler.add(samples[0], samples[1:])
        group = self._groups[samples[0].id] = _Group(samples, sink, len(samples))
        return group

    def _deliver(self, request: Request, now: float) -> None:
        """Stamp the times, and hand what is new to whoever waits for it."""
        delta = request.take_delta()
        if delta is None:
            return
        group = self._groups[request.id]
        group.sink.append(delta)
        self._generated += len(delta.token_ids)
        if delta.token_ids and request.metrics.first_token is None:
            request.metrics.first_token = now
        if request.is_finished:
            request.metrics.finished = now
            group.unreported -= 1
            if not group.unreported:
                del self._groups[request.id]

    def _abort(self, group: _Group) -> bool:
        """End what is unfinished of a group; False if nothing was."""
        ended = [r for r in group.samples if self.scheduler.finish(r, FinishReason.ABORT)]
        for request in ended:
            self._deliver(request, time.monotonic())
        return bool(ended)
