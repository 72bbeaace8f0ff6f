"""Time, and time that is made up.

A runner asks a clock what time it is, and waits by it. On a `SimulatedClock` waiting takes no time
at all, and a `PacedEngine` says how long its steps would have taken: what a queue does to latency
can then be computed exactly, the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from infer_lab.engine import Engine
    from infer_lab.request import Delta, Request


class Clock(Protocol):
    """What a runner needs of time, in seconds."""

    def now(self) -> float:
        """The time since some fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        ...


class WallClock:
    """Real time: monotonic, as fine as the machine has it."""

    def now(self) -> float:
        """The time since some fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        time.sleep(seconds)


class SimulatedClock:
    """Time passes when somebody sleeps, and only then."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The time since it was made."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self._now += seconds


class PacedEngine:
    """An engine whose steps take as long on a simulated clock as `seconds` says.

    seconds: from the number of tokens that a step computes to the step's length.
    """

    def __init__(
        self, engine: Engine, clock: SimulatedClock, seconds: Callable[[int], float]
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.seconds = seconds

    def add(self, *arguments: Any, **options: Any) -> Request:
        """See `Engine.add`."""
        return self.engine.add(*arguments, **options)

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        return self.engine.abort(request_id)

    def has_unfinished(self) -> bool:
        """See `Engine.has_unfinished`."""
        return self.engine.has_unfinished()

    def step(self) -> list[Delta]:
        """See `Engine.step`; the clock has moved on when it returns."""
        before = self.engine.stats().computed_tokens
        deltas = self.engine.step()
        self.clock.sleep(self.seconds(self.engine.stats().computed_tokens - before))
        return deltas
