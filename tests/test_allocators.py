"""Books of KV memory: every block counted once, shared by reference, copied before written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import ALLOCATORS, World, make_group, make_request

from infer_lab.allocator import BlockAllocator, BlockPool, BlockUsage, SlotAllocator
from infer_lab.prefix_cache import NamedBlockPool
from infer_lab.request import FinishReason, Request, Status

BOUNDARIES = [1, 3, 4, 5, 8, 9, 12]  # block size 4


def run_to(allocator: BlockAllocator, request: Request, num_computed: int) -> None:
    """Give a request memory and count its first tokens as computed."""
    assert allocator.reserve(request, num_computed)
    request.num_computed = num_computed
    allocator.publish(request)


# Pool ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_class", [BlockPool, NamedBlockPool])
def test_a_pool_gives_each_block_once_the_longest_unused_first(
    pool_class: type[BlockPool],
) -> None:
    pool = pool_class(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2] and pool.num_available == 0
    pool.drop(2)
    pool.drop(0)
    pool.check()
    assert pool.num_available == 2 and [pool.take(), pool.take()] == [2, 0]


@pytest.mark.parametrize("pool_class", [BlockPool, NamedBlockPool])
def test_a_shared_block_is_free_when_the_last_table_drops_it(pool_class: type[BlockPool]) -> None:
    pool = pool_class(2)
    block = pool.take()
    pool.share(block)
    pool.drop(block)
    assert pool.usage() == BlockUsage(free=1, cached=0, live=1)
    pool.drop(block)
    assert pool.usage() == BlockUsage(free=2, cached=0, live=0) and pool.usage().total == 2
    pool.check()


@pytest.mark.parametrize("pool_class", [BlockPool, NamedBlockPool])
def test_a_free_block_can_be_neither_dropped_nor_shared(pool_class: type[BlockPool]) -> None:
    pool = pool_class(1)
    with pytest.raises(AssertionError, match="dropped twice"):
        pool.drop(0)
    with pytest.raises(AssertionError, match="not live"):
        pool.share(0)


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (-1, 4), (4, 0), (4, -1)])
@pytest.mark.parametrize("kind", ALLOCATORS)
def test_sizes_below_one_are_refused(kind: str, num_blocks: int, block_size: int) -> None:
    name, value = ("num_blocks", num_blocks) if num_blocks < 1 else ("block_size", block_size)
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got {value}"):
        ALLOCATORS[kind](num_blocks, block_size)


# Reserve and release -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
@pytest.mark.parametrize("num_tokens", BOUNDARIES)
def test_a_request_holds_the_blocks_its_tokens_need(kind: str, num_tokens: int) -> None:
    allocator = ALLOCATORS[kind](3, 4)
    request = make_request(range(num_tokens))
    assert allocator.match(request) == 0
    assert allocator.reserve(request, num_tokens)
    needed = (num_tokens + 3) // 4
    assert allocator.table(request) == list(range(needed))
    assert allocator.usage() == BlockUsage(free=3 - needed, cached=0, live=needed)
    allocator.check()
    allocator.release(request)
    assert allocator.table(request) == [] and allocator.usage().free == 3
    allocator.check()


def test_a_table_grows_at_its_end_and_never_shrinks() -> None:
    allocator = BlockAllocator(4, 4)
    request = make_request(range(9))
    for num_tokens, blocks in [(1, 1), (4, 1), (5, 2), (3, 2), (8, 2), (9, 3)]:
        assert allocator.reserve(request, num_tokens)
        assert allocator.table(request) == [0, 1, 2][:blocks]


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_a_reservation_that_does_not_fit_changes_nothing(kind: str) -> None:
    allocator = ALLOCATORS[kind](2, 4)
    one, other = make_request([1, 2, 3]), make_request([1, 2, 3, 4, 5])
    assert allocator.reserve(one, 3) and allocator.reserve(other, 4)
    for request in (make_request([1]), other):
        before = [list(allocator.table(r)) for r in (one, other, request)]
        if kind != "slots" or request is not other:
            assert not allocator.reserve(request, 5 if request is other else 1)
        assert [allocator.table(r) for r in (one, other, request)] == before
        assert allocator.take_copies() == []
        allocator.check()


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_releasing_what_holds_nothing_does_no_harm(kind: str) -> None:
    allocator = ALLOCATORS[kind](2, 4)
    request = make_request([1])
    allocator.release(request)
    allocator.reserve(request, 1)
    allocator.release(request)
    allocator.release(request)
    assert allocator.usage().free == 2
    allocator.check()


def test_the_end_of_a_released_table_is_reused_first() -> None:
    allocator = BlockAllocator(3, 1)
    request = make_request(range(3))
    allocator.reserve(request, 3)
    allocator.release(request)
    allocator.reserve(request, 3)
    assert allocator.table(request) == [2, 1, 0]


def test_a_slot_is_one_block_for_any_length() -> None:
    allocator = SlotAllocator(2, 10)
    assert (allocator.capacity, allocator.num_blocks, allocator.block_size) == (10, 2, 10)
    for request, length in ((make_request([1]), 1), (make_request(range(9)), 10)):
        assert allocator.match(request) == 0 and allocator.reserve(request, length)
        assert len(allocator.table(request)) == 1
    assert not allocator.reserve(make_request([1]), 1)
    allocator.check()


def test_samples_in_slots_share_nothing() -> None:
    allocator = SlotAllocator(2, 10)
    parent, sibling = make_group([1, 2, 3], 2)
    run_to(allocator, parent, 3)
    assert allocator.match(sibling) == 0 and allocator.table(sibling) == []


def test_blocks_hold_one_request_as_long_as_all_of_them() -> None:
    assert BlockAllocator(3, 4).capacity == 12


# Samples of one prompt -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
@pytest.mark.parametrize("num_prompt", BOUNDARIES)
def test_a_sample_shares_the_full_blocks_and_copies_one_if_it_must_write_there(
    kind: str, num_prompt: int
) -> None:
    allocator = ALLOCATORS[kind](12, 4)
    parent, *siblings = make_group(range(num_prompt), 3)
    run_to(allocator, parent, num_prompt)
    known = num_prompt - 1  # the last token is computed again, for its logits
    # A prefix hit of all but the last token gives whole blocks and leaves nothing to copy.
    must_copy = known % 4 != 0
    for sibling in siblings:
        assert allocator.match(sibling) == known
        sibling.num_computed = known
        shared = allocator.table(parent)[: -(-known // 4)]
        assert allocator.table(sibling) == shared
        assert allocator.reserve(sibling, num_prompt)
        table = allocator.table(sibling)
        assert table[: known // 4] == shared[: known // 4]
        assert table[-1] not in allocator.table(parent), "it writes to its parent's block"
        assert allocator.take_copies() == ([(shared[-1], table[-1])] if must_copy else [])
        assert allocator.take_copies() == []
        allocator.check()
    for request in (parent, *siblings):
        full = allocator.table(request)[: known // 4]
        assert all(allocator.pool.references[block] == 3 for block in full)
        assert allocator.pool.references[allocator.table(request)[-1]] == 1
    for request in (parent, *siblings):
        allocator.release(request)
        allocator.check()
    assert allocator.usage().live == 0


def test_copies_come_in_the_order_in_which_they_must_be_done() -> None:
    allocator = BlockAllocator(4, 2)
    parent, one, two = make_group([1, 2], 3)
    run_to(allocator, parent, 2)
    for sibling in (one, two):
        sibling.num_computed = allocator.match(sibling)
        assert allocator.reserve(sibling, 2)
    assert allocator.take_copies() == [(0, 1), (0, 2)]


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_a_copy_that_does_not_fit_is_refused_before_anything_changes(kind: str) -> None:
    allocator = ALLOCATORS[kind](2, 4)
    parent, sibling = make_group(range(6), 2)
    run_to(allocator, parent, 6)
    sibling.num_computed = allocator.match(sibling)
    assert not allocator.reserve(sibling, 6)
    assert allocator.table(sibling) == allocator.table(parent)
    assert allocator.take_copies() == []
    allocator.release(sibling)
    allocator.check()


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_what_the_parent_has_not_computed_is_not_shared(kind: str) -> None:
    allocator = ALLOCATORS[kind](9, 4)
    parent, sibling = make_group(range(7), 2)
    assert allocator.match(sibling) == 0  # the parent holds nothing
    allocator.release(sibling)
    assert allocator.reserve(parent, 7)
    parent.num_computed = 5
    assert allocator.match(sibling) == 0
    allocator.release(sibling)
    parent.num_computed = 6  # all that the sibling would not compute anyway
    assert allocator.match(sibling) == 6
    allocator.release(sibling)
    allocator.release(parent)
    assert allocator.match(sibling) == 0


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_a_one_token_prompt_leaves_nothing_to_share(kind: str) -> None:
    allocator = ALLOCATORS[kind](4, 1)
    parent, sibling = make_group([1], 2)
    run_to(allocator, parent, 1)
    assert allocator.match(sibling) == 0
    assert allocator.reserve(sibling, 1) and allocator.take_copies() == []
    allocator.check()


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_a_request_that_holds_blocks_cannot_be_matched_again(kind: str) -> None:
    allocator = ALLOCATORS[kind](4, 4)
    request = make_request(range(6))
    allocator.reserve(request, 6)
    with pytest.raises(AssertionError, match="already holds blocks"):
        allocator.match(request)


@pytest.mark.parametrize("kind", ["blocks", "prefix"])
@pytest.mark.parametrize("num_prompt", BOUNDARIES)
@pytest.mark.parametrize("n", [2, 5])
def test_n_samples_compute_the_prompt_once_and_one_token_each(
    kind: str, num_prompt: int, n: int
) -> None:
    world = World(ALLOCATORS[kind](60, 4), max_num_seqs=8, max_batch_tokens=64)
    group = make_group(range(num_prompt), n, max_tokens=6)
    world.add(group)
    world.drain()
    decoded = sum(request.num_output - 1 for request in group)
    assert world.computed == num_prompt + (n - 1) + decoded
    assert world.copies == (n - 1 if (num_prompt - 1) % 4 else 0)
    assert [r.metrics.cached_tokens for r in group] == [0] + [num_prompt - 1] * (n - 1)
    outputs = {tuple(request.output_token_ids) for request in group}
    assert len(outputs) == n, "every sample is drawn for itself"


# Check ---------------------------------------------------------------------------------------


def free_twice(allocator: BlockAllocator, _: Request) -> None:
    allocator.pool.free.append(allocator.pool.free[0])


def lose_a_block(allocator: BlockAllocator, _: Request) -> None:
    allocator.pool.free.pop()


def free_a_live_block(allocator: BlockAllocator, request: Request) -> None:
    allocator.pool.free.append(allocator.table(request)[0])


def forget_a_reference(allocator: BlockAllocator, request: Request) -> None:
    allocator.pool.share(allocator.table(request)[0])


def drop_behind_its_back(allocator: BlockAllocator, request: Request) -> None:
    allocator.pool.drop(allocator.table(request)[0])


def hold_a_block_twice(allocator: BlockAllocator, request: Request) -> None:
    allocator.pool.share(allocator.table(request)[0])
    allocator.table(request).append(allocator.table(request)[0])


def end_with_blocks(_: BlockAllocator, request: Request) -> None:
    request.move(Status.FINISHED)


def compute_without_memory(_: BlockAllocator, request: Request) -> None:
    request.num_computed = 9


def share_what_will_be_written(allocator: BlockAllocator, request: Request) -> None:
    other = make_request([1])
    allocator.pool.share(allocator.table(request)[1])
    allocator.tables[other] = [allocator.table(request)[1]]


DAMAGE = [
    (free_twice, "free twice"),
    (lose_a_block, "blocks are lost"),
    (free_a_live_block, "a free block is live"),
    (forget_a_reference, "3 references|2 references"),
    (drop_behind_its_back, "tables"),
    (hold_a_block_twice, "holds a block twice"),
    (end_with_blocks, "has ended and holds blocks"),
    (compute_without_memory, "is short"),
    (share_what_will_be_written, "writes a shared block"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
@pytest.mark.parametrize("kind", ["blocks", "prefix"])
def test_check_finds(
    kind: str, damage: Callable[[BlockAllocator, Request], None], message: str
) -> None:
    allocator = ALLOCATORS[kind](4, 4)
    request = make_request(range(6))
    run_to(allocator, request, 6)
    allocator.check()
    damage(allocator, request)
    with pytest.raises(AssertionError, match=message):
        allocator.check()


def test_a_preempted_sample_may_be_forked_again() -> None:
    world = World(BlockAllocator(6, 2), max_num_seqs=3, max_batch_tokens=32)
    group = make_group([5, 6, 7], 3, max_tokens=6)
    world.add(group)
    world.drain()
    assert world.scheduler.num_preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 6])
@pytest.mark.parametrize("num_prompt", BOUNDARIES)
@pytest.mark.parametrize("num_blocks", [6, 16])
@pytest.mark.parametrize("kind", ALLOCATORS)
def test_whenever_a_parent_ends_its_samples_get_their_own_tokens(
    kind: str, num_blocks: int, num_prompt: int, max_tokens: int
) -> None:
    for moment in range(6):
        size = 24 if kind == "slots" else 4
        world = World(ALLOCATORS[kind](num_blocks, size), max_num_seqs=4, max_batch_tokens=7)
        group = make_group(range(num_prompt), 4, max_tokens=max_tokens)
        world.add(group)
        for _ in range(moment):
            world.step()
        world.step(abort=[group[0]])
        assert world.scheduler.finish(group[0], FinishReason.ABORT) is False
        world.drain()
