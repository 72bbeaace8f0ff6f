"""Two engines on the same work, in turn, pair by pair.

    round 1   ours  theirs        each pair sees the same machine a moment apart, so what slows
    round 2   theirs  ours        the machine down slows both, and drops out of their ratio;
    round 3   ours  theirs        who goes first changes from round to round

A single ratio says little: the median of several with the least and the largest says how much of
it is chance. Every round has fresh prompts, so that no cache holds them; both engines get the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from infer_lab.bench.metrics import Summary, summarize
from infer_lab.bench.runners import OnTokens, Run, Steppable, closed_loop, open_loop
from infer_lab.bench.workloads import Job

WARM_UP = 8  # tokens of each answer


@dataclass(frozen=True)
class Load:
    """How a workload is sent; see `runners`."""

    is_open: bool = False
    concurrency: int | None = None  # of a closed loop; None: all at once


class Contestant(Protocol):
    """An engine that can be sent a workload."""

    name: str

    def run(self, jobs: Sequence[Job], load: Load, on_tokens: OnTokens | None = None) -> Run: ...


class Ours:
    """An `Engine` as a contestant."""

    def __init__(self, engine: Steppable, name: str = "infer_lab") -> None:
        self.engine = engine
        self.name = name

    def run(self, jobs: Sequence[Job], load: Load, on_tokens: OnTokens | None = None) -> Run:
        """See `runners`."""
        if load.is_open:
            return open_loop(self.engine, jobs, on_tokens=on_tokens)
        return closed_loop(self.engine, jobs, load.concurrency, on_tokens=on_tokens)


def take_turns(
    contestants: Sequence[Contestant],
    make_jobs: Callable[[str], Sequence[Job]],
    rounds: int,
    load: Load | None = None,
    on_tokens: OnTokens | None = None,
) -> dict[str, list[Run]]:
    """Warm all up, then let each run in every round; their runs by name, in the rounds' order.

    make_jobs: the workload from a name for its seed, such as "round-1".
    on_tokens: is told of the measured rounds' tokens.

    Raises ValueError for no rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    load = Load() if load is None else load
    short = [replace(job, output_len=min(job.output_len, WARM_UP)) for job in make_jobs("warm-up")]
    for contestant in contestants:
        contestant.run(short, Load())
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for number in range(1, rounds + 1):
        jobs = make_jobs(f"round-{number}")
        for contestant in contestants if number % 2 else reversed(contestants):
            runs[contestant.name].append(contestant.run(jobs, load, on_tokens))
    return runs


RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
TIMES = ("ttft", "ttft_cold", "ttft_warm", "itl", "latency")


def quantities(summary: Summary) -> dict[str, float]:
    """The numbers that are compared: rates, where more is better, and times, where less is."""
    found = {name: getattr(summary, name) for name in RATES}
    for name in TIMES:
        distribution = getattr(summary, name)
        if distribution is not None:
            found |= {f"{name}_p50": distribution.p50, f"{name}_p99": distribution.p99}
    return found


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs, round by round."""

    median: float
    min: float
    max: float
    pairs: tuple[float, ...]


def ratios(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Ratio]:
    """One ratio for each quantity that both have in all rounds and that is never 0."""
    pairs: dict[str, list[float]] = {}
    for our_run, their_run in zip(ours, theirs, strict=True):
        our, their = quantities(summarize(our_run)), quantities(summarize(their_run))
        for name in our:
            if their.get(name):
                pairs.setdefault(name, []).append(our[name] / their[name])
    return {
        name: Ratio(statistics.median(each), min(each), max(each), tuple(each))
        for name, each in pairs.items()
        if len(each) == len(ours)
    }


@dataclass(frozen=True)
class Disagreement:
    """Where two answers part."""

    round: int
    job: int
    position: int  # in the answer
    ours: int
    theirs: int


@dataclass(frozen=True)
class Agreement:
    """How far greedy answers are the same.

    From the first different token on, two answers go on from different texts, so only what comes
    before it counts. Two tokens that are all but equally likely may change places between engines,
    since they add in different orders; long equal beginnings show that both compute the same.
    """

    answers: int
    equal_answers: int
    tokens: int
    equal_tokens: int  # before the first difference of each answer
    first: Disagreement | None


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> Agreement:
    """Compare all answers of all rounds, token by token."""
    answers = equal_answers = tokens = equal_tokens = 0
    first = None
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        for job, (mine, yours) in enumerate(zip(a.records, b.records, strict=True)):
            both = list(zip(mine.token_ids, yours.token_ids, strict=True))
            parts_at = next((i for i, (x, y) in enumerate(both) if x != y), len(both))
            answers += 1
            tokens += len(both)
            equal_tokens += parts_at
            equal_answers += parts_at == len(both)
            if first is None and parts_at < len(both):
                first = Disagreement(number, job, parts_at, *both[parts_at])
    return Agreement(answers, equal_answers, tokens, equal_tokens, first)
