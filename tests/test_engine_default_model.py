"""The engine on the default model: transformers says the same, and the loop costs little."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer_lab import Engine, SamplingParams, Tokenizer
from infer_lab.model.transformer import Transformer

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 2, 3, 4,",
    "The largest planet in the solar system",
    "In 1969, humans first",
    "Roses are red,",
    "To make bread you need",
    "The opposite of hot is",
    "import numpy as",
    "Dear Sir or Madam,",
    "The chemical symbol of gold is",
    "A triangle has three",
    "Shakespeare wrote",
    "SELECT name FROM users WHERE",
    "The sun rises in the",
    "Machine learning is",
    "The first ten prime numbers are 2, 3, 5,",
    "Photosynthesis is the process by which",
    "Bonjour, je m'appelle",
]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def oracle(default_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(default_dir, dtype=torch.float32).eval()


def test_greedy_text_and_logits_are_those_of_transformers(
    default_model: Transformer, oracle: Any, default_tokenizer: Tokenizer
) -> None:
    """Ours in chunks beside decodes, in small pages, from the prefix cache; theirs one by one."""
    engine = Engine(
        default_model,
        default_tokenizer,
        num_blocks=300,
        block_size=4,
        max_batch_tokens=30,
        max_num_seqs=22,
    )
    seen: dict[tuple[Any, int], torch.Tensor] = {}
    sampler = engine.sampler

    def recording(logits: torch.Tensor, rows: Any) -> Any:
        for row, own in zip(rows, logits, strict=True):
            seen[tuple(row.prompt_token_ids), row.output_index] = own.clone()
        return sampler(logits, rows)

    engine.sampler = recording  # type: ignore[assignment]
    params = replace(PARAMS, logit_bias={0: 0.0})  # of nothing: the rows carry their prompt
    completions = engine.generate(PROMPTS, params)
    first = dict(seen)
    again = engine.generate(PROMPTS[-4:], params)
    assert engine.stats().cached_tokens >= 16
    engine.check()

    compared, worst = 0, 0.0
    for prompt, completion in zip([*PROMPTS, *PROMPTS[-4:]], [*completions, *again], strict=True):
        logits, tokens = generated(oracle, completion.prompt_token_ids)
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() < 2e-3:
            continue  # a near tie: either token is right
        compared += 1
        assert list(completion.token_ids) == tokens, prompt
        assert completion.text == default_tokenizer.decode(tokens), prompt
        for recorded in (first, seen):  # `seen` holds the second run's, if there was one
            ours = torch.stack([recorded[completion.prompt_token_ids, i] for i in range(12)])
            worst = max(worst, float((ours - logits).abs().max()))
    assert compared >= 24
    assert worst <= 1e-3


@cache
def generated(oracle: Any, prompt: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
    """What transformers' `generate` makes of a prompt alone: logits (12, V) and tokens."""
    with torch.inference_mode():
        result = oracle.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(result.logits)[:, 0], result.sequences[0, len(prompt) :].tolist()


def test_a_small_pool_gives_the_same_text(
    default_model: Transformer, default_tokenizer: Tokenizer
) -> None:
    rng = random.Random(0)
    words = [
        f" {word}"
        for word in ["red", "green", "blue", "one", "two", "three", "house", "tree", "river", "cat"]
    ]
    prompts = ["Repeat:" + "".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    results = []
    for num_blocks in (8, 400):
        engine = Engine(default_model, default_tokenizer, num_blocks=num_blocks)
        results.append([c.token_ids for c in engine.generate(prompts, params)])
        engine.check()
        assert (engine.stats().num_steps > 6) == (num_blocks == 8)
    assert results[0] == results[1]


def test_a_chat_is_answered(default_model: Transformer, default_tokenizer: Tokenizer) -> None:
    engine = Engine(default_model, default_tokenizer, num_blocks=20)
    question = [{"role": "user", "content": "What is the capital of France? Answer in a word."}]
    (completion,) = engine.chat(question, SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert completion.token_ids[-1] == 2 and "<|" not in completion.text


def test_an_engine_comes_from_a_name_alone(default_dir: Path) -> None:
    engine = Engine.from_pretrained(default_dir, device="cpu", dtype="bfloat16", num_blocks=20)
    assert engine.model.dtype == engine.kv.cache.keys.dtype == torch.bfloat16
    assert engine.max_model_len == 320
    deltas = list(engine.stream("The capital of France is", PARAMS))
    assert len(deltas) == 12 and "Paris" in "".join(delta.text for delta in deltas)
