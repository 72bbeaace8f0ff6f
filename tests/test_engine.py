"""The engine's contract: what goes in, what comes out, and what no caller can break."""

from __future__ import annotations

import copy
import gc
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from naive import GREEDY, SEEDED, byte_model, byte_tokenizer, naive, poisoned_engine

from conftest import SMALL, random_model
from infer_lab import Completion, Delta, Engine, NoCache, SamplingParams, Tokenizer
from infer_lab.model.transformer import Transformer
from infer_lab.prefill import prefill
from infer_lab.request import CONTEXT_FULL, FinishReason

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(97) for _ in range(length)] for length in (5, 17, 1, 32, 9, 16)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model()


@pytest.fixture(scope="module")
def speaker() -> Transformer:
    return byte_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def engine(model: Transformer) -> Iterable[Engine]:
    engine = poisoned_engine(model, block_size=4, max_num_seqs=4)
    yield engine
    engine.check()


def tokens_of(completions: Iterable[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def run(engine: Engine) -> dict[tuple[str, int], list[Delta]]:
    """Step until nothing is left; the deltas of each sample."""
    deltas: dict[tuple[str, int], list[Delta]] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        engine.check()
    return deltas


def joined(deltas: Iterable[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def is_idle(engine: Engine) -> bool:
    engine.check()
    return not engine.has_unfinished() and engine.stats().blocks.live == 0


# generate --------------------------------------------------------------------------------------


def test_one_or_many_prompts_with_one_or_many_params(engine: Engine, model: Transformer) -> None:
    many = [replace(GREEDY, max_tokens=2 + i) for i in range(len(PROMPTS))]
    expected = [naive(model, p, each) for p, each in zip(PROMPTS, many, strict=True)]
    assert tokens_of(engine.generate(PROMPTS, many)) == expected
    assert tokens_of(engine.generate(tuple(map(tuple, PROMPTS)), tuple(many))) == expected
    assert tokens_of(engine.generate(PROMPTS[1], many[1])) == [expected[1]]
    assert tokens_of(engine.generate([PROMPTS[1]], [many[1]])) == [expected[1]]
    same = tokens_of(engine.generate(PROMPTS[:2], many[1]))
    assert same == [naive(model, p, many[1]) for p in PROMPTS[:2]]
    assert engine.generate([]) == [] == engine.generate([], many[0]) == engine.generate([], [])


def test_params_have_defaults(engine: Engine) -> None:
    (completion,) = engine.generate(PROMPTS[0])
    assert len(completion.token_ids) == 16 and completion.finish_reason == "length"


def test_text_goes_in_and_comes_out(speaker: Transformer, tokenizer: Tokenizer) -> None:
    engine = poisoned_engine(speaker, tokenizer)
    texts = ["the cab", "é 😀", "日本"]
    for text, completion in zip(texts, engine.generate(texts, GREEDY), strict=True):
        ids = tokenizer.encode(text)
        assert completion.prompt_token_ids == tuple(ids)
        assert list(completion.token_ids) == naive(speaker, ids, GREEDY)
        assert completion.text == tokenizer.decode(completion.token_ids)
    assert engine.generate("the cab", GREEDY)[0].text == engine.generate(texts, GREEDY)[0].text


def test_without_a_tokenizer_there_is_no_text(engine: Engine) -> None:
    assert engine.generate(PROMPTS[0], GREEDY)[0].text == ""


def test_a_chat_is_a_prompt_in_the_models_format(
    speaker: Transformer, tokenizer: Tokenizer
) -> None:
    engine = poisoned_engine(speaker, tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    (completion,) = engine.chat(messages, GREEDY)
    assert completion.prompt_token_ids == tuple(tokenizer.encode("<|begin|>user: hi\n"))
    assert completion.token_ids == engine.generate("<|begin|>user: hi\n", GREEDY)[0].token_ids


def test_one_engine_used_twice_and_two_at_once_are_like_fresh_ones(model: Transformer) -> None:
    expected = [naive(model, p, SEEDED) for p in PROMPTS]
    first, second = (poisoned_engine(model, block_size=4) for _ in range(2))
    for p in PROMPTS:
        first.add(p, SEEDED, request_id=str(len(p)))
        second.add(p, SEEDED, request_id=str(len(p)))
    deltas: dict[str, list[Delta]] = {}
    while first.has_unfinished() or second.has_unfinished():  # step by step in turn
        first.step()
        for delta in second.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    assert [joined(deltas[str(len(p))]) for p in PROMPTS] == expected
    assert tokens_of(first.generate(PROMPTS, SEEDED)) == expected
    assert tokens_of(first.generate(PROMPTS, SEEDED)) == expected


def test_tokens_depend_neither_on_batch_mates_nor_on_the_order_of_arrival(
    model: Transformer,
) -> None:
    params = [replace(SEEDED, seed=i, temperature=1 + i / 9) for i in range(len(PROMPTS))]
    expected = [naive(model, p, each) for p, each in zip(PROMPTS, params, strict=True)]
    rng = random.Random(0)
    for _ in range(5):
        order = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        engine = poisoned_engine(model, block_size=4, num_blocks=14, max_num_seqs=3)
        handles = {}
        for i in order:
            handles[i] = engine.add(PROMPTS[i], params[i])
            for _ in range(rng.randrange(4)):
                engine.step()
        run(engine)
        assert [handles[i].output_token_ids for i in range(len(PROMPTS))] == expected


def test_without_a_seed_every_call_draws_anew(engine: Engine) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12)
    assert len({c.token_ids for c in engine.generate([PROMPTS[0]] * 4, params)}) == 4


def test_shared_params_are_never_changed(engine: Engine) -> None:
    params = SamplingParams(
        n=3, seed=1, max_tokens=6, stop_token_ids=[3], logit_bias={4: 1.0}, logprobs=2
    )
    before = copy.deepcopy(params)
    engine.generate([PROMPTS[0]] * 3, params)
    list(engine.stream(PROMPTS[1], params))
    assert params == before


# n > 1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"max_batch_tokens": 4}])
def test_samples_are_all_drawn_for_themselves(
    model: Transformer, length: int, options: dict[str, Any]
) -> None:
    engine = poisoned_engine(model, block_size=4, max_num_seqs=4, **options)
    params = SamplingParams(n=5, seed=3, temperature=2.0, max_tokens=8)
    completions = engine.generate(PROMPTS[3][:length], params)
    assert [c.index for c in completions] == list(range(5))
    assert len({c.token_ids for c in completions}) == 5
    for c in completions:
        assert list(c.token_ids) == naive(model, PROMPTS[3][:length], params, c.index)
    alone = engine.generate(PROMPTS[3][:length], replace(params, n=1))
    assert alone[0].token_ids == completions[0].token_ids


def test_samples_compute_the_prompt_once(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, prefix_caching=False)
    engine.generate(PROMPTS[3], replace(SEEDED, n=4, max_tokens=5))
    prompt = len(PROMPTS[3])
    # each of the four computes its own tokens but the last; the three later ones the prompt's last
    assert engine.stats().computed_tokens == prompt + 4 * 4 + 3


def test_more_samples_than_can_run_wait_for_their_turn(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, num_blocks=12, max_num_seqs=2)
    params = replace(SEEDED, n=7)
    expected = [naive(model, PROMPTS[1], params, i) for i in range(7)]
    assert tokens_of(engine.generate(PROMPTS[1], params)) == expected
    assert is_idle(engine)


# stream ----------------------------------------------------------------------------------------


def test_a_stream_gives_the_tokens_one_by_one(engine: Engine, model: Transformer) -> None:
    deltas = list(engine.stream(PROMPTS[1], SEEDED))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 10
    assert joined(deltas) == naive(model, PROMPTS[1], SEEDED)
    assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]
    assert is_idle(engine)


def test_a_stream_of_several_samples_ends_with_the_last(engine: Engine) -> None:
    params = replace(SEEDED, n=3, stop_token_ids=[30, 31, 32, 33])
    deltas = list(engine.stream(PROMPTS[1], params))
    whole = engine.generate(PROMPTS[1], params)
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        assert joined(own) == list(whole[index].token_ids)
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [
            True
        ]


def test_interleaved_streams_share_steps_and_mix_nothing(
    engine: Engine, model: Transformer
) -> None:
    streams = [engine.stream(p, SEEDED) for p in PROMPTS]
    got: list[list[int]] = [[] for _ in PROMPTS]
    rng = random.Random(2)
    while streams_left := [i for i, tokens in enumerate(got) if len(tokens) < 10]:
        i = rng.choice(streams_left)
        got[i] += next(streams[i]).token_ids
    assert got == [naive(model, p, SEEDED) for p in PROMPTS]
    assert all(next(stream, None) is None for stream in streams)
    assert engine.stats().num_steps < 40
    assert is_idle(engine)


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("end", ["close", "forget"])
def test_a_stream_closed_early_frees_everything(engine: Engine, taken: int, end: str) -> None:
    stream = engine.stream(PROMPTS[1], replace(SEEDED, n=2))
    for _ in range(taken):
        next(stream)
    if end == "close":
        stream.close()  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert is_idle(engine)
    assert engine.step() == []


def test_a_stream_aborted_from_outside_ends(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[1], SEEDED)
    first = next(stream)
    assert engine.abort(first.request_id)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert is_idle(engine)


def test_generate_and_stream_lose_nothing_of_other_requests(
    engine: Engine, model: Transformer
) -> None:
    added = engine.add(PROMPTS[0], SEEDED, request_id="added")
    stream = engine.stream(PROMPTS[1], SEEDED)
    got = [next(stream)]
    assert tokens_of(engine.generate(PROMPTS[2:], SEEDED)) == [
        naive(model, p, SEEDED) for p in PROMPTS[2:]
    ]
    got += stream
    assert joined(got) == naive(model, PROMPTS[1], SEEDED)
    deltas = run(engine)
    assert deltas.keys() == {("added", 0)}
    assert joined(deltas["added", 0]) == naive(model, PROMPTS[0], SEEDED)
    assert added.completion().token_ids == tuple(joined(deltas["added", 0]))
    assert is_idle(engine)


# add, step, abort ------------------------------------------------------------------------------


def test_deltas_joined_are_the_whole_result(speaker: Transformer, tokenizer: Tokenizer) -> None:
    engine = poisoned_engine(speaker, tokenizer, max_num_seqs=3)
    params = replace(SEEDED, max_tokens=25, n=2, logprobs=1, stop=["a", "!"])
    handles = [engine.add(text, params) for text in ("the", "日本 ", "a😀", "x\n")]
    deltas = run(engine)
    samples = {(h.id, i): c for h in handles for i, c in enumerate(reference(h, speaker))}
    assert deltas.keys() == samples.keys()
    for handle in handles:
        own, completion = deltas[handle.id, 0], handle.completion()
        assert joined(own) == list(completion.token_ids) == samples[handle.id, 0]
        assert "".join(delta.text for delta in own) == completion.text
        assert own[-1].finish_reason == completion.finish_reason
        assert own[-1].stop_reason == completion.stop_reason
        assert tuple(x for delta in own for x in delta.logprobs or ()) == completion.logprobs
        assert len(completion.logprobs or ()) == len(completion.token_ids)
    for key, tokens in samples.items():
        assert joined(deltas[key]) == tokens


def reference(handle: Any, model: Transformer) -> list[list[int]]:
    prompt = list(handle.prompt_token_ids)
    params, tokenizer = handle.params, byte_tokenizer()
    return [naive(model, prompt, params, i, tokenizer=tokenizer) for i in range(params.n)]


def test_a_step_without_requests_does_nothing(engine: Engine) -> None:
    assert engine.step() == [] and not engine.has_unfinished()
    assert engine.stats().num_steps == 0


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_abort_works_at_every_point_of_a_life(model: Transformer, victim: int) -> None:
    params = replace(SEEDED, max_tokens=5)
    wishes = [params, replace(params, n=3), params, params]
    expected = [
        [naive(model, p, w, i) for i in range(w.n)] for p, w in zip(PROMPTS, wishes, strict=False)
    ]
    for when in range(30):
        engine = poisoned_engine(
            model, block_size=4, num_blocks=13, max_num_seqs=3, max_batch_tokens=8
        )
        for i, wish in enumerate(wishes):
            engine.add(PROMPTS[i], wish, request_id=str(i))
        deltas: dict[tuple[str, int], list[Delta]] = {}
        for _ in range(when):
            for delta in engine.step():
                deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        was_unfinished = engine.abort(str(victim))
        engine.check()
        assert not engine.abort(str(victim)) and not engine.abort("nobody")
        for key, more in run(engine).items():
            deltas.setdefault(key, []).extend(more)
        for i, wish in enumerate(wishes):
            for index in range(wish.n):
                own = deltas[str(i), index]
                reasons = [delta.finish_reason for delta in own if delta.finish_reason]
                assert len(reasons) == 1 and own[-1].finish_reason == reasons[0]
                if i == victim and reasons == ["abort"]:
                    assert was_unfinished
                    assert joined(own) == expected[i][index][: len(joined(own))]
                else:
                    assert joined(own) == expected[i][index]
        assert is_idle(engine)
        if not was_unfinished:
            return
    raise AssertionError("the victim never ended by itself")


def test_the_last_delta_of_an_aborted_request_comes_with_the_next_step(engine: Engine) -> None:
    engine.add(PROMPTS[0], SEEDED, request_id="a")
    engine.step()
    engine.abort("a")
    assert engine.has_unfinished()
    (delta,) = engine.step()
    assert (delta.request_id, delta.finish_reason) == ("a", "abort")
    assert is_idle(engine)


def test_ids_of_unfinished_requests_are_refused_and_free_again_afterwards(engine: Engine) -> None:
    engine.add(PROMPTS[0], SEEDED, request_id="a")
    with pytest.raises(ValueError, match=r"request_id .*'a'"):
        engine.add(PROMPTS[1], SEEDED, request_id="a")
    run(engine)
    engine.add(PROMPTS[0], SEEDED, request_id="a")
    engine.abort("a")
    engine.add(PROMPTS[0], SEEDED, request_id="a")
    deltas = run(engine)["a", 0]
    assert deltas[0].finish_reason == "abort" and len(joined(deltas)) == 10


def test_ids_that_callers_choose_never_meet_the_engines_own(
    engine: Engine, model: Transformer
) -> None:
    handles = [engine.add(PROMPTS[0], SEEDED, request_id=f"request-{i}") for i in range(6)]
    assert len(engine.generate(PROMPTS[:3], GREEDY)) == 3
    assert joined(engine.stream(PROMPTS[1], GREEDY)) == naive(model, PROMPTS[1], GREEDY)
    run(engine)
    assert [h.finish_reason for h in handles] == ["length"] * 6
    # A stream whose request has ended, but not been read, must not abort its id's next owner.
    stream = engine.stream(PROMPTS[1], GREEDY)
    request_id = next(stream).request_id
    while engine.has_unfinished():
        engine.step()
    engine.add(PROMPTS[0], SEEDED, request_id=request_id)
    del stream
    assert len(joined(run(engine)[request_id, 0])) == 10


def test_priority_decides_who_goes_first(model: Transformer) -> None:
    engine = poisoned_engine(model, max_num_seqs=1, policy="priority")
    for name, priority in (("last", 5), ("first", -1), ("second", 0), ("third", 0)):
        engine.add(PROMPTS[0], GREEDY, request_id=name, priority=priority)
    ends = []
    while engine.has_unfinished():
        ends += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ends == ["first", "second", "third", "last"]


# What ends a request ---------------------------------------------------------------------------


def test_every_end_is_told_apart_also_when_they_meet(
    speaker: Transformer, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("the ")
    free = replace(GREEDY, max_tokens=12, ignore_eos=True)
    plain = naive(speaker, prompt, free)
    third, text = plain[2], tokenizer.decode(plain[:3])
    assert third not in plain[:2] and text

    def end(eos: int | None = None, length: int | None = None, **wishes: Any) -> tuple[Any, ...]:
        own = copy.copy(speaker)
        own.config = replace(speaker.config, eos_token_ids=() if eos is None else (eos,))
        engine = poisoned_engine(own, tokenizer, max_model_len=length)
        (c,) = engine.generate(prompt, replace(GREEDY, **{"max_tokens": 9} | wishes))
        assert list(c.token_ids) == plain[: len(c.token_ids)]
        return len(c.token_ids), c.finish_reason, c.stop_reason

    context = len(prompt) + 3
    assert end() == (9, "length", None)
    assert end(max_tokens=3) == (3, "length", None)
    assert end(length=context) == (3, "length", CONTEXT_FULL)
    assert end(eos=third) == (3, "stop", None)
    assert end(stop_token_ids=[third]) == (3, "stop", third)
    stop = tokenizer.decode([third])
    assert end(stop=stop) == (3, "stop", stop)
    # Several at once: the earlier in this list counts.
    assert end(eos=third, stop_token_ids=[third], stop=stop, max_tokens=3) == (3, "stop", None)
    assert end(stop_token_ids=[third], stop=stop, max_tokens=3) == (3, "stop", third)
    assert end(stop=stop, max_tokens=3, length=context) == (3, "stop", stop)
    assert end(max_tokens=3, length=context) == (3, "length", None)
    assert end(eos=third, ignore_eos=True, max_tokens=4) == (4, "length", None)
    assert end(eos=third, ignore_eos=True, stop_token_ids=[third]) == (3, "stop", third)
    # min_tokens forbids the end, so another token comes in its place.
    engine = poisoned_engine(speaker, tokenizer)
    (c,) = engine.generate(prompt, replace(free, stop_token_ids=[third], min_tokens=5))
    assert third not in c.token_ids[:5] and len(c.token_ids) >= 5


def test_the_context_limit_of_the_model_ends_a_request(model: Transformer) -> None:
    engine = poisoned_engine(model, num_blocks=32)  # 512 tokens, all of the context
    rng = random.Random(4)
    prompt = [rng.randrange(97) for _ in range(508)]
    (completion,) = engine.generate(prompt, replace(GREEDY, max_tokens=99))
    assert (len(completion.token_ids), completion.stop_reason) == (4, CONTEXT_FULL)
    assert list(completion.token_ids) == naive(model, prompt, replace(GREEDY, max_tokens=4))


def test_token_ids_hold_the_stop_token_and_text_does_not(
    speaker: Transformer, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("the ")
    plain = naive(speaker, prompt, replace(GREEDY, ignore_eos=True))
    engine = poisoned_engine(speaker, tokenizer)
    (c,) = engine.generate(prompt, replace(GREEDY, stop_token_ids=[plain[2]], ignore_eos=True))
    assert list(c.token_ids) == plain[:3]
    assert c.text == tokenizer.decode(plain[:2])


def test_a_stop_string_is_cut_out_wherever_tokens_split_it(
    speaker: Transformer, tokenizer: Tokenizer
) -> None:
    engine = poisoned_engine(speaker, tokenizer)
    free = replace(SEEDED, max_tokens=30, ignore_eos=True)
    met = 0
    for seed in range(5):
        params = replace(free, seed=seed)
        (whole,) = engine.generate("the ", params)
        for start in range(0, len(whole.text) - 3, 5):
            stop = whole.text[start : start + 3]
            if "\ufffd" in stop:
                continue
            met += 1
            pieces = [d.text for d in engine.stream("the ", replace(params, stop=[stop, "zzzz"]))]
            assert "".join(pieces) == whole.text[: whole.text.index(stop)]
            (cut,) = engine.generate("the ", replace(params, stop=[stop]))
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert met >= 8


# Logits, logprobs, errors ----------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_distribution(engine: Engine, model: Transformer) -> None:
    params = replace(SEEDED, logprobs=3, temperature=0.5, top_k=2, logit_bias={5: 9.0})
    (completion,) = engine.generate(PROMPTS[1], params)
    tokens = list(PROMPTS[1])
    for token, got in zip(completion.token_ids, completion.logprobs or (), strict=True):
        logprobs = prefill(model, tokens, NoCache()).log_softmax(-1)
        assert got.logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
        assert list(got.top) == logprobs.topk(3).indices.tolist()
        assert list(got.top.values()) == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-5)
        tokens.append(token)
    assert engine.generate(PROMPTS[1], SEEDED)[0].logprobs is None
    own = engine.generate(PROMPTS[1], replace(SEEDED, logprobs=0))[0].logprobs
    assert own is not None and all(entry.top == {} for entry in own) and len(own) == 10


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_end_their_own_request_alone(value: float) -> None:
    model = random_model()
    good = [[t for t in p if t != 96] for p in PROMPTS]
    expected = [naive(model, p, replace(SEEDED, logit_bias={96: -100.0})) for p in good]
    model.embed_tokens.weight.data[96] = value  # whoever reads token 96 is lost
    engine = poisoned_engine(model, block_size=4, max_batch_tokens=12, max_num_seqs=6)
    params = replace(SEEDED, logit_bias={96: -100.0})
    handles = [engine.add(p, params) for p in good]
    bad = [engine.add([*PROMPTS[0][:4], 96, 5][:length], params) for length in (5, 6)]
    deltas = run(engine)
    for handle in bad:
        completion = handle.completion()
        assert completion.finish_reason is FinishReason.ERROR
        assert "not finite" in str(completion.stop_reason)
        assert completion.token_ids == ()
        assert [d.finish_reason for d in deltas[handle.id, 0]] == ["error"]
    assert [h.output_token_ids for h in handles] == expected
    assert is_idle(engine)
    assert tokens_of(engine.generate(good, params)) == expected


class Flaky:
    """A model whose forward raises at chosen calls: before, within or behind its layers."""

    def __init__(self, model: Transformer, fails: dict[int, type[BaseException]], where: str):
        self.model, self.fails, self.where, self.calls = model, fails, where, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Any) -> torch.Tensor:
        self.calls += 1
        error = self.fails.pop(self.calls, None)
        if error is None:
            return self.model(input_ids, positions, kv)
        if self.where == "within":
            attend = kv.cache.backend.attend

            def raising(*args: Any) -> Any:
                kv.cache.backend.attend = attend
                raise error("simulated")

            kv.cache.backend.attend = raising  # the first layer has written its keys by then
        if self.where != "before":
            self.model(input_ids, positions, kv)
        raise error("simulated")


@pytest.mark.parametrize("where", ["before", "within", "after"])
@pytest.mark.parametrize(
    "options", [{"num_blocks": 13, "max_batch_tokens": 8}, {"prefix_caching": False}]
)
def test_a_forward_that_raises_costs_nothing_but_its_step(
    model: Transformer, where: str, options: dict[str, Any]
) -> None:
    params = replace(SEEDED, max_tokens=5)
    wishes = [params, replace(params, n=3), params, replace(params, n=2)]
    expected = [
        [naive(model, p, w, i) for i in range(w.n)] for p, w in zip(PROMPTS, wishes, strict=False)
    ]
    for fail_at in range(1, 40, 3):
        engine = poisoned_engine(model, block_size=4, max_num_seqs=4, **options)
        fails = {fail_at: RuntimeError, fail_at + 1: KeyboardInterrupt, fail_at + 3: RuntimeError}
        engine.model = flaky = Flaky(model, fails, where)  # type: ignore[assignment]
        handles = [engine.add(p, w) for p, w in zip(PROMPTS, wishes, strict=False)]
        groups = [engine._groups[handle.id].samples for handle in handles]
        raised = 0
        while engine.has_unfinished():
            try:
                engine.step()
            except (RuntimeError, KeyboardInterrupt):
                raised += 1
            engine.check()
        assert [[s.output_token_ids for s in group] for group in groups] == expected
        assert is_idle(engine)
        if flaky.calls < fail_at:
            return
        assert raised
    raise AssertionError("every run failed somewhere")


def test_an_interrupted_generate_leaves_nothing_behind(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, max_num_seqs=3)
    other = engine.add(PROMPTS[5], SEEDED, request_id="other")
    for fail_at in (1, 2, 5):
        engine.model = Flaky(model, {fail_at: KeyboardInterrupt}, "within")  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:4], replace(SEEDED, n=2))
        engine.check()
        assert {r.id for r in (*engine.scheduler.running, *engine.scheduler.waiting)} == {"other"}
    deltas = run(engine)
    assert deltas.keys() == {("other", 0)}
    assert other.output_token_ids == naive(model, PROMPTS[5], SEEDED)
    assert tokens_of(engine.generate(PROMPTS, SEEDED)) == [naive(model, p, SEEDED) for p in PROMPTS]


def test_a_stream_in_which_a_step_raises_ends_and_others_go_on(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4)
    first, second = engine.stream(PROMPTS[0], SEEDED), engine.stream(PROMPTS[1], SEEDED)
    got = joined([next(first)])
    engine.model = Flaky(model, {2: RuntimeError}, "within")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="simulated"):
        list(second)
    assert list(second) == []
    assert got + joined(first) == naive(model, PROMPTS[0], SEEDED)
    assert is_idle(engine)


