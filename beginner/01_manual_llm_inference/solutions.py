"""Solutions of chapter 1's exercises. Try first: the checks tell you what is missing."""

import math

import torch


def tokens_that_fit(memory_bytes, config, bytes_per_number):
    # One token leaves a key and a value (hence the 2) of head_size numbers for each KV head of
    # each layer. Query heads don't count: queries are used once and thrown away.
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_size
    # Floor division: a token of which a byte is missing can't be attended to.
    return memory_bytes // (numbers * bytes_per_number)


def tokens_computed(prompt_tokens, new_tokens, cached):
    # Step i (from 0) turns a sequence of prompt_tokens + i into its next token.
    lengths = [prompt_tokens + i for i in range(new_tokens)]
    # With a cache a step computes only what it adds, so the total is the length before the last
    # step. The token that the last step chooses is never fed: nothing comes after it.
    return lengths[-1] if cached else sum(lengths)


def visible_keys(num_new, num_cached):
    # Query t stands at position num_cached + t; it may see that position and all before it.
    # `tril(d)` keeps entry (t, n) where n <= t + d, so the diagonal moves right by num_cached.
    everything = torch.ones(num_new, num_cached + num_new, dtype=torch.bool)
    return everything.tril(num_cached)


def attend(q, k, v):
    num_new, num_keys = q.shape[0], k.shape[0]
    # Query heads 0, 1, 2 use KV head 0, the next three KV head 1, and so on: each KV head is
    # repeated in place. (`repeat` would give 0, 1, 2, 0, 1, 2: the wrong partners.)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (N, Hq, D)
    # The scale keeps scores of the same size whatever D is; else the softmax would saturate.
    scores = torch.einsum("thd,nhd->htn", q, k) / math.sqrt(q.shape[-1])  # (Hq, T, N)
    # The T queries are the last T of N positions, so N - T keys were cached before them.
    hidden = ~visible_keys(num_new, num_keys - num_new).to(q.device)
    # Minus infinity before the softmax is weight zero after it; the rest still sums to one.
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)  # over the keys
    return torch.einsum("htn,nhd->thd", weights, v)  # (T, Hq, D)


def tokens_to_feed(cached_ids, prompt_ids):
    # A key depends on its token and on all tokens before it, so what is cached holds up to the
    # first difference and not a token further, even if later tokens agree again.
    # The last prompt token goes in always: its logits choose the next token, and logits aren't
    # cached. So at most len(prompt_ids) - 1 tokens are kept.
    keep = 0
    limit = min(len(cached_ids), len(prompt_ids) - 1)
    while keep < limit and cached_ids[keep] == prompt_ids[keep]:
        keep += 1
    return keep, prompt_ids[keep:]
