"""Solutions of chapter 6's exercises. Try first: the checks tell you what is missing."""

import torch


def slots_that_fit(total, fraction, weights, step, config, bytes_per_number, max_model_len):
    # A key and a value in each layer, for KV heads: query heads keep nothing.
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * bytes_per_number
    # The fraction is of the whole: others' part stays theirs, however large our weights are.
    room = total * fraction - weights - step
    # A model that doesn't fit leaves less than nothing, and that is room for nobody.
    return max(0, int(room // (per_token * max_model_len)))


def waste(num_prompt, num_answer, slot_length):
    # The last token of the answer is never fed, so it needs no room.
    longest = num_prompt + num_answer - 1
    # n steps: the first brings the prompt, each later one a token more.
    used = sum(num_prompt + step for step in range(num_answer))
    later = num_answer * longest - used
    never = num_answer * (slot_length - longest)
    return used, later, never


def best_fit(runs, size, length):
    gaps, end = [], 0
    # Sorted, each gap lies between the end of one run and the start of the next. A run of no
    # length at the very end makes the room behind the last one a gap like any other.
    for start, run in [*sorted(runs), (size, 0)]:
        if start - end >= length:
            gaps.append((start - end, end))
        end = start + run
    # Tuples compare by length, and equals by their place: the first one wins.
    return min(gaps)[1] if gaps else None


def at_the_door(waiting, free, room):
    admitted, later, refused = [], [], []
    for i, (num_prompt, max_tokens) in enumerate(waiting):
        claim = num_prompt + max_tokens
        if claim > room:
            # Never, whoever leaves: say so at once, also to those at the end of the line.
            refused.append(i)
        elif not later and claim <= free:
            admitted.append(i)
            free -= claim
        else:
            # Once somebody waits all behind wait. If small ones passed, a large one might starve.
            later.append(i)
    return admitted, later, refused


def pack_int4(x):
    largest = x.abs().amax(dim=-1, keepdim=True)  # (T, Hkv, 1)
    # Any scale is right for zeros, except zero itself, which would make 0 / 0.
    scales = torch.where(largest > 0, largest / 7, torch.ones_like(largest))
    # From -7..7 to 1..15: no sign to care about, and it fits into four bits.
    codes = ((x / scales).round() + 8).to(torch.uint8)
    # Neighbours share a byte; times 16 moves the second one by four bits.
    return codes[..., 0::2] + 16 * codes[..., 1::2], scales
