"""A fuzzer over scheduler x allocator: whatever comes in whatever order, `World` finds no fault.

Hypothesis draws a small world and a list of operations, and shrinks what fails. More steps than
the default: INFER_LAB_FUZZ_STEPS=1000000 pytest tests/test_fuzz_scheduler.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from fakes import ALLOCATORS, EOS, World, make_group
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from infer_lab.scheduler import BATCHING, POLICIES

STEPS = int(os.environ.get("INFER_LAB_FUZZ_STEPS", "12000"))
EXAMPLES = 100  # in a round
# Equal tokens at different places, and equal ends after different beginnings.
TEXTS = ([1] * 32, [2] + [1] * 31, [1, 2] * 16)


# What a request may be; hypothesis draws one of each list and shrinks to the first.
PROMPTS = list(product(range(3), range(4), (0, -1, 1), (False, True)))
LENGTHS = [(low, high) for high in (*range(1, 9), 12, 16, 24) for low in (0, 0, 0, 1, 4) if low <= high]
FIELDS = list(product((0, 1, -1), (None, "", "a"), ((), (3,), (EOS,)), (False, True)))
ENDS = [(None, 2**31)] * 5 + [(0, 2**31), (2, 2**31), (None, 3), (None, 8), (None, 12)]


@dataclass(frozen=True)
class Add:
    prompt: tuple[int, int, int, bool]  # text, blocks, tokens more, whether its end is its own
    lengths: tuple[int, int]  # min_tokens, max_tokens
    n: int
    fields: tuple[int, str | None, tuple[int, ...], bool]
    ends: tuple[int | None, int]  # where sample 0 fails, max_model_len


@dataclass(frozen=True)
class Steps:
    count: int
    abort: int | None  # which request ends within the first of them
    fails: str | None  # where a step before them fails


@dataclass(frozen=True)
class Abort:
    which: int


def operations() -> st.SearchStrategy[list[Any]]:
    add = st.builds(
        Add,
        prompt=st.sampled_from(PROMPTS),
        lengths=st.sampled_from(LENGTHS),
        n=st.sampled_from([1, 1, 1, 2, 3, 4]),
        fields=st.sampled_from(FIELDS),
        ends=st.sampled_from(ENDS),
    )
    which = st.integers(0, 30)
    fails = st.sampled_from([None, None, "before", "after"])
    steps = st.builds(Steps, count=st.integers(1, 6), abort=st.none() | which, fails=fails)
    return st.lists(add | add | steps | st.builds(Abort, which=which), min_size=1, max_size=30)


def worlds(kind: str) -> st.SearchStrategy[World]:
    sizes = [st.integers(1, 10), st.integers(1, 5)]
    if kind == "slots":
        sizes = [st.integers(1, 4), st.integers(2, 24)]

    def build(num_blocks: int, size: int, num_seqs: int, more: int, how: tuple[str, str]) -> World:
        return World(
            ALLOCATORS[kind](num_blocks, size),
            max_num_seqs=num_seqs,
            max_batch_tokens=num_seqs + more,
            policy=how[0],
            batching=how[1],
        )

    return st.builds(
        build,
        *sizes,
        num_seqs=st.integers(1, 5),
        more=st.sampled_from([0, 1, 2, 3, 5, 8, 40]),
        how=st.sampled_from(list(product(POLICIES, BATCHING))),
    )


def perform(world: World, operation: Add | Steps | Abort) -> None:
    if isinstance(operation, Add):
        add(world, operation)
    elif isinstance(operation, Abort):
        if world.requests:
            world.abort(world.requests[operation.which % len(world.requests)])
    else:
        abort = []
        if operation.abort is not None and world.requests:
            abort = [world.requests[operation.abort % len(world.requests)]]
        if operation.fails:
            world.step(fails=operation.fails)
        for _ in range(operation.count):
            world.step(abort=abort)
            abort = []


def add(world: World, operation: Add) -> None:
    text, blocks, more, own_end = operation.prompt
    length = max(1, blocks * world.block_size + more)
    priority, salt, stop_token_ids, ignore_eos = operation.fields
    fails_at, max_model_len = operation.ends
    if length >= max_model_len:  # refused before a scheduler sees it
        return
    group = make_group(
        [*TEXTS[text][: length - 1], 3 if own_end else 1],
        operation.n,
        min_tokens=operation.lengths[0],
        max_tokens=operation.lengths[1],
        priority=priority,
        cache_salt=salt,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
    )
    if group[0].max_length > world.allocator.capacity:
        with pytest.raises(ValueError, match="must fit into KV memory"):
            world.add(group)
        world.check()
    else:
        world.add(group, fails_at)


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_no_order_of_events_breaks_the_scheduler(kind: str) -> None:
    steps = preemptions = copies = hits = 0

    def run(world: World, operations: list[Any]) -> None:
        nonlocal steps, preemptions, copies, hits
        for operation in operations:
            perform(world, operation)
        world.drain()
        steps += world.steps
        preemptions += world.scheduler.num_preemptions
        copies += world.copies
        hits += world.scheduler.num_cached_tokens

    options = settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    rounds = 0
    while steps < STEPS / len(ALLOCATORS):
        seed(rounds)(options(given(worlds(kind), operations())(run)))()
        rounds += 1
    assert preemptions or kind == "slots", "the fuzzer never ran out of memory"
    assert (copies > 0) == (hits > 0) == (kind != "slots"), "the fuzzer never shared a block"
