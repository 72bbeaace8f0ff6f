"""Schedules as Gantt charts: a row for each request, time from left to right.

    viz.gantt(viz.bars(engine.steps), title="Continuous batching")

A bar says what a request does from one step to another: it waits, prefills, decodes, or is put
back into the queue. `bars` reads them off an engine's steps; a lesson may as well make its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from infer_lab.engine_trace import EngineStep
from infer_lab.viz.style import COLORS, figure, show

# Kinds of bars, in the legend's order: what each looks like.
KINDS: dict[str, dict[str, Any]] = {
    "waits": {"color": "white", "hatch": "////", "edgecolor": "gray"},
    "prefill": {"color": COLORS[0], "edgecolor": "white"},
    "decode": {"color": COLORS[2], "edgecolor": "white"},
    "prefill again": {"color": COLORS[1], "edgecolor": "white", "hatch": "//"},
    "slot stays empty": {"color": "white", "hatch": "..", "edgecolor": "gray"},
}


@dataclass(frozen=True)
class Bar:
    """What a request does from `start` up to, not including, `end`; see KINDS."""

    request: str
    kind: str
    start: float
    end: float


def bars(steps: Sequence[EngineStep]) -> list[Bar]:
    """What each request did in each step of an engine, neighbouring steps of a kind joined.

    A chunk that begins below what the request had computed before is computed again, after a
    preemption; a chunk that ends behind the prompt is decode.
    """
    doing: dict[str, dict[int, str]] = {}  # request -> step -> kind, in order of arrival
    computed: dict[str, int] = {}  # the most that a request ever had in memory
    produced: set[str] = set()  # requests that have a token
    for number, step in enumerate(steps):
        for chunk in step.chunks:
            if chunk.start < computed.get(chunk.request, 0):
                kind = "prefill again"
            else:
                kind = "decode" if chunk.request in produced else "prefill"
            doing.setdefault(chunk.request, {})[number] = kind
            end = chunk.start + chunk.length
            computed[chunk.request] = max(end, computed.get(chunk.request, 0))
            if chunk.token is not None:
                produced.add(chunk.request)
        for name in step.waiting:  # behind the step, hence in it
            doing.setdefault(name, {})[number] = "waits"
    return [bar for name, kinds in doing.items() for bar in _joined(name, kinds)]


def _joined(name: str, kinds: dict[int, str]) -> Iterable[Bar]:
    runs = groupby(enumerate(sorted(kinds)), key=lambda item: (item[1] - item[0], kinds[item[1]]))
    for (_, kind), run in runs:
        numbers = [number for _, number in run]
        if kind in ("waits", "slot stays empty"):
            yield Bar(name, kind, numbers[0], numbers[-1] + 1)
        else:  # steps of work stay visible one by one
            yield from (Bar(name, kind, number, number + 1) for number in numbers)


def gantt(bars: Sequence[Bar], *, title: str, xlabel: str = "time (steps)") -> None:
    """Show bars as a Gantt chart, requests from top to bottom in the order they first appear.

    The alt text is made from the bars: it says for each request when it does what.
    Raises ValueError for no bars or an unknown kind.
    """
    if not bars:
        raise ValueError("bars must hold at least one bar, got none")
    if unknown := sorted({bar.kind for bar in bars} - set(KINDS)):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {', '.join(unknown)}")
    names = list(dict.fromkeys(bar.request for bar in bars))
    size = (7.2, 1.4 + 0.27 * len(names))
    fig, ax = figure(title=title, xlabel=xlabel, ylabel="request", size=size, grid="x")
    for kind, style in KINDS.items():
        if chosen := [bar for bar in bars if bar.kind == kind]:
            rows = [names.index(bar.request) for bar in chosen]
            widths = [bar.end - bar.start for bar in chosen]
            left = [bar.start for bar in chosen]
            ax.barh(rows, widths, left=left, height=0.7, label=kind, **style)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.locator_params(axis="x", integer=True)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    show(fig, alt=f"Gantt chart. {in_words(bars)}.")


def in_words(bars: Sequence[Bar]) -> str:
    """The bars as a sentence: "A prefill from 0 to 1, decode from 1 to 4; B waits ..."."""
    parts = []
    for name, own in groupby(sorted(bars, key=lambda bar: bar.request), lambda bar: bar.request):
        spans: list[list[Any]] = []  # kind, start, end
        for bar in sorted(own, key=lambda bar: bar.start):
            if spans and spans[-1][0] == bar.kind and spans[-1][2] == bar.start:
                spans[-1][2] = bar.end
            else:
                spans.append([bar.kind, bar.start, bar.end])
        parts.append(f"{name} " + ", ".join(f"{k} from {a:g} to {b:g}" for k, a, b in spans))
    return "; ".join(parts)
