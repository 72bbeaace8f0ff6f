"""Fakes for tests without tensors: a decoder, a model, KV memory, and the loop around a scheduler.

The fake model's next token depends on every token so far, their order and the salt, through what it
*reads from memory*. Memory is a list of slots. A slot holds a mark: (salt, position, hash of all
tokens up to here). Whoever reads a slot that was not written, or that holds another history, sees
a mark that differs from its own. `World` runs a scheduler on it and checks what must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from infer_lab.allocator import BlockAllocator, SlotAllocator
from infer_lab.prefix_cache import NamedBlockPool, PrefixCachingAllocator
from infer_lab.request import FinishReason, Request
from infer_lab.sampling_params import SamplingParams
from infer_lab.scheduler import Scheduler, StepPlan
from infer_lab.text_stream import TextStream

ALLOCATORS = {"slots": SlotAllocator, "blocks": BlockAllocator, "prefix": PrefixCachingAllocator}
VOCABULARY = 17
EOS = 0
Mark = tuple[str | None, int, int]


class FakeDecoder:
    """Ids into text, where an id is a run of bytes; holds back characters that are incomplete."""

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self._bytes_of = bytes_of
        self._held = b""

    def push(self, token_id: int) -> str:
        self._held += self._bytes_of[token_id]
        for end in range(len(self._held), max(-1, len(self._held) - 4), -1):
            try:
                text = self._held[:end].decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[end:]
            return text
        return ""

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


@dataclass(frozen=True)
class FakeSample:
    """What a scheduler wants to know of a `Sample`."""

    token_id: int = -1
    logprobs: None = None
    error: str | None = None


def make_request(
    prompt: Iterable[int], name: str = "r", *, stream: TextStream | None = None, **wishes: Any
) -> Request:
    """A request; wishes go to where they belong, `Request` or `SamplingParams`."""
    own = {"seed", "priority", "cache_salt", "max_model_len", "eos_token_ids", "index", "parent"}
    fields = {key: wishes.pop(key) for key in own & wishes.keys()}
    return Request(name, tuple(prompt), SamplingParams(**wishes), text_stream=stream, **fields)


def make_group(prompt: Iterable[int], n: int, name: str = "r", **wishes: Any) -> list[Request]:
    """The n samples of one prompt."""
    samples: list[Request] = []
    for index in range(n):
        parent = samples[0] if samples else None
        samples.append(make_request(prompt, name, n=n, index=index, parent=parent, **wishes))
    return samples


def mark_of(request: Request, before: Mark | None, token_id: int) -> Mark:
    """What is written for a token that follows a token with the mark `before`."""
    _, position, history = before or (None, -1, 1)
    return request.cache_salt, position + 1, (history * 1_000_003 + token_id + 1) % (2**61 - 1)


def next_token(mark: Mark, request: Request, num_output: int) -> int:
    """The fake model and sampler: a token from the last mark and the sample's index."""
    token_id = (mark[2] * 31 + request.index * 7 + (mark[2] >> 20)) % VOCABULARY
    if num_output < request.params.min_tokens:
        while token_id in {*request.eos_token_ids, *request.params.stop_token_ids}:
            token_id = (token_id + 1) % VOCABULARY
    return token_id


def naive(request: Request, fails_at: int | None = None) -> tuple[list[int], FinishReason]:
    """What a request must come to: one token after another, nobody else in the world."""
    params, mark = request.params, None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    for token_id in request.prompt_token_ids:
        mark = mark_of(request, mark, token_id)
    output: list[int] = []
    while True:
        if len(output) == fails_at:
            return output, FinishReason.ERROR
        output.append(next_token(mark, request, len(output)))
        if output[-1] in ends and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens:
            return output, FinishReason.LENGTH
        if request.num_prompt + len(output) == request.max_model_len:
            return output, FinishReason.LENGTH
        mark = mark_of(request, mark, output[-1])


