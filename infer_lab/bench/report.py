"""What is shown and kept of a benchmark: a table for the terminal, and a JSON document.

    {"created": ..., "hardware": {...}, "versions": {...}, "settings": {...},
     "engines": {"infer_lab": {"runs": [{"summary": {...}, "records": [...]}, ...]}, ...},
     "ratio": {"output_tokens_per_s": {"median": 1.8, "min": 1.7, "max": 1.9, "pairs": [...]}, ...},
     "agreement": {"answers": 96, "equal_answers": 95, ...}}

Times are in seconds there, in milliseconds in the table. `ratio` is ours over the other engine's.
With several rates, "engines", "ratio" and "agreement" stand in each entry of a list "loads".
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infer_lab.bench.compare import (
    RATES,
    TIMES,
    Agreement,
    Ratio,
    agreement,
    quantities,
    ratios,
)
from infer_lab.bench.metrics import LoadPoint, Objective, goodput, summarize
from infer_lab.bench.runners import Record, Run


@dataclass(frozen=True)
class LoadResult:
    """All runs of one load: by engine, ours first, then by round."""

    rate: float | None  # requests per second; None: a closed loop, or a trace's own arrivals
    runs: Mapping[str, Sequence[Run]]
    comparable: bool = False  # both compute the same numbers, so greedy answers should agree
    objective: Objective | None = None

    @property
    def ratio(self) -> dict[str, Ratio]:
        """Ours over theirs; empty if ours ran alone."""
        return ratios(*self.runs.values()) if len(self.runs) == 2 else {}

    @property
    def agreement(self) -> Agreement | None:
        """None if ours ran alone, or if answers may differ."""
        return agreement(*self.runs.values()) if len(self.runs) == 2 and self.comparable else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        engines = {
            name: {"runs": [_run(run, self.objective) for run in runs]}
            for name, runs in self.runs.items()
        }
        ratio = {name: asdict(each) for name, each in self.ratio.items()}
        agreed = None if self.agreement is None else asdict(self.agreement)
        return {"rate": self.rate, "engines": engines, "ratio": ratio, "agreement": agreed}


_LABELS = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s with prompts",
    "requests_per_s": "requests/s",
    "goodput": "requests/s fast enough",
    "ttft": "first token",
    "ttft_cold": "  if nothing is cached",
    "ttft_warm": "  if its prefix is cached",
    "itl": "next token",
    "latency": "whole answer",
}


def table(load: LoadResult) -> str:
    """The median over the rounds of each number, and the ratios' median, least and largest."""
    ratio = load.ratio
    medians = [_medians(runs, load.objective) for runs in load.runs.values()]
    heads = [*load.runs, *(["ratio", "min", "max"] if ratio else [])]
    lines = [f"{_title(load):<34}" + "".join(f"{head:>14}" for head in heads)]
    rows = [(name, _LABELS[name], 1.0) for name in (*RATES, "goodput")]
    for name in TIMES:
        if not name.endswith("_cold") or any("ttft_warm_p50" in each for each in medians):
            rows += [(f"{name}_{p}", f"{_LABELS[name]}, {p} (ms)", 1e3) for p in ("p50", "p99")]
    for key, label, scale in rows:
        if not any(key in each for each in medians):
            continue
        cells = [f"{scale * each[key]:,.1f}" if key in each else "-" for each in medians]
        if key in ratio:
            r = ratio[key]
            cells += [f"{value:.2f}x" for value in (r.median, r.min, r.max)]
        lines.append(f"{label:<34}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def agreement_in_words(found: Agreement) -> str:
    """A sentence or two on how far greedy answers are the same."""
    text = (
        f"{found.equal_answers} of {found.answers} greedy answers are equal, and"
        f" {100 * found.equal_tokens / found.tokens:.1f} % of the tokens before the first"
        " difference of each."
    )
    if found.first is not None:
        at = found.first
        text += (
            f" The first: round {at.round}, job {at.job}, token {at.position}"
            f" ({at.ours}, not {at.theirs})."
        )
    return text


def document(loads: Sequence[LoadResult], header: Mapping[str, Any]) -> dict[str, Any]:
    """What is written to a file. header: created, hardware, versions, settings."""
    bodies = [load.to_dict() for load in loads]
    return {**header, **(bodies[0] if len(bodies) == 1 else {"loads": bodies})}


def to_json(value: Any, indent: str = "") -> str:
    """JSON with a line for whatever fits into one or holds only numbers."""
    flat = json.dumps(value)
    is_plain = isinstance(value, list) and not any(isinstance(v, dict | list) for v in value)
    if len(indent) + len(flat) <= 100 or is_plain or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, list):
        lines = [f"{inner}{to_json(each, inner)}" for each in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    lines = [f"{inner}{json.dumps(key)}: {to_json(each, inner)}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def curves(loads: Sequence[LoadResult]) -> dict[str, list[LoadPoint]]:
    """Each engine's saturation curve; of a load's rounds, the one with the median throughput."""
    found: dict[str, list[LoadPoint]] = {}
    for load in loads:
        assert load.rate is not None
        for name, runs in load.runs.items():
            run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
            good = goodput(run, load.objective or Objective())
            found.setdefault(name, []).append(LoadPoint(load.rate, summarize(run), good))
    return {name: sorted(points, key=lambda point: point.rate) for name, points in found.items()}


def _title(load: LoadResult) -> str:
    return "" if load.rate is None else f"{load.rate:g} requests/s arrive"


def _medians(runs: Sequence[Run], objective: Objective | None) -> dict[str, float]:
    each = [_numbers(run, objective) for run in runs]
    keys = [key for key in each[0] if all(key in numbers for numbers in each)]
    return {key: statistics.median(numbers[key] for numbers in each) for key in keys}


def _numbers(run: Run, objective: Objective | None) -> dict[str, float]:
    good = {} if objective is None else {"goodput": goodput(run, objective)}
    return quantities(summarize(run)) | good


def _run(run: Run, objective: Objective | None) -> dict[str, Any]:
    good = {} if objective is None else {"goodput": goodput(run, objective)}
    records = [_record(record) for record in run.records]
    return {"summary": asdict(summarize(run)) | good, "records": records}


def _record(record: Record) -> dict[str, Any]:
    times = [round(time, 6) for time in record.token_times]
    return {**asdict(record), "arrival": round(record.arrival, 6), "token_times": times}
