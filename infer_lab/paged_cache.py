"""KV memory in pages: small blocks, so that a request holds what it uses and can share the rest.

    BlockPool       all blocks, and how many requests hold each one        (books: `allocator`)
    BlockAllocator  which request holds which blocks; copy-on-write
    PagedKVCache    the tensors: num_blocks blocks of block_size tokens

A request's tokens lie scattered over memory; its table says where. A slot cache is the special
case in which every table has one entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer_lab.allocator import BlockAllocator, BlockPool
from infer_lab.kv_cache import PooledKVCache

__all__ = ["BlockAllocator", "BlockPool", "PagedKVCache"]


class PagedKVCache(PooledKVCache):
    """Many sequences in blocks of block_size tokens."""

    def gather(self, table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a request as one run, (L, length, Hkv, D) each."""
        blocks = torch.tensor(table, device=self.keys.device)
        within = torch.arange(self.block_size, device=self.keys.device)
        slots = (blocks[:, None] * self.block_size + within).flatten()[:length]
        return self.keys[:, slots], self.values[:, slots]
