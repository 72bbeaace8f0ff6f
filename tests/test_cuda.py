"""The same code on a GPU: same tokens, no needless waiting, memory measured."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from naive import GREEDY, SEEDED, naive, poisoned_engine

from conftest import SMALL, random_model
from infer_lab import Engine, NoCache
from infer_lab.batcher import pack, to_device
from infer_lab.kv_memory import CUDA_FRACTION, LargestStep, kv_budget
from infer_lab.model.transformer import Transformer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(97) for _ in range(n)] for n in (1, 4, 5, 15, 16, 17, 33, 40)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model().to("cuda")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_layout": "slots", "max_model_len": 64},
        {"max_num_seqs": 3, "max_batch_tokens": 6},
        {"block_size": 4, "num_blocks": 14},
        {"block_size": 1, "num_blocks": 500},
        {"attention_backend": "reference"},
        {"batching": "static", "max_num_seqs": 3, "prefix_caching": False},
    ],
)
def test_tokens_in_float64_are_those_of_the_naive_loop_on_the_cpu(
    model: Transformer, options: dict[str, Any]
) -> None:
    on_cpu = random_model()
    for params in (GREEDY, SEEDED):
        engine = poisoned_engine(model, **options)
        for _ in range(2):
            completions = engine.generate(PROMPTS, params)
            assert [list(c.token_ids) for c in completions] == [
                naive(on_cpu, p, params) for p in PROMPTS
            ]
            engine.check()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_logits_in_other_formats_are_close(dtype: torch.dtype, tolerance: float) -> None:
    """In standard deviations of a row, against the same format without a cache."""
    model = random_model().to("cuda", dtype)
    model.reset_rope()
    engine = poisoned_engine(model, block_size=4, max_batch_tokens=20, max_num_seqs=4)
    seen: dict[Any, torch.Tensor] = {}
    sampler = engine.sampler

    def recording(logits: torch.Tensor, rows: Any) -> Any:
        seen.update(
            (tuple(row.prompt_token_ids), own) for row, own in zip(rows, logits, strict=True)
        )
        return sampler(logits, rows)

    engine.sampler = recording  # type: ignore[assignment]
    params = SEEDED.__class__(temperature=0, max_tokens=1, logit_bias={0: 0.0})
    for c in engine.generate(PROMPTS, params):
        ids = torch.tensor(c.prompt_token_ids, device="cuda")
        hidden = model(ids, torch.arange(len(ids), device="cuda"), NoCache())
        logits = model.logits(hidden[-1:])[0]
        assert float(((seen[c.prompt_token_ids] - logits) / logits.std()).abs().max()) <= tolerance


def test_a_step_waits_for_the_gpu_only_when_it_samples(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4)
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    engine.step()
    plan = engine.scheduler.schedule()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.kv.cache.copy_blocks(plan.copies)
        batch = pack(plan, engine.kv.allocator, model.device)
        with torch.inference_mode():
            hidden = model(batch.input_ids, batch.positions, engine.kv.cache.bind(batch))
            model.logits(hidden.index_select(0, batch.logit_rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_arrays_arrive_whole_though_nobody_waits() -> None:
    device = torch.device("cuda")
    arrays = [np.arange(i, i + 50_000) for i in range(200)]
    busy = torch.randn(4000, 4000, device=device)
    for _ in range(20):
        busy = busy @ busy
    tensors = [to_device(array, device) for array in arrays]
    for array, tensor in zip(arrays, tensors, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)
    assert to_device(np.zeros(0, dtype=np.int64), device).shape == (0,)


def test_keys_and_values_get_what_the_largest_step_leaves(model: Transformer) -> None:
    engine = Engine(model, num_blocks=8)
    backend = engine.kv.cache.backend
    total = torch.cuda.mem_get_info()[1]
    small = kv_budget(model, LargestStep(backend, 4, 64, 512))
    large = kv_budget(model, LargestStep(backend, 64, 65536, 512))
    assert 0 < large < small < total * CUDA_FRACTION
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert small - kv_budget(model, LargestStep(backend, 4, 64, 512)) >= 2**30
    del held


def test_an_engine_at_its_limits_stays_within_its_memory() -> None:
    model = random_model(SMALL).to("cuda", torch.float32)
    model.reset_rope()
    engine = Engine(model, max_num_seqs=32, max_batch_tokens=4096)
    prompts = [[RNG.randrange(97) for _ in range(500)] for _ in range(40)]
    torch.cuda.reset_peak_memory_stats()
    assert len(engine.generate(prompts, GREEDY)) == 40
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.max_memory_allocated() <= total * CUDA_FRACTION
    assert "requests of 512" in engine.kv.describe()
