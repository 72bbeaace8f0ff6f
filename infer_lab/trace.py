"""A record of every step: what went in, what came out, what the cache holds, how long it took.

The table has the same columns in every chapter, so that each later idea (batching, pages, shared
prefixes) can be compared with the plain loop line by line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from infer_lab.kv_cache import SequenceCache


@dataclass
class StepRecord:
    """One step. Bytes are of the KV cache after it; predicted comes from the formula alone."""

    step: int
    phase: str
    tokens_in: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    sequence_length: int
    cache_length: int
    predicted_bytes: int
    measured_bytes: int
    seconds: float


class Trace:
    """Collects `StepRecord`s; `table()` prints them."""

    columns = (
        "step",
        "phase",
        "tokens_in",
        "input_shape",
        "output_shape",
        "sequence_length",
        "cache_length",
        "predicted_bytes",
        "measured_bytes",
    )

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    @contextmanager
    def step(self, phase: str, cache: SequenceCache, tokens_in: int) -> Iterator[StepRecord]:
        """Time the block and record it when it ends well; set `output_shape` inside it."""
        start = cache.length
        record = StepRecord(
            len(self.records), phase, tokens_in, (tokens_in,), (), start + tokens_in, 0, 0, 0, 0.0
        )
        began = time.perf_counter()
        yield record
        record.seconds = time.perf_counter() - began
        record.cache_length = cache.length
        record.predicted_bytes = cache.length * cache.bytes_per_token
        record.measured_bytes = cache.nbytes_used
        self.records.append(record)

    def rows(self, *, seconds: bool = False) -> list[dict[str, Any]]:
        """The records as dicts, one a step; times vary from run to run and come only if asked."""
        names = self.columns + (("seconds",) if seconds else ())
        return [{name: asdict(record)[name] for name in names} for record in self.records]

    def table(self, *, seconds: bool = False) -> str:
        """The records as a text table, numbers right-aligned."""
        rows = self.rows(seconds=seconds)
        names = list(rows[0]) if rows else list(self.columns)
        cells = [[_format(row[name]) for name in names] for row in rows]
        titles = [name.replace("_", " ") for name in names]
        widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        lines = [titles, ["-" * width for width in widths], *cells]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
