"""Solutions of chapter 5's exercises. Try first: the checks tell you what is missing."""

import heapq

import torch


def padding_cells(prompt_lengths, answer_lengths):
    # The first step has as many columns as the longest prompt; it gives everybody the first token.
    left = sum(max(prompt_lengths) - length for length in prompt_lengths)
    # Each later step adds a column. A row with n tokens takes part in n - 1 of them, the longest
    # in max - 1, so max - n cells are left over: the 1 cancels out.
    behind = sum(max(answer_lengths) - length for length in answer_lengths)
    return left, behind


def last_steps(lengths, num_slots):
    # For each slot the first step in which it is free. A request takes the slot that is free
    # first, stays for as many steps as it has tokens, and hands it on to the step after its last.
    free, last = [0] * num_slots, []
    for length in lengths:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length)
        last.append(start + length - 1)
    return last


def pack_chunks(chunks):
    ids, positions, logit_rows = [], [], []
    for token_ids, start, length in chunks:
        end = start + length
        ids += token_ids[start:end]
        # A position is a place in the request's own text; where the chunk lies in the flat run
        # doesn't matter to the model.
        positions += range(start, end)
        # What follows a token in the middle of a prompt is known already.
        if end == len(token_ids):
            logit_rows.append(len(ids) - 1)
    return ids, positions, logit_rows


def plan_step(running, waiting, num_slots, budget):
    given = []
    for i, wanted in enumerate(running):
        # It matters when a prefill is under way that isn't the newest request's: after a
        # preemption, say (chapter 7). Without the reserve it would stop the streams behind it.
        behind = len(running) - i - 1
        given.append(min(wanted, budget - sum(given) - behind))
    newcomers = []
    for wanted in waiting[: num_slots - len(running)]:
        rest = budget - sum(given) - sum(newcomers)
        if rest == 0:  # a chunk without tokens would be none
            break
        newcomers.append(min(wanted, rest))
    return given, newcomers


def ragged_mask(query_lens, context_lens):
    # Each sequence is a block of its own: the triangle of chapter 1, moved right by what is
    # cached, since its queries are the newest of its tokens. Outside the blocks nobody sees
    # anything: other people's keys.
    blocks = [
        torch.ones(queries, context).tril(context - queries)
        for queries, context in zip(query_lens, context_lens, strict=True)
    ]
    return torch.block_diag(*blocks).bool()
