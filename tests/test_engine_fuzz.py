"""Random traffic through the real tensor path: every request's tokens are the naive loop's.

Each round is an engine with random options and too little memory, and requests that come, share
beginnings, branch into samples, are aborted, and meet steps that raise. After every step the books
are checked, and memory that nobody holds is filled with NaN again.

INFER_LAB_FUZZ_STEPS sets the number of steps, INFER_LAB_FUZZ_SEED the first round's seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive import naive, poison, poisoned_engine

from conftest import SMALL, random_model
from infer_lab import Delta, Engine, SamplingParams
from infer_lab.kernels import BACKENDS
from infer_lab.model.transformer import Transformer
from infer_lab.request import Request

STEPS = int(os.environ.get("INFER_LAB_FUZZ_STEPS", "900"))
SEED = int(os.environ.get("INFER_LAB_FUZZ_SEED", "1000"))
CONFIG = replace(SMALL, vocab_size=23, hidden_size=24, num_layers=2, max_position_embeddings=48)
MOST = 14  # new tokens
KINDS = (
    SamplingParams(temperature=0, max_tokens=MOST),
    SamplingParams(temperature=1.5, seed=1, max_tokens=MOST),
    SamplingParams(temperature=2.0, top_p=0.9, top_k=9, seed=2, max_tokens=MOST),
    SamplingParams(temperature=1.0, min_p=0.01, presence_penalty=1.0, seed=3, max_tokens=MOST),
)

TRUNK = random.Random(0).choices(range(23), k=30)
PROMPTS = [TRUNK[:n] for n in (1, 4, 8, 17, 30)]
PROMPTS += [[*TRUNK[:n], 22 - TRUNK[n]] for n in (0, 2, 3, 8, 23)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(CONFIG, seed=5)


class Round:
    """One engine and its traffic."""

    def __init__(self, model: Transformer, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.model = model
        self.options = self._options()
        self.engine = poisoned_engine(model, **self.options)
        forward = self.engine.model

        def flaky(*args: Any) -> torch.Tensor:
            if rng.random() < 0.02:
                raise RuntimeError("simulated")
            hidden = forward(*args)
            if rng.random() < 0.02:
                raise KeyboardInterrupt
            return hidden

        self.engine.model = _Model(forward, flaky)  # type: ignore[assignment]
        longest = rng.choice([4, 9, 30])
        self.prompts = [prompt for prompt in PROMPTS if len(prompt) <= longest]
        self.groups: dict[str, list[Request]] = {}
        self.aborted: set[str] = set()
        self.deltas: dict[tuple[str, int], list[Delta]] = {}

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        max_num_seqs = rng.choice([1, 2, 4, 8, 12])
        options: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_batch_tokens": max_num_seqs + rng.choice([0, 1, 5, 40, 200]),
            "policy": rng.choice(["fcfs", "shortest", "priority"]),
            "batching": rng.choice(["continuous", "continuous", "static"]),
            "attention_backend": rng.choice([*BACKENDS, "sdpa"]),
        }
        if rng.random() < 0.1:
            return options | {"kv_layout": "slots", "max_model_len": 40}
        block_size = rng.choice([1, 2, 3, 4, 7, 16])
        smallest = -(-40 // block_size)
        return options | {
            "block_size": block_size,
            "num_blocks": smallest + rng.choice([0, 0, 1, 2, 4 * smallest]),
            "max_model_len": 40,
            "prefix_caching": rng.random() < 0.7,
        }

    def run(self, limit: int) -> int:
        """Let requests come for a while, then drain; returns the number of steps."""
        rng, steps = self.rng, 0
        arrivals = rng.randint(4, 16)
        while arrivals or self.engine.has_unfinished():
            while arrivals and (rng.random() < 0.4 or not self.engine.has_unfinished()):
                arrivals -= 1
                self._add()
            if self.groups and rng.random() < 0.06:
                request_id = rng.choice([*self.groups])
                if self.engine.abort(request_id):
                    self.aborted.add(request_id)
                self.engine.check()
            try:
                for delta in self.engine.step():
                    self.deltas.setdefault((delta.request_id, delta.index), []).append(delta)
            except (RuntimeError, KeyboardInterrupt):
                pass
            steps += 1
            assert steps < 5000, "it never ends"
            self.engine.check()
            poison(self.engine, only_free=True)
        usage = self.engine.stats().blocks
        assert usage.live == 0 and usage.free + usage.cached == usage.total
        return steps

    def _add(self) -> None:
        rng = self.rng
        params = replace(
            rng.choice(KINDS),
            max_tokens=rng.choice([1, 2, 5, MOST, MOST]),
            n=rng.choice([1, 1, 1, 2, 3, 5]),
            stop_token_ids=rng.sample(range(23), rng.choice([0, 0, 1, 3])),
        )
        request = self.engine.add(
            rng.choice(self.prompts),
            params,
            cache_salt=rng.choice([None, None, "a", "b"]),
            priority=rng.randint(-2, 2),
        )
        self.groups[request.id] = self.engine._groups[request.id].samples

    def check_results(self) -> None:
        for request_id, samples in self.groups.items():
            for sample in samples:
                got = sample.output_token_ids
                want = self._expected(sample)
                deltas = self.deltas[request_id, sample.index]
                assert [token for delta in deltas for token in delta.token_ids] == got
                assert [d.finish_reason for d in deltas if d.finish_reason] == [
                    sample.finish_reason
                ]
                if sample.finish_reason == "abort":
                    assert request_id in self.aborted
                    assert got == want[: len(got)]
                else:
                    assert got == want

    def _expected(self, sample: Request) -> list[int]:
        """The naive loop's tokens, without ends, then cut as the params say."""
        params = sample.params
        plain = replace(params, max_tokens=MOST, n=1, stop_token_ids=None)
        tokens = naive(self.model, sample.prompt_token_ids, plain, sample.index)
        tokens = tokens[: min(params.max_tokens, 40 - sample.num_prompt)]
        ends = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


class _Model:
    """A model with another forward."""

    def __init__(self, model: Transformer, forward: Any) -> None:
        self._model, self._forward = model, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any) -> torch.Tensor:
        return self._forward(*args)


def run_rounds(model: Transformer, first: int, steps: int) -> list[Engine]:
    """Rounds until so many steps are done."""
    engines: list[Engine] = []
    while steps > 0:
        seed = first + len(engines)
        fuzz = Round(model, seed)
        try:
            steps -= fuzz.run(steps)
            fuzz.check_results()
        except BaseException as error:
            error.add_note(f"INFER_LAB_FUZZ_SEED={seed} with {fuzz.options}")
            raise
        engines.append(fuzz.engine)
    return engines


def test_random_traffic_gives_the_naive_tokens(model: Transformer) -> None:
    engines = run_rounds(model, SEED, STEPS)
    stats = [engine.stats() for engine in engines]
    print(describe(engines))
    assert len(stats) >= 10
    assert sum(s.num_preemptions for s in stats) > 10, "too tame"
    assert sum(s.cached_tokens for s in stats) > 100, "too tame"


def describe(engines: Sequence[Engine]) -> str:
    stats = [engine.stats() for engine in engines]
    return (
        f"{len(stats)} rounds, {sum(s.num_steps for s in stats)} steps,"
        f" {sum(s.num_preemptions for s in stats)} preemptions,"
        f" {sum(s.cached_tokens for s in stats)} cached tokens,"
        f" {sum(s.generated_tokens for s in stats)} tokens"
    )
