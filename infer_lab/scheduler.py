"""Whose turn is it? Every step the scheduler answers: who runs, and which of their tokens.

There are no phases. A request has `num_tokens`, of which `num_computed` are in the cache; a step
gives it a chunk that lets the second catch up with the first:

    prefill            0 -> 37 of 37       preempted, resumed    0 -> 52 of 52
    decode            37 -> 38 of 38       prefix hit           32 -> 37 of 37
    chunked prefill    0 -> 16 of 37

When a chunk reaches `num_tokens`, the model's answer to the last token is the next token.

`schedule()` makes the plan of one step, `commit()` takes its results; state moves nowhere else.
Running requests come first, the oldest before all others; each gets at least one token, so a long
prefill never holds up the others. If memory runs out, the newest gives up its blocks and will be
computed again. The oldest therefore always advances: no deadlock, no livelock. A request is
admitted when memory suffices for all its tokens so far, though the step may compute fewer; so
memory can run out only when a running one begins a new block, which it does once for each block.

Pure Python. Sources: Orca (Yu et al. 2022) for scheduling by iteration, Sarathi-Serve (Agrawal et
al. 2024) for chunks beside decodes, vLLM's scheduler for the absence of phases.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer_lab.allocator import KVAllocator
from infer_lab.request import FinishReason, Request, Status
from infer_lab.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from infer_lab.sampler import Sample

# A policy is a sort key for who is admitted next: the smallest first, equals by arrival.
POLICIES: dict[str, Callable[[Request], int]] = {
    "fcfs": lambda request: 0,
    "shortest": lambda request: request.num_prompt + request.params.max_tokens,
    "priority": lambda request: request.priority,
}
BATCHING = ("continuous", "static")


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of a request, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        """The first token not in it."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether it reaches the last token, so that the model says the next one."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: what to copy first, then what to compute."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Queue, running set and memory, moved step by step."""

    def __init__(
        self,
        allocator: KVAllocator,
        *,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
        policy: str = "fcfs",
        batching: str = "continuous",
    ) -> None:
        """
        max_num_seqs: at most so many requests run at once.
        max_batch_tokens: at most so many tokens in a step, all chunks together.
        policy: who is admitted next: "fcfs", "shortest" or "priority" (the lowest number).
        batching: "static" admits only when nobody runs any more; "continuous" whenever there is
            room. That is the whole difference.
        """
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be >= 1, got {max_num_seqs}")
        if max_batch_tokens < max_num_seqs:
            raise ValueError(
                f"max_batch_tokens must be >= max_num_seqs={max_num_seqs} (a token for each"
                f" running request), got {max_batch_tokens}"
            )
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if batching not in BATCHING:
            raise ValueError(f"batching must be one of {', '.join(BATCHING)}, got {batching!r}")
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.policy = policy
        self.batching = batching
        self.waiting = WaitingQueue(POLICIES[policy])
        self.running: list[Request] = []  # the senior ones first
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # that first admissions did not have to compute
        self._arrivals: dict[Request, int] = {}
        self._num_arrivals = 0
        self._siblings: dict[Request, list[Request]] = {}  # wait for sample 0's prompt
        self._copies: list[tuple[int, int]] = []  # owed until a step with them is committed

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._arrivals)

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Queue a request. Its siblings (samples 1 to n - 1) follow once its prompt is computed.

        Raises ValueError when it could never run, however long it waited.
        """
        if request.max_length > self.allocator.capacity:
            raise ValueError(
                f"prompt and max_tokens must fit into KV memory ({self.allocator.capacity} tokens),"
                f" got {request.num_prompt} + {request.params.max_tokens}"
            )
        for each in (request, *siblings):
            self._arrivals[each] = self._num_arrivals
            self._num_arrivals += 1
        self.waiting.push(request, self._arrivals[request])
        if siblings:
            self._siblings[request] = list(siblings)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """End a request from outside, wherever it is. False, and no harm, if it isn't here."""
        if request not in self._arrivals:
            return False
        request.finish(reason, stop_reason)
        self._retire(request)
        return True

    def schedule(self) -> StepPlan:
        """Plan one step. Empty only if no request is unfinished.

        A step that failed half-way is not committed: plan the next one, which repeats its work.
        """
        chunks: list[Chunk] = []
        preempted: list[Request] = []
        may_admit = self.batching == "continuous" or not self.running
        budget = self.max_batch_tokens
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # preempted by one before it
                break
            younger = len(self.running) - len(chunks) - 1  # a token is kept for each of them
            length = min(request.num_tokens - request.num_computed, budget - younger)
            if self._make_room(request, request.num_computed + length, preempted):
                chunks.append(Chunk(request, request.num_computed, length))
                budget -= length
        if may_admit and not preempted:
            chunks += self._admit(budget)
        self._copies += self.allocator.take_copies()
        return StepPlan(tuple(chunks), tuple(self._copies), tuple(preempted))

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Reserve, taking memory from the newest as long as needed; False if that is itself."""
        while not self.allocator.reserve(request, num_tokens):
            newest = self.running.pop()
            newest.move(Status.PREEMPTED)
            newest.num_computed = 0
            newest.metrics.preemptions += 1
            self.num_preemptions += 1
            self.allocator.release(newest)
            self.waiting.push(newest, self._arrivals[newest])
            preempted.append(newest)
            if newest is request:
                return False
        return True

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting requests while there is room; the first that doesn't fit holds the rest."""
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            request.num_computed = cached = self.allocator.match(request)
            length = min(request.num_tokens - cached, budget)
            if not self.allocator.reserve(request, request.num_tokens):
                request.num_computed = 0
                self.allocator.release(request)
                break
            if request.status is Status.WAITING:
                request.metrics.cached_tokens = cached
                self.num_cached_tokens += cached
            self.waiting.pop()
            request.move(Status.RUNNING)
            insort(self.running, request, key=self._seniority)
            chunks.append(Chunk(request, cached, length))
            budget -= length
        return chunks

    def commit(self, plan: StepPlan, samples: Sequence[Sample]) -> list[Request]:
        """Take the results of a step: a sample for each chunk that samples, in their order.

        Returns the requests that moved. One that ended in the meantime is left alone.
        """
        assert len(samples) == sum(chunk.samples for chunk in plan.chunks)
        self._copies.clear()
        remaining = iter(samples)
        moved = []
        for chunk in plan.chunks:
            request = chunk.request
            sample = next(remaining) if chunk.samples else None
            if request.status is not Status.RUNNING:
                continue
            assert request.num_computed == chunk.start
            request.num_computed = chunk.end
            moved.append(request)
            if sample is not None and sample.error is not None:  # nobody should find these blocks
                request.finish(FinishReason.ERROR, sample.error)
                self._retire(request)
                continue
            self.allocator.publish(request)
            if request.num_computed >= request.num_prompt:
                self._release_siblings(request)
            if sample is not None:
                request.append(sample.token_id, sample.logprobs)
            if request.finish_reason is not None:
                self._retire(request)
        return moved

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or memory does not hold."""
        self.allocator.check()
        assert len(self.running) <= self.max_num_seqs
        assert self.running == sorted(self.running, key=self._seniority)
        assert all(request.status is Status.RUNNING for request in self.running)
        waiting = (Status.WAITING, Status.PREEMPTED)
        assert all(request.status in waiting for request in self.waiting)
        held_back = [each for siblings in self._siblings.values() for each in siblings]
        everyone = [*self.running, *self.waiting, *held_back]
        assert sorted(map(id, everyone)) == sorted(map(id, self._arrivals)), "a request is lost"
        for request in everyone:
            assert request.num_computed < request.num_tokens < request.max_length
            is_running = request.status is Status.RUNNING
            assert is_running == bool(self.allocator.table(request)), f"{request.id}: {is_running}"
            assert is_running or request.num_computed == 0, f"{request.id} waits, yet is computed"
        for parent in self._siblings:
            assert not parent.is_finished and parent.num_computed < parent.num_prompt

    def _retire(self, request: Request) -> None:
        """Forget a request that has ended: the one way out, wherever it was."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.discard(request)
        request.move(Status.FINISHED)
        self.allocator.release(request)
        del self._arrivals[request]
        self._release_siblings(request)
        if request.parent in self._siblings:
            siblings = self._siblings[request.parent]
            if request in siblings:
                siblings.remove(request)

    def _release_siblings(self, request: Request) -> None:
        for sibling in self._siblings.pop(request, ()):
            self.waiting.push(sibling, self._arrivals[sibling])

    def _seniority(self, request: Request) -> tuple[int, int]:
        """Who keeps memory when it runs out: by priority if that is the policy, then by age."""
        priority = request.priority if self.policy == "priority" else 0
        return priority, self._arrivals[request]
