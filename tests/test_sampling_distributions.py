"""The sampler draws from exactly the distribution that its documentation describes.

Three judges, none of which shares code with it: a sampler in plain Python (below), the logits
processors of transformers, and the chi-square test over many draws.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as theirs

import infer_lab.sampler
from infer_lab.sampler import Sampler, SamplingParams, SamplingRow, uniform

torch.set_num_threads(1)
TOO_UNLIKELY = 1e-4  # p-value; all seeds are fixed, so a test that passes once always passes
SEEDS = [0, -7, 2**63 + 11]
END = 3  # the token that min_tokens forbids

Scores = list[float]


# A sampler in plain Python: a list of stages, each from scores (or probabilities) to the same.


@dataclass(frozen=True)
class Case:
    """One row of logits and what is asked of it."""

    logits: Scores
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    def row(self, seed: int = 0, sample_index: int = 0, output_index: int | None = None) -> Any:
        index = len(self.output) if output_index is None else output_index
        return SamplingRow(self.params, seed, sample_index, index, self.prompt, self.output, (END,))


def bias(x: Scores, case: Case) -> Scores:
    return [v + (case.params.logit_bias or {}).get(i, 0.0) for i, v in enumerate(x)]


def repetition(x: Scores, case: Case, tokens: Sequence[int] | None = None) -> Scores:
    seen = set(case.prompt + case.output if tokens is None else tokens)
    penalty = case.params.repetition_penalty
    return [(v / penalty if v > 0 else v * penalty) if i in seen else v for i, v in enumerate(x)]


def presence(x: Scores, case: Case, tokens: Sequence[int] | None = None) -> Scores:
    seen = set(case.output if tokens is None else tokens)
    return [v - case.params.presence_penalty * (i in seen) for i, v in enumerate(x)]


def frequency(x: Scores, case: Case, tokens: Sequence[int] | None = None) -> Scores:
    uses = Counter(case.output if tokens is None else tokens)
    return [v - case.params.frequency_penalty * uses[i] for i, v in enumerate(x)]


def min_tokens(x: Scores, case: Case) -> Scores:
    early = len(case.output) < case.params.min_tokens
    return [-math.inf if early and i == END else v for i, v in enumerate(x)]


def temperature(x: Scores, case: Case) -> Scores:
    return [v / case.params.temperature for v in x]


def ranked(x: Scores) -> list[int]:
    return sorted(range(len(x)), key=lambda i: (-x[i], i))


def softmax(x: Scores) -> Scores:
    highest = max(x)
    weights = [math.exp(v - highest) for v in x]
    whole = math.fsum(weights)
    return [w / whole for w in weights]


def keeping(x: Scores, kept: set[int]) -> Scores:
    return [v if i in kept else -math.inf for i, v in enumerate(x)]


def top_k(x: Scores, case: Case) -> Scores:
    return keeping(x, set(ranked(x)[: case.params.top_k or None]))


def top_p(x: Scores, case: Case) -> Scores:
    if case.params.top_p == 1.0:
        return x
    probs, kept, likelier = softmax(x), set[int](), 0.0
    for i in ranked(x):
        if likelier < case.params.top_p:
            kept.add(i)
        likelier += probs[i]
    return keeping(x, kept)


def min_p(x: Scores, case: Case) -> Scores:
    probs = softmax(x)
    least = case.params.min_p * max(probs)
    return keeping(x, {i for i, p in enumerate(probs) if p >= least})


Stage = Callable[[Scores, Case], Scores]
STAGES: list[Stage] = [bias, repetition, presence, frequency, min_tokens, temperature]
STAGES += [top_k, top_p, min_p]


def scores_of(case: Case, stages: Sequence[Stage] = STAGES) -> Scores:
    scores = case.logits
    for stage in stages:
        scores = stage(scores, case)
    return scores


def exact(case: Case, stages: Sequence[Stage] = STAGES) -> Scores:
    """The exact probability of each token."""
    return softmax(scores_of(case, stages))


def pick(case: Case, u: float) -> int:
    """The token where u falls: by rank where there are filters, else by id."""
    if case.params.temperature == 0.0:
        return ranked(scores_of(case, STAGES[: STAGES.index(temperature)]))[0]
    scores = scores_of(case)
    probs = softmax(scores)
    order = ranked(scores) if case.params.filters else range(len(scores))
    likely = [i for i in order if probs[i] > 0]
    below = 0.0
    for i in likely:
        below += probs[i]
        if u < below:
            return i
    return likely[-1]


# How the sampler's distribution is seen.


def draws(case: Case, seed: int, n: int) -> list[int]:
    """n tokens of one request, at consecutive output indices."""
    first = len(case.output)
    rows = [case.row(seed, output_index=first + i) for i in range(n)]
    logits = torch.tensor(case.logits, dtype=torch.float64).expand(n, -1)
    return [sample.token_id for sample in Sampler()(logits, rows)]


def swept(case: Case, monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype) -> np.ndarray:
    """How many of n evenly spaced random numbers lead to each token: within 1 of n * p."""
    monkeypatch.setattr(infer_lab.sampler, "uniform", lambda seed, output, i: (i + 0.5) / n)
    logits = torch.tensor(case.logits, dtype=dtype).expand(n, -1)
    samples = Sampler()(logits, [case.row(sample_index=i) for i in range(n)])
    return np.bincount([s.token_id for s in samples], minlength=len(case.logits))


def p_value(tokens: Sequence[int], probabilities: Scores) -> float:
    """Chi-square of drawn tokens against exact probabilities; 0 for an impossible token."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = np.array(probabilities) * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5  # pooled, as the approximation demands
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*expected[~rare], expected[rare].sum()]
    if expected[-1] < 5:  # too few even together: they join the last of the others
        observed[-2:] = [sum(observed[-2:])]
        expected[-2:] = [sum(expected[-2:])]
    return 1.0 if len(expected) == 1 else float(stats.chisquare(observed, expected).pvalue)


