"""Checks of chapter 2's exercises, and answers that they must reject.

Numbers are drawn at random, from fixed seeds, and no two sizes are alike. Where borders matter
(ties, the token that crosses p, a draw exactly between two tokens) the numbers are binary
fractions, which add up without any rounding.
"""

import math
import random

import torch

from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("I'm not sure what to do. I'm", max_tokens=40),
    GreedyExample("We walked along the", max_tokens=6),
]


# 1 -- the temperature for given odds -------------------------------------------------------------


def check_temperature_for(temperature_for, claim):
    rng = random.Random(1)
    with claim("odds of e to the power of the difference need temperature 1"):
        claim.returns(1.0, temperature_for, 3.5, 1.25, math.exp(2.25))
    with claim("two tokens have these odds after a softmax at this temperature"):
        for _ in range(5):
            second = rng.uniform(-9, 9)
            first, heat = second + rng.uniform(0.5, 6), rng.uniform(0.3, 3)
            p = (torch.tensor([first, second, 0.7], dtype=torch.float64) / heat).softmax(dim=0)
            claim.returns(heat, temperature_for, first, second, float(p[0] / p[1]))
    with claim("only the difference of the logits counts"):
        claim.returns(temperature_for(7.0, 4.0, 5.0), temperature_for, -2.0, -5.0, 5.0)


def forgets_the_logarithm(first, second, odds):
    return (first - second) / odds


def is_upside_down(first, second, odds):
    return math.log(odds) / (first - second)


def divides_the_logits(first, second, odds):
    return first / second / math.log(odds)


def takes_another_logarithm(first, second, odds):
    return (first - second) / math.log2(odds)


# 2 -- exactly k survive --------------------------------------------------------------------------


def survivors_one_by_one(logits, k):
    """Take the highest that is left, from low ids to high, k times."""
    left = logits.tolist()
    keep = torch.zeros(len(left), dtype=torch.bool)
    for _ in range(min(k or len(left), len(left))):
        best = left.index(max(left))
        keep[best], left[best] = True, -math.inf
    return keep


def check_exactly_top_k(exactly_top_k, claim):
    generator = torch.Generator().manual_seed(2)
    with claim("the k highest survive, wherever they are"):
        for k in (1, 4, 7):
            logits = torch.randn(11, generator=generator)
            claim.returns(survivors_one_by_one(logits, k), exactly_top_k, logits, k)
    with claim("of equals the lower ids survive, and exactly k in all"):
        for k in (1, 3, 5, 8):
            logits = torch.randint(0, 4, (13,), generator=generator).float()
            claim.returns(survivors_one_by_one(logits, k), exactly_top_k, logits, k)
        many = torch.zeros(5000)
        claim.returns(survivors_one_by_one(many, 3), exactly_top_k, many, 3)
    with claim("k = 0 keeps all"):
        logits = torch.randn(9, generator=generator)
        claim.returns(torch.ones(9, dtype=torch.bool), exactly_top_k, logits, 0)
    with claim("so does a k larger than the vocabulary"):
        claim.returns(torch.ones(9, dtype=torch.bool), exactly_top_k, logits, 12)
    with claim("the logits stay as they were"):
        before = logits.clone()
        exactly_top_k(logits, 4)
        claim.true(torch.equal(logits, before), "exactly_top_k changed its argument")


def lets_equals_through(logits, k):
    k = min(k or len(logits), len(logits))
    return logits >= logits.topk(k).values[-1]


def cuts_all_equals(logits, k):
    if k == 0 or k >= len(logits):
        return torch.ones(len(logits), dtype=torch.bool)
    return logits > logits.topk(k + 1).values[-1]


def prefers_higher_ids(logits, k):
    k = min(k or len(logits), len(logits))
    keep = torch.zeros(len(logits), dtype=torch.bool)
    keep[len(logits) - 1 - logits.flip(0).argsort(descending=True, stable=True)[:k]] = True
    return keep


def takes_zero_at_its_word(logits, k):
    keep = torch.zeros(len(logits), dtype=torch.bool)
    keep[logits.argsort(descending=True, stable=True)[:k]] = True
    return keep


# 3 -- the logprob of a text ----------------------------------------------------------------------


def logprob_in_loops(all_logits, token_ids):
    """Row t speaks of token t + 1: the definition, number by number."""
    total = 0.0
    for t in range(len(token_ids) - 1):
        row = all_logits[t].double().tolist()
        total += row[token_ids[t + 1]] - math.log(sum(math.exp(x) for x in row))
    return total


