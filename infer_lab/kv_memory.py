"""How much memory keys and values get, in what layout, and what fits into it.

On CUDA memory is measured: a step as large as any shows what the model needs besides its weights,
and keys and values get the rest of what we may use. A CPU shares its memory with all that runs on
the machine, so there they take a modest part unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import torch

from infer_lab.allocator import BlockAllocator, SlotAllocator
from infer_lab.batcher import Batch
from infer_lab.kernels import AttentionBackend, pick_backend
from infer_lab.kv_cache import CacheSpec, PooledKVCache, SlotKVCache
from infer_lab.model.transformer import Transformer
from infer_lab.paged_cache import PagedKVCache
from infer_lab.prefix_cache import PrefixCachingAllocator
from infer_lab.sampler import Sampler, SamplingRow
from infer_lab.sampling_params import SamplingParams

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
    if not isinstance(prefix_caching, bool):
        raise ValueError(f"prefix_caching must be True or False, got {prefix_caching!r}")
    backend = pick_backend(attention_backend, model.device)
    spec = CacheSpec.from_config(model.config, model.dtype)
    length = max_model_len or context
    if layout == "slots":
        block_size = length
    if num_blocks is None:
        step = LargestStep(backend, max_num_seqs, max_batch_tokens, length)
        budget = kv_cache_bytes or kv_budget(model, step)
        useful = max_num_seqs * -(-length // block_size)  # all requests at their longest
        num_blocks = min(budget // (spec.bytes_per_token * block_size), useful)
    capacity = num_blocks * block_size
    if max_model_len is None and layout == "paged":
        length = min(context, max(capacity, 2))
    if capacity < length:
        needed = format_bytes(length * spec.bytes_per_token)
        raise ValueError(
            f"KV memory must hold a request of max_model_len={length} tokens ({needed}),"
            f" got room for {capacity}"
        )
    _check_fits(capacity * spec.bytes_per_token, model.device)
    if layout == "slots":
        slots = SlotKVCache(spec, num_blocks, length, device=model.device, backend=backend)
        return KVMemory(slots, SlotAllocator(num_blocks, length), length)
    allocator = PrefixCachingAllocator if prefix_caching else BlockAllocator
    pages = PagedKVCache(spec, num_blocks, block_size, device=model.device, backend=backend)
    return KVMemory(pages, allocator(num_blocks, block_size), length)


@dataclass(frozen=True)
class LargestStep:
    """No step needs more memory: all requests run, with a full context each, and fill the batch."""

    backend: AttentionBackend
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int

    @torch.inference_mode()
    def run(self, model: Transformer) -> None:
        """Compute it, in a KV memory of one block that all of the requests share."""
        block_size = 16
        spec = CacheSpec.from_config(model.config, model.dtype)
        cache = PagedKVCache(spec, 1, block_size, device=model.device, backend=self.backend)
        cache.keys.zero_()
        cache.values.zero_()
        query_lens, left = [], self.max_batch_tokens
        for younger in reversed(range(self.max_num_seqs)):  # a token is kept for each
            query_lens.append(min(self.max_model_len, left - younger))
            left -= query_lens[-1]
        num_seqs, num_tokens = len(query_lens), sum(query_lens)
        zeros = torch.zeros(num_tokens, dtype=torch.long, device=model.device)
        row = SamplingRow(SamplingParams(top_p=0.5, min_tokens=1, logprobs=1), seed=0)
        batch = Batch(
            input_ids=zeros,
            positions=zeros,
            slots=zeros,
            logit_rows=zeros[:num_seqs],
            query_lens=np.array(query_lens),
            context_lens=np.full(num_seqs, self.max_model_len),
            block_tables=np.zeros((num_seqs, -(-self.max_model_len // block_size)), dtype=np.int64),
            block_size=block_size,
            sampling=(row,) * num_seqs,
        )
        hidden = model(batch.input_ids, batch.positions, cache.bind(batch))
        Sampler()(model.logits(hidden.index_select(0, batch.logit_rows)), batch.sampling)


def kv_budget(model: Transformer, step: LargestStep) -> int:
    """Bytes that keys and values may take on the model's device."""
    if model.device.type == "cuda":
        return _cuda_budget(model, step)
    return min(int(psutil.virtual_memory().available * CPU_FRACTION), CPU_LIMIT)


def _cuda_budget(model: Transformer, step: LargestStep) -> int:
    device = model.device
    torch.cuda.empty_cache()  # what torch keeps for later would count as ours
    torch.cuda.reset_peak_memory_stats(device)
    try:
        step.run(model)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{step} does not fit on the GPU: lower these limits") from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)  # with the weights, and all else that we hold
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    budget = int(total * CUDA_FRACTION) - peak - others
    if budget <= 0:
        raise ValueError(
            f"the model needs {format_bytes(peak)} of the GPU's {format_bytes(total)}, others have"
            f" {format_bytes(others)}: no memory is left for keys and values; lower"
            " max_batch_tokens, max_num_seqs or max_model_len, or free the GPU"
        )
    return budget


def _check_fits(num_bytes: int, device: torch.device) -> None:
    """Refuse what the device could never hold, before a system that overcommits says yes to it."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = psutil.virtual_memory().total
    if num_bytes > total:
        raise ValueError(
            f"num_blocks or kv_cache_bytes must fit into {format_bytes(total)} of memory,"
            f" got {format_bytes(num_bytes)}"
        )


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
