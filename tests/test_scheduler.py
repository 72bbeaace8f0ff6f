"""Who runs, with which tokens, and who gives way: the scheduler against a fake model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import ALLOCATORS, EOS, FakeSample, World, make_group, make_request

from infer_lab.allocator import BlockAllocator, SlotAllocator
from infer_lab.request import FinishReason, Request, Status
from infer_lab.scheduler import BATCHING, POLICIES, Scheduler, StepPlan


def world(
    kind: str = "blocks",
    num_blocks: int = 40,
    block_size: int = 4,
    *,
    seqs: int = 4,
    tokens: int = 64,
    **options: str,
) -> World:
    allocator = ALLOCATORS[kind](num_blocks, block_size)
    return World(allocator, max_num_seqs=seqs, max_batch_tokens=tokens, **options)


def add(to: World, num_prompt: int, max_tokens: int = 8, **wishes: Any) -> Request:
    """Queue a request of its own text."""
    start = 100 * len(to.requests)
    request = make_request(range(start, start + num_prompt), max_tokens=max_tokens, **wishes)
    to.add([request])
    return request


def work(plan: StepPlan) -> dict[Request, tuple[int, int]]:
    """Who gets which tokens: request -> (start, end)."""
    return {chunk.request: (chunk.start, chunk.end) for chunk in plan.chunks}


# Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_batch_tokens": 3}, r"max_batch_tokens must be >= max_num_seqs=4 .*, got 3"),
        ({"policy": "fast"}, "policy must be one of fcfs, shortest, priority, got 'fast'"),
        ({"batching": "none"}, "batching must be one of continuous, static, got 'none'"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(BlockAllocator(4, 4), **{"max_num_seqs": 4, **wrong})


def test_the_smallest_scheduler_works() -> None:
    w = world(num_blocks=1, block_size=2, seqs=1, tokens=1)
    add(w, 1, max_tokens=1)
    w.drain()


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_what_can_never_fit_is_refused_and_what_just_fits_runs(kind: str) -> None:
    w = world(kind, num_blocks=1, block_size=12)
    for num_prompt, max_tokens in ((9, 4), (13, 1), (1, 12)):
        with pytest.raises(ValueError, match=rf"\(12 tokens\), got {num_prompt} \+ {max_tokens}"):
            w.scheduler.add(make_request(range(num_prompt), max_tokens=max_tokens))
        assert not w.scheduler.has_unfinished and not w.scheduler.waiting
    for num_prompt, max_tokens in ((9, 3), (11, 1), (1, 11)):
        add(w, num_prompt, max_tokens)
    add(w, 9, max_tokens=99, max_model_len=12)  # the context ends it in time
    w.drain()


# One step ------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_plan() -> None:
    plan = world().step()
    assert plan == StepPlan(()) and plan.num_tokens == 0


def test_prefill_decode_and_chunks_differ_in_numbers_only() -> None:
    w = world(tokens=8)
    short, long = add(w, 5), add(w, 12)
    assert work(w.step()) == {short: (0, 5), long: (0, 3)}
    assert work(w.step()) == {short: (5, 6), long: (3, 10)}
    assert work(w.step()) == {short: (6, 7), long: (10, 12)}
    assert work(w.step()) == {short: (7, 8), long: (12, 13)}


def test_a_long_prefill_leaves_every_running_request_its_token() -> None:
    w = world(seqs=4, tokens=4)
    requests = [add(w, 20), add(w, 1), add(w, 1), add(w, 1)]
    assert work(w.step()) == {requests[0]: (0, 4)}  # it came first and fills the step
    assert work(w.step()) == {requests[0]: (4, 8)}
    w.drain()
    w = world(seqs=4, tokens=4)
    requests = [add(w, 1), add(w, 1), add(w, 20), add(w, 1)]
    w.step()
    for step in range(5):
        plan = work(w.step())
        assert all(request in plan for request in requests[:3])
        assert plan[requests[0]] == (1 + step, 2 + step)


def test_an_older_prefill_takes_all_but_one_token_for_each_younger() -> None:
    w = world(seqs=3, tokens=10)
    old, mid, young = add(w, 30), add(w, 1), add(w, 1)
    w.scheduler.max_batch_tokens = 12
    assert work(w.step()) == {old: (0, 12)}
    w.scheduler.max_batch_tokens = 20
    assert work(w.step()) == {old: (12, 30), mid: (0, 1), young: (0, 1)}
    w = world(seqs=3, tokens=10)
    first, second = add(w, 8), add(w, 30)
    assert work(w.step()) == {first: (0, 8), second: (0, 2)}
    third = add(w, 5)
    assert work(w.step()) == {first: (8, 9), second: (2, 11)}
    assert work(w.step()) == {first: (9, 10), second: (11, 20)}
    assert work(w.step()) == {first: (10, 11), second: (20, 29)}
    assert work(w.step()) == {first: (11, 12), second: (29, 30), third: (0, 5)}


def test_no_more_run_than_max_num_seqs() -> None:
    w = world(seqs=2)
    requests = [add(w, 3, max_tokens=3, min_tokens=3) for _ in range(3)]
    for _ in range(3):
        assert list(work(w.step())) == requests[:2]
    assert list(work(w.step())) == requests[2:]


def test_the_first_that_does_not_fit_holds_the_rest() -> None:
    w = world(num_blocks=4)
    first, large, small = add(w, 9, 4), add(w, 8, 4), add(w, 1, 1)
    assert list(work(w.step())) == [first]
    while not first.is_finished:
        w.step()
    assert list(work(w.step())) == [large, small]


def test_a_prompt_is_not_begun_before_memory_suffices_for_all_of_it() -> None:
    w = world(num_blocks=8, seqs=4, tokens=8)
    small, large = add(w, 13, max_tokens=8, min_tokens=8), add(w, 20, max_tokens=8)
    while not small.is_finished:
        assert large not in work(w.step())
    w.drain()
    assert w.scheduler.num_preemptions == 0
    assert w.computed == small.num_tokens + large.num_tokens - 2  # nothing was computed twice


def test_memory_runs_out_at_block_boundaries_only() -> None:
    w = world(num_blocks=6)
    old, young = add(w, 8, 9, min_tokens=9), add(w, 8, 9, min_tokens=9)
    preempted_at = []
    while w.scheduler.has_unfinished:
        if w.step().preempted:
            preempted_at.append(old.num_tokens)
    assert preempted_at == [14]  # 13 needed a fourth block, and there was none
    assert young.metrics.preemptions == 1


# Policies and batching -----------------------------------------------------------------------


def order_of(policy: str) -> list[int]:
    w = world(seqs=1, policy=policy)
    requests = [add(w, 9, 1), add(w, 2, 9, priority=2), add(w, 3, 3, priority=-1), add(w, 1, 5)]
    order: list[int] = []
    while w.scheduler.has_unfinished:
        (request,) = work(w.step())
        if request not in [requests[i] for i in order]:
            order.append(requests.index(request))
    return order


def test_policies_are_sort_keys() -> None:
    assert order_of("fcfs") == [0, 1, 2, 3]
    assert order_of("shortest") == [2, 3, 0, 1]  # 6, 6, 10, 11 tokens at most
    assert order_of("priority") == [2, 0, 3, 1]


def test_static_batching_admits_when_nobody_runs_any_more() -> None:
    w = world(seqs=3, batching="static")
    requests = [add(w, 2, n, min_tokens=n) for n in (1, 4, 2, 2)]
    assert list(work(w.step())) == requests[:3]
    assert list(work(w.step())) == requests[1:3]
    for _ in range(2):
        assert list(work(w.step())) == requests[1:2]
    assert list(work(w.step())) == requests[3:]


def test_continuous_batching_admits_as_soon_as_there_is_room() -> None:
    w = world(seqs=3)
    requests = [add(w, 2, n, min_tokens=n) for n in (1, 4, 2, 2)]
    assert list(work(w.step())) == requests[:3]
    assert list(work(w.step())) == requests[1:]


# Preemption ----------------------------------------------------------------------------------


def test_the_newest_gives_up_its_memory_and_goes_on_later_where_it_was() -> None:
    w = world(num_blocks=6)
    old, young = add(w, 8, 9, min_tokens=9), add(w, 8, 9, min_tokens=9)
    while not young.metrics.preemptions:
        plan = w.step()
    assert plan.preempted == (young,) and list(work(plan)) == [old]
    assert young.status is Status.PREEMPTED and young.num_computed == 0
    output = young.output_token_ids
    assert output and not w.allocator.table(young)
    while young.status is Status.PREEMPTED:
        plan = w.step()
    assert work(plan)[young] == (0, 8 + len(output))
    assert young.output_token_ids[: len(output)] == output
    w.drain()
    assert w.scheduler.num_preemptions == young.metrics.preemptions == 1
    assert old.metrics.preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    w = world(num_blocks=6)
    add(w, 8, 9, min_tokens=9), add(w, 8, 9, min_tokens=9)
    w.step()
    small = add(w, 1, 1)
    w.scheduler.max_num_seqs = 2
    while not (plan := w.step()).preempted:
        pass
    assert small not in work(plan)


def test_one_that_needs_memory_itself_as_the_newest_waits_again() -> None:
    w = world(num_blocks=6)
    old, young = add(w, 5, 16, min_tokens=16), add(w, 12, 9, min_tokens=9)
    plans = [w.step(), w.step()]
    assert plans[-1].preempted == ()
    while not (plan := w.step()).preempted:
        pass
    assert plan.preempted == (young,) and list(work(plan)) == [old]


def test_as_many_give_way_as_it_takes() -> None:
    """A step adds one token to a request today; with speculation it may add many."""
    scheduler = Scheduler(BlockAllocator(4, 4), max_num_seqs=4)
    requests = [make_request([n] * 3, max_tokens=9) for n in range(4)]
    for request in requests:
        scheduler.add(request)
    scheduler.commit(scheduler.schedule(), [FakeSample(1)] * 4)  # type: ignore[list-item]
    requests[0].token_ids += [1] * 7
    plan = scheduler.schedule()
    assert plan.preempted == (requests[3], requests[2])
    assert work(plan) == {requests[0]: (3, 11), requests[1]: (3, 4)}
    scheduler.check()


def test_under_the_priority_policy_the_less_important_gives_way_however_old() -> None:
    w = world(num_blocks=6, policy="priority")
    old = add(w, 8, 9, min_tokens=9, priority=1)
    w.step()
    urgent = add(w, 8, 9, min_tokens=9, priority=0)
    w.step()
    assert w.scheduler.running == [urgent, old]
    while not w.scheduler.num_preemptions:
        w.step()
    assert old.metrics.preemptions == 1 and w.scheduler.running == [urgent]
    w.drain()


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_under_the_other_policies_age_decides_whatever_the_priority(policy: str) -> None:
    w = world(num_blocks=6, policy=policy)
    old, young = add(w, 8, 9, priority=1), add(w, 8, 9, priority=0)
    w.step()
    assert w.scheduler.running == [old, young]


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", BATCHING)
def test_a_stream_of_short_requests_cannot_stop_a_running_one(
    kind: str, policy: str, batching: str
) -> None:
    w = world(kind, num_blocks=6, seqs=3, tokens=6, policy=policy, batching=batching)
    long = add(w, 8, 14, min_tokens=14)
    w.step()
    steps = 0
    while not long.is_finished:
        add(w, 2, 2)
        w.step()
        steps += 1
        assert long.num_tokens + long.num_computed > 8 + steps, "it did not advance"
    w.drain()


# Ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("mid_step", [False, True])
def test_an_abort_works_at_any_moment_of_a_life(kind: str, mid_step: bool) -> None:
    """Waiting, in a prompt's chunks, decoding, preempted, admitted again, ended."""
    seen = set()
    for moment in range(0, 42, 2) if mid_step else range(1, 42, 2):
        size = (3, 24) if kind == "slots" else (6, 4)
        w = world(kind, *size, seqs=3, tokens=5)
        add(w, 8, 9, min_tokens=9)
        victim = add(w, 8, 9, min_tokens=9)
        add(w, 1, 3)
        for _ in range(moment):
            w.step()
        seen.add(victim.status)
        output, was_unfinished = victim.output_token_ids, not victim.is_finished
        if mid_step:
            w.step(abort=[victim])
        else:
            w.abort(victim)
        assert w.allocator.table(victim) == [] and victim.output_token_ids == output
        assert (victim.finish_reason == "abort") == was_unfinished
        w.drain()
    assert seen == set(Status) - ({Status.PREEMPTED} if kind == "slots" else set())


