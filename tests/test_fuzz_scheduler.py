"""A fuzzer over scheduler x allocator: whatever comes in whatever order, `World` finds no fault.

Hypothesis draws a string of bytes, which says what the world is like and what happens in it: zeros
are the smallest world in which nothing happens, so what fails shrinks to few small events, and
they are printed. More steps than the default: INFER_LAB_FUZZ_STEPS=1000000 pytest
tests/test_fuzz_scheduler.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeVar

import pytest
from fakes import ALLOCATORS, EOS, World, make_group
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from infer_lab.scheduler import BATCHING, POLICIES

STEPS = int(os.environ.get("INFER_LAB_FUZZ_STEPS", "30000"))
EXAMPLES = 50  # in a round
EVENTS = 24  # in an example
CHOICES = 6  # at most, in an event

# Equal tokens at different places, and equal ends after different beginnings.
TEXTS = ([1] * 32, [2] + [1] * 31, [1, 2] * 16)
PROMPTS = list(product(range(3), range(4), (0, -1, 1), (False, True)))
LENGTHS = [
    (low, high) for high in (*range(1, 9), 12, 16, 24) for low in (0, 0, 1, 4) if low <= high
]
FIELDS = list(product((0, 1, -1), (None, "", "a"), ((), (3,), (EOS,)), (False, True)))
ENDS = [(None, 2**31)] * 5 + [(0, 2**31), (2, 2**31), (None, 3), (None, 8), (None, 12)]

T = TypeVar("T")


class Choices:
    """Bytes as choices from lists, each event at a place of its own."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def of(self, options: Sequence[T]) -> T:
        self._position += 1
        return options[self._data[self._position - 1] % len(options)]

    def events(self, start: int) -> Iterator[None]:
        for position in range(start, len(self._data), CHOICES):
            self._position = position
            yield


def world(kind: str, choose: Choices) -> World:
    block_size = choose.of(range(2, 25) if kind == "slots" else range(1, 6))
    num_blocks = choose.of(range(1, 5) if kind == "slots" else range(1, 13))
    max_num_seqs = choose.of(range(1, 6))
    how = {
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max_num_seqs + choose.of([0, 1, 2, 3, 5, 8, 40]),
        "policy": choose.of(list(POLICIES)),
        "batching": choose.of(BATCHING),
    }
    note(f"{kind}({num_blocks}, {block_size}), {how}")
    return World(ALLOCATORS[kind](num_blocks, block_size), **how)


def happen(world: World, choose: Choices) -> None:
    """One event, of five kinds."""
    kind = choose.of(["nothing", "add", "add", "add", "steps", "steps", "abort", "failure"])
    if kind == "add":
        add(world, choose)
    elif kind == "failure":
        fails = choose.of(["before", "after"])
        note(f"a step fails {fails} the forward")
        world.step(fails=fails)
    elif kind == "steps":
        count, within = choose.of(range(1, 7)), choose.of([False, False, True])
        victims = [choose.of(world.requests)] if within and world.requests else []
        note(f"{count} steps, {[world.requests.index(v) for v in victims]} aborted in the first")
        world.step(abort=victims)
        for _ in range(count - 1):
            world.step()
    elif kind == "abort" and world.requests:
        victim = choose.of(world.requests)
        note(f"{world.requests.index(victim)} is aborted")
        world.abort(victim)


def add(world: World, choose: Choices) -> None:
    text, blocks, more, own_end = choose.of(PROMPTS)
    length = max(1, blocks * world.block_size + more)
    n = choose.of([1, 1, 1, 2, 3, 4])
    min_tokens, max_tokens = choose.of(LENGTHS)
    priority, salt, stop_token_ids, ignore_eos = choose.of(FIELDS)
    fails_at, max_model_len = choose.of(ENDS)
    wishes = {
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "priority": priority,
        "cache_salt": salt,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": ignore_eos,
        "max_model_len": max_model_len,
    }
    if length >= max_model_len:  # refused before a scheduler sees it
        return
    prompt = [*TEXTS[text][: length - 1], 3 if own_end else 1]
    group = make_group(prompt, n, eos_token_ids=(EOS,), **wishes)
    if group[0].max_length > world.allocator.capacity:
        with pytest.raises(ValueError, match="must fit into KV memory"):
            world.add(group)
        world.check()
        return
    note(f"{n} of {prompt} are added, {wishes}, the first fails at {fails_at}")
    world.add(group, fails_at)


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_no_order_of_events_breaks_the_scheduler(kind: str) -> None:
    steps = preemptions = copies = hits = 0

    def run(data: bytes) -> None:
        nonlocal steps, preemptions, copies, hits
        choose = Choices(data)
        w = world(kind, choose)
        for _ in choose.events(start=CHOICES):
            happen(w, choose)
        w.drain()
        steps += w.steps
        preemptions += w.scheduler.num_preemptions
        copies += w.copies
        hits += w.scheduler.num_cached_tokens

    size = CHOICES * (1 + EVENTS)
    draw = given(st.binary(min_size=size, max_size=size))
    options = settings(max_examples=EXAMPLES, deadline=None, database=None)
    rounds = 0
    while steps < STEPS / len(ALLOCATORS):  # each round of its own, the same in every run
        seed(rounds)(options(draw(run)))()
        rounds += 1
    assert preemptions or kind == "slots", "the fuzzer never ran out of memory"
    assert (copies > 0) == (hits > 0) == (kind != "slots"), "the fuzzer never shared a block"
