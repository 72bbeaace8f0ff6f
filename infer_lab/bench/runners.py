"""Send a workload to an engine and write down when each token came.

    closed loop   `concurrency` users; each sends the next request when the last one is answered.
                  A slow engine is asked less: this finds out how much it can do.
    open loop     requests arrive at their own times, whether the engine keeps up or not, as those
                  of strangers do. This finds out how long they wait.

In an open loop a request's clock starts when it was to arrive, not when the loop got round to
sending it. An engine that blocks for a second delays all who arrive meanwhile, and that second
belongs into their latency; leaving it out is called coordinated omission.

Requests are greedy and go on after end-of-sequence tokens, so each answer has the length asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infer_lab.bench.clock import Clock, WallClock
from infer_lab.bench.workloads import Job
from infer_lab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infer_lab.request import Delta, Request


@dataclass(frozen=True)
class Record:
    """What happened to one job. Times are in seconds after the start of the run."""

    arrival: float
    token_times: tuple[float, ...]  # when each token of the answer was there
    token_ids: tuple[int, ...]
    prompt_len: int
    cached_tokens: int = 0  # of the prompt, that needed no computing
    preemptions: int = 0


@dataclass(frozen=True)
class Run:
    """One workload, once through one engine. Records are in the order of the jobs."""

    records: tuple[Record, ...]

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(record.token_times[-1] for record in self.records)


class Steppable(Protocol):
    """What a runner needs of an engine; see `Engine`."""

    def add(self, prompt: Any, params: SamplingParams | None = None) -> Request: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[Delta]: ...
    def has_unfinished(self) -> bool: ...


OnTokens = Callable[[int], object]  # is told of so many new tokens, for progress bars


def closed_loop(
    engine: Steppable,
    jobs: Sequence[Job],
    concurrency: int | None = None,
    *,
    clock: Clock | None = None,
    on_tokens: OnTokens | None = None,
) -> Run:
    """Keep `concurrency` jobs in the engine until all are done; None: all of them, at once.

    Raises ValueError for no jobs, a concurrency below 1, or an engine that is at work already.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be >= 1, got {concurrency}")
    users = len(jobs) if concurrency is None else concurrency
    unsent = deque(range(len(jobs)))
    with _Desk(engine, jobs, clock, on_tokens) as desk:
        while unsent or desk.open:
            while unsent and len(desk.open) < users:
                desk.send(unsent.popleft(), arrival=desk.now())
            desk.step()
        return desk.run()


def open_loop(
    engine: Steppable,
    jobs: Sequence[Job],
    *,
    clock: Clock | None = None,
    on_tokens: OnTokens | None = None,
) -> Run:
    """Send each job at its own arrival time, and run until all are done.

    Raises ValueError for no jobs or an engine that is at work already.
    """
    unsent = deque(sorted(range(len(jobs)), key=lambda i: jobs[i].arrival))
    with _Desk(engine, jobs, clock, on_tokens) as desk:
        while unsent or desk.open:
            while unsent and jobs[unsent[0]].arrival <= desk.now():
                desk.send(i := unsent.popleft(), arrival=jobs[i].arrival)
            if desk.open:
                desk.step()
            else:
                desk.wait_until(jobs[unsent[0]].arrival)
        return desk.run()


class _Desk:
    """Hands jobs to the engine and stamps what comes back."""

    def __init__(
        self,
        engine: Steppable,
        jobs: Sequence[Job],
        clock: Clock | None,
        on_tokens: OnTokens | None,
    ) -> None:
        if not jobs:
            raise ValueError("jobs must not be empty")
        if engine.has_unfinished():
            raise ValueError("engine must be idle, but it has unfinished requests")
        self._engine = engine
        self._jobs = jobs
        self._clock = WallClock() if clock is None else clock
        self._on_tokens = on_tokens
        self._requests: dict[int, Request] = {}  # by the job's place
        self._arrivals: dict[int, float] = {}
        self._times: list[list[float]] = [[] for _ in jobs]
        self.open: dict[str, int] = {}  # unfinished request's id -> its job
        self._start = self._clock.now()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock.now() - self._start

    def wait_until(self, moment: float) -> None:
        self._clock.sleep(max(moment - self.now(), 0.0))

    def send(self, i: int, *, arrival: float) -> None:
        job = self._jobs[i]
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
        self._requests[i] = request = self._engine.add(job.prompt_token_ids, params)
        self._arrivals[i] = arrival
        self.open[request.id] = i

    def step(self) -> None:
        deltas = self._engine.step()
        now = self.now()
        for delta in deltas:
            i = self.open[delta.request_id]
            self._times[i] += [now] * len(delta.token_ids)
            if delta.finish_reason is not None:
                del self.open[delta.request_id]
                self._check_whole(i, delta)
        if self._on_tokens is not None:
            self._on_tokens(sum(len(delta.token_ids) for delta in deltas))

    def _check_whole(self, i: int, delta: Delta) -> None:
        asked, got = self._jobs[i].output_len, len(self._times[i])
        if got != asked:
            why = delta.stop_reason or delta.finish_reason
            raise RuntimeError(f"job {i} ended after {got} of {asked} tokens: {why}")

    def run(self) -> Run:
        return Run(tuple(self._record(i) for i in range(len(self._jobs))))

    def _record(self, i: int) -> Record:
        request = self._requests[i]
        return Record(
            arrival=self._arrivals[i],
            token_times=tuple(self._times[i]),
            token_ids=tuple(request.output_token_ids),
            prompt_len=request.num_prompt,
            cached_tokens=request.metrics.cached_tokens,
            preemptions=request.metrics.preemptions,
        )

    def __enter__(self) -> _Desk:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the engine idle, also after an error or Ctrl-C."""
        for request_id in self.open:
            self._engine.abort(request_id)
        if self.open:
            self._engine.step()  # takes the last deltas out
