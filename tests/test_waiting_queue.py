"""A queue in order, from which anyone can leave; and what a step costs when many wait."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable

import pytest
from fakes import FakeSample, make_request

from infer_lab.prefix_cache import PrefixCachingAllocator
from infer_lab.request import Request
from infer_lab.sampling_params import SamplingParams
from infer_lab.scheduler import POLICIES, Scheduler
from infer_lab.waiting_queue import WaitingQueue


def queue_of(requests: Iterable[Request]) -> WaitingQueue:
    queue = WaitingQueue(lambda request: request.priority)
    for arrival, request in enumerate(requests):
        queue.push(request, arrival)
    return queue


def test_a_queue_gives_the_smallest_key_first_and_equals_by_arrival() -> None:
    requests = [make_request([1], priority=p) for p in (2, 1, 2, 0, 1)]
    queue = queue_of(requests)
    expected = [requests[i] for i in (3, 1, 4, 0, 2)]
    assert list(queue) == expected and len(queue) == 5 and queue.peek() is expected[0]
    assert [queue.pop() for _ in range(5)] == expected
    assert not queue and not list(queue)


def test_what_is_discarded_from_a_queue_can_come_back() -> None:
    one, two, three = requests = [make_request([1]) for _ in range(3)]
    queue = queue_of(requests)
    for _ in range(3):
        queue.discard(one)
        queue.discard(one)
        assert list(queue) == [two, three] and len(queue) == 2
        queue.push(one, 0)
        assert next(iter(queue)) is one
    assert queue.pop() is one and queue.pop() is two
    queue.push(one, 0)
    assert [queue.pop(), queue.pop()] == [one, three] and not queue._heap


def test_a_queue_forgets_whoever_leaves() -> None:
    queue = queue_of(make_request([1], priority=p) for p in range(9))
    requests = list(queue)
    for request in requests[5:]:  # the last ones, which never come to the top
        queue.discard(request)
    for _ in range(5):
        queue.pop()
    assert not queue._heap and not queue._members


# Cost ----------------------------------------------------------------------------------------


class Counted(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


@pytest.mark.parametrize("order", ["first to last", "last to first", "mixed"])
def test_queue_operations_cost_o_log_n(order: str) -> None:
    n = 1024
    requests = [make_request([1], priority=Counted(i * 2654435761 % n)) for i in range(n)]
    queue = WaitingQueue(lambda request: request.priority)
    Counted.comparisons = 0
    for arrival, request in enumerate(requests):
        queue.push(request, arrival)
    by_priority = sorted(requests, key=lambda request: int(request.priority))
    aborts = {"first to last": by_priority, "last to first": by_priority[::-1], "mixed": requests}
    for i, request in enumerate(aborts[order][: n - 64]):
        queue.discard(request)
        assert len(queue) == n - 1 - i
        assert len(queue._heap) <= 2 * len(queue), "the dead are kept"
        queue.peek()
    left = []
    while queue:
        left.append(queue.pop())
    assert left == [r for r in by_priority if r in set(aborts[order][n - 64 :])]
    assert Counted.comparisons <= 8 * n * math.log2(n)


def count_calls(function: Callable[[], object]) -> int:
    """Python and C functions called, a measure of work that is the same on every machine."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def busy(num_waiting: int, policy: str, blocked_by: str) -> Scheduler:
    """Four requests run; many wait, for a seat or for memory."""
    seats = 4 if blocked_by == "seats" else 8
    scheduler = Scheduler(PrefixCachingAllocator(40, 4), max_num_seqs=seats, policy=policy)
    for n in range(4):
        scheduler.add(make_request([n] * 20, max_tokens=16))
    scheduler.commit(scheduler.schedule(), [FakeSample(1)] * 4)  # type: ignore[list-item]
    params = [SamplingParams(max_tokens=8 + n) for n in range(7)]
    for n in range(num_waiting):
        scheduler.add(Request("w", (50,) * 120, params[n % 7], priority=n % 5))
    return scheduler


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocked_by", ["seats", "memory"])
def test_a_step_costs_the_same_however_many_wait(policy: str, blocked_by: str) -> None:
    costs = []
    for num_waiting in (10, 10_000):
        scheduler = busy(num_waiting, policy, blocked_by)

        def step(scheduler: Scheduler = scheduler) -> None:
            plan = scheduler.schedule()
            scheduler.commit(plan, [FakeSample(1)] * 4)  # type: ignore[list-item]

        step()
        costs.append(count_calls(step))
        assert len(scheduler.running) == 4 and len(scheduler.waiting) == num_waiting
    assert costs[0] == costs[1]
