"""How much memory keys and values get, in what layout, and what fits into it.

On CUDA memory is measured: a forward pass as large as any step shows what the model needs besides
its weights, and keys and values get the rest of what we may use. A CPU shares its memory with all
that runs on the machine, so there they take a modest part unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from infer_lab.allocator import BlockAllocator, SlotAllocator
from infer_lab.kernels import pick_backend
from infer_lab.kv_cache import CacheSpec, NoCache, PooledKVCache, SlotKVCache
from infer_lab.model.transformer import Transformer
from infer_lab.paged_cache import PagedKVCache
from infer_lab.prefix_cache import PrefixCachingAllocator

CUDA_FRACTION = 0.9  # of the GPU's memory, for weights, activations and KV together
CPU_FRACTION = 0.25  # of the memory that is free now
CPU_LIMIT = 2 * 2**30  # bytes
LAYOUTS = ("paged", "slots")


@dataclass(frozen=True)
class KVMemory:
    """The tensors, the books, and the longest request."""

    cache: PooledKVCache
    allocator: BlockAllocator
    max_model_len: int

    def describe(self) -> str:
        """What it is and what fits, in a sentence."""
        blocks, size = self.cache.num_blocks, self.cache.block_size
        per_request = -(-self.max_model_len // size)
        return (
            f"{format_bytes(self.cache.nbytes)} of KV memory: {blocks:,} blocks of {size:,} tokens,"
            f" room for {blocks * size:,} tokens or {blocks // per_request:,} requests of"
            f" {self.max_model_len:,}"
        )


def plan_kv_memory(
    model: Transformer,
    *,
    layout: str,
    max_num_seqs: int,
    max_batch_tokens: int,
    max_model_len: int | None,
    block_size: int,
    kv_cache_bytes: int | None,
    num_blocks: int | None,
    prefix_caching: bool,
    attention_backend: str,
) -> KVMemory:
    """Decide about sizes and reserve the memory; see `Engine` for the arguments.

    Raises ValueError when a size is out of range or not even one request fits.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"kv_layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    context = model.config.max_position_embeddings
    _check_range("max_num_seqs", max_num_seqs, 1, None)
    _check_range("max_batch_tokens", max_batch_tokens, max_num_seqs, None)
    _check_range("max_model_len", max_model_len, 2, context)
    _check_range("block_size", block_size, 1, None)
    _check_range("kv_cache_bytes", kv_cache_bytes, 1, None)
    _check_range("num_blocks", num_blocks, 1, None)
    if kv_cache_bytes is not None and num_blocks is not None:
        raise ValueError("kv_cache_bytes and num_blocks say the same thing: give one of them")
    backend = pick_backend(attention_backend, model.device)
    spec = CacheSpec.from_config(model.config, model.dtype)
    length = max_model_len or context
    if layout == "slots":
        block_size = length
    if num_blocks is None:
        budget = kv_cache_bytes or kv_budget(model, max_batch_tokens)
        useful = max_num_seqs * -(-length // block_size)  # all requests at their longest
        num_blocks = min(budget // (spec.bytes_per_token * block_size), useful)
    capacity = num_blocks * block_size
    if max_model_len is None and layout == "paged":
        length = min(context, capacity)
    if capacity < max(length, 2):
        needed = format_bytes(max(length, 2) * spec.bytes_per_token)
        raise ValueError(
            f"KV memory must hold a request of max_model_len={length} tokens ({needed}),"
            f" got room for {capacity}"
        )
    if layout == "slots":
        slots = SlotKVCache(spec, num_blocks, length, device=model.device, backend=backend)
        return KVMemory(slots, SlotAllocator(num_blocks, length), length)
    allocator = PrefixCachingAllocator if prefix_caching else BlockAllocator
    pages = PagedKVCache(spec, num_blocks, block_size, device=model.device, backend=backend)
    return KVMemory(pages, allocator(num_blocks, block_size), length)


def kv_budget(model: Transformer, max_batch_tokens: int) -> int:
    """Bytes that keys and values may take on the model's device."""
    if model.device.type == "cuda":
        return _cuda_budget(model, max_batch_tokens)
    return min(int(psutil.virtual_memory().available * CPU_FRACTION), CPU_LIMIT)


@torch.inference_mode()
def _cuda_budget(model: Transformer, max_batch_tokens: int) -> int:
    num_tokens = min(max_batch_tokens, model.config.max_position_embeddings)
    tokens = torch.arange(num_tokens, device=model.device)
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    model.logits(model(tokens % model.config.vocab_size, tokens, NoCache())[-64:])
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    budget = int(total * CUDA_FRACTION) - peak - others
    if budget <= 0:
        raise ValueError(
            f"the model needs {format_bytes(peak)} and {format_bytes(free)} of"
            f" {format_bytes(total)} are free: no memory is left for keys and values;"
            " lower max_batch_tokens or free the GPU"
        )
    return budget


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _check_range(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    allowed = f">= {low}" if high is None else f"from {low} to {high}"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an int {allowed}, got {value!r}")