def test_finishing_what_is_not_here_does_no_harm() -> None:
    w = world()
    stranger = make_request([1])
    assert not w.scheduler.finish(stranger, FinishReason.ABORT)
    assert stranger.status is Status.WAITING and stranger.finish_reason is None
    ended = add(w, 1, 1)
    w.drain()
    assert not w.scheduler.finish(ended, FinishReason.ABORT)
    assert ended.finish_reason == "length"


def test_an_abort_may_carry_a_reason_of_its_own() -> None:
    w = world()
    request = add(w, 1)
    assert w.scheduler.finish(request, FinishReason.ERROR, "why")
    assert (request.finish_reason, request.stop_reason) == ("error", "why")


def test_an_error_ends_one_request_and_the_others_go_on() -> None:
    w = world()
    good, other = add(w, 3), add(w, 3)
    bad = make_request([5, 5, 5], max_tokens=8)
    w.add([bad], fails_at=2)
    w.drain()
    assert (bad.finish_reason, bad.stop_reason) == ("error", "not a number")
    assert bad.num_output == 2 and bad.num_tokens == 5
    assert {good.finish_reason, other.finish_reason} == {"length"}


def test_all_ways_to_end_in_one_step_release_all_memory() -> None:
    w = world(seqs=6)
    w.add([make_request([1] * 5, max_tokens=9)], fails_at=1)
    first_two = World(BlockAllocator(4, 4))
    probe = make_request([2] * 5, max_tokens=2)
    first_two.add([probe])
    first_two.drain()
    second = probe.output_token_ids[1]
    wishes = {"max_tokens": 9, "min_tokens": 1}
    eos = make_request([2] * 5, eos_token_ids=[second], **wishes)
    stop = make_request([2] * 5, stop_token_ids=[second], **wishes)
    length, context = add(w, 5, 2), add(w, 5, 9, max_model_len=7)
    victim = add(w, 5)
    for request in (eos, stop):
        w.add([request])
    w.step()
    w.step(abort=[victim])
    assert not w.scheduler.has_unfinished
    w.drain()
    reasons = [(r.finish_reason, r.stop_reason) for r in (eos, stop, length, context, victim)]
    assert reasons == [
        ("stop", None),
        ("stop", second),
        ("length", None),
        ("length", "max_model_len"),
        ("abort", None),
    ]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_a_step_that_failed_half_way_is_repeated_by_the_next(kind: str, when: str) -> None:
    w = world(kind, seqs=4, tokens=6)
    group = make_group(range(6), 4, max_tokens=4)
    w.add(group)
    while w.scheduler.has_unfinished:
        failed = w.step(fails=when)
        plan = w.step()
        assert plan.chunks[: len(failed.chunks)] == failed.chunks
        assert plan.copies[: len(failed.copies)] == failed.copies
    w.drain()
    assert w.copies == 3


