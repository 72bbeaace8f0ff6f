"""What a run is worth, from the times of its tokens.

    arrival          token 1      2      3              4          t
       |---------------|----------|------|--------------|---------->
       |     TTFT      |   gap    | gap  |     gap      |            gaps: ITL, their mean: TPOT
       |                    latency                     |

    TTFT     time to first token: how long a reader looks at nothing
    ITL      inter-token latency: each gap between two tokens, of all requests together
    TPOT     time per output token: the mean gap of one request
    latency  end to end, from arrival to the last token

Throughput counts tokens and requests of the whole run over its whole length, start-up and the last
stragglers included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infer_lab.bench.runners import Record, Run


def ttft(record: Record) -> float:
    """Seconds from arrival to the first token."""
    return record.token_times[0] - record.arrival


def gaps(record: Record) -> list[float]:
    """Seconds between each two neighbouring tokens; one fewer than there are tokens."""
    return [after - before for before, after in pairwise(record.token_times)]


def tpot(record: Record) -> float | None:
    """The mean gap in seconds; None for an answer of one token, which has none."""
    times = record.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def latency(record: Record) -> float:
    """Seconds from arrival to the last token."""
    return record.token_times[-1] - record.arrival


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of the values that at least `percent` % of them don't exceed (nearest rank).

    It is one of the values, never a mean of two; of fewer than 100 values p99 is the largest.

    Raises ValueError for no values or a percentage outside 0 < percent <= 100.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("values must not be empty")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, got {percent}")
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


@dataclass(frozen=True)
class Distribution:
    """Many values in a few numbers, in the values' unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        values = sorted(values)
        if not values:
            return None
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(len(values), math.fsum(values) / len(values), p50, p90, p99, values[-1])


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Times are in seconds."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompts, that needed no computing
    preemptions: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts and answers
    ttft: Distribution | None
    itl: Distribution | None  # None if no answer has two tokens
    tpot: Distribution | None
    latency: Distribution | None
    ttft_cold: Distribution | None  # of requests that found nothing cached
    ttft_warm: Distribution | None  # of those that did


def summarize(run: Run) -> Summary:
    """All metrics of a run."""
    records = run.records
    prompt_tokens = sum(record.prompt_len for record in records)
    output_tokens = sum(len(record.token_ids) for record in records)
    means = (tpot(record) for record in records)
    return Summary(
        num_requests=len(records),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in records),
        preemptions=sum(record.preemptions for record in records),
        seconds=run.seconds,
        requests_per_s=_per_second(len(records), run),
        output_tokens_per_s=_per_second(output_tokens, run),
        total_tokens_per_s=_per_second(prompt_tokens + output_tokens, run),
        ttft=Distribution.of(map(ttft, records)),
        itl=Distribution.of(gap for record in records for gap in gaps(record)),
        tpot=Distribution.of(mean for mean in means if mean is not None),
        latency=Distribution.of(map(latency, records)),
        ttft_cold=Distribution.of(ttft(each) for each in records if not each.cached_tokens),
        ttft_warm=Distribution.of(ttft(each) for each in records if each.cached_tokens),
    )


@dataclass(frozen=True)
class Objective:
    """What a user finds fast enough, in seconds (a service-level objective)."""

    ttft: float = math.inf
    itl: float = math.inf  # for every single gap: each stutter is seen
    tpot: float = math.inf  # for their mean

    def is_met(self, record: Record) -> bool:
        """Whether one request was fast enough in all respects."""
        return (
            ttft(record) <= self.ttft
            and all(gap <= self.itl for gap in gaps(record))
            and (tpot(record) or 0.0) <= self.tpot
        )


def attainment(run: Run, objective: Objective) -> float:
    """The share of requests that meet an objective, from 0 to 1."""
    return sum(map(objective.is_met, run.records)) / len(run.records)


def goodput(run: Run, objective: Objective) -> float:
    """Requests per second that meet an objective; slow ones count nothing."""
    return _per_second(sum(map(objective.is_met, run.records)), run)


def _per_second(count: int, run: Run) -> float:
    if run.seconds <= 0:
        raise ValueError("the run took no time: on a simulated clock, take a PacedEngine")
    return count / run.seconds


@dataclass(frozen=True)
class LoadPoint:
    """What became of one offered load."""

    rate: float  # requests per second that arrived
    summary: Summary
    goodput: float  # requests per second


def saturation_curve(
    run_at: Callable[[float], Run], rates: Sequence[float], objective: Objective | None = None
) -> list[LoadPoint]:
    """Run one load after the other, the lightest first.

    run_at: gives a run in an open loop at a rate in requests per second.

    Below saturation throughput follows the rate and latency stays; above it throughput stays and
    latency grows for as long as the load lasts.
    """
    objective = Objective() if objective is None else objective
    runs = [(rate, run_at(rate)) for rate in sorted(rates)]
    return [LoadPoint(rate, summarize(run), goodput(run, objective)) for rate, run in runs]
