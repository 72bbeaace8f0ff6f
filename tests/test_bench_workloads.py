"""Workloads: the same for the same seed, of the distribution they claim, and traces read right."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from infer_lab import Engine
from infer_lab.bench import (
    Job,
    check_fits,
    closed_loop,
    poisson_arrivals,
    ragged,
    random_prompts,
    shared_prefix,
    summarize,
)
from infer_lab.bench.traces import TraceRow, fit, read_azure, read_mooncake, read_trace
from infer_lab.model.transformer import Transformer

MAKERS: dict[str, Callable[..., list[Job]]] = {
    "random": lambda **how: random_prompts(20, 12, 5, vocab_size=97, **how),
    "shared-prefix": lambda **how: shared_prefix(20, 8, 4, 5, vocab_size=97, **how),
    "ragged": lambda **how: ragged(20, 12, (2, 9), vocab_size=97, **how),
}


def prompts(jobs: list[Job]) -> list[tuple[int, ...]]:
    return [job.prompt_token_ids for job in jobs]


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_decides_everything(name: str) -> None:
    make = MAKERS[name]
    assert make(seed=3, rate=2.0) == make(seed=3, rate=2.0)
    assert not {*prompts(make(seed=3))} & {*prompts(make(seed=4))}
    assert len({*prompts(make(seed=3))}) == 20


@pytest.mark.parametrize("name", MAKERS)
def test_another_rate_leaves_prompts_and_lengths_as_they_are(name: str) -> None:
    make = MAKERS[name]
    slow, fast, at_once = make(rate=1.0), make(rate=4.0), make()
    assert prompts(slow) == prompts(fast) == prompts(at_once)
    assert [job.output_len for job in slow] == [job.output_len for job in at_once]
    assert [job.arrival for job in slow] == pytest.approx([4 * job.arrival for job in fast])
    assert {job.arrival for job in at_once} == {0.0}


def test_workloads_leave_the_global_generator_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    for make in MAKERS.values():
        make(rate=1.0)
    assert random.random() == expected


def test_lengths_are_those_asked_for() -> None:
    for job in random_prompts(3, 12, 5, vocab_size=97):
        assert len(job.prompt_token_ids) == 12 and job.output_len == 5
    jobs = shared_prefix(5, 8, 4, 6, vocab_size=97)
    assert len({job.prompt_token_ids[:8] for job in jobs}) == 1
    assert len({job.prompt_token_ids[8:] for job in jobs}) == 5
    assert {(len(job.prompt_token_ids), job.output_len) for job in jobs} == {(12, 6)}


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    counts = Counter(random_prompts(1, 20_000, 1, vocab_size=50)[0].prompt_token_ids)
    assert {*counts} == {*range(50)}
    assert stats.chisquare([*counts.values()]).pvalue > 1e-3


def test_ragged_answers_have_all_lengths_alike() -> None:
    counts = Counter(job.output_len for job in ragged(5_000, 1, (8, 40), vocab_size=9))
    assert {*counts} == {*range(8, 41)}
    assert stats.chisquare([*counts.values()]).pvalue > 1e-3


def test_arrivals_are_poisson() -> None:
    times = poisson_arrivals(20_000, 4.0)
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all() and times == sorted(times)
    assert stats.kstest(gaps, "expon", args=(0, 1 / 4)).pvalue > 1e-3
    per_second = np.bincount([int(time) for time in times])[: int(times[-1])]
    assert per_second.mean() == pytest.approx(4, rel=0.05)
    assert per_second.var() == pytest.approx(4, rel=0.1)  # a Poisson's variance is its mean
    expected = stats.poisson.pmf(range(10), 4) * len(per_second)
    seen = [int((per_second == k).sum()) for k in range(10)]
    rest = len(per_second) - sum(seen), len(per_second) - sum(expected)
    assert stats.chisquare([*seen, rest[0]], [*expected, rest[1]]).pvalue > 1e-3
    correlation = np.corrcoef(gaps[:-1], gaps[1:])[0, 1]
    assert abs(correlation) < 0.03  # a gap says nothing about the next one


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: random_prompts(0, 1, 1, vocab_size=9), "num_prompts must be >= 1, got 0"),
        (lambda: random_prompts(1, 0, 1, vocab_size=9), "input_len must be >= 1, got 0"),
        (lambda: random_prompts(1, 1, -1, vocab_size=9), "output_len must be >= 1, got -1"),
        (lambda: shared_prefix(1, 0, 1, 1, vocab_size=9), "prefix_len must be >= 1"),
        (lambda: ragged(1, 1, (0, 4), vocab_size=9), "output_lens must be >= 1"),
        (lambda: ragged(1, 1, (5, 4), vocab_size=9), r"must be \(shortest, longest\)"),
        (lambda: random_prompts(1, 1, 1, vocab_size=9, rate=0.0), "rate must be > 0"),
        (lambda: random_prompts(1, 1, 1, vocab_size=9, rate=float("nan")), "rate must be > 0"),
        (lambda: check_fits([Job(0, (1,) * 9, 4)], 12), r"at most 12 tokens .* got 9 \+ 4"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def test_what_fits_is_let_through() -> None:
    check_fits([Job(0, (1,) * 9, 3)], 12)


# Traces ----------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 99]},
    {"timestamp": 4500, "input_length": 600, "output_length": 1, "hash_ids": [5, 6]},
]


def write(path: Path, content: str | list[Any]) -> Path:
    if not isinstance(content, str):
        content = "\n".join(json.dumps(line) for line in content) + "\n"
    path.write_text(content, encoding="utf-8")
    return path


def test_azure_rows_are_read(tmp_path: Path) -> None:
    rows = read_azure(write(tmp_path / "trace.csv", AZURE))
    assert [(row.input_len, row.output_len) for row in rows] == [(4808, 10), (3180, 8), (110, 27)]
    assert [b.arrival - a.arrival for a, b in pairwise(rows)] == pytest.approx([0.052, 1.948])
    assert all(row.hash_ids == () for row in rows)


def test_columns_may_come_in_any_order_and_with_others(tmp_path: Path) -> None:
    text = "Id,GeneratedTokens,TIMESTAMP,ContextTokens\r\n7,3,2024-05-10 00:00:00+00:00,5\r\n"
    (row,) = read_azure(write(tmp_path / "trace.csv", text))
    assert (row.input_len, row.output_len) == (5, 3)


def test_mooncake_rows_are_read(tmp_path: Path) -> None:
    rows = read_mooncake(write(tmp_path / "trace.jsonl", MOONCAKE))
    assert rows[1] == TraceRow(3.0, 1030, 26, (46, 47, 99))


def test_the_format_is_recognised(tmp_path: Path) -> None:
    azure, mooncake = write(tmp_path / "a", AZURE), write(tmp_path / "b", MOONCAKE)
    assert read_trace(azure) == read_azure(azure)
    assert read_trace(mooncake) == read_mooncake(mooncake)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "line 1: it must name the column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "line 1: it must name the column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "must hold at least one request"),
        (AZURE + "\n2023-11-16 18:17:09,110", "line 5: GeneratedTokens must be an integer"),
        (AZURE + "\nyesterday,110,4", "line 5: TIMESTAMP must be a time, got 'yesterday'"),
        (AZURE + "\n2023-11-16 18:17:09,-3,4", "line 5: ContextTokens .* >= 0, got -3"),
        (AZURE + "\n2023-11-16 18:17:09,3.5,4", "line 5: ContextTokens .* got '3.5'"),
    ],
)
def test_a_broken_azure_line_is_named(content: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"trace.csv.*{named}"):
        read_azure(write(tmp_path / "trace.csv", content))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"timestamp": 1', "line 2: it must be JSON"),
        ("[1, 2]", "line 2: it must be a JSON object, got "),
        ('{"input_length": 5, "output_length": 2}', "line 2: timestamp must be .* got None"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 2}', "line 2: timestamp"),
        ('{"timestamp": 1, "input_length": "5", "output_length": 2}', "line 2: input_length .*'5'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": true}', "line 2: output_length"),
        ('{"timestamp": 1, "input_length": 5}', "line 2: output_length .* got None"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1]}',
            "line 2: hash_ids must be one for each 512 of 600 tokens, got 1",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": ["x"]}',
            "line 2: hash_ids must be a list of integers",
        ),
    ],
)
def test_a_broken_mooncake_line_is_named(line: str, named: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", json.dumps(MOONCAKE[0]) + "\n" + line)
    with pytest.raises(ValueError, match=rf"trace.jsonl, {named}"):
        read_mooncake(path)


def test_blank_lines_and_missing_hash_ids_are_no_fault(tmp_path: Path) -> None:
    text = '{"timestamp": 1, "input_length": 5, "output_length": 2}\n\n'
    (row,) = read_mooncake(write(tmp_path / "trace.jsonl", text))
    assert row.hash_ids == ()


ROWS = [TraceRow(7.0, 1200, 52, (46, 47, 48)), TraceRow(10.0, 1030, 26, (46, 47, 99)),
        TraceRow(8.0, 600, 0)]  # fmt: skip


def test_without_scaling_a_trace_is_taken_as_it_is() -> None:
    first, second, third = fit(ROWS, vocab_size=97, max_model_len=2000)
    assert [job.arrival for job in (first, second, third)] == [0.0, 1.0, 3.0]
    lengths = [(len(job.prompt_token_ids), job.output_len) for job in (first, second, third)]
    assert lengths == [(1200, 52), (600, 1), (1030, 26)]  # an answer has at least a token


def test_equal_hash_ids_are_equal_tokens() -> None:
    first, other, second = (
        job.prompt_token_ids for job in fit(ROWS, vocab_size=97, max_model_len=2000)
    )
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert first[:512] != first[512:1024] and other[:512] not in (first[:512], first[512:1024])
    again = fit(ROWS, vocab_size=97, max_model_len=2000, seed=1)
    assert again[0].prompt_token_ids[:512] != first[:512]


def test_all_is_shrunk_alike_to_fit() -> None:
    jobs = fit(ROWS, vocab_size=97, max_model_len=120)
    lengths = [(len(job.prompt_token_ids), job.output_len) for job in jobs]
    assert all(sum(each) <= 120 for each in lengths)
    assert lengths[0][0] / lengths[2][0] == pytest.approx(1200 / 1030, rel=0.05)
    shared = int(1024 * 119 / 1252)
    assert jobs[0].prompt_token_ids[:shared] == jobs[2].prompt_token_ids[:shared]
    assert jobs[0].prompt_token_ids[: shared + 1] != jobs[2].prompt_token_ids[: shared + 1]


def test_every_context_from_2_tokens_on_can_hold_a_shrunk_trace() -> None:
    for max_model_len in (*range(2, 60), 500, 1251, 1252, 1253):
        for job in fit(ROWS, vocab_size=97, max_model_len=max_model_len):
            assert 2 <= len(job.prompt_token_ids) + job.output_len <= max_model_len


def test_time_and_count_can_be_scaled() -> None:
    jobs = fit(ROWS, vocab_size=97, max_model_len=2000, time_scale=2.5, limit=2)
    assert [job.arrival for job in jobs] == [0.0, 2.5]


def test_a_scale_at_which_some_do_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"length_scale must be at most 0\.\d+ .* got 0.5") as info:
        fit(ROWS, vocab_size=97, max_model_len=300, length_scale=0.5)
    largest = float(str(info.value).split("at most ")[1].split()[0])
    assert fit(ROWS, vocab_size=97, max_model_len=300, length_scale=largest)


@pytest.mark.parametrize("name", ["time_scale", "length_scale", "limit"])
def test_scales_and_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        fit(ROWS, vocab_size=97, max_model_len=300, **{name: 0})


def test_a_prefix_cache_finds_what_the_trace_shares(small_model: Transformer) -> None:
    engine = Engine(small_model, num_blocks=200, block_size=4)
    jobs = fit(ROWS, vocab_size=97, max_model_len=240)
    summary = summarize(closed_loop(engine, jobs, 1))
    assert summary.cached_tokens == int(1024 * 239 / 1252) // 4 * 4