def test_commit_wants_a_sample_for_each_chunk_that_samples() -> None:
    w = world(tokens=4)
    add(w, 2), add(w, 8)
    plan = w.scheduler.schedule()
    assert [chunk.samples for chunk in plan.chunks] == [True, False]
    for samples in ([], [FakeSample(1)] * 2):
        with pytest.raises(AssertionError):
            w.scheduler.commit(plan, samples)  # type: ignore[arg-type]
    w.scheduler.commit(plan, [FakeSample(1)])  # type: ignore[list-item]
    w.check()


# Samples of one prompt -----------------------------------------------------------------------


def test_samples_follow_when_their_prompt_is_computed() -> None:
    w = world(tokens=8)
    group = make_group(range(12), 3, max_tokens=4, min_tokens=4)
    w.add(group)
    other = add(w, 2)
    assert work(w.step()) == {group[0]: (0, 8)}
    assert len(w.scheduler.waiting) == 1
    assert work(w.step()) == {group[0]: (8, 12), other: (0, 2)}
    plan = w.step()
    assert work(plan) == {
        group[0]: (12, 13),
        other: (2, 3),
        group[1]: (11, 12),
        group[2]: (11, 12),
    }
    assert len(plan.copies) == 2
    assert w.scheduler.running == [*group, other]  # they are as old as their parent