def check_text_logprob(text_logprob, claim):
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)

    def text(length, size):
        logits = torch.randn(length, size, generator=generator, dtype=torch.float64)
        return 3 * logits, [rng.randrange(size) for _ in range(length)]

    with claim("two tokens: the first row speaks of the second token"):
        logits, ids = text(2, 5)
        claim.returns(logprob_in_loops(logits, ids), text_logprob, logits, ids)
    with claim("a longer text: the sum over all tokens but the first"):
        for length, size in ((6, 9), (17, 7)):
            logits, ids = text(length, size)
            claim.returns(logprob_in_loops(logits, ids), text_logprob, logits, ids)
    with claim("a text too unlikely for its probability to be a float"):
        logits, ids = text(500, 11)
        expected = logprob_in_loops(logits, ids)
        claim.returns(expected, text_logprob, logits, ids, tolerance=1e-4)
    with claim("large logits do no harm"):
        logits, ids = text(4, 6)
        expected = logprob_in_loops(logits, ids)
        claim.returns(expected, text_logprob, logits + 2000, ids)


def asks_each_row_for_its_own_token(all_logits, token_ids):
    return float(all_logits.log_softmax(dim=-1)[range(len(token_ids)), token_ids].sum())


def multiplies_probabilities(all_logits, token_ids):
    p = all_logits[:-1].softmax(dim=-1)
    return float(p[range(len(token_ids) - 1), token_ids[1:]].prod().log())


def adds_up_logits(all_logits, token_ids):
    return float(all_logits[range(len(token_ids) - 1), token_ids[1:]].sum())


def takes_the_mean(all_logits, token_ids):
    logprobs = all_logits[:-1].log_softmax(dim=-1)
    return float(logprobs[range(len(token_ids) - 1), token_ids[1:]].mean())


def overflows(all_logits, token_ids):
    logprobs = all_logits - all_logits.exp().sum(dim=-1, keepdim=True).log()
    return float(logprobs[range(len(token_ids) - 1), token_ids[1:]].sum())


# 4 -- a draw by weights --------------------------------------------------------------------------

LARGEST_U = 1 - 2.0**-33


def token_hit(weights, u):
    """Walk along the tokens until their weights exceed u times the whole."""
    weights = weights.double().tolist()
    target, walked = u * sum(weights), 0.0
    for token_id, weight in enumerate(weights):
        walked += weight
        if walked > target:
            return token_id
    raise AssertionError("u must be below 1")


def check_draw_by_weight(draw_by_weight, claim):
    def tries(weights, *numbers):
        for u in numbers:
            claim.returns(token_hit(weights, u), draw_by_weight, weights, u)

    with claim("each token is as long as its weight"):
        weights = torch.tensor([0.125, 0.5, 0.25, 0.125])
        tries(weights, 0.05, 0.2, 0.6, 0.7, 0.8, 0.9)
    with claim("weights may add up to anything"):
        generator = torch.Generator().manual_seed(4)
        rng = random.Random(4)
        for scale in (0.01, 30.0):
            weights = scale * torch.rand(9, generator=generator, dtype=torch.float64)
            tries(weights, *(rng.random() for _ in range(12)))
    with claim("on a border the next token is hit, and weight 0 never"):
        weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 1.0, 0.0])
        tries(weights, 0.0, 0.25, 0.75)
    with claim("the largest u hits the last token that has a weight, in float32 too"):
        weights = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0, 0.0])
        tries(weights, LARGEST_U)
        tries(weights.double(), LARGEST_U)
    with claim("a vocabulary of float32 weights: no u falls off the end"):
        weights = torch.rand(50_000, generator=torch.Generator().manual_seed(5)) ** 8
        weights[-2000:] = 0
        for u in (0.0, 0.37, 1 - 2.0**-20, LARGEST_U):
            token_id = draw_by_weight(weights, u)
            at = f"draw_by_weight(float32 weights of 50,000 tokens, {u!r}) gave {token_id!r}"
            is_token = isinstance(token_id, int) and 0 <= token_id < len(weights)
            claim.true(is_token, f"{at}, which is no token")
            claim.true(bool(weights[token_id] > 0), f"{at}, whose weight is 0")


def trusts_that_the_sum_is_one(weights, u):
    target = torch.tensor(u, dtype=torch.float64)
    return int(torch.searchsorted(weights.double().cumsum(dim=0), target, right=True))


def stays_in_float32(weights, u):
    sums = (weights / weights.sum()).cumsum(dim=0)
    return int(torch.searchsorted(sums, torch.tensor(u, dtype=sums.dtype), right=True))


def stops_on_the_border(weights, u):
    sums = weights.double().cumsum(dim=0)
    return int(torch.searchsorted(sums, u * sums[-1]))


