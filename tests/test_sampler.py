"""What holds for every row of logits, whatever it asks for and whoever shares its batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import infer_lab.sampler
from infer_lab.sampler import Sample, Sampler, SamplingParams, SamplingRow

torch.set_num_threads(1)
INF, NAN = math.inf, math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GREEDY = {"temperature": 0.0}
# One of each kind of work that a row can ask for.
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_k": 10**30, "temperature": 3.0},
    {"top_p": 0.8},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 20},
    {"logit_bias": {0: 50.0, 5: -100.0}, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {3: 5.0}},
    {"min_tokens": 9, "top_k": 5},
    {"temperature": 0.0, "logprobs": 5},
    {"logprobs": 0},
    {"logprobs": 20, "top_p": 0.7},
    {"logprobs": 2, "repetition_penalty": 2.0},
]


def row(seed: int = 0, output_index: int = 0, prompt: Sequence[int] = (), **wishes: Any) -> Any:
    """A row of a request; wishes are its SamplingParams. Its output so far is all token 1."""
    params = SamplingParams(**wishes)
    output = (1,) * output_index
    return SamplingRow(params, seed, 0, output_index, prompt, output, end_token_ids=(2, 4))


def sample(logits: Any, *rows: SamplingRow) -> list[Sample]:
    """Rows of one list of logits, or of one list each."""
    logits = torch.as_tensor(logits)
    return Sampler()(logits.expand(len(rows), -1), rows)


def drawn(logits: Any, n: int = 200, **wishes: Any) -> set[int]:
    """The tokens that n rows draw."""
    samples = sample(logits, *(row(seed=i, **wishes) for i in range(n)))
    assert not [s.error for s in samples if s.error]
    return {s.token_id for s in samples}


# Greedy.


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_0_is_argmax_and_takes_the_lower_id_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0, 3, -1, 3, 3], [5, 5, 5, 5, 5], [-9, -8, -7, -7, -8]], dtype=dtype)
    samples = sample(logits, *[row(temperature=0.0)] * 3)
    assert [s.token_id for s in samples] == [1, 0, 2]
    assert samples == [Sample(1), Sample(0), Sample(2)]  # no logprobs, no error
    big = torch.randint(-40, 40, (8, 5000), generator=torch.Generator().manual_seed(0)).to(dtype)
    for found, scores in zip(sample(big, *[row(temperature=0.0)] * 8), big.tolist(), strict=True):
        assert found.token_id == scores.index(max(scores))


def test_greedy_ignores_filters_but_not_penalties() -> None:
    logits = [[0.0, 2.0, 1.9, 1.0]]
    filters = {"top_k": 3, "top_p": 0.1, "min_p": 1.0}
    assert sample(logits, row(temperature=0.0, **filters))[0].token_id == 1
    assert sample(logits, row(temperature=-0.0, prompt=(1,), **filters))[0].token_id == 1
    penalised = row(temperature=0.0, prompt=(1,), repetition_penalty=1.2, **filters)
    assert sample(logits, penalised)[0].token_id == 2


class Work(TorchFunctionMode):
    """Which operations run, and on how many numbers at most."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if args and isinstance(args[0], Tensor) and name not in ("__get__", "__len__"):
            size = max(self.numbers.get(name, 0), args[0].numel())
            self.numbers[name] = size
        return func(*args, **(kwargs or {}))


def work(rows: Sequence[SamplingRow], vocab_size: int = 300) -> dict[str, int]:
    """Operations on more than one number a row."""
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(0))
    with Work() as done:
        Sampler()(logits, rows)
    return {name: size for name, size in done.numbers.items() if size > len(rows)}


def test_greedy_rows_cost_an_argmax_alone() -> None:
    wishes = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop_token_ids": [7]}
    assert set(work([row(seed=i, temperature=0.0, **wishes) for i in range(8)])) == {"max"}