def test_samples_wait_in_line_as_old_as_their_parent() -> None:
    w = world(seqs=1)
    group = make_group(range(5), 2, max_tokens=1)
    w.add(group)
    other = add(w, 1, 1)
    order = [next(iter(work(w.step()))) for _ in range(3)]
    assert order == [*group, other]


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("n", [2, 4, 9])
def test_samples_are_drawn_each_for_itself(kind: str, batching: str, n: int) -> None:
    w = world(kind, num_blocks=9, block_size=16, seqs=3, tokens=9, batching=batching)
    group = make_group(range(7), n, max_tokens=8)
    w.add(group)
    w.drain()
    assert len({tuple(request.output_token_ids) for request in group}) == n


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_a_parent_ends_early_its_samples_go_on_without_it(steps: int) -> None:
    w = world(tokens=4)
    group = make_group(range(10), 3, max_tokens=4)
    w.add(group)
    for _ in range(steps):
        w.step()
    w.abort(group[0])
    assert len(w.scheduler.waiting) == 2
    w.drain()
    assert group[0].finish_reason == "abort" and group[0].num_output == 0
    assert all(request.num_output == 4 for request in group[1:])


def test_when_a_parent_fails_its_samples_compute_the_prompt_for_themselves() -> None:
    w = world("prefix")
    group = make_group(range(10), 3, max_tokens=4)
    w.add(group, fails_at=0)
    w.step()
    assert work(w.step()) == {group[1]: (0, 10), group[2]: (0, 10)}
    w.drain()