def random_logits(vocab_size: int, seed: int = 0, scale: float = 1.5) -> Scores:
    # Rounded to float32, so that all dtypes above it agree on them.
    values = np.random.default_rng(seed).normal(0, scale, vocab_size).astype(np.float32)
    return [float(v) for v in values]


PROMPT, OUTPUT = (1, 4, 4, 9, 11, 20), (2, 4, 9, 9, 9, 15)
# Their logits: likely enough for a wrong penalty to be seen, and of both signs.
SEEN = {9: 2.5, 4: 1.8, 2: 1.2, 1: 1.5, 11: -0.5, 15: -0.6, 20: -0.4}
N = 1500  # draws for each of three seeds
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "bias": {"logit_bias": {0: 2.5, 4: -100.0, 9: 1.0}},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged repetition": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "encouraged frequency": {"frequency_penalty": -0.5},
    "min_tokens": {"min_tokens": 10_000, "max_tokens": 10_000},
    "temperature and top_k": {"temperature": 2.0, "top_k": 7},
    "temperature and top_p": {"temperature": 2.0, "top_p": 0.6},
    "temperature and min_p": {"temperature": 2.0, "min_p": 0.3},
    "top_k and top_p": {"top_k": 8, "top_p": 0.75},
    "all penalties": {
        "repetition_penalty": 1.7,
        "presence_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 3.0, 2: 2.0, 1: 2.0},
    },
    "everything": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "logit_bias": {9: 3.0, 2: 2.0, 1: 2.0, END: 4.0},
        "min_tokens": 10_000,
        "max_tokens": 10_000,
        "temperature": 1.7,
        "top_k": 14,
        "top_p": 0.9,
        "min_p": 0.12,
    },
}