@pytest.mark.parametrize("wishes", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_beside_others_they_still_cost_no_more(wishes: dict[str, Any]) -> None:
    rows = [row(seed=i, temperature=0.0) for i in range(6)] + [row(seed=9, **wishes)] * 2
    found = work(rows)
    assert {name for name, size in found.items() if size > 2 * 300} == {"max", "index_select"}
    assert "exp_" in found  # ... on the two rows that are drawn


def test_logprobs_cost_nothing_unless_asked() -> None:
    assert "log_softmax" not in work([row(), row(top_k=3), row(temperature=0.0)])
    found = work([row(), row(temperature=0.0, logprobs=0), row(top_p=0.5)])
    assert found["log_softmax"] == 300  # one row


# Ties and filters.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [6, 127, 128, 129, 300])
def test_exactly_k_survive_top_k_and_of_equals_the_lower_ids(
    vocab_size: int, dtype: torch.dtype
) -> None:
    equal = torch.zeros(vocab_size, dtype=dtype)
    for k in (1, 2, 5):
        assert drawn(equal, top_k=k) == set(range(k))
    some = equal.clone()
    some[5] = 0.5  # the likeliest; behind it all are equal
    assert drawn(some, top_k=3) == {5, 0, 1}
    assert drawn(some, top_k=1) == {5}


def test_top_k_past_the_vocabulary_keeps_everything() -> None:
    for k in (9, 10, 11, 10**30, 10**400):  # the last one is past the largest float too
        assert drawn(torch.zeros(9), top_k=k) == set(range(9))


def test_many_equals_keep_exactly_k() -> None:
    equal = torch.zeros(400)
    assert drawn(equal, n=1500, top_k=150) == set(range(150))
    equal[:200] = -1.0
    assert drawn(equal, n=1500, top_k=140) == set(range(200, 340))


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.5, 1.0, 30.0, 1e6, 1e17, 1e300])
def test_k_1_is_greedy_at_any_temperature(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (50, 200), generator=generator).double()
    logits += 1e-13 * torch.randint(0, 2, (50, 200), generator=generator)  # all but equal
    greedy = sample(logits, *[row(temperature=0.0)] * 50)
    for filters in ({"top_k": 1}, {"top_k": 1, "top_p": 0.5}, {"top_k": 1, "min_p": 0.5}):
        assert sample(logits, *[row(temperature=temperature, **filters)] * 50) == greedy


def test_top_p_at_a_border_of_equals_keeps_the_lower_ids() -> None:
    equal = torch.zeros(8)  # each has 1/8, exactly
    assert drawn(equal, top_p=0.5) == {0, 1, 2, 3}  # exactly half is enough
    assert drawn(equal, top_p=0.5 + 1e-9) == {0, 1, 2, 3, 4}
    assert drawn(equal, top_p=1e-9) == {0}
    assert drawn(equal, top_p=5e-324) == {0}
    assert drawn(equal, top_p=1 - 1e-9) == set(range(8))
    halves = torch.tensor([-1.0, 0.0, -1.0, -1.0, 0.0, -1.0]) * math.log(2) * 2
    # probabilities 1/12, 1/3, 1/12, 1/12, 1/3, 1/12
    assert drawn(halves, top_p=0.3) == {1}
    assert drawn(halves, top_p=0.6) == {1, 4}
    assert drawn(halves, top_p=0.74) == {1, 4, 0}


def test_min_p_keeps_what_is_exactly_at_the_border() -> None:
    assert drawn(torch.zeros(5), min_p=1.0) == {0, 1, 2, 3, 4}
    assert drawn(torch.tensor([0.0, 1.0, 1.0, 0.999]), min_p=1.0) == {1, 2}
    logits = torch.tensor([0.5, 0.25, 0.249, 0.001], dtype=torch.float64).log()
    # 0.25 itself is a matter of rounding; just beside it nothing is.
    assert drawn(logits, min_p=0.5 - 1e-9) == {0, 1}
    assert drawn(logits, min_p=0.5 + 1e-9) == {0}