def test_a_sample_can_be_aborted_while_it_is_held_back() -> None:
    w = world(tokens=4)
    group = make_group(range(10), 3, max_tokens=4)
    w.add(group)
    w.step()
    w.abort(group[1])
    w.step()
    w.step()
    assert set(work(w.step())) == {group[0], group[2]}
    w.drain()


def test_all_samples_can_be_aborted_while_they_are_held_back() -> None:
    w = world(tokens=4)
    group = make_group(range(10), 3, max_tokens=4)
    w.add(group)
    w.step()
    for request in reversed(group):
        w.abort(request)
    assert not w.scheduler.has_unfinished
    w.drain()


def test_a_preempted_parent_keeps_its_samples_waiting() -> None:
    w = world(num_blocks=6, tokens=5)
    old = add(w, 7, 12, min_tokens=12)
    group = make_group(range(16), 2, max_tokens=4)
    w.add(group)
    while not group[0].metrics.preemptions:
        w.step()
    assert not any(request is group[1] for request in w.scheduler.waiting)
    assert not old.is_finished
    w.drain()


# Check ---------------------------------------------------------------------------------------


def seat_too_many(scheduler: Scheduler) -> None:
    scheduler.max_num_seqs = 1


def wrong_order(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def not_running(scheduler: Scheduler) -> None:
    scheduler.running[0].status = Status.PREEMPTED


def not_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting.peek().status = Status.RUNNING


def run_after_the_end(scheduler: Scheduler) -> None:
    scheduler.running[0].move(Status.FINISHED)
    scheduler.allocator.release(scheduler.running[0])


def wait_after_the_end(scheduler: Scheduler) -> None:
    scheduler.waiting.peek().move(Status.FINISHED)


def lose_a_request(scheduler: Scheduler) -> None:
    scheduler.waiting.pop()


def know_a_request_twice(scheduler: Scheduler) -> None:
    scheduler._siblings[scheduler.running[0]] = [scheduler.waiting.peek()]


def compute_too_much(scheduler: Scheduler) -> None:
    request = scheduler.running[0]
    del request.token_ids[request.num_computed :]


def grow_too_long(scheduler: Scheduler) -> None:
    scheduler.running[0].token_ids += [1] * 9


def run_without_memory(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed = 0
    scheduler.allocator.release(scheduler.running[0])


def wait_with_memory(scheduler: Scheduler) -> None:
    scheduler.allocator.reserve(scheduler.waiting.peek(), 1)


def wait_with_progress(scheduler: Scheduler) -> None:
    scheduler.waiting.peek().num_computed = 1


def hold_siblings_back_too_long(scheduler: Scheduler) -> None:
    scheduler._siblings[scheduler.running[0]] = []


def damage_memory(scheduler: Scheduler) -> None:
    scheduler.allocator.pool.free.pop()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "damage",
    [
        seat_too_many,
        wrong_order,
        not_running,
        not_waiting,
        run_after_the_end,
        wait_after_the_end,
        lose_a_request,
        know_a_request_twice,
        compute_too_much,
        grow_too_long,
        run_without_memory,
        wait_with_memory,
        wait_with_progress,
        hold_siblings_back_too_long,
        damage_memory,
    ],
)
def test_check_finds(damage: Callable[[Scheduler], None]) -> None:
    w = world(seqs=2)
    for _ in range(3):
        add(w, 5)
    w.step()
    w.scheduler.check()
    damage(w.scheduler)
    with pytest.raises(AssertionError):
        w.scheduler.check()


# Equality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("tokens", [3, 4, 5, 16, 64])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_tokens_do_not_depend_on_budget_blocks_or_memory(
    kind: str, tokens: int, block_size: int
) -> None:
    """`World.drain` compares each request with the naive loop."""
    lengths = [1, 3, 4, 5, 15, 16, 17, 32, 1]
    size = 48 if kind == "slots" else block_size
    for num_blocks in {-(-48 // size), -(-60 // size), 90}:
        w = world(kind, num_blocks, size, seqs=3, tokens=tokens)
        for i, length in enumerate(lengths):
            prompt = [1] * (length - 1) + [i % 2]
            w.add(make_group(prompt, 1 + i % 2, max_tokens=16, eos_token_ids=(EOS,)))
        w.drain()


def test_slots_never_preempt() -> None:
    w = World(SlotAllocator(2, 20), max_num_seqs=4, max_batch_tokens=8)
    for _ in range(5):
        add(w, 9, 9)
    w.drain()
    assert w.scheduler.num_preemptions == 0
