"""Metrics of timelines made by hand, where every number is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from infer_lab.bench import (
    Distribution,
    Objective,
    Record,
    Run,
    attainment,
    gaps,
    goodput,
    latency,
    percentile,
    saturation_curve,
    summarize,
    tpot,
    ttft,
)


def record(arrival: float, *times: float, prompt_len: int = 10, cached: int = 0) -> Record:
    return Record(arrival, times, tuple(range(len(times))), prompt_len, cached)


FAST = record(0.0, 1.0, 1.5, 2.5)
LATE = record(1.0, 4.0, 4.25, prompt_len=20, cached=16)
SHORT = record(2.0, 8.0)  # one token: no gap
RUN = Run((FAST, LATE, SHORT))


def test_times_of_one_request() -> None:
    assert [ttft(r) for r in RUN.records] == [1.0, 3.0, 6.0]
    assert [gaps(r) for r in RUN.records] == [[0.5, 1.0], [0.25], []]
    assert [tpot(r) for r in RUN.records] == [0.75, 0.25, None]
    assert [latency(r) for r in RUN.records] == [2.5, 3.25, 6.0]


def test_several_tokens_at_one_moment_have_gaps_of_zero() -> None:
    burst = record(0.0, 1.0, 1.0, 1.0, 4.0)
    assert gaps(burst) == [0.0, 0.0, 3.0]
    assert tpot(burst) == 1.0


def test_a_run_in_numbers() -> None:
    summary = summarize(RUN)
    assert (summary.num_requests, summary.prompt_tokens, summary.output_tokens) == (3, 40, 6)
    assert summary.cached_tokens == 16
    assert summary.seconds == 8.0  # to the last token, not from the first
    assert summary.requests_per_s == 3 / 8
    assert summary.output_tokens_per_s == 6 / 8
    assert summary.total_tokens_per_s == 46 / 8
    assert summary.ttft == Distribution(3, 10 / 3, 3.0, 6.0, 6.0, 6.0)
    assert summary.itl == Distribution(3, 1.75 / 3, 0.5, 1.0, 1.0, 1.0)
    assert summary.tpot == Distribution(2, 0.5, 0.25, 0.75, 0.75, 0.75)
    assert summary.latency == Distribution(3, 11.75 / 3, 3.25, 6.0, 6.0, 6.0)


def test_answers_of_one_token_have_no_inter_token_latency() -> None:
    summary = summarize(Run((SHORT,)))
    assert summary.itl is None and summary.tpot is None


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [15, 20, 35, 40, 50]
    assert [percentile(values, p) for p in (5, 20, 30, 40, 50, 100)] == [15, 15, 20, 20, 35, 50]
    assert percentile(reversed(values), 40) == 20
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 100), 99) == 99  # fewer than 100: the largest
    drawn = np.random.default_rng(0).random(997)
    for p in (0.1, 50, 90, 99, 99.9, 100):
        assert percentile(drawn, p) == np.percentile(drawn, p, method="inverted_cdf")


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_a_percentage_out_of_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percent must be"):
        percentile([1.0], percent)


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="values must not be empty"):
        percentile([], 50)
    assert Distribution.of([]) is None


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        (Objective(), 3),
        (Objective(ttft=3.0), 2),
        (Objective(ttft=2.9), 1),
        (Objective(itl=1.0), 3),
        (Objective(itl=0.9), 2),  # a single gap too long is seen
        (Objective(tpot=0.75), 3),
        (Objective(tpot=0.7), 2),
        (Objective(ttft=1.0, itl=0.25), 0),
    ],
)
def test_goodput_counts_requests_that_were_fast_in_all_respects(
    objective: Objective, met: int
) -> None:
    assert goodput(RUN, objective) == met / 8
    assert attainment(RUN, objective) == met / 3


def test_a_saturation_curve_runs_the_lightest_load_first() -> None:
    ran = []

    def run_at(rate: float) -> Run:
        ran.append(rate)
        return Run(tuple(record(i / rate, i / rate + rate) for i in range(4)))

    points = saturation_curve(run_at, [4.0, 1.0, 2.0], Objective(ttft=2.0))
    assert ran == [1.0, 2.0, 4.0] == [point.rate for point in points]
    assert [point.summary.ttft.p99 for point in points] == [1.0, 2.0, 4.0]
    assert [math.isclose(p.goodput, p.summary.requests_per_s) for p in points[:2]] == [True] * 2
    assert points[2].goodput == 0.0


def test_a_run_without_duration_has_no_rates() -> None:
    with pytest.raises(ValueError, match="took no time"):
        summarize(Run((record(0.0, 0.0),)))