@pytest.mark.parametrize("wishes", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 128, 1000])
def test_at_least_one_survives_any_filter(wishes: dict[str, Any], vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    assert drawn(logits, n=20, **wishes) == {int(logits.argmax())}


# Extreme logits.

LAST = {"top_k": 3, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("wishes", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}, LAST])
def test_extreme_logits(wishes: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = lambda *values, dtype=dtype: torch.tensor(values, dtype=dtype)  # noqa: E731
        assert drawn(tensor(0.0, 1e30, -1e30, 5.0), **wishes) == {1}
        assert drawn(tensor(1e30, -INF, 1e30, -1e30), **wishes) == {0, 2}
        assert drawn(tensor(-1e30, -INF, -INF, -1e30), **wishes) == {0, 3}
        assert drawn(tensor(-INF, -INF, -3.0, -INF), **wishes) == {2}
        largest = torch.finfo(dtype).max
        assert drawn(tensor(-largest, largest, -INF), **wishes) == {1}
        tiny = torch.finfo(dtype).smallest_normal / 4  # denormal
        assert drawn(tensor(tiny, -tiny, -500.0, -INF), **wishes) == {0, 1}
    for dtype in (torch.float16, torch.bfloat16):
        assert drawn(torch.tensor([-6e4, 6e4, -INF, 5e4], dtype=dtype), **wishes) == {1}
    assert drawn(torch.tensor([1.25]), **wishes) == {0}


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.95}, {"min_p": 0.5}], ids=str)
def test_extreme_temperatures(filters: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 3.0, -INF, 2.999, 2.0])
    for cold in (1e-6, 1e-300, 5e-324):
        assert drawn(logits, temperature=cold, **filters) == {1}
    for hot in (1e6, 1e300):  # all but those with no chance at all become equal
        survivors = drawn(logits, temperature=hot, **filters)
        assert survivors == ({1, 3, 4} if "top_k" in filters else {0, 1, 3, 4})