def case_of(wishes: dict[str, Any], seed: int = 0, vocab_size: int = 24) -> Case:
    logits = random_logits(vocab_size, seed, scale=0.8)
    for i, value in SEEN.items():
        if i < vocab_size:
            logits[i] = value + logits[i] / 4
    return Case(logits, SamplingParams(**wishes), PROMPT, OUTPUT)


# Claims.


@pytest.mark.parametrize("name", WISHES)
def test_draws_follow_the_exact_probabilities(name: str) -> None:
    case = case_of(WISHES[name])
    probabilities = exact(case)
    together: list[int] = []
    for seed in SEEDS:
        tokens = draws(case, seed, N)
        assert p_value(tokens, probabilities) > TOO_UNLIKELY
        together += tokens
    assert p_value(together, probabilities) > TOO_UNLIKELY


def without(*dropped: Stage) -> list[Stage]:
    return [stage for stage in STAGES if stage not in dropped]


def before(stage: Stage, other: Stage) -> list[Stage]:
    """The stages with one of them moved in front of another."""
    rest = without(stage)
    rest.insert(rest.index(other), stage)
    return rest


def instead(stage: Stage, wrong: Stage) -> list[Stage]:
    return [wrong if s is stage else s for s in STAGES]


def halved(stage: Stage, **changes: Any) -> list[Stage]:
    """A stage that works with other parameters than it was given."""
    return instead(stage, lambda x, c: stage(x, replace(c, params=replace(c.params, **changes))))


WRONG: dict[str, tuple[str, list[Stage]]] = {
    "no temperature": ("hot", without(temperature)),
    "temperature multiplies": (
        "cold",
        instead(temperature, lambda x, c: [v * c.params.temperature for v in x]),
    ),
    "temperature after top_p": (
        "temperature and top_p",
        [*without(temperature, top_p, min_p), top_p, min_p, temperature],
    ),
    "temperature after min_p": (
        "temperature and min_p",
        [*without(temperature, min_p), min_p, temperature],
    ),
    "temperature before the penalties": ("everything", before(temperature, bias)),
    "top_p before top_k": ("top_k and top_p", before(top_p, top_k)),
    "bias after the penalties": ("all penalties", before(repetition, bias)),
    "presence before repetition": ("all penalties", before(presence, repetition)),
    "k - 1": ("top_k", halved(top_k, top_k=4)),
    "k + 1": ("top_k", halved(top_k, top_k=6)),
    "a little less of p": ("top_p", halved(top_p, top_p=0.6)),
    "min_p of the whole": (
        "min_p",
        instead(
            min_p,
            lambda x, c: keeping(x, {i for i, p in enumerate(softmax(x)) if p >= c.params.min_p}),
        ),
    ),
    "no bias": ("bias", without(bias)),
    "repetition of output only": (
        "repetition",
        instead(repetition, lambda x, c: repetition(x, c, c.output)),
    ),
    "repetition of prompt only": (
        "repetition",
        instead(repetition, lambda x, c: repetition(x, c, c.prompt)),
    ),
    "repetition without regard to sign": (
        "repetition",
        instead(
            repetition,
            lambda x, c: [
                v / c.params.repetition_penalty if i in c.prompt + c.output else v
                for i, v in enumerate(x)
            ],
        ),
    ),
    "presence of the prompt too": (
        "presence",
        instead(presence, lambda x, c: presence(x, c, c.prompt + c.output)),
    ),
    "frequency of the prompt too": (
        "frequency",
        instead(frequency, lambda x, c: frequency(x, c, c.prompt + c.output)),
    ),
    "frequency counts once": (
        "frequency",
        instead(frequency, lambda x, c: frequency(x, c, tuple(set(c.output)))),
    ),
    "presence counts every use": (
        "presence",
        instead(
            presence,
            lambda x, c: [
                v - c.params.presence_penalty * c.output.count(i) for i, v in enumerate(x)
            ],
        ),
    ),
    "end tokens allowed": ("min_tokens", without(min_tokens)),
    "end tokens forbidden for ever": ("plain", halved(min_tokens, min_tokens=16)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_chi_square_test_rejects_a_wrong_sampler(name: str) -> None:
    wishes, stages = WRONG[name]
    case = case_of(WISHES[wishes])
    rng = np.random.default_rng(0)
    tokens = rng.choice(len(case.logits), size=3 * N, p=exact(case, stages))
    assert p_value(list(tokens), exact(case)) < TOO_UNLIKELY / 100
    honest = rng.choice(len(case.logits), size=3 * N, p=exact(case))
    assert p_value(list(honest), exact(case)) > TOO_UNLIKELY


def test_requests_with_different_wishes_in_one_batch_keep_their_distributions() -> None:
    names, n = list(WISHES), 800
    cases = [case_of(WISHES[name], seed=i) for i, name in enumerate(names)]
    mixed = [(i, k) for k in range(n) for i in range(len(cases))]
    random.Random(0).shuffle(mixed)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(cases))}
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float64)
    for start in range(0, len(mixed), 1000):
        part = mixed[start : start + 1000]
        rows = [cases[i].row(seed=i, output_index=len(OUTPUT) + k) for i, k in part]
        samples = Sampler()(logits[[i for i, _ in part]], rows)
        for (i, _), sample in zip(part, samples, strict=True):
            tokens[i].append(sample.token_id)
    for i, case in enumerate(cases):
        assert p_value(tokens[i], exact(case)) > TOO_UNLIKELY, names[i]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WISHES)