class World:
    """A scheduler, its allocator and a fake memory; every step is checked from all sides."""

    def __init__(self, allocator: BlockAllocator, **options: Any) -> None:
        self.allocator = allocator
        self.scheduler = Scheduler(allocator, **options)
        self.block_size = allocator.block_size
        self.memory: list[Mark | None] = [None] * (allocator.num_blocks * self.block_size)
        self.requests: list[Request] = []
        self.fails_at: dict[Request, int] = {}
        self.steps = 0
        self.computed = 0  # tokens that went through the model
        self.copies = 0
        self._marks: dict[Request, list[Mark]] = {}
        self._name_of: dict[Mark, bytes] = {}  # of all times: a name means one history
        self._mark_of: dict[bytes, Mark] = {}
        take = allocator.pool.take

        def poisoned() -> int:
            block = take()
            self._set_block(block, [None] * self.block_size)
            return block

        allocator.pool.take = poisoned  # type: ignore[method-assign]

    def add(self, group: Sequence[Request], fails_at: int | None = None) -> None:
        """Queue the samples of a prompt. `fails_at`: the output token at which sample 0 fails."""
        self.scheduler.add(group[0], group[1:])
        self.requests += group
        if fails_at is not None:
            self.fails_at[group[0]] = fails_at
        self.check()

    def abort(self, request: Request) -> None:
        """End a request; a second time must do no harm."""
        was_unfinished = not request.is_finished
        assert self.scheduler.finish(request, FinishReason.ABORT) == was_unfinished
        assert not self.scheduler.finish(request, FinishReason.ABORT)
        self.check()

    def step(self, *, abort: Sequence[Request] = (), fails: str | None = None) -> StepPlan:
        """One step. abort: who ends between forward and commit.

        fails: "before" or "after" the forward something raises, so that commit is never reached.
        """
        before, names = list(self.scheduler.running), self._names()
        plan = self.scheduler.schedule()
        self._check_plan(plan, before)
        assert self._names() <= names, "a block was named outside of commit"
        self.check()
        if fails == "before":
            return plan
        samples = self._forward(plan)
        if fails == "after":
            return plan
        self.steps += 1
        self.computed += plan.num_tokens
        self.copies += len(plan.copies)
        for request in abort:
            self.abort(request)
        moved = self.scheduler.commit(plan, samples)
        assert moved == [chunk.request for chunk in plan.chunks if chunk.request not in abort]
        self.check()
        return plan

    def drain(self) -> None:
        """Run until all requests have ended, then look at what they got and what they left."""
        lengths = [request.max_length for request in self.requests]
        limit = self.steps + sum(lengths) * (len(lengths) + 1)
        while self.scheduler.has_unfinished:
            self.step()
            assert self.steps <= limit, "livelock"
        self._check_results()
        self._check_nothing_is_left()

    def check(self) -> None:
        """What must hold at any moment."""
        scheduler, allocator = self.scheduler, self.allocator
        scheduler.check()
        usage = allocator.usage()
        live = {block for table in allocator.tables.values() for block in table}
        assert usage.live == len(live) and usage.total == allocator.num_blocks
        assert not live & set(allocator.pool.free), "a freed block is in a live table"
        for request in scheduler.running:
            needed = -(-request.num_tokens // self.block_size)
            assert len(allocator.table(request)) <= needed, "more memory than it needs"
        if isinstance(allocator.pool, NamedBlockPool):
            self._check_names(allocator.pool)

    def _check_plan(self, plan: StepPlan, before: list[Request]) -> None:
        scheduler = self.scheduler
        runs = [chunk.request for chunk in plan.chunks]
        kept = len(before) - len(plan.preempted)
        assert runs or not scheduler.has_unfinished, "nobody runs"
        assert plan.num_tokens <= scheduler.max_batch_tokens
        assert len(set(runs)) == len(runs) == len(scheduler.running) <= scheduler.max_num_seqs
        assert runs[:kept] == before[:kept], "a running request did not advance"
        assert list(plan.preempted) == before[kept:][::-1], "not the newest first"
        assert kept > 0 or not before, "the oldest did not advance"
        for chunk in plan.chunks:
            assert 0 <= chunk.start == chunk.request.num_computed < chunk.end
            assert chunk.end <= chunk.request.num_tokens
            assert chunk.samples == (chunk.end == chunk.request.num_tokens)
        admitted = runs[kept:]
        assert not admitted or not plan.preempted
        assert not admitted or not before or scheduler.batching == "continuous"
        order = [(scheduler.waiting._key(r), self._arrival(r)) for r in admitted]
        order += [(scheduler.waiting._key(r), self._arrival(r)) for r in scheduler.waiting]
        assert all(a < b for a, b in pairwise(order)), "not admitted in the policy's order"

    def _forward(self, plan: StepPlan) -> list[FakeSample]:
        """What batcher, model, cache and sampler do: copy, write all, read all, answer."""
        for source, target in plan.copies:
            self._set_block(target, self._block(source))
        for chunk in plan.chunks:
            marks = self._marks_of(chunk.request)
            for position in range(chunk.start, chunk.end):
                block = self.allocator.table(chunk.request)[position // self.block_size]
                assert self.allocator.pool.references[block] == 1, "a shared block is written"
                assert block not in self._named_blocks(), "a named block is written"
                self.memory[self._slot(chunk.request, position)] = marks[position]
        samples = []
        for chunk in plan.chunks:
            request, marks = chunk.request, self._marks_of(chunk.request)
            read = [self.memory[self._slot(request, position)] for position in range(chunk.end)]
            assert read == marks[: chunk.end], "another's memory, or none, is read"
            if not chunk.samples:
                continue
            if request.num_output == self.fails_at.get(request):
                samples.append(FakeSample(error="not a number"))
            else:
                samples.append(FakeSample(next_token(read[-1], request, request.num_output)))
        return samples

    def _check_results(self) -> None:
        growth = 0
        for request in self.requests:
            output, reason = naive(request, self.fails_at.get(request))
            if request.finish_reason is FinishReason.ABORT:
                assert request.output_token_ids == output[: request.num_output]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)
            decoded = range(request.num_prompt, request.num_tokens)
            growth += sum(position % self.block_size == 0 for position in decoded)
            assert request.metrics.cached_tokens < request.num_prompt
        preemptions = sum(request.metrics.preemptions for request in self.requests)
        assert preemptions == self.scheduler.num_preemptions
        assert preemptions <= growth, "memory ran out more often than a block was begun"

    def _check_nothing_is_left(self) -> None:
        scheduler, allocator = self.scheduler, self.allocator
        usage = allocator.usage()
        assert usage.live == 0 and usage.free + usage.cached == allocator.num_blocks
        left = [scheduler.running, scheduler.waiting._heap, scheduler.waiting._members]
        left += [scheduler._arrivals, scheduler._siblings, scheduler._copies]
        left += [allocator.tables, allocator.take_copies()]
        if isinstance(allocator, PrefixCachingAllocator):
            left += [allocator._names, allocator._published]
        assert not any(left), "something is left behind"

    def _check_names(self, pool: NamedBlockPool) -> None:
        for block, name in pool.name_of.items():
            marks = self._block(block)
            assert None not in marks, "a named block is not full"
            assert self._mark_of.setdefault(name, marks[-1]) == marks[-1], "one name, two histories"
            assert self._name_of.setdefault(marks[-1], name) == name, "one history, two names"

    def _arrival(self, request: Request) -> int:
        return self.scheduler._arrivals[request]

    def _named_blocks(self) -> dict[int, bytes]:
        pool = self.allocator.pool
        return pool.name_of if isinstance(pool, NamedBlockPool) else {}

    def _names(self) -> set[bytes]:
        return set(self._named_blocks().values())

    def _marks_of(self, request: Request) -> list[Mark]:
        marks = self._marks.setdefault(request, [])
        for token_id in request.token_ids[len(marks) :]:
            marks.append(mark_of(request, marks[-1] if marks else None, token_id))
        return marks

    def _slot(self, request: Request, position: int) -> int:
        block = self.allocator.table(request)[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _block(self, block: int) -> list[Mark | None]:
        return self.memory[block * self.block_size : (block + 1) * self.block_size]

    def _set_block(self, block: int, marks: list[Mark | None]) -> None:
        self.memory[block * self.block_size : (block + 1) * self.block_size] = marks
