"""Who owns which piece of KV memory: bookkeeping in whole numbers, no tensors.

KV memory is a row of blocks, each with room for `block_size` tokens. A request's table lists its
blocks in order: token p of a request with table t lies in slot t[p // block_size] * block_size +
p % block_size.

    table of A: [3, 0]       block   0     1     2     3     4
    table of B: [3, 4]             | A  |free |free | A,B | B  |      3 is shared: two references

The scheduler knows the protocol `KVAllocator` only:

    SlotAllocator     one block as long as the context for each request
    BlockAllocator    small blocks as needed; samples of one prompt share its blocks
    prefix_cache.PrefixCachingAllocator    blocks outlive requests and are found again

A shared block is never written: `reserve` puts a copy in its place first (copy-on-write).
Source: vLLM's PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from infer_lab.request import Request


class KVAllocator(Protocol):
    """What the scheduler asks of KV memory. Lengths are in tokens."""

    block_size: int
    num_blocks: int

    @property
    def capacity(self) -> int:
        """The longest request that can run, alone if need be."""
        ...

    def match(self, request: Request) -> int:
        """Give a request that holds nothing what is already computed for it.

        Returns the number of tokens found; never the whole prompt, since the last token's logits
        are needed.
        """
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first num_tokens, writable from `num_computed` on.

        All or nothing: False, and nothing has changed, when memory does not suffice.
        """
        ...

    def publish(self, request: Request) -> None:
        """The first `num_computed` tokens are in memory now: others may use them."""
        ...

    def release(self, request: Request) -> None:
        """Take back all that the request holds. Harmless when it holds nothing."""
        ...

    def table(self, request: Request) -> list[int]:
        """The request's blocks in order; empty when it holds nothing."""
        ...

    def take_copies(self) -> list[tuple[int, int]]:
        """Block copies (from, to) that must be done, in this order, before the next forward."""
        ...

    def usage(self) -> BlockUsage:
        """How many blocks are in which state."""
        ...

    def cached_blocks(self) -> list[int]:
        """Unused blocks whose contents can still be found, the longest unused first."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        ...


@dataclass(frozen=True)
class BlockUsage:
    """Blocks by state."""

    free: int
    cached: int  # unused, but a request with the same beginning would find them
    live: int  # in a table

    @property
    def total(self) -> int:
        """All blocks, each counted once."""
        return self.free + self.cached + self.live


class BlockPool:
    """All blocks, and how many tables hold each one."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = deque(range(num_blocks))  # the longest unused one first

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return len(self.free)

    def take(self) -> int:
        """A block nobody holds, with its first reference."""
        block = self.free.popleft()
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds a live block."""
        assert self.references[block] > 0, f"block {block} is not live"
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """One table fewer; the last one frees the block."""
        assert self.references[block] > 0, f"block {block} is dropped twice"
        self.references[block] -= 1
        if self.references[block] == 0:
            self._idle(block)

    def _idle(self, block: int) -> None:
        self.free.append(block)

    def usage(self) -> BlockUsage:
        """How many blocks are in which state."""
        live = sum(count > 0 for count in self.references)
        return BlockUsage(free=len(self.free), cached=0, live=live)

    def check(self) -> None:
        """Every block is either free once or referenced."""
        assert len(set(self.free)) == len(self.free), "a block is free twice"
        assert all(self.references[block] == 0 for block in self.free), "a free block is live"
        assert self.usage().total == self.num_blocks, "blocks are lost"


class BlockAllocator:
    """Blocks as they are needed, and a sample of the same prompt starts on its parent's blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[Request, list[int]] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def capacity(self) -> int:
        """The longest request that can run: one that takes all blocks."""
        return self.num_blocks * self.block_size

    def match(self, request: Request) -> int:
        """Share the parent's blocks of the prompt, all but its last token.

        That token is computed again for its logits. If its block is shared, `reserve` copies it.
        """
        blocks = self._from_parent(request)
        self._adopt(request, blocks)
        return request.num_prompt - 1 if blocks else 0

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Add blocks up to num_tokens; replace by copies those to be written that others hold."""
        table = self.tables.get(request, [])
        num_new = self._blocks_for(num_tokens) - len(table)
        written = range(request.num_computed // self.block_size, len(table))
        shared = [i for i in written if self._is_shared(table[i])]
        if max(num_new, 0) + len(shared) > self.pool.num_available:
            return False
        for i in shared:
            copy = self.pool.take()
            self._copies.append((table[i], copy))
            self.pool.drop(table[i])
            table[i] = copy
        table.extend(self.pool.take() for _ in range(num_new))
        self.tables[request] = table
        return True

    def publish(self, request: Request) -> None:
        """Nothing to do: without a prefix cache only samples of one prompt share."""

    def release(self, request: Request) -> None:
        """Drop the blocks, the last one first, so that it is also the first to be reused."""
        for block in reversed(self.tables.pop(request, [])):
            self.pool.drop(block)

    def table(self, request: Request) -> list[int]:
        """The request's blocks in order."""
        return self.tables.get(request, [])

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies owed since the last call, in order."""
        copies, self._copies = self._copies, []
        return copies

    def usage(self) -> BlockUsage:
        """How many blocks are in which state."""
        return self.pool.usage()

    def cached_blocks(self) -> list[int]:
        """None: what nobody uses is forgotten."""
        return []

    def check(self) -> None:
        """References equal the tables that hold a block; what will be written is held once."""
        self.pool.check()
        held = Counter(block for table in self.tables.values() for block in table)
        for block, count in enumerate(self.pool.references):
            assert held[block] == count, f"block {block}: {count} references, {held[block]} tables"
        for request, table in self.tables.items():
            assert len(set(table)) == len(table), f"{request.id} holds a block twice"
            assert not request.is_finished, f"{request.id} has ended and holds blocks"
            assert len(table) >= self._blocks_for(request.num_computed), f"{request.id} is short"
            to_write = table[request.num_computed // self.block_size :]
            assert not any(map(self._is_shared, to_write)), f"{request.id} writes a shared block"

    def _from_parent(self, request: Request) -> list[int]:
        parent, known = request.parent, request.num_prompt - 1
        if parent is None or parent not in self.tables or parent.num_computed < known:
            return []
        return self.tables[parent][: self._blocks_for(known)]

    def _adopt(self, request: Request, blocks: list[int]) -> None:
        assert request not in self.tables, f"{request.id} already holds blocks"
        for block in blocks:
            self.pool.share(block)
        self.tables[request] = list(blocks)

    def _is_shared(self, block: int) -> bool:
        return self.pool.references[block] > 1

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class SlotAllocator(BlockAllocator):
    """One block as long as the context for each request: simple, and mostly empty."""

    def __init__(self, num_slots: int, slot_length: int) -> None:
        super().__init__(num_slots, slot_length)

    @property
    def capacity(self) -> int:
        """The longest request that can run: one that fills its slot."""
        return self.block_size

    def match(self, request: Request) -> int:
        """Slots share nothing."""
        return 0