def test_every_token_gets_its_share_of_the_random_numbers(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, n = case_of(WISHES[name], seed=1), 500
    counts = swept(case, monkeypatch, n, dtype)
    assert np.abs(counts - n * np.array(exact(case))).max() <= 1.001


WIDE: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"top_k": 128},
    {"top_k": 129},
    {"min_p": 0.01},
    {"top_k": 127, "top_p": 0.99},
    {"top_k": 400, "top_p": 0.9},
    {"top_k": 599, "min_p": 1e-3},
    {"top_k": 600, "top_p": 0.95},
    {"top_k": 10**30, "top_p": 0.5},
]


@pytest.mark.parametrize("wishes", WIDE, ids=str)
def test_filters_are_exact_however_many_survive(
    wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for scale in (0.2, 1.5):
        case = Case(random_logits(600, 5, scale), SamplingParams(**wishes))
        n = 1000
        counts = swept(case, monkeypatch, n, torch.float32)
        assert np.abs(counts - n * np.array(exact(case))).max() <= 1.001


def random_case(rng: random.Random) -> Case:
    """Anything at all: ties, few or many tokens, forbidden ones, filters that bite or don't."""
    vocab_size = rng.choice([4, 5, 12, 40, 127, 128, 129, 300])
    kind = rng.choice(["normal", "ties", "flat", "all equal"])
    draw = {
        "normal": lambda: rng.gauss(0, 2),
        "ties": lambda: float(rng.randint(-3, 3)),
        "flat": lambda: rng.gauss(0, 0.1),
        "all equal": lambda: 1.5,
    }[kind]
    logits = [draw() for _ in range(vocab_size)]
    if rng.random() < 0.3:
        logits = [v if i < 2 or rng.random() < 0.6 else -math.inf for i, v in enumerate(logits)]
    some = lambda *values: rng.choice(values)  # noqa: E731
    params = SamplingParams(
        temperature=some(0.0, 0.3, 1.0, 1.0, 2.5),
        top_k=some(0, 0, 0, 1, 2, 10, 64, 127, 128, 129, 1000),
        top_p=some(1.0, 1.0, 0.05, 0.5, 0.93, 0.9999),
        min_p=some(0.0, 0.0, 0.01, 0.4, 1.0),
        repetition_penalty=some(1.0, 1.0, 1.3, 0.7),
        presence_penalty=some(0.0, 0.0, 0.4, -0.4),
        frequency_penalty=some(0.0, 0.0, 0.3, -0.2),
        logit_bias=some(None, None, {0: 1.5, 3: -2.0}),
        min_tokens=some(0, 0, 5, 16),
    )
    prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, 6)))
    output = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, 8)))
    return Case(logits, params, prompt, output)


