"""What an engine's steps did: who ran, what they got, who holds which blocks.

`Engine(record_steps=True)` keeps one `EngineStep` a step; figures replay them.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer_lab.allocator import BlockUsage
from infer_lab.scheduler import Chunk, Scheduler, StepPlan


@dataclass(frozen=True)
class ChunkRecord:
    """A request's part in one step of an engine."""

    request: str
    start: int
    length: int
    token: int | None  # what it got; None: its prompt goes on, or it failed


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine, and the state it leaves; requests go by their names.

    A call of `Engine.step` with nothing to compute leaves no record.
    """

    step: int
    chunks: tuple[ChunkRecord, ...]
    preempted: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    finished: tuple[str, ...]
    tables: dict[str, tuple[int, ...]]  # the blocks of each running request
    computed: dict[str, int]  # tokens of each running request that are in the cache
    cached: tuple[int, ...]  # unused blocks that can be found again, the longest unused first
    blocks: BlockUsage
    block_size: int
    seconds: float


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


def record_step(
    number: int, plan: StepPlan, sampled: tuple[bool, ...], scheduler: Scheduler, seconds: float
) -> EngineStep:
    """What a plan did, told after its commit. sampled: which of its chunks were due a token."""
    requests = [chunk.request for chunk in plan.chunks]
    return EngineStep(
        step=number,
        chunks=tuple(
            ChunkRecord(
                request=chunk.request.name,
                start=chunk.start,
                length=chunk.length,
                token=_new_token(chunk) if due else None,
            )
            for chunk, due in zip(plan.chunks, sampled, strict=True)
        ),
        preempted=tuple(request.name for request in plan.preempted),
        waiting=tuple(request.name for request in scheduler.waiting),
        running=tuple(request.name for request in scheduler.running),
        finished=tuple(request.name for request in requests if request.is_finished),
        tables={
            request.name: tuple(scheduler.allocator.table(request)) for request in scheduler.running
        },
        computed={request.name: request.num_computed for request in scheduler.running},
        cached=tuple(scheduler.allocator.cached_blocks()),
        blocks=scheduler.allocator.usage(),
        block_size=scheduler.allocator.block_size,
        seconds=seconds,
    )


def _new_token(chunk: Chunk) -> int | None:
    """The token right behind a chunk; there is none if the request failed."""
    tokens = chunk.request.token_ids
    return tokens[-1] if len(tokens) == chunk.end + 1 else None