# Prefix cache and tenants ----------------------------------------------------------------------


def test_a_cached_prefix_is_invisible_behind_another_salt(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4)

    def cached(salt: str | None) -> int:
        handle = engine.add(PROMPTS[3], GREEDY, cache_salt=salt)
        run(engine)
        assert handle.output_token_ids == naive(model, PROMPTS[3], GREEDY)
        return handle.metrics.cached_tokens

    for salt in (None, "a", "b", "", "A"):
        assert cached(salt) == 0
        assert cached(salt) == 28  # 32 tokens, the last block is computed
    assert engine.stats().cached_tokens == 5 * 28


def test_an_error_in_the_prompt_is_not_found_by_others(model: Transformer) -> None:
    """Blocks of a request that ended with an error may hold anything."""
    engine = poisoned_engine(model, block_size=4)
    sampler = engine.sampler
    engine.sampler = lambda logits, rows: sampler(logits * math.nan, rows)  # type: ignore[assignment]
    assert engine.generate(PROMPTS[3], GREEDY)[0].finish_reason == "error"
    engine.sampler = sampler
    (completion,) = engine.generate(PROMPTS[3], GREEDY)
    assert completion.metrics.cached_tokens == 0


# Numbers ---------------------------------------------------------------------------------------


def test_times_and_counts_of_a_request_are_in_order(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, num_blocks=13, max_num_seqs=4)
    before = time.monotonic()
    completions = engine.generate([PROMPTS[3], *PROMPTS], replace(SEEDED, max_tokens=8))
    after = time.monotonic()
    for c in completions:
        m = c.metrics
        assert m.first_token is not None and m.finished is not None
        assert before <= m.arrival <= m.first_token < m.finished <= after
        assert 0 <= m.cached_tokens < len(c.prompt_token_ids)
        assert m.cached_tokens % 4 == 0
    stats = engine.stats()
    assert sum(c.metrics.preemptions for c in completions) == stats.num_preemptions > 0
    assert sum(c.metrics.cached_tokens for c in completions) == stats.cached_tokens
    assert stats.generated_tokens == sum(len(c.token_ids) for c in completions) == 7 * 8


