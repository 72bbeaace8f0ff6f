"""Where a step's time goes: to the model, or to what is around it.

    schedule | pack |            model, logits            | sample | commit | hand out
    ---------------------------------- one step ----------------------------------->

`watch` puts a stopwatch before the parts that an engine calls, for as long as its block lasts. What
is left of a step when they are taken away is packing the batch and handing out deltas. On a GPU the
host runs ahead of the device, and such a stopwatch shows the host's time alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_lab.engine import Engine

PARTS = ("schedule", "model", "sample", "commit")


@dataclass
class Breakdown:
    """Seconds of all steps, and of the parts in them."""

    steps: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def rest(self) -> float:
        """Seconds in no part: packing batches and handing out deltas."""
        return self.seconds - sum(self.parts.values())

    @property
    def outside_model(self) -> float:
        """The share of the time that isn't the model's, from 0 to 1."""
        return 1 - self.parts["model"] / self.seconds

    def table(self) -> str:
        """Milliseconds a step and the share of each part."""
        rows = [*self.parts.items(), ("pack, hand out", self.rest), ("all", self.seconds)]
        lines = [f"{'':<16}{'ms a step':>12}{'share':>9}"]
        for name, seconds in rows:
            each, share = 1e3 * seconds / self.steps, 100 * seconds / self.seconds
            lines.append(f"{name:<16}{each:>12.3f}{share:>8.1f} %")
        return "\n".join(lines)


@contextlib.contextmanager
def watch(engine: Engine) -> Iterator[Breakdown]:
    """Time the engine's parts inside the block; afterwards it is as it was before."""
    found = Breakdown()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                found.parts[part] += time.perf_counter() - began

        return call

    def step() -> Any:
        began = time.perf_counter()
        deltas = plain_step()
        found.seconds += time.perf_counter() - began
        found.steps += 1
        return deltas

    scheduler, plain_step, model, sampler = (
        engine.scheduler,
        engine.step,
        engine.model,
        engine.sampler,
    )
    try:
        engine.model = _TimedModel(model, timed)  # type: ignore[assignment]
        engine.sampler = timed("sample", sampler)  # type: ignore[assignment]
        scheduler.schedule = timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.commit = timed("commit", scheduler.commit)  # type: ignore[method-assign]
        engine.step = step  # type: ignore[method-assign]
        yield found
    finally:
        engine.model, engine.sampler = model, sampler
        del scheduler.schedule, scheduler.commit, engine.step  # the class's own come back


class _TimedModel:
    """A model whose two calls are timed; all else is the model's own."""

    def __init__(self, model: Any, timed: Callable[[str, Any], Any]) -> None:
        self._model = model
        self._call = timed("model", model)
        self.logits = timed("model", model.logits)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
