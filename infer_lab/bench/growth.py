"""Costs that must not grow with the load, measured while it grows.

    schedule        planning one step            10 to 10,000 requests waiting      flat
    pack, commit    a plan's tensors; results    1 to 256 requests running          linear
    match, evict    finding a known prefix;      100 to 100,000 blocks in the       flat
                    taking the oldest block      prefix cache

Flat: it doesn't matter how many there are. Linear: in proportion, since each has to be looked at
once. The exponent tells which it is: the slope of a line through the points when both axes are
logarithmic, 0 for flat and 1 for linear. Of many repeats the fastest counts, as in `timeit`: what
else the machine does can only make them slower.

No model runs here: this is the bookkeeping around it, which a learner's first version often makes
grow. One `waiting.remove(request)` is enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from infer_lab.allocator import BlockAllocator
from infer_lab.batcher import pack
from infer_lab.prefix_cache import PrefixCachingAllocator
from infer_lab.request import Request
from infer_lab.sampler import Sample
from infer_lab.sampling_params import SamplingParams
from infer_lab.scheduler import Scheduler, StepPlan

PASSES = 3  # over all sizes, so that a slow moment of the machine doesn't hit one size alone
SLOTS = 32
WAITING = (10, 100, 1_000, 10_000)
RUNNING = (1, 4, 16, 64, 256)
BLOCKS = (100, 1_000, 10_000, 100_000)
BLOCK_SIZE = 16
PROMPT_LEN = 64
T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Growth:
    """What an operation costs at each size."""

    operation: str
    of: str  # what grows
    expected: str  # "flat" or "linear"
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]  # of one operation, the fastest of many

    @property
    def exponent(self) -> float:
        """The power of the size with which the cost grows, by least squares."""
        logarithms = ([math.log(value) for value in each] for each in (self.sizes, self.seconds))
        return statistics.linear_regression(*logarithms).slope


def measure(
    *,
    waiting: Sequence[int] = WAITING,
    running: Sequence[int] = RUNNING,
    blocks: Sequence[int] = BLOCKS,
    repeats: int = 200,
) -> list[Growth]:
    """All of them, with `repeats` operations at each size in each pass."""
    return [
        *_grow(["schedule"], "requests waiting", "flat", waiting, repeats, _with_waiting),
        *_grow(["pack", "commit"], "requests running", "linear", running, repeats, _with_running),
        *_grow(["match", "evict"], "cached blocks", "flat", blocks, repeats, _with_blocks),
    ]


def _grow(
    operations: Sequence[str],
    of: str,
    expected: str,
    sizes: Sequence[int],
    repeats: int,
    costs_at: Callable[[int, int], tuple[float, ...]],
) -> list[Growth]:
    passes = [[costs_at(size, repeats) for size in sizes] for _ in range(PASSES)]
    found = []
    for i, operation in enumerate(operations):
        costs = zip(*([each[i] for each in one] for one in passes), strict=True)
        seconds = tuple(map(min, costs))
        found.append(Growth(operation, of, expected, tuple(sizes), seconds))
    return found


def _with_waiting(size: int, repeats: int) -> tuple[float]:
    """Seconds of `schedule` when `size` requests wait behind SLOTS that run.

    In each step one ends, the first of those that wait is admitted, and another joins them.
    """
    scheduler = Scheduler(BlockAllocator(1_000, BLOCK_SIZE), max_num_seqs=SLOTS)
    for i in range(SLOTS + size):
        scheduler.add(_request(i, output_len=min(i + 1, SLOTS)))
    costs, arrived = [], SLOTS + size
    for _ in range(repeats):
        cost, plan = _timed(scheduler.schedule)
        costs.append(cost)
        for request in _commit(scheduler, plan):
            if request.is_finished:
                scheduler.add(_request(arrived, output_len=SLOTS))
                arrived += 1
    return (min(costs),)


def _with_running(size: int, repeats: int) -> tuple[float, float]:
    """Seconds of `pack` and of `commit` when `size` requests decode."""
    num_blocks = size * (PROMPT_LEN + repeats + 1) // BLOCK_SIZE + size
    allocator = PrefixCachingAllocator(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(allocator, max_num_seqs=size, max_batch_tokens=size * PROMPT_LEN)
    for i in range(size):
        scheduler.add(_request(i, output_len=repeats + 1))
    _commit(scheduler, scheduler.schedule())  # the prompts
    packs, commits = [], []
    for _ in range(repeats):
        plan = scheduler.schedule()
        packs.append(_timed(partial(pack, plan, allocator, CPU))[0])
        commits.append(_timed(partial(_commit, scheduler, plan))[0])
    return min(packs), min(commits)


def _with_blocks(size: int, repeats: int) -> tuple[float, float]:
    """Seconds to `match` a prompt of 4 blocks and to `take` a block in a full cache of `size`."""
    per_request = PROMPT_LEN // BLOCK_SIZE
    allocator = PrefixCachingAllocator(size, BLOCK_SIZE)
    for i in range(size // per_request):
        _compute(allocator, _request(i))
    matches, evictions = [], []
    for i in range(repeats):
        request = _request(i % (size // per_request), extra=1)
        cost, found = _timed(partial(allocator.match, request))
        assert found == PROMPT_LEN, "a cached prompt was not found"
        allocator.release(request)
        matches.append(cost)
    for i in range(repeats):
        request = _request(size + i)
        cost, _ = _timed(partial(allocator.reserve, request, PROMPT_LEN))
        evictions.append(cost / per_request)
        _finish(allocator, request)
    return min(matches), min(evictions)


def _compute(allocator: PrefixCachingAllocator, request: Request) -> None:
    """Put a prompt into the cache, as if it had gone through the model."""
    assert allocator.reserve(request, PROMPT_LEN)
    _finish(allocator, request)


def _finish(allocator: PrefixCachingAllocator, request: Request) -> None:
    request.num_computed = PROMPT_LEN
    allocator.publish(request)
    allocator.release(request)


def _commit(scheduler: Scheduler, plan: StepPlan) -> list[Request]:
    return scheduler.commit(plan, [Sample(1) for chunk in plan.chunks if chunk.samples])


def _request(number: int, *, output_len: int = 1, extra: int = 0) -> Request:
    """A request whose prompt no other number has. extra: tokens behind the prompt."""
    prompt = (number,) * (PROMPT_LEN + extra)
    return Request(f"{number}", prompt, SamplingParams(max_tokens=output_len, ignore_eos=True))


def _timed(operation: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = operation()
    return time.perf_counter() - began, result


def table(growths: Iterable[Growth]) -> str:
    """A line for each operation and size, and the exponents."""
    lines = []
    for growth in growths:
        lines.append(
            f"{growth.operation:<10} {growth.of}: {growth.expected} is expected,"
            f" exponent {growth.exponent:.2f}"
        )
        for size, seconds in zip(growth.sizes, growth.seconds, strict=True):
            lines.append(f"{size:>14,} {1e6 * seconds:>12,.1f} µs")
    return "\n".join(lines)
