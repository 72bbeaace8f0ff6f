"""Where keys and values live between steps, and what each query may see.

The model calls `kv.attend(layer, q, k, v)` once a layer. Two answers for one sequence, and one for
many:

    NoCache             keeps nothing: every step must bring the whole sequence again
    ContiguousKVCache   keeps one sequence in one run of memory; a step brings the new tokens only
    SlotKVCache         keeps many sequences, each in a slot as long as the context

        layer 0   | k0 | k1 | k2 | k3 |    |    |    |    |      length = 4, max_length = 8
                    <-- computed -->   <-- free -->

`attend` writes the T new keys and values behind `length`; `advance(T)` moves `length` once all
layers have run. So a step that fails half-way leaves the cache as it was.

With many sequences, memory is one row of token slots, (L, N, Hkv, D), and the batch says where
each token lies. `SlotKVCache` and `paged_cache.PagedKVCache` differ in the block's length alone.

T new tokens, N = length + T tokens to see, Hq/Hkv query and KV heads, D head size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer_lab.allocator import SlotAllocator
from infer_lab.kernels import AttentionBackend, pick_backend
from infer_lab.model.config import ModelConfig

if TYPE_CHECKING:
    from infer_lab.batcher import Batch

__all__ = [
    "CacheSpec",
    "ContiguousKVCache",
    "NoCache",
    "PooledKVCache",
    "SequenceCache",
    "SlotAllocator",
    "SlotKVCache",
    "causal_attention",
]


@dataclass(frozen=True)
class CacheSpec:
    """What one token costs: a key and a value of D numbers for each KV head of each layer."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: ModelConfig, dtype: torch.dtype | None = None) -> CacheSpec:
        """The spec for a model; dtype defaults to the one that the model's file was saved in."""
        dtype = getattr(torch, config.dtype) if dtype is None else dtype
        return cls(config.num_layers, config.num_kv_heads, config.head_size, dtype)

    @property
    def bytes_per_token(self) -> int:
        """2 (key and value) x L x Hkv x D x bytes per number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize


class SequenceCache(Protocol):
    """The cache of one sequence, as `prefill` and `decode` use it."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the formula predicts for each of them."""
        ...

    @property
    def nbytes_used(self) -> int:
        """Bytes that those tokens take, counted from the tensors."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, Hq, D), k and v (T, Hkv, D) -> (T, Hq, D)."""
        ...

    def advance(self, num_tokens: int) -> None:
        """All layers have run: the last num_tokens count as kept."""
        ...


class NoCache:
    """Keeps nothing: the tokens of a step are the whole sequence."""

    length = 0
    bytes_per_token = 0
    nbytes_used = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each of the T tokens sees itself and those before it."""
        return causal_attention(q, k, v)

    def advance(self, num_tokens: int) -> None:
        """Nothing to do: the next step computes these tokens again."""


class ContiguousKVCache:
    """One sequence, keys and values (L, max_length, Hkv, D) reserved at once."""

    def __init__(
        self, spec: CacheSpec, max_length: int, device: str | torch.device = "cpu"
    ) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be >= 1, got {max_length}")
        shape = (spec.num_layers, max_length, spec.num_kv_heads, spec.head_size)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.max_length = max_length
        self.bytes_per_token = spec.bytes_per_token
        self.length = 0

    @property
    def nbytes_used(self) -> int:
        """Bytes of the keys and values of the `length` tokens kept."""
        return self.keys[:, : self.length].nbytes + self.values[:, : self.length].nbytes

    @property
    def nbytes_allocated(self) -> int:
        """Bytes reserved, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v behind `length`, then let each query see all that came before it."""
        start, end = self.length, self.length + k.shape[0]
        if end > self.max_length:
            raise ValueError(
                f"the cache holds max_length={self.max_length} tokens:"
                f" {k.shape[0]} more do not fit after {start}"
            )
        self.keys[layer, start:end] = k
        self.values[layer, start:end] = v
        return causal_attention(q, self.keys[layer, :end], self.values[layer, :end])

    def advance(self, num_tokens: int) -> None:
        """Count num_tokens more as kept; the forward pass that wrote them is over."""
        if not 0 <= num_tokens <= self.max_length - self.length:
            raise ValueError(
                f"num_tokens must be 0 to {self.max_length - self.length}, got {num_tokens}"
            )
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on; their memory is written over later."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be 0 to {self.length}, got {length}")
        self.length = length


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention where the T queries are the last T of N positions and none sees its future.

    q (T, Hq, D), k and v (N, Hkv, D) -> (T, Hq, D).
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    mask = None  # one query is the last position: it sees everything
    if num_queries > 1:
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        mask = visible.tril(num_keys - num_queries)  # query t sees keys 0 .. N - T + t
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, tokens, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class PooledKVCache:
    """Keys and values of many requests: num_blocks blocks of block_size token slots, in a row.

    `keys` and `values` are (L, num_blocks * block_size, Hkv, D); an allocator owns the blocks.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        block_size: int,
        *,
        device: str | torch.device = "cpu",
        backend: AttentionBackend | None = None,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_size)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.backend = backend or pick_backend("auto", self.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.keys.nbytes + self.values.nbytes

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (from, to) pairs, in order since they may form a chain."""
        for source, target in copies:
            for tensor in (self.keys, self.values):
                blocks = tensor.unflatten(1, (self.num_blocks, self.block_size))
                blocks[:, target] = blocks[:, source]

    def bind(self, batch: Batch) -> BoundKVCache:
        """This cache as the model sees it during one step."""
        plan = self.backend.prepare(batch, self.keys.dtype, self.keys.device)
        return BoundKVCache(self, batch.slots, plan)


@dataclass(frozen=True)
class BoundKVCache:
    """A pooled cache, and where one step's tokens go and look."""

    cache: PooledKVCache
    slots: Tensor  # (T,) where each new token's key and value are written
    plan: Any  # what the backend has prepared for this batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, Hq, D), k and v (T, Hkv, D) -> (T, Hq, D)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]  # (N, Hkv, D)
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        return self.cache.backend.attend(q, keys, values, self.plan)


class SlotKVCache(PooledKVCache):
    """Many sequences, each with room for slot_length tokens, used or not."""

    def __init__(
        self,
        spec: CacheSpec,
        num_slots: int,
        slot_length: int,
        *,
        device: str | torch.device = "cpu",
        backend: AttentionBackend | None = None,
    ) -> None:
        super().__init__(spec, num_slots, slot_length, device=device, backend=backend)