@pytest.mark.parametrize("wishes", KINDS, ids=str)
def test_the_dtype_of_the_logits_changes_nothing_but_their_precision(wishes: Any) -> None:
    logits = torch.randint(-8, 9, (20, 150), generator=torch.Generator().manual_seed(3)) / 4
    rows = [row(seed=i, output_index=3, prompt=(7, 8), **wishes) for i in range(20)]
    tokens = {d: [s.token_id for s in Sampler()(logits.to(d), rows)] for d in DTYPES}
    assert all(tokens[d] == tokens[torch.float64] for d in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_logits_are_left_as_they_were(dtype: torch.dtype) -> None:
    logits = torch.randn(len(KINDS), 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    for kinds in (KINDS, [{}], [{"top_p": 0.9}], [GREEDY], [{"logit_bias": {3: 1.0}}]):
        given = logits[: len(kinds)].clone()
        Sampler()(given, [row(output_index=2, prompt=(7,), **k) for k in kinds])
        assert torch.equal(given, logits[: len(kinds)])


# Rows do not touch each other.


def batch(vocab_size: int, dtype: torch.dtype, ties: bool) -> tuple[Tensor, list[SamplingRow]]:
    """Three rows of each kind, shuffled."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    rows = [
        row(
            seed=rng.randrange(-(2**63), 2**64),
            output_index=rng.randrange(12),
            prompt=[rng.randrange(vocab_size) for _ in range(5)],
            **wishes,
        )
        for wishes in KINDS * 3
    ]
    rng.shuffle(rows)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 2
    return (logits.round() if ties else logits).to(dtype), rows


BATCHES = [(40, torch.float64, False), (40, torch.bfloat16, True), (129, torch.float16, True)]
BATCHES += [(5000, torch.float32, False), (5000, torch.bfloat16, True)]


@pytest.fixture(params=BATCHES, ids=str)
def mixed(request: pytest.FixtureRequest) -> Iterator[tuple[Tensor, list[SamplingRow]]]:
    yield batch(*request.param)


def test_a_row_gets_the_same_alone_as_in_a_batch(mixed: tuple[Tensor, list[SamplingRow]]) -> None:
    logits, rows = mixed
    together = Sampler()(logits, rows)
    for i, own in enumerate(rows):  # equal to the last bit of each log-probability
        assert Sampler()(logits[i : i + 1], [own]) == [together[i]]


def test_a_row_gets_the_same_at_any_place(mixed: tuple[Tensor, list[SamplingRow]]) -> None:
    logits, rows = mixed
    together = Sampler()(logits, rows)
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    moved = Sampler()(logits[order], [rows[i] for i in order])
    assert moved == [together[i] for i in order]
    half = order[: len(order) // 2]
    assert Sampler()(logits[half], [rows[i] for i in half]) == [together[i] for i in half]


def test_a_row_gets_the_same_whatever_its_neighbours_ask_for(
    mixed: tuple[Tensor, list[SamplingRow]],
) -> None:
    logits, rows = mixed
    together = Sampler()(logits, rows)
    for wishes in KINDS:
        others = [own if i % 3 == 0 else row(seed=i, **wishes) for i, own in enumerate(rows)]
        assert Sampler()(logits, others)[::3] == together[::3]


@pytest.mark.parametrize("wishes", KINDS, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite_ends_alone_with_an_error(
    wishes: dict[str, Any], bad: float
) -> None:
    logits, rows = batch(40, torch.float32, False)
    together = Sampler()(logits, rows)
    for place in (0, 2, 39):  # 2 is an end token, forbidden by min_tokens
        spoilt = torch.cat([logits, logits[:1]])
        spoilt[-1, place] = bad
        *others, last = Sampler()(spoilt, [*rows, row(**wishes)])
        assert last.token_id == -1
        assert last.logprobs is None
        assert last.error is not None and "not finite" in last.error
        assert others == together


@pytest.mark.parametrize("wishes", KINDS, ids=str)
@pytest.mark.parametrize("values", [[-INF], [NAN], [INF], [INF, -INF, NAN]], ids=str)
def test_a_row_without_any_finite_logit_is_an_error(
    wishes: dict[str, Any], values: list[float]
) -> None:
    logits = torch.zeros(3, 12)
    logits[1] = torch.tensor(values * (12 // len(values)))
    errors = [s.error is not None for s in sample(logits, row(), row(**wishes), row())]
    assert errors == [False, True, False]


def test_parameters_that_leave_no_token_are_an_error_of_that_row_alone() -> None:
    logits = torch.tensor([[-INF, -INF, 1.0, -INF, 2.0]]).expand(3, -1)
    forbidden = row(min_tokens=3)  # both that have a chance, 2 and 4, are end tokens
    exploding = row(repetition_penalty=1e-300, prompt=(2,))
    first, second, third = sample(logits, forbidden, row(seed=5), exploding)
    assert first.error and third.error
    assert second == sample(logits[:1], row(seed=5))[0]


def test_the_largest_bias_decides_its_own_row_only() -> None:
    logits = torch.zeros(3, 6)
    rows = [row(seed=i) for i in range(3)]
    plain = sample(logits, *rows)
    rows[1] = row(seed=1, logit_bias={4: 100.0, 0: -100.0})
    first, second, third = sample(logits, *rows)
    assert (first, second.token_id, third) == (plain[0], 4, plain[2])


@pytest.mark.parametrize("shape", [(2, 5), (4, 5), (5,), (3, 1, 5), (0, 5)])
def test_logits_must_have_a_row_for_each_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be \(3, V\) for 3 rows, got \("):
        Sampler()(torch.zeros(shape), [row()] * 3)


def test_no_rows_give_no_samples() -> None:
    assert Sampler()(torch.zeros(0, 5), []) == []


# Seeds.


@pytest.mark.parametrize("wishes", [{}, {"top_p": 0.9}], ids=str)
def test_same_seed_and_place_same_token(wishes: dict[str, Any]) -> None:
    logits = torch.zeros(1, 5000)

    def token(seed: int, output_index: int = 0, sample_index: int = 0) -> int:
        own = SamplingRow(SamplingParams(**wishes), seed, sample_index, output_index)
        return sample(logits, own)[0].token_id

    assert token(7, 3, 1) == token(7, 3, 1)
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63) + 1, 2**64 - 2]
    assert len({token(seed) for seed in seeds}) == len(seeds)
    assert len({token(7, output_index=i) for i in range(9)}) == 9
    assert len({token(7, sample_index=i) for i in range(9)}) == 9


def test_the_seed_is_the_rows_and_nothing_else_is_random() -> None:
    logits = torch.zeros(1, 5000)
    own = SamplingRow(SamplingParams(seed=99), seed=3)  # the engine has already chosen: 3
    torch.manual_seed(0)
    token = sample(logits, own)[0].token_id
    torch.manual_seed(1)
    random.seed(1)
    assert Sampler()(logits, [own])[0].token_id == token
    assert sample(logits, SamplingRow(SamplingParams(), seed=3))[0].token_id == token


# Log-probabilities.


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_of_the_models_own_distribution(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(4)).to(dtype) * 4
    exact = logits[0].double().log_softmax(-1)
    likeliest = exact.argsort(descending=True, stable=True).tolist()
    everything = {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {likeliest[0]: -5.0, 17: 8.0},
        "min_tokens": 9,
    }
    for wishes in ({}, GREEDY, {"top_k": 1}, everything):
        own = row(output_index=2, prompt=likeliest[1:4], logprobs=7, **wishes)
        found = sample(logits, own)[0]
        assert found.logprobs is not None
        assert found.logprobs.logprob == pytest.approx(exact[found.token_id].item(), abs=1e-5)
        assert list(found.logprobs.top) == likeliest[:7]  # from high to low
        expected = [exact[i].item() for i in likeliest[:7]]
        assert list(found.logprobs.top.values()) == pytest.approx(expected, abs=1e-5)
        if found.token_id in found.logprobs.top:
            assert found.logprobs.top[found.token_id] == found.logprobs.logprob


def test_float64_logits_keep_their_precision_in_logprobs() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = sample(logits, row(temperature=0.0, logprobs=1))[0].logprobs
    assert found is not None
    assert found.logprob == logits.log_softmax(-1).max().item()


def test_logprobs_none_0_and_more_than_the_vocabulary() -> None:
    logits = torch.tensor([[0.5, 2.5, 1.5]])
    assert sample(logits, row())[0].logprobs is None
    only = sample(logits, row(temperature=0.0, logprobs=0))[0].logprobs
    assert only is not None
    assert only.top == {}
    assert only.logprob == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)))
    whole = sample(logits, row(temperature=0.0, logprobs=20))[0].logprobs
    assert whole is not None
    assert list(whole.top) == [1, 2, 0]
    assert sum(math.exp(v) for v in whole.top.values()) == pytest.approx(1.0)


def test_equal_logprobs_are_listed_by_id_and_the_greedy_token_is_first() -> None:
    logits = torch.tensor([[0.0] * 300])
    logits[0, 200:210] = 1.0
    for k in range(1, 21):  # whatever k is, and whatever the others ask for
        alone, _ = sample(logits, row(temperature=0.0, logprobs=k), row(logprobs=20))
        assert alone.token_id == 200
        assert alone.logprobs is not None
        assert list(alone.logprobs.top) == [*range(200, 210), *range(10)][:k]


def test_logprobs_of_extreme_logits() -> None:
    logits = torch.tensor([[1e30, -1e30, -INF, 1e30]])
    found = sample(logits, row(temperature=0.0, logprobs=4))[0].logprobs
    assert found is not None
    assert found.top == pytest.approx({0: -math.log(2), 3: -math.log(2), 1: -2e30, 2: -INF})


# Penalties, bias and min_tokens.


def adjusted(logits: list[float], own: SamplingRow) -> list[float]:
    """Logits after bias, penalties and min_tokens."""
    tensor = torch.tensor([logits], dtype=torch.float64)
    return infer_lab.sampler._adjust(tensor, [own])[0].tolist()


def test_penalties_see_the_tokens_that_they_should() -> None:
    logits = [4.0, -4.0, 2.0, -2.0, 0.0]
    prompt, output = (0, 3, 3), (1, 1, 2, 1)
    see = lambda **wishes: adjusted(  # noqa: E731
        logits, SamplingRow(SamplingParams(**wishes), 0, 0, 4, prompt, output)
    )
    assert see(repetition_penalty=2.0) == [2.0, -8.0, 1.0, -4.0, 0.0]  # prompt and output
    assert see(repetition_penalty=0.5) == [8.0, -2.0, 4.0, -1.0, 0.0]
    assert see(presence_penalty=0.5) == [4.0, -4.5, 1.5, -2.0, 0.0]  # output, once
    assert see(frequency_penalty=0.5) == [4.0, -5.5, 1.5, -2.0, 0.0]  # output, each time
    assert see(presence_penalty=-1.0, frequency_penalty=0.25) == [4.0, -3.75, 2.75, -2.0, 0.0]
    assert see(logit_bias={0: 1.5, 4: -100}) == [5.5, -4.0, 2.0, -2.0, -100.0]
    # bias, then repetition, then presence and frequency
    combined = see(logit_bias={1: 6.0}, repetition_penalty=2.0, presence_penalty=1.0)
    assert combined == [2.0, 0.0, 0.0, -4.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_penalty_is_not_lost_in_the_precision_of_the_logits(dtype: torch.dtype) -> None:
    for wishes in ({"logit_bias": {1: 1e-4}}, {"presence_penalty": 1e-4}):
        logits = torch.tensor([[8.0, 8.0, 0.0]], dtype=dtype)
        own = SamplingRow(SamplingParams(temperature=0.0, **wishes), 0, 0, 1, (), (0,))
        assert sample(logits, own)[0].token_id == 1
    near = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert sample(near, row(temperature=0.0, logit_bias={0: 0.0}))[0].token_id == 1


def test_penalties_of_a_request_without_tokens_change_nothing() -> None:
    wishes = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert adjusted([1.0, 2.0], SamplingRow(SamplingParams(**wishes), 0)) == [1.0, 2.0]


def test_penalties_and_bias_leave_forbidden_tokens_forbidden() -> None:
    wishes = {"repetition_penalty": 0.5, "presence_penalty": -2.0, "logit_bias": {1: 100.0}}
    own = SamplingRow(SamplingParams(**wishes), 0, 0, 1, (1,), (1,))
    assert adjusted([0.0, -INF, 1.0], own) == [0.0, -INF, 1.0]


def test_min_tokens_forbids_the_end_tokens_and_only_while_needed() -> None:
    logits = [[0.0, 1.0, 9.0, 0.5, 8.0]]  # 2 and 4 end a request
    for output_index in range(6):
        wishes = {"temperature": 0.0, "min_tokens": 3}
        token = sample(logits, row(output_index=output_index, **wishes))[0].token_id
        assert token == (1 if output_index < 3 else 2)
    own = row(output_index=2, min_tokens=3)
    assert adjusted(logits[0], own) == [0.0, 1.0, -INF, 0.5, -INF]
    assert adjusted(logits[0], row(output_index=3, min_tokens=3)) == logits[0]
    assert drawn(torch.tensor(logits[0]), min_tokens=3, top_k=2) == {1, 3}
    no_end = SamplingRow(SamplingParams(min_tokens=3), 0)
    assert adjusted(logits[0], no_end) == logits[0]


def test_end_tokens_outside_the_vocabulary_do_no_harm() -> None:
    own = SamplingRow(SamplingParams(min_tokens=1), 0, end_token_ids=(1, 3, 500))
    assert adjusted([0.5, 1.0, 2.0], own) == [0.5, -INF, 2.0]


def test_a_bias_cannot_bring_back_what_min_tokens_forbids() -> None:
    own = row(temperature=0.0, min_tokens=1, logit_bias={2: 100.0})
    assert sample([[0.0, 0.5, 0.0, 0.2, 0.0]], own)[0].token_id == 1
