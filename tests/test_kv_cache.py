"""Where keys and values live: one sequence, many in slots, many in pages."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from naive import poison, poisoned_engine

from conftest import SMALL, random_model
from infer_lab import CacheSpec, ContiguousKVCache, NoCache
from infer_lab.allocator import BlockAllocator
from infer_lab.batcher import pack
from infer_lab.kv_cache import PooledKVCache, SlotKVCache, causal_attention
from infer_lab.kv_memory import LargestStep, format_bytes, kv_budget
from infer_lab.model.transformer import Transformer
from infer_lab.paged_cache import PagedKVCache
from infer_lab.prefill import prefill
from infer_lab.request import Request
from infer_lab.sampling_params import SamplingParams
from infer_lab.scheduler import Chunk, StepPlan

SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_size=8, dtype=torch.float64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model()


def test_a_token_costs_a_key_and_a_value_of_every_head_and_layer() -> None:
    assert SPEC.bytes_per_token == 2 * 2 * 2 * 8 * 8
    assert CacheSpec.from_config(SMALL).dtype == torch.float32  # as the file was saved
    assert CacheSpec.from_config(SMALL, torch.bfloat16).bytes_per_token == 2 * 2 * 2 * 8 * 2


# One sequence ----------------------------------------------------------------------------------


def test_the_formula_is_what_the_tensors_take() -> None:
    cache = ContiguousKVCache(SPEC, 10)
    assert cache.keys.shape == cache.values.shape == (2, 10, 2, 8)
    assert cache.nbytes_used == 0 and cache.nbytes_allocated == 10 * SPEC.bytes_per_token
    cache.advance(7)
    assert cache.nbytes_used == 7 * SPEC.bytes_per_token == 7 * cache.bytes_per_token
    assert NoCache().nbytes_used == NoCache().bytes_per_token == NoCache().length == 0


def test_a_forward_that_fails_leaves_the_cache_as_it_was(model: Transformer) -> None:
    prompt = list(range(12))
    cache = ContiguousKVCache(SPEC, 20)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    prefill(model, prompt[:8], cache)
    half = ContiguousKVCache(SPEC, 20)  # has one layer only, then breaks
    half.keys, half.values, half.length = cache.keys[:1], cache.values[:1], cache.length
    with pytest.raises(IndexError):
        prefill(model, [90, 91], half)
    assert cache.length == half.length == 8
    assert torch.equal(prefill(model, prompt[8:], cache), prefill_anew(model, prompt))


def prefill_anew(model: Transformer, prompt: list[int]) -> torch.Tensor:
    return prefill(model, prompt, ContiguousKVCache(SPEC, 20), chunk_size=4)


def test_what_is_cut_off_is_computed_again(model: Transformer) -> None:
    prompt = list(range(12))
    cache = ContiguousKVCache(SPEC, 20)
    prefill(model, [*prompt[:5], 80, 81, 82], cache)
    cache.truncate(5)
    got = prefill(model, prompt[5:], cache)
    assert torch.allclose(got, prefill(model, prompt, NoCache()), atol=1e-12)


def test_a_full_cache_takes_no_more(model: Transformer) -> None:
    cache = ContiguousKVCache(SPEC, 4)
    prefill(model, [1, 2, 3], cache)
    with pytest.raises(ValueError, match=r"max_length=4 tokens: 2 more do not fit after 3"):
        prefill(model, [4, 5], cache)
    assert cache.length == 3
    prefill(model, [4], cache)
    for wrong in (-1, 1):
        with pytest.raises(ValueError, match=rf"num_tokens must be 0 to 0, got {wrong}"):
            cache.advance(wrong)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=rf"length must be 0 to 4, got {wrong}"):
            cache.truncate(wrong)
    with pytest.raises(ValueError, match="max_length must be >= 1, got 0"):
        ContiguousKVCache(SPEC, 0)


def test_queries_are_the_last_positions_and_see_no_future() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (3, 5, 5))
    out = causal_attention(q, k, v)
    for t in range(3):
        seen = 5 - 3 + t + 1
        alone = causal_attention(q[t : t + 1], k[:seen], v[:seen])
        assert torch.allclose(out[t], alone[0], atol=1e-14)


# Many sequences --------------------------------------------------------------------------------


def test_blocks_are_copied_in_order_over_all_layers() -> None:
    cache = PagedKVCache(SPEC, 4, 3)
    cache.keys.copy_(torch.randn_like(cache.keys))
    cache.values.copy_(torch.randn_like(cache.values))
    keys, values = (t.unflatten(1, (4, 3)).clone() for t in (cache.keys, cache.values))
    cache.copy_blocks([(0, 1), (1, 2), (3, 0)])  # a chain: block 2 gets what 0 was
    for tensor, old in ((cache.keys, keys), (cache.values, values)):
        new = tensor.unflatten(1, (4, 3))
        for block, source in enumerate((3, 0, 0, 3)):
            assert torch.equal(new[:, block], old[:, source])
    cache.copy_blocks([])
    assert cache.nbytes == 12 * SPEC.bytes_per_token


def test_gather_finds_a_request_scattered_over_memory() -> None:
    cache = PagedKVCache(SPEC, 5, 4)
    cache.keys.copy_(torch.arange(20.0)[None, :, None, None].expand_as(cache.keys))
    cache.values.copy_(-cache.keys)
    keys, values = cache.gather([3, 0, 4], 10)
    assert keys.shape == (2, 10, 2, 8)
    assert keys[0, :, 0, 0].tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 16, 17]
    assert torch.equal(values, -keys)


def test_slots_are_pages_as_long_as_the_context() -> None:
    slots, pages = SlotKVCache(SPEC, 3, 50), PagedKVCache(SPEC, 3, 50)
    assert isinstance(slots, PooledKVCache) and slots.keys.shape == pages.keys.shape
    assert (slots.num_blocks, slots.block_size) == (3, 50)


def test_keys_lie_where_the_table_says_and_nowhere_else(model: Transformer) -> None:
    prompt = [random.Random(0).randrange(97) for _ in range(11)]
    engine = poisoned_engine(model, block_size=4, num_blocks=9)
    request = engine.add(prompt, SamplingParams(max_tokens=3, temperature=0))
    engine.step()
    assert isinstance(engine.kv.cache, PagedKVCache)
    keys, values = engine.kv.cache.gather(engine.kv.allocator.table(request), 11)
    alone = ContiguousKVCache(SPEC, 11)
    prefill(model, prompt, alone)
    assert torch.allclose(keys, alone.keys, atol=1e-12)
    assert torch.allclose(values, alone.values, atol=1e-12)
    written = ~engine.kv.cache.keys.isnan().any(-1).any(-1)
    assert written.sum(-1).tolist() == [11, 11]
    poison(engine, only_free=True)
    assert torch.equal(written, ~engine.kv.cache.keys.isnan().any(-1).any(-1))


# From a plan to tensors ------------------------------------------------------------------------


def test_a_batch_lays_chunks_end_to_end() -> None:
    allocator = BlockAllocator(20, 4)
    requests = []
    for name, prompt, computed in (("a", range(10, 17), 5), ("b", range(30, 34), 0)):
        request = Request(name, tuple(prompt), SamplingParams())
        allocator.reserve(request, request.num_tokens)
        request.num_computed = computed
        requests.append(request)
    a, b = requests
    a.token_ids += [50]
    plan = StepPlan((Chunk(a, 5, 3), Chunk(b, 0, 2)))
    batch = pack(plan, allocator, CPU)
    assert batch.input_ids.tolist() == [15, 16, 50, 30, 31]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1]
    table = allocator.table(a)
    second = allocator.table(b)[0] * 4
    assert batch.slots.tolist() == [table[1] * 4 + i for i in (1, 2, 3)] + [second, second + 1]
    assert batch.logit_rows.tolist() == [2]  # b's prompt goes on
    assert batch.query_lens.tolist() == [3, 2] and batch.context_lens.tolist() == [8, 2]
    assert batch.query_starts.tolist() == [0, 3]
    assert len(batch.sampling) == 1
    assert batch.sampling[0].output_index == 1
    assert batch.token_slots(np.array(0), np.arange(8)).tolist() == [
        table[i // 4] * 4 + i % 4 for i in range(8)
    ]


def test_a_batch_whose_prompts_all_go_on_wants_no_logits() -> None:
    allocator = BlockAllocator(20, 4)
    request = Request("a", tuple(range(9)), SamplingParams())
    allocator.reserve(request, 9)
    batch = pack(StepPlan((Chunk(request, 0, 4),)), allocator, CPU)
    assert batch.logit_rows.tolist() == [] and batch.sampling == ()


# Sizes -----------------------------------------------------------------------------------------


def test_the_largest_step_is_as_large_as_the_limits_allow(model: Transformer) -> None:
    """It is what is measured on CUDA; here it is watched."""
    seen = []

    class Watched:
        config, device, dtype = model.config, model.device, model.dtype

        def __call__(self, ids: torch.Tensor, positions: torch.Tensor, kv: object) -> torch.Tensor:
            hidden = model(ids, positions, kv)
            assert hidden.isfinite().all()
            seen.append((len(ids), kv.plan))  # type: ignore[attr-defined]
            return hidden

        logits = staticmethod(model.logits)

    engine = poisoned_engine(model)
    for max_num_seqs, max_batch_tokens, longest in ((4, 40, 30), (3, 3, 100), (2, 500, 60)):
        step = LargestStep(engine.kv.cache.backend, max_num_seqs, max_batch_tokens, longest)
        step.run(Watched())  # type: ignore[arg-type]
        num_tokens, plan = seen.pop()
        assert num_tokens == min(max_batch_tokens, max_num_seqs * longest)
        assert sum(group.slots.numel() for group in plan) == max_num_seqs * longest


def test_sizes_are_written_for_people() -> None:
    sizes = (0, 1023, 1024, 1536, 2**20, 2**31, 3 * 2**40)
    assert [format_bytes(size) for size in sizes] == [
        "0 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB", "2 GiB", "3072 GiB",
    ]  # fmt: skip


GIB = 2**30


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """A GPU of `total` bytes with `free` ones; we hold `reserved`, and had `peak` at most."""
    cuda = torch.cuda
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(cuda, name, lambda *args: None)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: numbers["peak"])
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: numbers["reserved"])
    free_and_total = numbers["free"], numbers["total"]
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: free_and_total)


class OnCuda:
    """As much of a model as its budget asks about."""

    device = torch.device("cuda", 0)


class Runs:
    """A largest step that runs, or does not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def run(self, model: object) -> None:
        if self.error is not None:
            raise self.error


def budget(step: object) -> int:
    return kv_budget(OnCuda(), step)  # type: ignore[arg-type]


def test_on_cuda_keys_and_values_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, total=80 * GIB, free=60 * GIB, reserved=16 * GIB, peak=20 * GIB)
    # 4 GiB belong to other processes; 90 % of 80 may be used; we need 20 at most.
    assert budget(Runs()) == (72 - 20 - 4) * GIB


def test_on_cuda_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, total=8 * GIB, free=1 * GIB, reserved=2 * GIB, peak=3 * GIB)
    with pytest.raises(ValueError, match=r"needs 3 GiB of the GPU's 8 GiB, others have 5 GiB"):
        budget(Runs())
    with pytest.raises(ValueError, match="does not fit on the GPU: lower these limits"):
        budget(Runs(torch.OutOfMemoryError("CUDA out of memory")))
