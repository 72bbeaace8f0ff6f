"""Attention for a ragged batch over torch's fused kernel, without a loop over sequences.

Sequences of similar shape are padded together: queries to the longest chunk of the group, keys to
its longest context. A group spans at most a factor of two in each, so a step has a handful of
groups however many sequences it has, and padding never more than doubles either length.

Padding must not meet memory that nobody has written: a padded key repeats the sequence's last slot
and is masked, a padded query repeats its last query and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infer_lab.batcher import Batch, IntArray, to_device

SMALLEST_CONTEXT = 128  # shorter contexts are not worth a group of their own


@dataclass(frozen=True)
class _Group:
    """Sequences that are computed together: S of them, P queries and N keys each."""

    num_sequences: int
    slots: Tensor  # (S * N,) slots of the keys and values, padding included
    mask: Tensor | None  # (S, 1, P, N): 0 where a query sees a key, else -inf; None: all
    tokens: Tensor | None  # (S * P,) rows of the flat run, padding included; None: it is the run
    kept: Tensor | None = None  # which of the S * P results are no padding; None: all
    targets: Tensor | None = None  # where in the flat run those belong


class SdpaBackend:
    """`scaled_dot_product_attention` over keys and values gathered from their slots."""

    def prepare(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> list[_Group]:
        """Group the sequences, and index and mask each group."""
        query_size = np.ceil(np.log2(batch.query_lens))
        context_size = np.ceil(np.log2(np.maximum(batch.context_lens, SMALLEST_CONTEXT)))
        _, group_of = np.unique(np.stack((query_size, context_size)), axis=1, return_inverse=True)
        return [
            _prepare_group(batch, np.flatnonzero(group_of == i), dtype, device)
            for i in range(group_of.max() + 1)
        ]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: list[_Group]) -> Tensor:
        """q (T, Hq, D), keys and values (N, Hkv, D) of all slots -> (T, Hq, D)."""
        if plan[0].tokens is None:
            return _attend_group(q, keys, values, plan[0])
        out = torch.empty_like(q)
        for group in plan:
            assert group.tokens is not None and group.targets is not None
            result = _attend_group(q.index_select(0, group.tokens), keys, values, group)
            if group.kept is not None:
                result = result.index_select(0, group.kept)
            out.index_copy_(0, group.targets, result)
        return out


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
    """q (S * P, Hq, D) -> (S * P, Hq, D)."""
    num_kv_heads, head_size = keys.shape[1:]
    num_sequences = group.num_sequences

    def gather(memory: Tensor) -> Tensor:  # -> (S, Hkv, N, D)
        rows = memory.flatten(1).index_select(0, group.slots)  # whole tokens: faster than heads
        return rows.view(num_sequences, -1, num_kv_heads, head_size).transpose(1, 2)

    k, v = gather(keys), gather(values)
    if q.shape[0] == num_sequences:
        # One query each: the query heads that share a KV head act as queries of that head.
        heads = q.view(num_sequences, num_kv_heads, -1, head_size)  # (S, Hkv, Hq / Hkv, D)
        return F.scaled_dot_product_attention(heads, k, v, attn_mask=group.mask).flatten(1, 2)
    queries = q.view(num_sequences, -1, *q.shape[1:]).transpose(1, 2)  # (S, Hq, P, D)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _prepare_group(
    batch: Batch, members: IntArray, dtype: torch.dtype, device: torch.device
) -> _Group:
    query_lens = batch.query_lens[members, None]  # (S, 1)
    context_lens = batch.context_lens[members, None]
    num_queries, num_keys = query_lens.max(), context_lens.max()
    query = np.minimum(np.arange(num_queries), query_lens - 1)  # (S, P)
    slots = _slots(batch.block_tables[members], context_lens, batch.block_size, device)  # (S, N)
    mask = None
    if num_queries > 1 or context_lens.min() < num_keys:
        own = to_device(context_lens - query_lens + query, device)  # (S, P) a query's position
        hidden = torch.arange(num_keys, device=device) > own[:, :, None]  # (S, P, N)
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = zeros.masked_fill_(hidden, -torch.inf)[:, None]
    group = _Group(len(members), slots.flatten(), mask, tokens=None)
    tokens = (batch.query_starts[members, None] + query).ravel()
    if np.array_equal(tokens, np.arange(batch.query_lens.sum())):
        return group
    kept = np.flatnonzero(np.arange(num_queries) < query_lens)  # of S * P, row by row
    return replace(
        group,
        tokens=to_device(tokens, device),
        kept=None if len(kept) == len(tokens) else to_device(kept, device),
        targets=to_device(tokens[kept], device),
    )


def _slots(
    tables: IntArray, context_lens: IntArray, block_size: int, device: torch.device
) -> Tensor:
    """The slots of the first N positions of each sequence, its last one repeated. (S, N)"""
    num_keys = int(context_lens.max())
    blocks = to_device(tables[:, : -(-num_keys // block_size)], device)
    lengths = to_device(context_lens, device)  # (S, 1)
    offsets = torch.arange(block_size, device=device)
    slots = (blocks[:, :, None] * block_size + offsets).flatten(1)[:, :num_keys]
    position = torch.arange(num_keys, device=device)
    return torch.where(position < lengths, slots, slots.gather(1, lengths - 1))