def test_stats_tell_what_is_going_on(model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, num_blocks=20, max_num_seqs=2, max_model_len=40)
    for p in PROMPTS[:3]:
        engine.add(p, replace(GREEDY, max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 1, 1)
    assert stats.computed_tokens == 5 + 17 and stats.generated_tokens == 2
    assert stats.blocks.live == 2 + 5 and stats.blocks.total == 20
    run(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks.live) == (0, 0, 0)
    # a request's last token is never computed
    assert stats.computed_tokens == sum(len(p) + 2 for p in PROMPTS[:3])
    assert stats.kv_cache_bytes == 20 * 4 * engine.kv.cache.spec.bytes_per_token


def test_usage_counts_ids_not_text(speaker: Transformer, tokenizer: Tokenizer) -> None:
    engine = poisoned_engine(speaker, tokenizer)
    deltas = list(engine.stream("the ", replace(SEEDED, max_tokens=40, ignore_eos=True)))
    assert sum(len(delta.token_ids) for delta in deltas) == 40
    text = "".join(delta.text for delta in deltas)
    assert len(tokenizer.encode(text)) != 40


def test_a_step_record_replays_what_happened(model: Transformer) -> None:
    engine = poisoned_engine(
        model, block_size=4, num_blocks=13, max_num_seqs=3, max_batch_tokens=8, record_steps=True
    )
    completions = engine.generate(PROMPTS, GREEDY)
    outputs: dict[str, list[int]] = {}
    for number, step in enumerate(engine.steps):
        assert step.step == number and step.seconds > 0 and step.blocks.total == 13
        assert sum(chunk.length for chunk in step.chunks) <= 8
        assert step.tables.keys() == set(step.running)
        for chunk in step.chunks:
            if chunk.token is not None:
                outputs.setdefault(chunk.request, []).append(chunk.token)
    assert outputs == {c.request_id: list(c.token_ids) for c in completions}
    assert [name for step in engine.steps for name in step.finished] == sorted(
        outputs, key=lambda name: next(s.step for s in engine.steps if name in s.finished)
    )
    assert sum(len(step.preempted) for step in engine.steps) == engine.stats().num_preemptions
    assert not poisoned_engine(model).steps


def test_an_engine_says_how_many_requests_fit(model: Transformer) -> None:
    text = poisoned_engine(model, block_size=16, num_blocks=100, max_model_len=200).kv.describe()
    bytes_per_token = 2 * 2 * 2 * 8 * 8  # key and value, layers, KV heads, head size, float64
    assert f"{100 * 16 * bytes_per_token / 1024:.4g} KiB" in text
    assert "100 blocks of 16 tokens" in text and "1,600 tokens" in text
    assert "7 requests of 200" in text  # 13 blocks each


# Bad input -------------------------------------------------------------------------------------

BAD_CALLS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "id beyond the vocabulary": (lambda e: e.generate([1, 97]), "0 to 96, got 97"),
    "negative id": (lambda e: e.generate([[1, -1]]), "0 to 96, got -1"),
    "huge id": (lambda e: e.add([2**70]), "0 to 96"),
    "bool as id": (lambda e: e.generate([True, False]), "ints, got True"),
    "float as id": (lambda e: e.add([1.0]), "ints, got 1.0"),
    "nan as id": (lambda e: e.add([math.nan]), "ints, got nan"),
    "numpy int as id": (lambda e: e.add([np.int64(3)]), "ints, got np.int64"),
    "string as id": (lambda e: e.add(["a"]), "ints, got 'a'"),
    "None as id": (lambda e: e.add([1, None]), "ints, got None"),
    "nested ids": (lambda e: e.add([[1]]), "ints, got"),
    "empty prompt": (lambda e: e.generate([[]]), "prompt must hold at least one"),
    "empty prompt added": (lambda e: e.add([]), "prompt must hold at least one"),
    "empty prompt among others": (lambda e: e.generate([[1], [], [2]]), "at least one"),
    "a prompt as long as the context": (lambda e: e.add([1] * 512), "at most 511 .*got 512"),
    "an endless prompt": (lambda e: e.add([1] * 10**6), "at most 511 .*got 1000000"),
    "text without a tokenizer": (lambda e: e.generate("hello"), "prompt .*no tokenizer"),
    "texts without a tokenizer": (lambda e: e.generate(["hello"]), "prompt .*no tokenizer"),
    "chat without a tokenizer": (lambda e: e.chat([]), "messages need a tokenizer"),
    "stop without a tokenizer": (
        lambda e: e.add([1], SamplingParams(stop="a")),
        "stop needs a tokenizer",
    ),
    "None as prompt": (lambda e: e.add(None), "prompt must be .*got NoneType"),
    "None as prompts": (lambda e: e.generate(None), "prompts must be .*got NoneType"),
    "an int as prompt": (lambda e: e.generate(5), "prompts must be .*got int"),
    "bytes as prompt": (lambda e: e.generate(b"hello"), "prompts must be .*got bytes"),
    "a generator of prompts": (lambda e: e.generate(p for p in [[1]]), "prompts .*got generator"),
    "a dict": (lambda e: e.generate({"prompt": [1]}), "prompts must be .*got dict"),
    "a tensor": (lambda e: e.generate(torch.tensor([1, 2])), "prompts must be .*got Tensor"),
    "an array": (lambda e: e.generate(np.array([1, 2])), "prompts must be .*got ndarray"),
    "an array among prompts": (lambda e: e.generate([np.array([1])]), "prompt .*got ndarray"),
    "an id among prompts": (lambda e: e.generate([[1], 5]), "prompt must be .*got int"),
    "fewer params than prompts": (
        lambda e: e.generate([[1], [2]], [GREEDY]),
        "params must be one or 2.*got 1",
    ),
    "params for one prompt": (lambda e: e.generate([1, 2], [GREEDY, GREEDY]), "params .*got 2"),
    "a dict as params": (lambda e: e.add([1], {"n": 1}), "params must be .*got dict"),
    "one of the params is wrong": (
        lambda e: e.generate([[1], [2]], [GREEDY, 5]),
        "params must be .*got int",
    ),
    "stop id beyond the vocabulary": (
        lambda e: e.add([1], SamplingParams(stop_token_ids=[97])),
        "stop_token_ids .*got 97",
    ),
    "bias beyond the vocabulary": (
        lambda e: e.add([1], SamplingParams(logit_bias={1000: 1.0})),
        "logit_bias .*got 1000",
    ),
    "n without end": (lambda e: e.add([1], SamplingParams(n=10**9)), "n must be"),
    "a number as request id": (lambda e: e.add([1], request_id=5), "request_id .*got 5"),
    "an endless request id": (lambda e: e.add([1], request_id="x" * 10**6), "request_id .*256"),
    "half a character as request id": (lambda e: e.add([1], request_id="\ud800"), "request_id"),
    "half a character as salt": (lambda e: e.add([1], cache_salt="a\udfff"), "cache_salt"),
    "a number as salt": (lambda e: e.add([1], cache_salt=5), "cache_salt .*got 5"),
    "a float as priority": (lambda e: e.add([1], priority=1.5), "priority .*got 1.5"),
    "a bool as priority": (lambda e: e.add([1], priority=True), "priority .*got True"),
    "a stream of nothing": (lambda e: e.stream([]), "prompt must hold at least one"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused_before_it_costs_anything(case: str, model: Transformer) -> None:
    engine = poisoned_engine(model, block_size=4, num_blocks=128)
    handle = engine.add(PROMPTS[0], GREEDY)
    engine.step()
    before = engine.stats()
    call, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message) as caught:
        call(engine)
    assert len(str(caught.value)) < 700
    assert engine.stats() == before
    engine.abort(handle.id)
    engine.step()
    assert is_idle(engine)
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert is_idle(engine) and engine.stats().num_steps == 1
    assert tokens_of(engine.generate(PROMPTS[0], GREEDY)) == [naive(model, PROMPTS[0], GREEDY)]


def test_bad_text_is_refused_too(speaker: Transformer, tokenizer: Tokenizer) -> None:
    engine = poisoned_engine(speaker, tokenizer, max_model_len=64)
    began = time.monotonic()
    for prompt, message in {
        "": "at least one",
        "\ud83d": "text must be valid Unicode",
        "a" * 64: "at most 63 tokens .*got 64",
        "a" * 50_000_000: "prompt must be at most .* characters .*got 50000000",
        "\x00": "at least one",  # spelled by no token of this vocabulary
    }.items():
        with pytest.raises(ValueError, match=message):
            engine.generate(prompt)
    assert time.monotonic() - began < 2
    for messages in ([], "hi", [{"role": "user"}], [{"role": "user", "content": 5}], None):
        with pytest.raises(ValueError, match=r"messages|content"):
            engine.chat(messages)  # type: ignore[arg-type]
    assert is_idle(engine) and engine.stats().num_steps == 0


BAD_ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "no request at once": ({"max_num_seqs": 0}, "max_num_seqs .*>= 1, got 0"),
    "half a request at once": ({"max_num_seqs": 1.5}, "max_num_seqs .*got 1.5"),
    "a bool of requests": ({"max_num_seqs": True}, "max_num_seqs .*got True"),
    "fewer tokens than requests": (
        {"max_num_seqs": 64, "max_batch_tokens": 63},
        "max_batch_tokens .*>= 64, got 63",
    ),
    "no context": ({"max_model_len": 1}, "max_model_len .*from 2 to 512, got 1"),
    "more context than the model's": ({"max_model_len": 513}, "max_model_len .*got 513"),
    "empty blocks": ({"block_size": 0}, "block_size .*got 0"),
    "negative blocks": ({"block_size": -4}, "block_size .*got -4"),
    "no blocks": ({"num_blocks": 0}, "num_blocks .*got 0"),
    "blocks as text": ({"num_blocks": "12"}, "num_blocks .*got '12'"),
    "no bytes": ({"kv_cache_bytes": 0}, "kv_cache_bytes .*got 0"),
    "bytes as float": ({"kv_cache_bytes": 1e9}, "kv_cache_bytes .*got 1000000000.0"),
    "both sizes": ({"kv_cache_bytes": 10**6, "num_blocks": 9}, "kv_cache_bytes and num_blocks"),
    "too few bytes for a token": ({"kv_cache_bytes": 100}, "KV memory must hold"),
    "too few blocks for the context asked": (
        {"num_blocks": 6, "max_model_len": 100},
        "must hold a request of max_model_len=100 tokens .*room for 96",
    ),
    "a memory of one token": ({"num_blocks": 1, "block_size": 1}, "KV memory must hold"),
    "slots too small": ({"kv_layout": "slots", "kv_cache_bytes": 1000}, "KV memory must hold"),
    "more than the machine has": ({"num_blocks": 10**9}, "num_blocks .*must fit"),
    "more than can be counted": ({"num_blocks": 10**30}, "num_blocks .*must fit"),
    "an unknown layout": ({"kv_layout": "pages"}, "kv_layout .*paged, slots.*got 'pages'"),
    "an unknown backend": ({"attention_backend": "fast"}, "attention_backend .*got 'fast'"),
    "no backend": ({"attention_backend": None}, "attention_backend .*got None"),
    "an unknown policy": ({"policy": "luck"}, "policy .*got 'luck'"),
    "unknown batching": ({"batching": "dynamic"}, "batching .*got 'dynamic'"),
    "yes": ({"prefix_caching": "yes"}, "prefix_caching must be True or False, got 'yes'"),
}