def takes_the_last_token_if_in_doubt(weights, u):
    sums = (weights / weights.sum()).cumsum(dim=0)
    found = torch.searchsorted(sums, torch.tensor(u, dtype=sums.dtype), right=True)
    return min(int(found), len(weights) - 1)


def returns_the_one_before(weights, u):
    sums = weights.double().cumsum(dim=0)
    return max(int(torch.searchsorted(sums, u * sums[-1], right=True)) - 1, 0)


# 5 -- top-p for all rows -------------------------------------------------------------------------


def survivors_row_by_row(p, top_p):
    """From the likeliest on, until their sum has reached p."""
    keep = torch.zeros_like(p, dtype=torch.bool)
    for row, fraction in enumerate(top_p.tolist()):
        total = 0.0
        for token_id in p[row].argsort(descending=True, stable=True).tolist():
            if total < fraction:
                keep[row, token_id] = True
            total += float(p[row, token_id])
    return keep


def random_rows(seed, rows, size):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return logits.softmax(dim=-1)


def check_keep_top_p_rows(keep_top_p_rows, claim):
    def tries(p, *fractions):
        top_p = torch.tensor(fractions, dtype=torch.float64)
        claim.returns(survivors_row_by_row(p, top_p), keep_top_p_rows, p, top_p)

    with claim("one row"):
        tries(random_rows(1, 1, 9), 0.7)
    with claim("every row has its own order"):
        tries(random_rows(2, 4, 11), 0.6, 0.6, 0.6, 0.6)
    with claim("every row has its own p"):
        tries(random_rows(3, 3, 13), 0.3, 0.95, 0.6)
        tries(random_rows(4, 5, 5), 0.9, 0.2, 0.8, 0.5, 0.4)
    with claim("the token that crosses p survives; one that comes after p is reached does not"):
        row = [0.125, 0.0625, 0.5, 0.0625, 0.25]
        tries(torch.tensor([row, row[::-1], row], dtype=torch.float64), 0.5, 0.75, 0.8)
    with claim("the likeliest survives, however small p is"):
        tries(random_rows(5, 2, 7), 1e-9, 0.5)


def sorted_rows(p):
    values, order = p.sort(dim=-1, descending=True, stable=True)
    return values.cumsum(dim=-1) - values, values, order


def by_id(keep, order):
    return torch.zeros_like(keep).scatter(-1, order, keep)


def stays_in_sorted_order(p, top_p):
    return sorted_rows(p)[0] < top_p[:, None]


def drops_the_token_that_crosses(p, top_p):
    likelier, values, order = sorted_rows(p)
    return by_id(likelier + values <= top_p[:, None], order)


def keeps_one_too_many(p, top_p):
    likelier, _, order = sorted_rows(p)
    return by_id(likelier <= top_p[:, None], order)


def uses_the_first_p_for_all(p, top_p):
    likelier, _, order = sorted_rows(p)
    return by_id(likelier < top_p[0], order)


def uses_the_first_order_for_all(p, top_p):
    likelier, _, order = sorted_rows(p)
    return by_id(likelier < top_p[:, None], order[:1].expand_as(order))


def gathers_instead_of_scattering(p, top_p):
    likelier, _, order = sorted_rows(p)
    return (likelier < top_p[:, None]).gather(-1, order)


EXERCISES = [
    Exercise(
        "temperature_for",
        check_temperature_for,
        wrong=[
            forgets_the_logarithm,
            is_upside_down,
            divides_the_logits,
            takes_another_logarithm,
        ],
    ),
    Exercise(
        "exactly_top_k",
        check_exactly_top_k,
        wrong=[
            lets_equals_through,
            cuts_all_equals,
            prefers_higher_ids,
            takes_zero_at_its_word,
        ],
    ),
    Exercise(
        "text_logprob",
        check_text_logprob,
        wrong=[
            asks_each_row_for_its_own_token,
            multiplies_probabilities,
            adds_up_logits,
            takes_the_mean,
            overflows,
        ],
    ),
    Exercise(
        "draw_by_weight",
        check_draw_by_weight,
        wrong=[
            trusts_that_the_sum_is_one,
            stays_in_float32,
            stops_on_the_border,
            takes_the_last_token_if_in_doubt,
            returns_the_one_before,
        ],
    ),
    Exercise(
        "keep_top_p_rows",
        check_keep_top_p_rows,
        wrong=[
            stays_in_sorted_order,
            drops_the_token_that_crosses,
            keeps_one_too_many,
            uses_the_first_p_for_all,
            uses_the_first_order_for_all,
            gathers_instead_of_scattering,
        ],
    ),
]
