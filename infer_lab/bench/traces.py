"""The traffic of real services: who came when, with how long a prompt, for how long an answer.

Public traces don't hold what people wrote, only lengths and times:

    Azure 2023    CSV    TIMESTAMP,ContextTokens,GeneratedTokens
                         2023-11-16 18:15:46.6805900,374,44
    Mooncake      JSONL  {"timestamp": 27482, "input_length": 6955, "output_length": 52,
                          "hash_ids": [46, 47, ...]}

Mooncake's timestamps are in milliseconds, and a hash id stands for 512 tokens of a prompt: where
ids are equal, so are the tokens, and all that comes before. `fit` makes prompts in which equal ids
are equal runs of tokens, so that a prefix cache finds what it would have found.

Services are larger than a laptop: `fit` can slow the clock and shrink all lengths alike. Neither is
done in silence, and nothing is cut off.

Sources: Patel et al. 2024 (Splitwise) with AzurePublicDataset; Qin et al. 2024 (Mooncake).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from infer_lab.bench.workloads import Job, token_run

HASHED_TOKENS = 512  # of a prompt, for each of Mooncake's hash ids
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace. Lengths are in tokens."""

    arrival: float  # seconds
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str | Path) -> list[TraceRow]:
    """The rows of a file in either format, which its first character tells."""
    with Path(path).open(encoding="utf-8-sig") as file:
        first = file.read(1)
    return read_mooncake(path) if first == "{" else read_azure(path)


def read_azure(path: str | Path) -> list[TraceRow]:
    """Read a trace as of AzurePublicDataset, in the order of its file.

    Raises ValueError that names the file and the line with what is wrong there.
    """
    rows = []
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (lines.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}, line 1: it must name the column {missing[0]}")
        for line in lines:
            where = f"{path}, line {lines.line_num}"
            time = line["TIMESTAMP"]
            try:
                arrival = datetime.fromisoformat(time or "").timestamp()
            except ValueError:
                raise ValueError(f"{where}: TIMESTAMP must be a time, got {time!r}") from None
            input_len, output_len = (
                _length(where, name, _integer(line[name])) for name in AZURE_COLUMNS[1:]
            )
            rows.append(TraceRow(arrival, input_len, output_len))
    return _not_empty(rows, path)


def read_mooncake(path: str | Path) -> list[TraceRow]:
    """Read a trace as of Mooncake, in the order of its file.

    Raises ValueError that names the file and the line with what is wrong there.
    """
    rows = []
    with Path(path).open(encoding="utf-8-sig") as file:
        for where, line in _objects(path, file):
            time, hash_ids = line.get("timestamp"), line.get("hash_ids", [])
            if isinstance(time, bool) or not isinstance(time, int | float) or not time >= 0:
                raise ValueError(f"{where}: timestamp must be milliseconds >= 0, got {time!r}")
            if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
                raise ValueError(f"{where}: hash_ids must be a list of integers, got {hash_ids!r}")
            input_len, output_len = (
                _length(where, name, line.get(name)) for name in ("input_length", "output_length")
            )
            if hash_ids and len(hash_ids) != -(-input_len // HASHED_TOKENS):
                raise ValueError(
                    f"{where}: hash_ids must be one for each {HASHED_TOKENS} of {input_len} tokens,"
                    f" got {len(hash_ids)}"
                )
            rows.append(TraceRow(time / 1000, input_len, output_len, tuple(hash_ids)))
    return _not_empty(rows, path)


def fit(
    rows: Sequence[TraceRow],
    *,
    vocab_size: int,
    max_model_len: int,
    limit: int | None = None,
    time_scale: float = 1.0,
    length_scale: float | None = None,
    seed: int | str = 0,
) -> list[Job]:
    """Make jobs of the first `limit` rows; the first arrives at 0.

    time_scale: 2.0 lets them come half as fast.
    length_scale: 0.5 makes prompts and answers half as long, and hashed runs of tokens, too; each
        has at least one token. None: the largest up to 1.0 at which all fit into max_model_len.

    Raises ValueError for a scale or a limit that isn't positive, and for a length_scale at which
    some don't fit.
    """
    for name, scale in (("time_scale", time_scale), ("length_scale", length_scale)):
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"{name} must be > 0, got {scale}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    if length_scale is None:
        length_scale = fitting_scale(rows, max_model_len, limit)
    rows = _first(rows, limit)
    if any(sum(_lengths(row, length_scale)) > max_model_len for row in rows):
        raise ValueError(
            f"length_scale must be at most {fitting_scale(rows, max_model_len):.4g} for all to fit"
            f" into {max_model_len} tokens, got {length_scale:g}"
        )
    jobs = []
    for i, row in enumerate(rows):
        input_len, output_len = _lengths(row, length_scale)
        prompt: list[int] = []
        for k, hash_id in enumerate(row.hash_ids, start=1):
            end = min(math.floor(k * HASHED_TOKENS * length_scale), input_len)
            prompt += token_run(end - len(prompt), vocab_size, f"{seed}/hash {hash_id}")
        prompt += token_run(input_len - len(prompt), vocab_size, f"{seed}/{i}")
        arrival = (row.arrival - rows[0].arrival) * time_scale
        jobs.append(Job(arrival, tuple(prompt), output_len))
    return jobs


def fitting_scale(rows: Sequence[TraceRow], max_model_len: int, limit: int | None = None) -> float:
    """The largest scale of lengths, up to 1, at which the first `limit` rows fit into so many."""
    if max_model_len < 2:
        raise ValueError(f"max_model_len must be >= 2, got {max_model_len}")
    longest = max(row.input_len + row.output_len for row in _first(rows, limit))
    return min(1.0, (max_model_len - 1) / longest)  # one less: a length of 0.3 becomes 1


def _first(rows: Sequence[TraceRow], limit: int | None) -> list[TraceRow]:
    return sorted(rows, key=lambda row: row.arrival)[:limit]


def _lengths(row: TraceRow, scale: float) -> tuple[int, int]:
    return max(1, math.floor(row.input_len * scale)), max(1, math.floor(row.output_len * scale))


def _objects(path: str | Path, lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line stands, and its object; blank lines are passed over."""
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: it must be JSON, {error.msg.lower()}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}: it must be a JSON object, got {line.strip():.40}")
        yield where, value


def _integer(text: str | None) -> int | str | None:
    """A number if it is one; otherwise what stood there, for the message."""
    try:
        return int(text or "")
    except ValueError:
        return text


def _length(where: str, name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{where}: {name} must be an integer >= 0, got {value!r}")
    return value


def _not_empty(rows: list[TraceRow], path: str | Path) -> list[TraceRow]:
    if not rows:
        raise ValueError(f"{path}: it must hold at least one request")
    return rows