def test_a_batch_of_anything_gives_what_plain_python_gives_row_by_row() -> None:
    rng = random.Random(0)
    by_size: dict[int, list[tuple[Case, SamplingRow]]] = {}
    for _ in range(800):
        case = random_case(rng)
        row = case.row(seed=rng.randrange(-(2**63), 2**64), sample_index=rng.randrange(9))
        by_size.setdefault(len(case.logits), []).append((case, row))
    for batch in by_size.values():
        logits = torch.tensor([case.logits for case, _ in batch], dtype=torch.float64)
        samples = Sampler()(logits, [row for _, row in batch])
        for sample, (case, row) in zip(samples, batch, strict=True):
            u = uniform(row.seed, row.output_index, row.sample_index)
            assert sample.token_id == pick(case, u), case


# transformers, on the same logits. Theirs work in float32, so probabilities agree to 1e-5.


def their_probabilities(case: Case, dtype: torch.dtype = torch.float32) -> np.ndarray:
    params = case.params
    chain: list[Any] = []
    if params.logit_bias:
        pairs = [[[token], float(value)] for token, value in params.logit_bias.items()]
        chain.append(theirs.SequenceBiasLogitsProcessor(pairs))
    if params.repetition_penalty != 1.0:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        chain.append(
            theirs.MinNewTokensLengthLogitsProcessor(len(case.prompt), params.min_tokens, END)
        )
    if params.temperature != 1.0:
        chain.append(theirs.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(theirs.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(theirs.MinPLogitsWarper(params.min_p))
    input_ids = torch.tensor([case.prompt + case.output])
    scores = torch.tensor([case.logits], dtype=dtype)
    for processor in chain:
        scores = processor(input_ids, scores)
    return scores.double().softmax(-1)[0].numpy()


CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_k": 6},
    {"top_k": 1},
    {"top_p": 0.55},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"logit_bias": {0: 3.0, 7: -100.0, END: 2.0}},
    {"min_tokens": 7},
    {"min_tokens": 6},
    {"top_k": 12, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 9, "min_p": 0.05},
    {"temperature": 1.8, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.5, "repetition_penalty": 1.3, "top_p": 0.9},
    {
        "logit_bias": {9: 3.0, END: 5.0, 1: -1.5},
        "repetition_penalty": 1.5,
        "min_tokens": 8,
        "temperature": 1.4,
        "top_k": 15,
        "top_p": 0.92,
        "min_p": 0.04,
    },
]


@pytest.mark.parametrize("wishes", CHAINS, ids=str)
def test_filters_agree_with_transformers(
    wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (2, 3):
        case, n = case_of(wishes, seed=seed), 500
        assert len(set(case.logits)) == len(case.logits)  # no ties
        probabilities = their_probabilities(case)
        assert np.abs(probabilities - exact(case)).max() < 1e-5
        counts = swept(case, monkeypatch, n, torch.float32)
        survivors = probabilities > 2 / n
        assert set(np.flatnonzero(survivors)) <= set(np.flatnonzero(counts))
        assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(probabilities))
        assert np.abs(counts - n * probabilities).max() <= 1.02


@pytest.mark.parametrize("wishes", CHAINS, ids=str)
def test_exactly_the_same_tokens_survive_as_in_transformers(wishes: dict[str, Any]) -> None:
    for seed in range(20):
        case = case_of(wishes, seed=seed, vocab_size=200)
        ours = np.array(exact(case))
        probabilities = their_probabilities(case)
        assert (ours > 0).tolist() == (probabilities > 0).tolist()
        assert np.abs(ours - probabilities).max() < 1e-5


