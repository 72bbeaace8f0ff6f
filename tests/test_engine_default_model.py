"""The engine on the default model: transformers says the same, and the loop costs little."""

from __future__ import annotations

import random
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


@pytest.fixture(scope="module")
def engine(default_model: Transformer, default_tokenizer: Tokenizer) -> Engine:
    return Engine(default_model, default_tokenizer, num_blocks=400)


def test_greedy_text_is_that_of_transformers(
    engine: Engine, oracle: Any, default_tokenizer: Tokenizer
) -> None:
    completions = engine.generate(PROMPTS, PARAMS)
    assert engine.stats().num_steps == 12  # all in one batch
    compared = 0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([default_tokenizer.encode(prompt)])
        with torch.inference_mode():
            generated = oracle.generate(
                ids, max_new_tokens=12, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        logits = torch.stack(generated.logits)[:, 0]  # (new tokens, V)
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() < 2e-3:
            continue  # a near tie: either token is right
        compared += 1
        tokens = generated.sequences[0, ids.shape[1] :].tolist()
        assert list(completion.token_ids) == tokens, prompt
        text = default_tokenizer.decode(tokens)
        assert completion.text == text, prompt
    assert compared >= 20


def test_logits_of_every_step_are_those_of_transformers(
    default_model: Transformer, oracle: Any, default_tokenizer: Tokenizer
) -> None:
    """Prompts in chunks beside decodes, shared prefixes, small pages: all the same numbers."""
    engine = Engine(
        default_model, num_blocks=300, block_size=4, max_batch_tokens=40, max_num_seqs=8
    )
    seen: dict[tuple[Any, int], torch.Tensor] = {}
    sampler = engine.sampler

    def recording(logits: torch.Tensor, rows: Any) -> Any:
        for row, own in zip(rows, logits, strict=True):
            seen[tuple(row.prompt_token_ids), row.output_index] = own.clone()
        return sampler(logits, rows)

    engine.sampler = recording  # type: ignore[assignment]
    story = default_tokenizer.encode("The engine takes requests and turns them into tokens. " * 4)
    prompts = [story[:n] for n in (44, 21, 20, 19)]
    prompts += [default_tokenizer.encode(p) for p in PROMPTS[:2]]
    # A bias of nothing makes the rows carry their prompt.
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={0: 0.0})
    worst = 0.0
    for _ in range(2):  # the second time from the prefix cache
        for c in engine.generate(prompts, params):
            tokens = torch.tensor([[*c.prompt_token_ids, *c.token_ids[:-1]]])
            with torch.inference_mode():
                theirs = oracle(tokens).logits[0, len(c.prompt_token_ids) - 1 :]
            ours = torch.stack([seen.pop((c.prompt_token_ids, i)) for i in range(4)])
            worst = max(worst, float((ours - theirs).abs().max()))
    engine.check()
    assert engine.stats().cached_tokens > 80
    assert worst <= 1e-3


def test_a_small_pool_gives_the_same_text(
    default_model: Transformer, default_tokenizer: Tokenizer
) -> None:
    rng = random.Random(0)
    words = [
        f" {word}"
        for word in ["red", "green", "blue", "one", "two", "three", "house", "tree", "river", "cat"]
    ]
    prompts = ["Repeat:" + "".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(10)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    results = []
    for num_blocks in (8, 400):
        engine = Engine(default_model, default_tokenizer, num_blocks=num_blocks)
        results.append([c.token_ids for c in engine.generate(prompts, params)])
        engine.check()
        assert (engine.stats().num_steps > 10) == (num_blocks == 8)
    assert results[0] == results[1]


def test_a_chat_is_answered(engine: Engine) -> None:
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
