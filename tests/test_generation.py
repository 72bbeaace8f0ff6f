"""Prefill, decode and the trace: one sequence, in the plainest form."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive import GREEDY, naive

from conftest import SMALL, random_model
from infer_lab import CacheSpec, ContiguousKVCache, NoCache, Trace
from infer_lab.decode import argmax, decode_step, generate_tokens
from infer_lab.model.transformer import Transformer
from infer_lab.prefill import prefill
from infer_lab.trace import StepRecord

SPEC = CacheSpec.from_config(SMALL, torch.float64)
PROMPT = [3, 14, 15, 92, 65, 35, 8, 9]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model()


def fresh(length: int = 64) -> ContiguousKVCache:
    cache = ContiguousKVCache(SPEC, length)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 7, 8, 9, 100])
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(
    model: Transformer, chunk_size: int | None
) -> None:
    cache = fresh()
    logits = prefill(model, PROMPT, cache, chunk_size=chunk_size)
    assert logits.shape == (97,) and cache.length == 8
    assert torch.allclose(logits, prefill(model, PROMPT, NoCache()), atol=1e-12)


def test_a_decode_step_is_a_prefill_of_one_token(model: Transformer) -> None:
    cache = fresh()
    prefill(model, PROMPT[:7], cache)
    logits = decode_step(model, PROMPT[7], cache)
    assert torch.allclose(logits, prefill(model, PROMPT, NoCache()), atol=1e-12)


def test_with_and_without_a_cache_the_tokens_are_the_same(model: Transformer) -> None:
    expected = naive(model, PROMPT, GREEDY)
    for cache in (NoCache(), fresh()):
        assert list(generate_tokens(model, PROMPT, cache, max_tokens=10)) == expected


def test_a_cache_that_holds_the_beginning_goes_on_from_there(model: Transformer) -> None:
    cache, trace = fresh(), Trace()
    prefill(model, PROMPT[:5], cache)
    tokens = generate_tokens(model, PROMPT, cache, max_tokens=10, trace=trace)
    assert list(tokens) == naive(model, PROMPT, GREEDY)
    assert trace.records[0].tokens_in == 3


def test_generation_ends_after_a_stop_token() -> None:
    model = random_model()
    expected = naive(model, PROMPT, GREEDY)
    first = expected.index(expected[2]) + 1
    for stop in (expected[2:3], {expected[2], expected[-1]}):
        got = list(generate_tokens(model, PROMPT, NoCache(), max_tokens=10, stop_token_ids=stop))
        assert got == expected[:first]
    model.config = replace(SMALL, eos_token_ids=(expected[1],))
    first = expected.index(expected[1]) + 1
    assert list(generate_tokens(model, PROMPT, fresh(), max_tokens=10)) == expected[:first]
    all_ten = generate_tokens(model, PROMPT, fresh(), max_tokens=10, stop_token_ids=())
    assert list(all_ten) == expected


def test_generation_ends_when_the_context_is_full(model: Transformer) -> None:
    prompt = [i % 97 for i in range(510)]
    tokens = list(generate_tokens(model, prompt, fresh(512), max_tokens=99))
    assert len(tokens) == 3  # the last one has position 512, and is never fed back
    assert tokens == list(generate_tokens(model, prompt, NoCache(), max_tokens=99))


def test_another_choice_than_argmax(model: Transformer) -> None:
    least = lambda logits: int(logits.argmin())  # noqa: E731
    tokens = list(generate_tokens(model, PROMPT, fresh(), max_tokens=4, choose=least))
    assert tokens[0] == int(prefill(model, PROMPT, NoCache()).argmin())
    assert argmax(torch.tensor([1.0, 3.0, 3.0])) == 1  # the lowest id wins a tie


def test_arguments_are_checked_at_the_call_not_at_the_first_token(model: Transformer) -> None:
    def refused(message: str, *args: Any, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            generate_tokens(model, *args, **{"max_tokens": 3} | more)

    refused("prompt_ids must hold at least one", [], NoCache())
    refused("0 to 96, got 97", [97], NoCache())
    refused("ints, got True", [True], NoCache())
    refused("max_tokens must be >= 1, got 0", [1], NoCache(), max_tokens=0)
    cache = fresh()
    prefill(model, PROMPT, cache)
    refused("must hold less than the prompt's 8 tokens, got 8", PROMPT, cache)
    for chunk_size in (0, -1):
        with pytest.raises(ValueError, match=rf"chunk_size must be .*got {chunk_size}"):
            prefill(model, PROMPT, fresh(), chunk_size=chunk_size)
    with pytest.raises(ValueError, match="NoCache keeps none"):
        prefill(model, PROMPT, NoCache(), chunk_size=3)
    with pytest.raises(ValueError, match="context holds 512 tokens, got 513"):
        prefill(model, [1] * 513, NoCache())


# The trace -------------------------------------------------------------------------------------


def test_a_trace_tells_what_each_step_took_and_kept(model: Transformer) -> None:
    trace = Trace()
    list(generate_tokens(model, PROMPT, fresh(), max_tokens=3, trace=trace))
    assert [r.phase for r in trace.records] == ["prefill", "decode", "decode"]
    assert [r.tokens_in for r in trace.records] == [8, 1, 1]
    assert [r.input_shape for r in trace.records] == [(8,), (1,), (1,)]
    assert [r.output_shape for r in trace.records] == [(97,)] * 3
    assert [r.sequence_length for r in trace.records] == [8, 9, 10]
    assert [r.cache_length for r in trace.records] == [8, 9, 10]
    for record in trace.records:
        assert record.predicted_bytes == record.measured_bytes > 0
        assert record.predicted_bytes == record.cache_length * SPEC.bytes_per_token
        assert record.seconds > 0


def test_without_a_cache_every_step_brings_everything(model: Transformer) -> None:
    trace = Trace()
    list(generate_tokens(model, PROMPT, NoCache(), max_tokens=3, trace=trace))
    assert [r.tokens_in for r in trace.records] == [8, 9, 10]
    assert {(r.cache_length, r.predicted_bytes, r.measured_bytes) for r in trace.records} == {
        (0, 0, 0)
    }


def test_a_step_that_raises_is_not_recorded() -> None:
    trace = Trace()
    with pytest.raises(RuntimeError), trace.step("decode", NoCache(), 1):
        raise RuntimeError
    assert trace.records == []


def test_the_table_has_the_same_columns_every_time() -> None:
    trace = Trace()
    empty = trace.table().splitlines()
    trace.records.append(StepRecord(0, "prefill", 1200, (1200,), (97,), 1200, 1200, 5, 5, 0.25))
    lines = trace.table().splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == re.split(r"\s{2,}", empty[0].strip())
    assert [name.replace(" ", "_") for name in re.split(r"\s{2,}", lines[0].strip())] == list(
        Trace.columns
    )
    assert "1,200" in lines[2] and len({len(line) for line in lines}) == 1
    assert "0.2500" in trace.table(seconds=True) and "0.2500" not in trace.table()
    assert trace.rows()[0].keys() == set(Trace.columns)
    assert trace.rows(seconds=True)[0]["seconds"] == 0.25
