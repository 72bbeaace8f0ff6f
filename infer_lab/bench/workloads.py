"""What is asked of an engine: a list of jobs, the same ones for the same seed.

A job says when it arrives, what its prompt is and how many tokens its answer must have:

    random_prompts    all prompts and all answers equally long
    shared_prefix     prompts that begin alike, as with one system prompt
    ragged            answers from short to long, arriving as they please
    traces.fit        lengths and arrivals of a real service

Prompts are random token ids. Speed doesn't depend on what they mean, and an engine that keeps
prefixes finds only those that the workload shares on purpose. Tokens, lengths and arrivals are
drawn apart, so that another rate or another answer length leaves the prompts as they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    arrival: float  # seconds after the start; only an open loop looks at it
    prompt_token_ids: tuple[int, ...]
    output_len: int  # tokens that must be generated, whatever they are


def random_prompts(
    num_prompts: int,
    input_len: int,
    output_len: int,
    *,
    vocab_size: int,
    rate: float | None = None,
    seed: int | str = 0,
) -> list[Job]:
    """Jobs that are all alike but for their tokens.

    input_len, output_len: tokens of each prompt and of each answer.
    rate: arrivals per second, see `poisson_arrivals`; None: all at 0.

    Raises ValueError for a count or a rate that isn't positive.
    """
    check_counts(num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    prompts = [token_run(input_len, vocab_size, f"{seed}/{i}") for i in range(num_prompts)]
    return _jobs(prompts, [output_len] * num_prompts, rate, seed)


def shared_prefix(
    num_prompts: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    *,
    vocab_size: int,
    rate: float | None = None,
    seed: int | str = 0,
) -> list[Job]:
    """Jobs whose prompts begin with the same prefix_len tokens and go on with their own.

    Raises ValueError for a count or a rate that isn't positive.
    """
    check_counts(num_prompts=num_prompts, prefix_len=prefix_len, suffix_len=suffix_len,
                 output_len=output_len)  # fmt: skip
    prefix = token_run(prefix_len, vocab_size, f"{seed}/prefix")
    suffixes = [token_run(suffix_len, vocab_size, f"{seed}/{i}") for i in range(num_prompts)]
    prompts = [prefix + suffix for suffix in suffixes]
    return _jobs(prompts, [output_len] * num_prompts, rate, seed)


def ragged(
    num_prompts: int,
    input_len: int,
    output_lens: tuple[int, int] = (8, 256),
    *,
    vocab_size: int,
    rate: float | None = None,
    seed: int | str = 0,
) -> list[Job]:
    """Jobs with answers of all lengths from the first to the second of output_lens, all as likely.

    Raises ValueError for a count or a rate that isn't positive, or for lengths out of order.
    """
    shortest, longest = output_lens
    check_counts(num_prompts=num_prompts, input_len=input_len, output_lens=shortest)
    if longest < shortest:
        raise ValueError(f"output_lens must be (shortest, longest), got {output_lens}")
    draw = random.Random(f"{seed}/lengths")
    lengths = [draw.randint(shortest, longest) for _ in range(num_prompts)]
    prompts = [token_run(input_len, vocab_size, f"{seed}/{i}") for i in range(num_prompts)]
    return _jobs(prompts, lengths, rate, seed)


def poisson_arrivals(count: int, rate: float, seed: int | str = 0) -> list[float]:
    """Times in seconds at which independent users arrive, `rate` of them per second on average.

    The gaps between them are exponentially distributed, hence the number of arrivals in any second
    has a Poisson distribution: users come in clumps, though nobody arranged it.

    Raises ValueError unless rate > 0.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate must be > 0 arrivals per second, got {rate}")
    draw = random.Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def token_run(length: int, vocab_size: int, seed: int | str) -> tuple[int, ...]:
    """Random token ids, all as likely."""
    return tuple(random.Random(seed).choices(range(vocab_size), k=length))


def check_counts(**counts: int) -> None:
    """Raise ValueError for the first that is below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def check_fits(jobs: Sequence[Job], max_model_len: int) -> None:
    """Raise ValueError if a job is longer than an engine's longest request, in tokens."""
    longest = max(jobs, key=lambda job: len(job.prompt_token_ids) + job.output_len)
    length = len(longest.prompt_token_ids)
    if length + longest.output_len > max_model_len:
        raise ValueError(
            f"prompt and answer must be at most {max_model_len} tokens together (max_model_len),"
            f" got {length} + {longest.output_len}"
        )


def _jobs(
    prompts: Sequence[tuple[int, ...]],
    output_lens: Sequence[int],
    rate: float | None,
    seed: int | str,
) -> list[Job]:
    count = len(prompts)
    arrivals = [0.0] * count if rate is None else poisson_arrivals(count, rate, seed)
    return [Job(*parts) for parts in zip(arrivals, prompts, output_lens, strict=True)]