# The random numbers.


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**63 - 1, -(2**63), 2**64 - 2])
def test_random_numbers_are_uniform(seed: int) -> None:
    by_output = [uniform(seed, i) for i in range(5000)]
    by_sample = [uniform(seed, 7, i) for i in range(5000)]
    by_seed = [uniform(seed // 2 + i, 7) for i in range(5000)]
    for numbers in (by_output, by_sample, by_seed):
        assert stats.kstest(numbers, "uniform").pvalue > TOO_UNLIKELY
        counts = np.bincount([int(u * 64) for u in numbers], minlength=64)
        assert stats.chisquare(counts).pvalue > TOO_UNLIKELY
        assert len(set(numbers)) > 4990  # 32 bits: hardly ever the same twice


@pytest.mark.parametrize(
    "other",
    [lambda s, i: uniform(s, i + 1), lambda s, i: uniform(s, i, 1), lambda s, i: uniform(s + 1, i)],
    ids=["the next token", "the next sample", "the next seed"],
)
def test_random_numbers_say_nothing_of_each_other(other: Callable[[int, int], float]) -> None:
    for seed in (0, 99, -5):
        pairs = [(uniform(seed, 2 * i), other(seed, 2 * i)) for i in range(6000)]
        cells = np.zeros((12, 12))
        for u, v in pairs:
            cells[int(u * 12), int(v * 12)] += 1
        assert stats.chisquare(cells.ravel()).pvalue > TOO_UNLIKELY


def test_samples_of_one_request_are_drawn_each_for_itself() -> None:
    case, n = case_of({"top_k": 6}, vocab_size=10), 3000
    rows = [case.row(1, sample_index=s, output_index=6 + i) for i in range(n) for s in (0, 1)]
    logits = torch.tensor(case.logits).expand(2 * n, -1)
    tokens = [sample.token_id for sample in Sampler()(logits, rows)]
    table = np.zeros((10, 10))
    for first, second in zip(tokens[::2], tokens[1::2], strict=True):
        table[first, second] += 1
    alive = np.flatnonzero(table.sum(1))
    assert stats.chi2_contingency(table[np.ix_(alive, alive)]).pvalue > TOO_UNLIKELY


def test_the_random_number_is_never_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    class Digest:
        def __init__(self, content: bytes) -> None:
            self.digest = lambda: content

    for content in (b"\x00" * 4, b"\xff" * 4):
        monkeypatch.setattr(
            infer_lab.sampler.hashlib, "blake2b", lambda *a, c=content, **k: Digest(c)
        )
        assert 0.0 < uniform(0, 0) < 1.0
        # ... and even then the first or the last token that has a probability is drawn.
        logits = torch.tensor([[-math.inf, 1.0, 2.0, 0.0, -math.inf]])
        for wishes in ({}, {"top_k": 3}, {"top_p": 0.9999}, {"min_p": 0.01}):
            token = Sampler()(logits, [SamplingRow(SamplingParams(**wishes), 0)])[0].token_id
            by_id, by_rank = (1, 2) if content[0] == 0 else (3, 3)
            assert token == (by_rank if wishes else by_id)


def test_a_random_number_at_a_border_belongs_to_the_next_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, 0.0, 0.0]])
    for wishes in ({}, {"top_k": 4}):
        for u, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.5, 3), (0.75, 4), (0.9999, 4)):
            monkeypatch.setattr(infer_lab.sampler, "uniform", lambda *place, u=u: u)
            own = SamplingRow(SamplingParams(**wishes), 0)
            assert Sampler()(logits, [own])[0].token_id == token


def test_random_numbers_are_the_same_everywhere_and_for_ever() -> None:
    assert uniform(0, 0) == 0.264748664223589
    assert uniform(-1, 5) == uniform(2**64 - 1, 5) == 0.8777548949001357  # the same 64 bits
    assert uniform(2**63 - 1, 2**20, 3) == 0.528170075151138
