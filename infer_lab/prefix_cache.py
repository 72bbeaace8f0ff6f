"""Blocks that outlive their request, so that the next one with the same beginning finds them.

A full block is named by a hash of its tokens and of the block before it, so that equal names mean
equal text from the very start:

    h0 = H(salt)    h1 = H(h0, tokens 0-15)    h2 = H(h1, tokens 16-31)    ...

A request's beginning is looked up name by name until one is missing. A block that nobody holds
keeps its name and its contents until memory is needed; the one unused for longest goes first.

- Published only when computed (`publish`), and full. The first publisher of a name wins; a second
  block with the same contents stays nameless, so that no table ever changes under a request.
- A wholly cached prompt still computes its last block: its logits are needed, and a named block
  is never written.
- A salt keeps tenants apart: another salt, other names.

SHA-256, since two texts with one name would give one tenant the other's answer.
Sources: vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al. 2024) keeps a tree.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import replace

from infer_lab.allocator import BlockAllocator, BlockPool, BlockUsage
from infer_lab.request import Request


class NamedBlockPool(BlockPool):
    """A pool in which an unused block may keep its name and be found again."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.name_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()  # unused, the longest first

    @property
    def num_available(self) -> int:
        """Free blocks, and cached ones that can be evicted."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A free block; if there is none, the cached one that was unused for longest."""
        if not self.free:
            block, _ = self.cached.popitem(last=False)
            del self.block_of[self.name_of.pop(block)]
            self.free.append(block)
        return super().take()

    def share(self, block: int) -> None:
        """One more table holds a live or cached block."""
        if block in self.cached:
            del self.cached[block]
            self.references[block] = 1
        else:
            super().share(block)

    def name(self, block: int, name: bytes) -> None:
        """Name a live block, unless the name is taken already."""
        assert self.references[block] > 0, f"block {block} is not live"
        if name not in self.block_of and block not in self.name_of:
            self.name_of[block], self.block_of[name] = name, block

    def _idle(self, block: int) -> None:
        if block in self.name_of:
            self.cached[block] = None
        else:
            super()._idle(block)

    def usage(self) -> BlockUsage:
        """How many blocks are in which state."""
        return replace(super().usage(), cached=len(self.cached))

    def check(self) -> None:
        """Names and blocks are one to one; cached means named and unused."""
        super().check()
        assert {name: block for block, name in self.name_of.items()} == self.block_of, "names"
        assert all(self.references[block] == 0 for block in self.cached), "a cached block is live"
        assert self.cached.keys() <= self.name_of.keys(), "a cached block has no name"
        assert not self.name_of.keys() & set(self.free), "a free block has a name"


class PrefixCachingAllocator(BlockAllocator):
    """A `BlockAllocator` whose full blocks can be found by their contents."""

    pool: NamedBlockPool

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = NamedBlockPool(num_blocks)
        self._names: dict[Request, list[bytes]] = {}  # of its full blocks, until it ends
        self._published: dict[Request, int] = {}  # how many of them have been offered

    def match(self, request: Request) -> int:
        """Share the longest known run of full blocks, or the parent's blocks if that is more."""
        limit = (request.num_tokens - 1) // self.block_size  # never the whole request
        blocks = []
        for name in self._names_of(request, limit):
            if name not in self.pool.block_of:
                break
            blocks.append(self.pool.block_of[name])
        found = len(blocks) * self.block_size
        if found < request.num_prompt - 1 and self._from_parent(request):
            return super().match(request)
        self._adopt(request, blocks)
        return found

    def publish(self, request: Request) -> None:
        """Name the blocks that have become full."""
        first, full = self._published.get(request, 0), request.num_computed // self.block_size
        if first == full:  # in most steps
            return
        names = self._names_of(request, full)
        for i in range(first, full):
            self.pool.name(self.tables[request][i], names[i])
        self._published[request] = full

    def release(self, request: Request) -> None:
        """Drop the blocks; named ones stay findable. A finished request is forgotten wholly."""
        super().release(request)
        self._published.pop(request, None)
        if request.is_finished:
            self._names.pop(request, None)

    def cached_blocks(self) -> list[int]:
        """Named blocks that nobody uses, the longest unused first."""
        return list(self.pool.cached)

    def check(self) -> None:
        """Also: a named block in a table carries the name of the request's own tokens."""
        super().check()
        for request, table in self.tables.items():
            names = self._names_of(request, request.num_computed // self.block_size)
            for block, name in zip(table, names, strict=False):
                assert self.pool.name_of.get(block, name) == name, f"block {block}: wrong name"
        assert self._published.keys() <= self.tables.keys(), "a request left its count behind"
        assert not any(request.is_finished for request in self._names), "an ended request's names"

    def _is_shared(self, block: int) -> bool:
        return super()._is_shared(block) or block in self.pool.name_of

    def _names_of(self, request: Request, num_blocks: int) -> list[bytes]:
        """The names of the first num_blocks blocks, each computed once for a request."""
        names = self._names.setdefault(request, [])
        for i in range(len(names), num_blocks):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            previous = names[-1] if names else root_name(request.cache_salt)
            names.append(block_name(previous, tokens))
        return names[:num_blocks]


def root_name(salt: str | None) -> bytes:
    """What the first block's name is chained to; no salt and an empty one differ."""
    return hashlib.sha256(b"no salt" if salt is None else b"salt:" + salt.encode()).digest()


def block_name(previous: bytes, token_ids: list[int]) -> bytes:
    """The name of a block that follows the block named `previous`."""
    return hashlib.sha256(previous + array("q", token_ids).tobytes()).digest()
