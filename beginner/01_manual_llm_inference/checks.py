"""Checks of chapter 1's exercises, and answers that they must reject.

Sizes are drawn at random and never alike, so that swapped axes and numbers that are off by one
show; the seeds are fixed, so that a check says the same thing on every run.
"""

import math
import random
from types import SimpleNamespace

import torch

from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("The capital of France is", max_tokens=3),
    GreedyExample("1, 2, 3, 4,", max_tokens=15),
    GreedyExample("Tell me the capital of France.", max_tokens=32, chat=True),
    GreedyExample("The quick brown", max_tokens=2),
    GreedyExample("The quick brown fox fox", max_tokens=1),
]


# 1 -- how many tokens fit ------------------------------------------------------------------------


def random_config(rng):
    """A model's sizes, no two alike, with fewer KV heads than query heads."""
    num_kv_heads = rng.choice([2, 3, 5])
    return SimpleNamespace(
        num_layers=rng.randint(11, 19),
        num_heads=num_kv_heads * 4,
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([6, 10, 14]),
    )


def bytes_of_one_token(config, bytes_per_number):
    """Counted piece by piece: for every layer and KV head a key, then a value."""
    total = 0
    for _ in range(config.num_layers):
        for _ in range(config.num_kv_heads):
            total += config.head_size * bytes_per_number  # the key
            total += config.head_size * bytes_per_number  # the value
    return total


def check_tokens_that_fit(tokens_that_fit, claim):
    rng = random.Random(1)
    config = random_config(rng)
    one = bytes_of_one_token(config, 4)
    with claim("exactly enough memory for one token holds one"):
        claim.returns(1, tokens_that_fit, one, config, 4)
    with claim("memory for several tokens holds as many, for any sizes"):
        for _ in range(5):
            config, number = random_config(rng), rng.choice([1, 2, 4])
            tokens = rng.randint(20, 90)
            memory = tokens * bytes_of_one_token(config, number)
            claim.returns(tokens, tokens_that_fit, memory, config, number)
    with claim("a token fits whole or not at all"):
        config = random_config(rng)
        one = bytes_of_one_token(config, 2)
        claim.returns(6, tokens_that_fit, 7 * one - 1, config, 2)
        claim.returns(0, tokens_that_fit, one - 1, config, 2)


def forgets_the_values(memory_bytes, config, bytes_per_number):
    one = config.num_layers * config.num_kv_heads * config.head_size * bytes_per_number
    return memory_bytes // one


def counts_query_heads(memory_bytes, config, bytes_per_number):
    one = 2 * config.num_layers * config.num_heads * config.head_size * bytes_per_number
    return memory_bytes // one


def forgets_the_layers(memory_bytes, config, bytes_per_number):
    return memory_bytes // (2 * config.num_kv_heads * config.head_size * bytes_per_number)


def rounds_up(memory_bytes, config, bytes_per_number):
    return math.ceil(memory_bytes / bytes_of_one_token(config, bytes_per_number))


def counts_numbers_instead_of_bytes(memory_bytes, config, bytes_per_number):
    return memory_bytes // bytes_of_one_token(config, 1)


# 2 -- how many tokens are computed ---------------------------------------------------------------


def check_tokens_computed(tokens_computed, claim):
    rng = random.Random(2)
    with claim("one new token: the prompt goes in once, cache or not"):
        prompt = rng.randint(20, 50)
        claim.returns(prompt, tokens_computed, prompt, 1, True)
        claim.returns(prompt, tokens_computed, prompt, 1, False)
    with claim("with a cache, every token goes in once, except the last one"):
        for _ in range(3):
            prompt, new = rng.randint(20, 50), rng.randint(3, 15)
            sequence = [None] * prompt + [None] * new
            claim.returns(len(sequence[:-1]), tokens_computed, prompt, new, True)
    with claim("without a cache, every step takes the whole sequence so far"):
        for _ in range(3):
            prompt, new = rng.randint(20, 50), rng.randint(3, 15)
            total, length = 0, prompt
            for _ in range(new):
                total, length = total + length, length + 1
            claim.returns(total, tokens_computed, prompt, new, False)


