"""Blocks found by their contents: names, who publishes, what is evicted, who may see what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fakes import FakeSample, World, make_group, make_request

import infer_lab.prefix_cache as prefix_cache
from infer_lab.allocator import BlockUsage
from infer_lab.prefix_cache import PrefixCachingAllocator, block_name, root_name
from infer_lab.request import Request, Status
from infer_lab.scheduler import Scheduler

BOUNDARIES = [1, 3, 4, 5, 7, 8, 9, 12, 13]  # block size 4


def compute(allocator: PrefixCachingAllocator, request: Request) -> int:
    """Let a request compute all its tokens and publish them; returns what it found."""
    request.num_computed = found = allocator.match(request)
    assert allocator.reserve(request, request.num_tokens)
    request.num_computed = request.num_tokens
    allocator.publish(request)
    allocator.check()
    return found


def visit(allocator: PrefixCachingAllocator, prompt: Iterable[int], **wishes: Any) -> int:
    """A request comes, computes its prompt and ends; returns what it found."""
    request = make_request(prompt, **wishes)
    found = compute(allocator, request)
    request.move(Status.FINISHED)
    allocator.release(request)
    allocator.check()
    return found


# Names ---------------------------------------------------------------------------------------


def test_a_name_says_what_is_in_the_block_and_all_that_came_before() -> None:
    root = root_name(None)
    first = block_name(root, [1, 2])
    assert first == block_name(root, [1, 2])
    names = [first, block_name(root, [2, 1]), block_name(root, [1, 3]), block_name(first, [1, 2])]
    names += [block_name(root_name(""), [1, 2]), block_name(root_name("a"), [1, 2])]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {32}


def test_no_salt_an_empty_one_and_any_other_have_different_roots() -> None:
    salts = [None, "", "a", "b", "no salt", "salt:", "salt:a", "None"]
    assert len({root_name(salt) for salt in salts}) == len(salts)


def test_large_token_ids_are_told_apart() -> None:
    ids = [0, 1, 255, 256, 2**16, 2**31, 2**32, 2**32 + 1]
    assert len({block_name(root_name(None), [i]) for i in ids}) == len(ids)


# Hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", BOUNDARIES)
def test_a_second_prompt_finds_its_full_blocks_but_never_all_of_itself(num_prompt: int) -> None:
    allocator = PrefixCachingAllocator(9, 4)
    assert visit(allocator, range(num_prompt)) == 0
    assert allocator.usage().cached == num_prompt // 4
    found = visit(allocator, range(num_prompt))
    assert found == (num_prompt - 1) // 4 * 4 < num_prompt


def test_a_full_prefix_hit_still_computes_one_block() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    visit(allocator, range(8))
    again = make_request(range(8))
    assert compute(allocator, again) == 4
    assert allocator.usage() == BlockUsage(free=6, cached=1, live=2)  # its last block is its own


@pytest.mark.parametrize("num_common", [0, 1, 3, 4, 5, 7, 8, 9, 11, 12])
def test_a_prompt_finds_what_it_has_in_common_in_whole_blocks(num_common: int) -> None:
    allocator = PrefixCachingAllocator(9, 4)
    visit(allocator, range(12))
    assert visit(allocator, [*range(num_common), *[99] * (13 - num_common)]) == num_common // 4 * 4


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    allocator = PrefixCachingAllocator(20, 4)
    visit(allocator, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    assert visit(allocator, [2, 1, 1, 1, 5, 6, 7, 8, 9]) == 0
    assert visit(allocator, [5, 6, 7, 8, 9]) == 0
    assert allocator.usage().cached == 5


def test_equal_blocks_in_one_request_are_different() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    visit(allocator, [1] * 12)
    assert allocator.usage().cached == 3
    assert visit(allocator, [1] * 9) == 8


def test_generated_tokens_are_found_too() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    request = make_request([1, 2, 3])
    request.token_ids += [4, 5, 6, 7, 8]
    compute(allocator, request)
    assert visit(allocator, range(1, 10)) == 8


@pytest.mark.parametrize("one, other", [(None, ""), (None, "a"), ("", "a"), ("a", "b")])
def test_another_salt_finds_nothing(one: str | None, other: str | None) -> None:
    allocator = PrefixCachingAllocator(9, 4)
    visit(allocator, range(9), cache_salt=one)
    assert visit(allocator, range(9), cache_salt=other) == 0
    assert visit(allocator, range(9), cache_salt=one) == 8
    assert visit(allocator, range(9), cache_salt=other) == 8
    assert allocator.usage().cached == 4


def test_a_live_block_is_shared_and_a_cached_one_revived() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    one, two, three = (make_request(range(9)) for _ in range(3))
    compute(allocator, one)
    assert compute(allocator, two) == 8
    assert allocator.table(two)[:2] == allocator.table(one)[:2]
    assert allocator.usage() == BlockUsage(free=5, cached=0, live=4)
    for request in (one, two):
        allocator.release(request)
    assert allocator.usage() == BlockUsage(free=7, cached=2, live=0)
    assert compute(allocator, three) == 8
    assert allocator.usage() == BlockUsage(free=6, cached=0, live=3)


# Publishing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_computed", range(10))
def test_only_blocks_that_are_full_and_computed_are_published(num_computed: int) -> None:
    allocator = PrefixCachingAllocator(9, 4)
    request = make_request(range(9))
    allocator.match(request)
    assert allocator.reserve(request, 9) and not allocator.pool.name_of
    request.num_computed = num_computed
    allocator.publish(request)
    assert sorted(allocator.pool.name_of) == allocator.table(request)[: num_computed // 4]
    allocator.check()


def test_blocks_are_named_in_commit_and_nowhere_else() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    scheduler = Scheduler(allocator, max_num_seqs=2, max_batch_tokens=5)
    scheduler.add(make_request(range(9), max_tokens=4))
    named = []
    for samples in ([], [FakeSample(1)], [FakeSample(1)]):  # tokens 0-4, 5-8, 9
        plan = scheduler.schedule()
        named.append(len(allocator.pool.name_of))
        scheduler.commit(plan, samples)  # type: ignore[arg-type]
        named.append(len(allocator.pool.name_of))
    assert named == [0, 1, 1, 2, 2, 2]


def test_the_first_publisher_of_a_name_wins_and_tables_stay_as_they_are() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    one, two = make_request(range(5)), make_request(range(5))
    for request in (one, two):  # both come before either is computed
        assert allocator.match(request) == 0 and allocator.reserve(request, 5)
    tables = [list(allocator.table(request)) for request in (one, two)]
    for request in (two, one):
        request.num_computed = 5
        allocator.publish(request)
        allocator.check()
    assert [allocator.table(request) for request in (one, two)] == tables
    assert list(allocator.pool.name_of) == [tables[1][0]]
    three = make_request(range(5))
    assert allocator.match(three) == 4 and allocator.table(three) == [tables[1][0]]
    allocator.release(one)
    assert tables[0][0] in allocator.pool.free, "a nameless duplicate is not kept"


def test_a_request_that_fails_publishes_nothing_in_that_step() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    world = World(allocator, max_num_seqs=2, max_batch_tokens=20)
    bad = make_request(range(9), max_tokens=4)
    world.add([bad], fails_at=0)
    world.drain()
    assert bad.finish_reason == "error" and not allocator.pool.name_of
    assert allocator.usage().free == 9


# Eviction ------------------------------------------------------------------------------------


def test_free_blocks_are_taken_before_cached_ones() -> None:
    allocator = PrefixCachingAllocator(4, 4)
    visit(allocator, range(8))
    compute(allocator, make_request([50] * 7))
    assert allocator.usage() == BlockUsage(free=0, cached=2, live=2)
    assert allocator.match(make_request(range(9))) == 8


def test_the_block_unused_for_longest_is_evicted_and_only_it() -> None:
    allocator = PrefixCachingAllocator(4, 4)
    texts = [[n] * 4 for n in range(4)]

    def cached() -> list[int]:
        known = allocator.pool.block_of
        return [n for n, text in enumerate(texts) if block_name(root_name(None), text) in known]

    for text in texts:
        visit(allocator, text)
    assert cached() == [0, 1, 2, 3]
    assert visit(allocator, [*texts[0], 9]) == 4  # uses the first; for its end the second must go
    assert cached() == [0, 2, 3]
    compute(allocator, make_request([7] * 8))  # takes the free one and the third
    assert cached() == [0, 3]


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    allocator = PrefixCachingAllocator(4, 4)
    visit(allocator, range(12))
    compute(allocator, make_request([50] * 7))
    assert allocator.match(make_request(range(13))) == 8


def test_a_beginning_computed_again_makes_what_followed_it_findable_again() -> None:
    allocator = PrefixCachingAllocator(3, 4)
    visit(allocator, range(8))
    first = allocator.pool.block_of[block_name(root_name(None), list(range(4)))]
    allocator.pool.cached.move_to_end(first, last=False)  # so that the beginning goes first
    visit(allocator, [50] * 5)
    late = make_request(range(9))
    assert allocator.match(late) == 0
    allocator.release(late)
    visit(allocator, range(4))
    assert compute(allocator, late) == 8


def test_live_blocks_are_never_evicted() -> None:
    allocator = PrefixCachingAllocator(3, 4)
    request = make_request(range(9))
    compute(allocator, request)
    assert not allocator.reserve(make_request([1]), 1)
    assert len(allocator.pool.name_of) == 2


def test_a_hit_counts_the_revived_blocks_as_taken() -> None:
    allocator = PrefixCachingAllocator(3, 4)
    visit(allocator, range(12))
    request = make_request(range(20))
    request.num_computed = allocator.match(request)
    assert request.num_computed == 12
    assert not allocator.reserve(request, 13), "its own prefix was evicted for it"
    allocator.release(request)
    assert allocator.usage() == BlockUsage(free=0, cached=3, live=0)
    allocator.check()


# With the scheduler --------------------------------------------------------------------------


def test_a_preempted_request_finds_what_nobody_needed_meanwhile() -> None:
    world = World(PrefixCachingAllocator(6, 4), max_num_seqs=2, max_batch_tokens=64)
    old, young = make_request(range(11), max_tokens=5), make_request(range(50, 59), max_tokens=4)
    world.add([old])
    world.add([young])
    while not world.scheduler.num_preemptions:
        world.step()
    while not young.is_finished:
        plan = world.step()
        for chunk in plan.chunks:
            if chunk.request is young and chunk.start < young.num_prompt:
                assert chunk.start == 8, "both full blocks were still there"
    world.drain()
    assert young.metrics.preemptions == 1 and young.metrics.cached_tokens == 0


def test_a_preempted_sample_takes_its_own_blocks_when_they_are_more_than_its_parents() -> None:
    allocator = PrefixCachingAllocator(20, 4)
    parent, sibling = make_group(range(6), 2, max_tokens=20)
    compute(allocator, parent)
    assert compute(allocator, sibling) == 5
    sibling.token_ids += range(10, 20)
    sibling.num_computed = 16
    assert allocator.reserve(sibling, 16)
    allocator.publish(sibling)
    own = list(allocator.table(sibling))
    allocator.release(sibling)
    sibling.num_computed = 0
    assert allocator.match(sibling) == 12 and allocator.table(sibling) == own[:3]


def test_first_admissions_count_their_cached_tokens_and_later_ones_do_not() -> None:
    world = World(PrefixCachingAllocator(6, 4), max_num_seqs=2, max_batch_tokens=64)
    world.add([make_request(range(9), max_tokens=1)])
    world.drain()
    assert world.scheduler.num_cached_tokens == 0
    old, young = make_request(range(20, 31), max_tokens=8), make_request(range(9), max_tokens=4)
    world.add([old])
    world.add([young])
    world.drain()
    assert young.metrics.preemptions == 1
    assert young.metrics.cached_tokens == world.scheduler.num_cached_tokens == 8


def test_each_block_of_a_request_is_named_once_however_long_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = []

    def counted(previous: bytes, token_ids: list[int]) -> bytes:
        named.append(token_ids)
        return block_name(previous, token_ids)

    monkeypatch.setattr(prefix_cache, "block_name", counted)
    scheduler = Scheduler(PrefixCachingAllocator(8, 4), max_num_seqs=2, max_batch_tokens=64)
    scheduler.add(make_request(range(9), max_tokens=20))
    scheduler.add(make_request(range(50, 74), max_tokens=8))  # does not fit beside the first
    for _ in range(15):
        scheduler.commit(scheduler.schedule(), [FakeSample(1)])  # type: ignore[list-item]
    assert len(scheduler.waiting) == 1 and len(named) == 5 + 5


def test_an_ended_request_leaves_its_blocks_and_nothing_else() -> None:
    allocator = PrefixCachingAllocator(9, 4)
    visit(allocator, range(9))
    assert not allocator.tables and not allocator._names and not allocator._published
    assert allocator.usage() == BlockUsage(free=7, cached=2, live=0)


# Check ---------------------------------------------------------------------------------------


def rename(allocator: PrefixCachingAllocator, request: Request) -> None:
    pool, block = allocator.pool, allocator.table(request)[0]
    del pool.block_of[pool.name_of[block]]
    pool.name_of[block] = b"other"
    pool.block_of[b"other"] = block


def lose_a_name(allocator: PrefixCachingAllocator, request: Request) -> None:
    allocator.pool.name_of.pop(allocator.table(request)[0])


def point_elsewhere(allocator: PrefixCachingAllocator, request: Request) -> None:
    one, other = allocator.table(request)[:2]
    names = allocator.pool.name_of
    names[one], names[other] = names[other], names[one]


def name_too_early(allocator: PrefixCachingAllocator, request: Request) -> None:
    allocator.pool.name(allocator.table(request)[2], b"early")


def cache_a_live_block(allocator: PrefixCachingAllocator, request: Request) -> None:
    allocator.pool.cached[allocator.table(request)[0]] = None
    allocator.pool.free.pop()


def cache_without_a_name(allocator: PrefixCachingAllocator, _: Request) -> None:
    allocator.pool.cached[allocator.pool.free.pop()] = None


def name_a_free_block(allocator: PrefixCachingAllocator, _: Request) -> None:
    block = allocator.pool.free[0]
    allocator.pool.name_of[block], allocator.pool.block_of[b"free"] = b"free", block


def keep_a_count(allocator: PrefixCachingAllocator, _: Request) -> None:
    allocator._published[make_request([1])] = 0


def keep_names(allocator: PrefixCachingAllocator, _: Request) -> None:
    ended = make_request([1])
    ended.move(Status.FINISHED)
    allocator._names[ended] = []


DAMAGE = [
    (rename, "wrong name"),
    (lose_a_name, "names"),
    (point_elsewhere, "names"),
    (name_too_early, "writes a shared block"),
    (cache_a_live_block, "a cached block is live"),
    (cache_without_a_name, "a cached block has no name"),
    (name_a_free_block, "a free block has a name"),
    (keep_a_count, "left its count behind"),
    (keep_names, "an ended request's names"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_check_finds(
    damage: Callable[[PrefixCachingAllocator, Request], None], message: str
) -> None:
    allocator = PrefixCachingAllocator(9, 4)
    request = make_request(range(10))
    compute(allocator, request)
    damage(allocator, request)
    with pytest.raises(AssertionError, match=message):
        allocator.check()


def test_only_a_live_block_can_be_named() -> None:
    with pytest.raises(AssertionError, match="not live"):
        PrefixCachingAllocator(1, 4).pool.name(0, b"name")
