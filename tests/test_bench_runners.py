"""Runners on a simulated clock: every time is known in advance."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from naive import GREEDY, naive

from conftest import random_model
from infer_lab import Engine
from infer_lab.bench import (
    Job,
    PacedEngine,
    SimulatedClock,
    WallClock,
    closed_loop,
    gaps,
    latency,
    open_loop,
    random_prompts,
    shared_prefix,
    summarize,
    ttft,
)
from infer_lab.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model()


def paced(model: Transformer, **options: object) -> PacedEngine:
    """Every step takes a second, and each token that it computes a thousandth more."""
    engine = Engine(model, num_blocks=64, block_size=4, **options)
    return PacedEngine(engine, SimulatedClock(), lambda tokens: 1 + tokens / 1000)


def jobs(*parts: tuple[float, int, int]) -> list[Job]:
    """Jobs from (arrival, prompt length, output length), all prompts different."""
    return [
        Job(arrival, tuple((17 * i + j) % 97 for j in range(length)), output_len)
        for i, (arrival, length, output_len) in enumerate(parts)
    ]


def test_all_at_once_is_one_batch(model: Transformer) -> None:
    engine = paced(model)
    run = closed_loop(engine, jobs((5.0, 3, 2), (9.0, 5, 3)), clock=engine.clock)
    assert [record.arrival for record in run.records] == [0.0, 0.0]  # it asks when it likes
    assert run.records[0].token_times == pytest.approx((1.008, 2.010))
    assert run.records[1].token_times == pytest.approx((1.008, 2.010, 3.011))
    assert run.seconds == pytest.approx(3.011)


def test_a_closed_loop_keeps_so_many_in_flight_and_no_more(model: Transformer) -> None:
    engine = paced(model, prefix_caching=False)
    work = jobs((0, 2, 2), (0, 2, 4), (0, 2, 2), (0, 2, 1))
    run = closed_loop(engine, work, concurrency=2, clock=engine.clock)
    arrivals = [record.arrival for record in run.records]
    ends = [record.token_times[-1] for record in run.records]
    assert arrivals == [0.0, 0.0, ends[0], ends[1]]  # each is sent when another ends
    assert ends[1] == ends[2]
    for moment in [*arrivals, *ends]:
        assert sum(a <= moment < e for a, e in zip(arrivals, ends, strict=True)) <= 2


def test_an_open_loop_sends_at_the_arrival_times(model: Transformer) -> None:
    engine = paced(model)
    run = open_loop(engine, jobs((0.5, 3, 2), (10.0, 4, 1)), clock=engine.clock)
    assert run.records[0].token_times == pytest.approx((1.503, 2.504))
    assert run.records[1].token_times == pytest.approx((11.004,))
    assert [ttft(record) for record in run.records] == pytest.approx([1.003, 1.004])


def test_waiting_counts_from_the_arrival_even_while_the_engine_is_busy(model: Transformer) -> None:
    engine = paced(model)
    engine.seconds = lambda tokens: 10.0
    first, second = open_loop(engine, jobs((0, 3, 1), (1, 4, 1)), clock=engine.clock).records
    assert first.token_times == (10.0,)
    assert second.arrival == 1.0 and second.token_times == (20.0,)
    assert ttft(second) == 19.0  # of which it spent 9 outside, unseen by the engine


def test_an_open_loop_takes_jobs_in_any_order_and_returns_them_in_theirs(
    model: Transformer,
) -> None:
    engine = paced(model)
    run = open_loop(engine, jobs((8.0, 3, 2), (2.0, 5, 1)), clock=engine.clock)
    assert [record.arrival for record in run.records] == [8.0, 2.0]
    assert [record.prompt_len for record in run.records] == [3, 5]
    assert run.records[1].token_times[-1] < run.records[0].token_times[0]


def test_every_answer_has_the_length_asked_for_and_the_tokens_it_must_have(
    model: Transformer,
) -> None:
    work = random_prompts(5, 6, GREEDY.max_tokens, vocab_size=97)
    engine = paced(model, max_num_seqs=2)
    run = closed_loop(engine, work, 3, clock=engine.clock)
    for job, record in zip(work, run.records, strict=True):
        assert list(record.token_ids) == naive(model, job.prompt_token_ids, GREEDY)
        assert len(record.token_times) == GREEDY.max_tokens


def test_end_tokens_do_not_shorten_an_answer() -> None:
    model = random_model()
    prompt = tuple(range(1, 9))
    ends = tuple(naive(model, prompt, GREEDY))
    model.config = replace(model.config, eos_token_ids=ends)
    run = closed_loop(Engine(model, num_blocks=16), [Job(0.0, prompt, GREEDY.max_tokens)])
    assert run.records[0].token_ids == ends


def test_hits_and_preemptions_are_told(model: Transformer) -> None:
    engine = Engine(model, num_blocks=14, block_size=4, max_num_seqs=3)
    work = shared_prefix(3, 8, 4, 12, vocab_size=97)
    summary = summarize(closed_loop(engine, work, 1))
    assert summary.cached_tokens == 16
    assert summarize(closed_loop(engine, jobs(*[(0, 5, 20)] * 3))).preemptions > 0


def test_progress_adds_up_to_all_tokens(model: Transformer) -> None:
    told: list[int] = []
    closed_loop(paced(model), jobs((0, 3, 4), (0, 3, 7)), on_tokens=told.append)
    assert sum(told) == 11


def test_an_answer_that_breaks_off_is_an_error_and_leaves_the_engine_idle(
    model: Transformer,
) -> None:
    engine = Engine(model, num_blocks=64, max_model_len=8)
    with pytest.raises(RuntimeError, match="job 1 ended after 5 of 6 tokens: max_model_len"):
        closed_loop(engine, jobs((0, 2, 6), (0, 3, 6), (0, 2, 6)))
    assert not engine.has_unfinished()
    engine.check()


def test_an_interrupted_run_leaves_the_engine_idle(model: Transformer) -> None:
    engine = Engine(model, num_blocks=64)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_loop(engine, jobs((0, 2, 6), (0, 3, 6)), on_tokens=interrupt)
    assert not engine.has_unfinished()
    engine.check()


def test_bad_arguments_are_refused(model: Transformer) -> None:
    engine = Engine(model, num_blocks=16)
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        closed_loop(engine, jobs((0, 2, 2)), 0)
    for loop in (closed_loop, open_loop):
        with pytest.raises(ValueError, match="jobs must not be empty"):
            loop(engine, [])
    engine.add([1, 2, 3])
    for loop in (closed_loop, open_loop):
        with pytest.raises(ValueError, match="engine must be idle"):
            loop(engine, jobs((0, 2, 2)))


def test_real_time_passes(model: Transformer) -> None:
    began = time.monotonic()
    run = open_loop(Engine(model, num_blocks=16), jobs((0.05, 2, 3)), clock=WallClock())
    assert time.monotonic() - began >= run.seconds >= 0.05
    (record,) = run.records
    assert latency(record) == pytest.approx(ttft(record) + sum(gaps(record)))