def feeds_the_last_token(prompt_tokens, new_tokens, cached):
    if cached:
        return prompt_tokens + new_tokens
    return sum(prompt_tokens + i for i in range(new_tokens))


def recomputes_one_token_too_many(prompt_tokens, new_tokens, cached):
    if cached:
        return prompt_tokens + new_tokens - 1
    return sum(prompt_tokens + i for i in range(1, new_tokens + 1))


def ignores_the_growth(prompt_tokens, new_tokens, cached):
    return prompt_tokens + new_tokens - 1 if cached else prompt_tokens * new_tokens


def takes_the_prompt_as_free(prompt_tokens, new_tokens, cached):
    return new_tokens if cached else sum(prompt_tokens + i for i in range(new_tokens))


# 3 -- which keys a query may see -----------------------------------------------------------------


def expected_visible(num_new, num_cached):
    """Query t stands at position num_cached + t and sees that position and all before it."""
    rows = [[n <= num_cached + t for n in range(num_cached + num_new)] for t in range(num_new)]
    return torch.tensor(rows)


def check_visible_keys(visible_keys, claim):
    with claim("a lone first token sees itself"):
        claim.returns(expected_visible(1, 0), visible_keys, 1, 0)
    with claim("prefill: no token sees a later one"):
        claim.returns(expected_visible(4, 0), visible_keys, 4, 0)
        claim.returns(expected_visible(7, 0), visible_keys, 7, 0)
    with claim("decode: one new token sees all that is cached, and itself"):
        claim.returns(expected_visible(1, 6), visible_keys, 1, 6)
    with claim("a chunk behind a cache sees the cache whole, and its own past"):
        claim.returns(expected_visible(3, 5), visible_keys, 3, 5)
        claim.returns(expected_visible(5, 2), visible_keys, 5, 2)


def forgets_the_cache(num_new, num_cached):
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril()


def hides_the_token_itself(num_new, num_cached):
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached - 1)


def sees_one_token_of_the_future(num_new, num_cached):
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached + 1)


def is_transposed(num_new, num_cached):
    return expected_visible(num_new, num_cached).T


def marks_what_is_hidden(num_new, num_cached):
    return ~expected_visible(num_new, num_cached)


# 4 -- attention over a cache ---------------------------------------------------------------------


def attention_in_loops(q, k, v):
    """The definition, number by number: slow, and hard to get wrong."""
    (num_new, num_heads, size), num_keys = q.shape, k.shape[0]
    group = num_heads // k.shape[1]
    out = torch.zeros_like(q)
    for t in range(num_new):
        seen = range(num_keys - num_new + t + 1)
        for head in range(num_heads):
            kv_head = head // group
            scores = [float(q[t, head] @ k[n, kv_head]) / math.sqrt(size) for n in seen]
            weights = [math.exp(score) for score in scores]
            for n, weight in zip(seen, weights, strict=True):
                out[t, head] += weight / sum(weights) * v[n, kv_head]
    return out


