"""However keys and values are kept and requests are scheduled, the tokens are the naive loop's.

In float64 a small random model has no near ties, so tokens must be identical. In float32 and
bfloat16 logits are compared, to the tolerances stated there. All KV memory is NaN until written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from naive import GREEDY, SEEDED, naive, poison, poisoned_engine

from conftest import SMALL, random_model
from infer_lab import CacheSpec, ContiguousKVCache, Engine, NoCache, SamplingParams
from infer_lab.decode import generate_tokens
from infer_lab.kernels import BACKENDS
from infer_lab.model.config import RopeConfig
from infer_lab.model.transformer import Transformer
from infer_lab.prefill import prefill

CONFIGS = {
    "3 heads share keys": SMALL,
    "every head its own keys, normed": replace(SMALL, num_kv_heads=6, head_size=20, qk_norm=True),
    "6 heads share keys, biases, slow rotations": replace(
        SMALL,
        num_kv_heads=1,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope=RopeConfig(kind="llama3", factor=8.0, original_max_position=32),
    ),
}
LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 33)  # around the borders of blocks
PARAMS = (
    replace(GREEDY, max_tokens=6),
    replace(SEEDED, max_tokens=6),
    replace(GREEDY, repetition_penalty=1.3, max_tokens=5),
    replace(SEEDED, top_k=20, presence_penalty=0.5, seed=-3, max_tokens=8),
)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    common = [rng.randrange(SMALL.vocab_size) for _ in range(64)]
    alone = [[rng.randrange(SMALL.vocab_size) for _ in range(length)] for length in LENGTHS]
    return [p for length, own in zip(LENGTHS, alone, strict=True) for p in (own, common[:length])]


@cache
def model_of(config: str) -> Transformer:
    return random_model(CONFIGS[config], seed=len(config))


@cache
def expected(config: str) -> list[list[int]]:
    model = model_of(config)
    return [naive(model, p, PARAMS[i % 4]) for i, p in enumerate(prompts())]


@cache
def several_samples(config: str) -> list[tuple[list[int], SamplingParams, list[list[int]]]]:
    model = model_of(config)
    cases = [(p, replace(SEEDED, n=n, max_tokens=5)) for n, p in enumerate(prompts()[4::3], 2)]
    return [
        (p, params, [naive(model, p, params, i) for i in range(params.n)]) for p, params in cases
    ]


@dataclass(frozen=True)
class Path:
    """Options of an engine, and the evidence that it went the way that is meant."""

    options: dict[str, Any]
    shows: Callable[[Engine], bool] = lambda engine: True
    rounds: int = 1


PATHS = {
    "slots": Path({"kv_layout": "slots", "max_model_len": 64}),
    "one at a time": Path({"max_num_seqs": 1}, lambda e: e.stats().num_steps > 100),
    "all in one batch": Path({}, lambda e: e.stats().num_steps == 8),
    "continuous": Path({"max_num_seqs": 5}, lambda e: e.stats().num_steps > 20),
    "static": Path({"max_num_seqs": 5, "batching": "static"}, lambda e: e.stats().num_steps > 25),
    "chunked": Path({"max_num_seqs": 3, "max_batch_tokens": 6}, lambda e: e.stats().num_steps > 30),
    "pages of 1": Path({"block_size": 1, "num_blocks": 999, "prefix_caching": False}),
    "pages of 4": Path({"block_size": 4, "num_blocks": 200, "prefix_caching": False}),
    "pages of 16": Path({"block_size": 16, "num_blocks": 90, "prefix_caching": False}),
    "prefix hit": Path({"block_size": 4, "num_blocks": 300}, lambda e: cached(e) > 150, rounds=2),
    "prefix hit, pages of 1": Path(
        {"block_size": 1, "num_blocks": 999}, lambda e: cached(e) > 150, rounds=2
    ),
    "preempted": Path({"block_size": 4, "num_blocks": 13}, lambda e: preempted(e) > 3),
    "preempted, chunked, prefix hit": Path(
        {"block_size": 4, "num_blocks": 10, "max_batch_tokens": 8, "max_num_seqs": 8},
        lambda e: preempted(e) > 3 and cached(e) > 0,
        rounds=2,
    ),
    "shortest first": Path({"policy": "shortest", "max_num_seqs": 4}),
}


def cached(engine: Engine) -> int:
    return engine.stats().cached_tokens


def preempted(engine: Engine) -> int:
    return engine.stats().num_preemptions


def check_path(path: Path, config: str, **more: Any) -> None:
    engine = poisoned_engine(model_of(config), **path.options | more)
    for _ in range(path.rounds):
        params = [PARAMS[i % 4] for i in range(2 * len(LENGTHS))]
        completions = engine.generate(prompts(), params)
        assert [list(c.token_ids) for c in completions] == expected(config)
        engine.check()
        poison(engine, only_free=True)
    assert path.shows(engine), engine.stats()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_the_naive_loop(path: str, config: str) -> None:
    check_path(PATHS[path], config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("backend", set(BACKENDS) - {"sdpa"})
def test_every_attention_backend_gives_the_same_tokens(backend: str, config: str) -> None:
    for path in ("chunked", "prefix hit"):
        check_path(PATHS[path], config, attention_backend=backend)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_a_contiguous_cache_gives_the_same_tokens(config: str, chunk_size: int | None) -> None:
    model = model_of(config)
    for i, prompt in enumerate(prompts()):
        if i % 4:
            continue
        kept = ContiguousKVCache(CacheSpec.from_config(model.config, model.dtype), 64)
        kept.keys.fill_(torch.nan)
        kept.values.fill_(torch.nan)
        tokens = generate_tokens(model, prompt, kept, max_tokens=6, chunk_size=chunk_size)
        assert list(tokens) == expected(config)[i]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 200},
        {"block_size": 4, "num_blocks": 200, "prefix_caching": False},
        {"block_size": 4, "num_blocks": 12, "prefix_caching": False},
        {"block_size": 4, "num_blocks": 13, "max_num_seqs": 3, "max_batch_tokens": 5},
        {"kv_layout": "slots", "max_model_len": 64},
    ],
)
def test_samples_of_one_prompt_copy_on_write(config: str, options: dict[str, Any]) -> None:
    model = model_of(config)
    engine = poisoned_engine(model, **options)
    copies = []
    copy = engine.kv.cache.copy_blocks
    engine.kv.cache.copy_blocks = lambda pairs: copies.extend(pairs) or copy(pairs)
    for prompt, params, tokens in several_samples(config):
        completions = engine.generate(prompt, params)
        assert [list(c.token_ids) for c in completions] == tokens
        assert [c.index for c in completions] == list(range(params.n))
        engine.check()
    assert bool(copies) == (options.get("kv_layout") != "slots")


# A pool of 40 blocks and one of 4,000 ----------------------------------------------------------


def test_64_mixed_requests_do_not_notice_a_pool_of_40_blocks() -> None:
    model = model_of("3 heads share keys")
    rng = random.Random(5)
    common = [rng.randrange(97) for _ in range(200)]
    requests, params = [], []
    for i in range(64):
        own = [rng.randrange(97) for _ in range(rng.randint(1, 60))]
        shared = common[: rng.choice([0, 0, 16, 48, 100])]
        requests.append(shared + own)
        params.append(replace(rng.choice(PARAMS), max_tokens=rng.randint(1, 40), seed=i))
    results = []
    for num_blocks in (40, 4000):
        engine = poisoned_engine(model, num_blocks=num_blocks)
        completions = engine.generate(requests, params)
        engine.check()
        results.append([c.token_ids for c in completions])
        assert (preempted(engine) > 0) == (num_blocks == 40)
    assert results[0] == results[1]


# Other number formats --------------------------------------------------------------------------

# The largest difference, in standard deviations of a row of logits. A bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.08}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("path", ["slots", "continuous", "chunked", "prefix hit", "preempted"])
def test_logits_are_close_to_the_naive_ones_at_every_step(path: str, dtype: torch.dtype) -> None:
    exact = random_model(SMALL, seed=1)
    model = random_model(SMALL, seed=1).to(dtype)
    model.reset_rope()
    engine = poisoned_engine(model, **PATHS[path].options)
    seen: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # by prompt and output index
    sampler = engine.sampler

    def recording(logits: torch.Tensor, rows: Any) -> Any:
        for row, own in zip(rows, logits, strict=True):
            seen[tuple(row.prompt_token_ids), row.output_index] = own
        return sampler(logits, rows)

    engine.sampler = recording  # type: ignore[assignment]
    # The penalty makes the rows carry their prompt.
    params = replace(GREEDY, presence_penalty=0.1, max_tokens=6)
    worst = worst_naive = 0.0
    for _ in range(PATHS[path].rounds):
        for completion in engine.generate(prompts()[::2], params):
            prompt, output = completion.prompt_token_ids, completion.token_ids
            tokens = torch.tensor([*prompt, *output[:-1]])
            positions = torch.arange(len(tokens))
            naive_logits = model.logits(model(tokens, positions, NoCache()))[len(prompt) - 1 :]
            true = exact.logits(exact(tokens, positions, NoCache()))[len(prompt) - 1 :]
            ours = torch.stack([seen[prompt, i] for i in range(len(output))])
            scale = true.std(-1, keepdim=True)
            worst = max(worst, float(((ours - naive_logits) / scale).abs().max()))
            worst_naive = max(worst_naive, float(((naive_logits - true) / scale).abs().max()))
    print(f"{dtype} {path}: {worst:.1e} from the naive path, which is {worst_naive:.1e} from exact")
    assert worst <= TOLERANCE[dtype]


def test_a_contiguous_cache_is_as_close(dtype: torch.dtype = torch.float32) -> None:
    model = random_model(SMALL, seed=1).to(dtype)
    model.reset_rope()
    prompt = prompts()[-1]
    kept = ContiguousKVCache(CacheSpec.from_config(model.config, dtype), 64)
    ours = prefill(model, prompt, kept, chunk_size=7)
    theirs = prefill(model, prompt, NoCache())
    assert float(((ours - theirs) / theirs.std()).abs().max()) <= TOLERANCE[dtype]
