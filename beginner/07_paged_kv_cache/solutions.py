"""Solutions of chapter 7's exercises. Try first: the checks tell you what is missing."""

import math

import torch


def slot_mapping(table, start, end, block_size):
    # Token p is in the request's block p // block_size; the table says which block of memory that
    # is. Within the block it keeps its offset.
    return [table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def blocks_of_samples(num_prompt, num_output, n, block_size):
    # The last token of an answer has been chosen but not fed: it has no keys and values.
    each = -(-(num_prompt + num_output - 1) // block_size)
    if n == 1:
        return each
    # The others begin to write at the prompt's last token, to have its logits again. The block
    # with that token and all behind it are private; those before it are shared by all.
    shared = (num_prompt - 1) // block_size
    return shared + n * (each - shared)


def paged_attention(q, keys, values, table, length, block_size):
    where = [table[p // block_size] * block_size + p % block_size for p in range(length)]
    # From here on it is chapter 1's attention. The one query is the newest token: it sees all
    # `length` tokens, so no mask is needed, but nothing else of the last block may slip in.
    group = q.shape[0] // keys.shape[1]
    k = keys[where].repeat_interleave(group, dim=1)  # (N, Hq, D)
    v = values[where].repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q, k) / math.sqrt(q.shape[1])
    return torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), v)


def give_way(held, wanted, free):
    num_running, preempted = len(held), []
    for request in range(len(held)):
        # The newest who still runs is the last one. It may be the request itself: then the loop
        # ends, for it doesn't run any more, and those behind it have gone already.
        while request < num_running and wanted[request] > free:
            num_running -= 1
            free += held[num_running]
            preempted.append(num_running)
        if request < num_running:
            free -= wanted[request]
    return preempted


def reserve(table, references, free, start, end, block_size):
    # Blocks from that of the first new token on are written. Those before it are only read, and
    # may stay shared.
    first = start // block_size
    shared = [i for i in range(first, len(table)) if references[table[i]] > 1]
    missing = max(0, -(-end // block_size) - len(table))
    # Count before anything changes: all or nothing.
    if len(shared) + missing > len(free):
        return None
    copies = []
    for i in shared:
        copy = free.popleft()
        references[copy] = 1
        references[table[i]] -= 1  # at least one other still holds it, so it isn't free now
        copies.append((table[i], copy))
        table[i] = copy
    for _ in range(missing):
        table.append(free.popleft())
        references[table[-1]] = 1
    return copies