def random_qkv(seed, num_new, num_keys, num_heads, num_kv_heads, size):
    """q (T, Hq, D), k and v (N, Hkv, D), float64; drawn on the CPU, where the checks run."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_new, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads)
    return [torch.randn(*s, size, generator=generator, dtype=torch.float64) for s in shapes]


def check_attend(attend, claim):
    cases = {
        "decode: one query sees every key": (1, 6, 2, 2, 5),
        "prefill: no query sees a later key": (4, 4, 3, 3, 7),
        "a chunk behind a cache sees the cache and its own past": (3, 8, 2, 2, 5),
        "neighbouring query heads share a KV head": (1, 5, 6, 2, 7),
        "all of it at once": (3, 7, 6, 3, 5),
    }
    for seed, (text, sizes) in enumerate(cases.items()):
        with claim(text):
            q, k, v = random_qkv(seed, *sizes)
            claim.returns(attention_in_loops(q, k, v), attend, q, k, v)


def attend_with(q, k, v, mask=expected_visible, scale=True, spread="repeat_interleave", dim=-1):
    """Right as it stands; the wrong answers below turn one thing each."""
    num_new, num_keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if spread == "repeat_interleave":
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    else:
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    scores = torch.einsum("thd,nhd->htn", q, k)
    if scale:
        scores = scores / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask(num_new, num_keys - num_new), -torch.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(dim).nan_to_num(), v)


def attends_to_the_future(q, k, v):
    return attend_with(q, k, v, mask=lambda new, old: torch.ones(new, old + new, dtype=torch.bool))


def masks_as_if_nothing_were_cached(q, k, v):
    return attend_with(q, k, v, mask=forgets_the_cache)


def shares_far_apart_heads(q, k, v):
    return attend_with(q, k, v, spread="repeat")


def forgets_the_scale(q, k, v):
    return attend_with(q, k, v, scale=False)


def normalizes_over_the_queries(q, k, v):
    return attend_with(q, k, v, dim=-2)


# 5 -- the second turn of a chat ------------------------------------------------------------------


def check_tokens_to_feed(tokens_to_feed, claim):
    rng = random.Random(5)
    history = rng.sample(range(100, 1000), 9)
    more = rng.sample(range(1000, 2000), 4)
    with claim("an empty cache: everything goes in"):
        claim.returns((0, history), tokens_to_feed, [], history)
    with claim("a prompt that goes on where the cache ends: only the new tokens go in"):
        claim.returns((9, more), tokens_to_feed, history, history + more)
    with claim("from the first difference on, everything goes in"):
        changed = [*history[:3], 7, *history[4:]]
        claim.returns((3, changed[3:]), tokens_to_feed, history, changed)
        claim.returns((0, more), tokens_to_feed, history, more)
    with claim("a prompt shorter than the cache: its last token still goes in"):
        claim.returns((4, history[4:5]), tokens_to_feed, history, history[:5])
    with claim("a prompt that is cached whole: its last token still goes in"):
        claim.returns((8, history[8:]), tokens_to_feed, history, history)


def trusts_the_cache(cached_ids, prompt_ids):
    return len(cached_ids), prompt_ids[len(cached_ids) :]


def counts_equal_tokens_anywhere(cached_ids, prompt_ids):
    same = sum(a == b for a, b in zip(cached_ids, prompt_ids, strict=False))
    keep = min(same, len(prompt_ids) - 1)
    return keep, prompt_ids[keep:]


def may_feed_nothing(cached_ids, prompt_ids):
    keep = 0
    while keep < min(len(cached_ids), len(prompt_ids)) and cached_ids[keep] == prompt_ids[keep]:
        keep += 1
    return keep, prompt_ids[keep:]


def all_or_nothing(cached_ids, prompt_ids):
    if len(cached_ids) < len(prompt_ids) and prompt_ids[: len(cached_ids)] == cached_ids:
        return len(cached_ids), prompt_ids[len(cached_ids) :]
    return 0, prompt_ids


EXERCISES = [
    Exercise(
        "tokens_that_fit",
        check_tokens_that_fit,
        wrong=[
            forgets_the_values,
            counts_query_heads,
            forgets_the_layers,
            rounds_up,
            counts_numbers_instead_of_bytes,
        ],
    ),
    Exercise(
        "tokens_computed",
        check_tokens_computed,
        wrong=[
            feeds_the_last_token,
            recomputes_one_token_too_many,
            ignores_the_growth,
            takes_the_prompt_as_free,
        ],
    ),
    Exercise(
        "visible_keys",
        check_visible_keys,
        wrong=[
            forgets_the_cache,
            hides_the_token_itself,
            sees_one_token_of_the_future,
            is_transposed,
            marks_what_is_hidden,
        ],
    ),
    Exercise(
        "attend",
        check_attend,
        wrong=[
            attends_to_the_future,
            masks_as_if_nothing_were_cached,
            shares_far_apart_heads,
            forgets_the_scale,
            normalizes_over_the_queries,
        ],
    ),
    Exercise(
        "tokens_to_feed",
        check_tokens_to_feed,
        wrong=[
            trusts_the_cache,
            counts_equal_tokens_anywhere,
            may_feed_nothing,
            all_or_nothing,
        ],
    ),
]
