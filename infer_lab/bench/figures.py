"""Benchmarks in pictures. Each function gives a figure and its alt text:

viz.show(*latency_figure({"infer_lab": run}))    in a notebook, where alt= is the second
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from infer_lab.bench.growth import Growth
from infer_lab.bench.metrics import LoadPoint, gaps, percentile, summarize, ttft
from infer_lab.bench.runners import Run
from infer_lab.viz.style import line, panels


def latency_figure(runs: Mapping[str, Sequence[Run]]) -> tuple[Figure, str]:
    """Throughput of each round, and how first-token and inter-token times are distributed.

    runs: by engine, then by round.
    """
    titles = ("Throughput", "Time to first token", "Inter-token latency")
    fig, (speed, first, between) = panels(
        titles, xlabel="time (ms)", ylabel="share that took at most this (%)", columns=3,
        panel_size=(3.8, 3.2), share=False,
    )  # fmt: skip
    speed.set(xlabel="round", ylabel="output tokens per second")
    words, fastest = [], 0.0
    for i, (name, rounds) in enumerate(runs.items()):
        rates = [summarize(run).output_tokens_per_s for run in rounds]
        records = [record for run in rounds for record in run.records]
        fastest = max(fastest, *rates)
        speed.plot(range(1, len(rates) + 1), rates, label=name, **line(i))
        words.append(f"{name}: {min(rates):.0f} to {max(rates):.0f} output tokens/s")
        samples = {"first token": [ttft(record) for record in records],
                   "next token": [gap for record in records for gap in gaps(record)]}  # fmt: skip
        for ax, (what, values) in zip((first, between), samples.items(), strict=True):
            if values:
                _distribution(ax, values, i, name)
                p50, p99 = (1e3 * percentile(values, percent) for percent in (50, 99))
                words.append(f"{what} in {p50:.4g} ms (p50), {p99:.4g} ms (p99)")
    speed.set_ylim(0, 1.3 * fastest)  # room for the legend
    speed.set_xticks(range(1, max(map(len, runs.values())) + 1))
    speed.legend(frameon=False)
    return fig, f"Throughput by round, distributions of latencies. {'; '.join(words)}."


def _distribution(ax: Axes, values: Sequence[float], i: int, name: str) -> None:
    """The share of values up to each of them; a logarithmic axis, since tails are long."""
    ordered = sorted(1e3 * value for value in values)
    shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
    ax.step(ordered, shares, where="post", label=name, **line(i, marker=""))
    if ordered[0] > 0 and ordered[-1] > 10 * ordered[0]:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())


def saturation_figure(curves: Mapping[str, Sequence[LoadPoint]]) -> tuple[Figure, str]:
    """Throughput and latency against the offered load, a curve for each engine.

    The grey line is where every request that arrives is answered at once.
    """
    titles = ("Requests answered", "Time to first token, p99")
    fig, (done, wait) = panels(
        titles, xlabel="offered load (requests/s)", ylabel="requests/s", panel_size=(4.2, 3.2),
        share=False,
    )  # fmt: skip
    wait.set(ylabel="time (s)", yscale="log")
    words, most = [], 0.0
    for i, (name, points) in enumerate(curves.items()):
        rates = [point.rate for point in points]
        answered = [point.summary.requests_per_s for point in points]
        most = max(most, *answered)
        waits = [point.summary.ttft.p99 if point.summary.ttft else math.nan for point in points]
        done.plot(rates, answered, label=name, **line(2 * i))
        if any(point.goodput != each for point, each in zip(points, answered, strict=True)):
            good = [point.goodput for point in points]
            done.plot(rates, good, label=f"{name}, fast enough", **line(2 * i + 1))
        wait.plot(rates, waits, label=name, **line(2 * i))
        words.append(
            f"{name}: from {rates[0]:g} to {rates[-1]:g} requests/s offered, answered go from"
            f" {answered[0]:.3g} to {answered[-1]:.3g}, p99 of the first token from"
            f" {waits[0]:.3g} s to {waits[-1]:.3g} s"
        )
    top = max(point.rate for points in curves.values() for point in points)
    done.plot([0, top], [0, top], color="gray", linewidth=1, zorder=0)
    done.set_ylim(0, 1.6 * most)
    done.legend(frameon=False)
    return fig, f"Throughput and latency against offered load. {'; '.join(words)}."


def growth_figure(growths: Sequence[Growth]) -> tuple[Figure, str]:
    """What operations cost at each size, on logarithmic axes; a panel for each thing that grows."""
    panel_of = list(dict.fromkeys(growth.of for growth in growths))
    fig, axes = panels(
        [f"With more {of}" for of in panel_of], xlabel="", ylabel="time of one operation (µs)",
        columns=3, panel_size=(3.6, 3.2), share=False,
    )  # fmt: skip
    words = []
    for of, ax in zip(panel_of, axes, strict=True):
        here = [growth for growth in growths if growth.of == of]
        for i, growth in enumerate(here):
            costs = [1e6 * seconds for seconds in growth.seconds]
            ax.plot(growth.sizes, costs, label=growth.operation, **line(i))
            words.append(
                f"{growth.operation} from {costs[0]:.3g} to {costs[-1]:.3g} µs for"
                f" {growth.sizes[0]:,} to {growth.sizes[-1]:,} {of}"
            )
        ax.set(xlabel=of, xscale="log", yscale="log")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 1.0), max(high, 1_000.0))  # flat shall look flat
        ax.legend(frameon=False)
    return fig, f"Cost of an operation against what grows: {'; '.join(words)}."
