"""Checks of chapter @NUMBER@'s exercises, and answers that they must reject.

Numbers are drawn at random and never alike, so that swapped arguments and numbers that are off by
one show; the seeds are fixed, so that a check says the same thing on every run.
"""

# mypy: ignore-errors

import random

import torch

from infer_lab.course import Exercise, GreedyExample

# What the notebook generates greedily on the default model; [] if nothing.
GREEDY = [
    GreedyExample("The capital of France is", max_tokens=3),
]


# 1 -- how long is the cache ----------------------------------------------------------------------


def check_cache_lengths(cache_lengths, claim):
    rng = random.Random(1)
    with claim("one new token leaves the prompt in the cache"):
        claim.returns([5], cache_lengths, 5, 1)
    with claim("each further step adds one token"):
        claim.returns([7, 8, 9, 10], cache_lengths, 7, 4)
    with claim("any lengths"):
        for _ in range(5):
            prompt, new = rng.randint(1, 90), rng.randint(2, 9)
            claim.returns(list(range(prompt, prompt + new)), cache_lengths, prompt, new)


def counts_the_token_just_chosen(prompt_tokens, new_tokens):
    return [prompt_tokens + i + 1 for i in range(new_tokens)]


def forgets_the_prompt(prompt_tokens, new_tokens):
    return list(range(new_tokens))


# 2 -- how many bytes -----------------------------------------------------------------------------


def check_cache_bytes(cache_bytes, claim):
    rng = random.Random(2)
    with claim("one token, one layer, one head: a key and a value"):
        claim.returns(2 * 6 * 4, cache_bytes, 1, 1, 1, 6, 4)
    with claim("no tokens take no bytes"):
        claim.returns(0, cache_bytes, 0, 3, 5, 6, 4)
    with claim("any sizes"):
        for _ in range(5):
            tokens, layers, heads, size, width = rng.sample(range(2, 30), k=5)
            piece_by_piece = sum(size * width for _ in range(tokens * layers * heads) for _ in "kv")
            claim.returns(piece_by_piece, cache_bytes, tokens, layers, heads, size, width)


def forgets_the_values(num_tokens, num_layers, num_kv_heads, head_size, bytes_per_number):
    return num_tokens * num_layers * num_kv_heads * head_size * bytes_per_number


def counts_one_layer(num_tokens, num_layers, num_kv_heads, head_size, bytes_per_number):
    return 2 * num_tokens * num_kv_heads * head_size * bytes_per_number


# 3 -- which token is next ------------------------------------------------------------------------


def check_next_token(next_token, claim):
    generator = torch.Generator().manual_seed(3)
    with claim("the likeliest of the last row, as an int"):
        for num_tokens, vocab_size in ((1, 7), (4, 11), (6, 5)):
            logits = torch.randn(num_tokens, vocab_size, generator=generator)
            last = logits[-1].tolist()
            claim.returns(last.index(max(last)), next_token, logits)
    with claim("the lowest id of equals"):
        claim.returns(1, next_token, torch.tensor([[9.0, 0.0, 0.0], [0.5, 2.0, 2.0]]))


def reads_the_first_row(logits):
    return int(logits[0].argmax())


def searches_all_rows(logits):
    return int(logits.argmax())


def takes_the_last_of_equals(logits):
    return int((logits[-1] == logits[-1].max()).nonzero()[-1])


EXERCISES = [
    Exercise(
        "cache_lengths",
        check_cache_lengths,
        wrong=[counts_the_token_just_chosen, forgets_the_prompt],
    ),
    Exercise("cache_bytes", check_cache_bytes, wrong=[forgets_the_values, counts_one_layer]),
    Exercise(
        "next_token",
        check_next_token,
        wrong=[reads_the_first_row, searches_all_rows, takes_the_last_of_equals],
    ),
]