@pytest.mark.parametrize("case", BAD_ENGINES)
def test_an_engine_that_cannot_work_is_refused(case: str, model: Transformer) -> None:
    options, message = BAD_ENGINES[case]
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


def test_unknown_options_are_refused(model: Transformer) -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        Engine(model, max_seqs=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="quantization"):
        Engine.from_pretrained("nowhere", quantization="int3")


@pytest.mark.parametrize("options", [{"num_blocks": 10}, {"kv_cache_bytes": 160 * 512}])
def test_the_context_shrinks_to_what_memory_holds(
    model: Transformer, options: dict[str, Any]
) -> None:
    engine = Engine(model, **options)  # 512 bytes a token
    assert engine.max_model_len == 160
    (completion,) = engine.generate(PROMPTS[0], replace(GREEDY, max_tokens=1000))
    assert len(completion.token_ids) == 155 and completion.stop_reason == CONTEXT_FULL
    with pytest.raises(ValueError, match="at most 159 tokens"):
        engine.add([1] * 160)


def test_memory_is_not_reserved_beyond_use(model: Transformer) -> None:
    engine = Engine(model, max_num_seqs=2, kv_cache_bytes=10**9)
    assert engine.kv.cache.num_blocks == 2 * 512 // 16
    assert Engine(model, max_num_seqs=2, kv_layout="slots").kv.cache.num_blocks == 2
    assert SMALL.max_position_embeddings == 512
