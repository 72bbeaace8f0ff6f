"""Checks of chapter 5's exercises, and answers that they must reject.

Lengths are drawn at random, no two alike where that matters, so that swapped axes and numbers that
are off by one show; the seeds are fixed, so that a check says the same thing on every run.
"""

import random

import torch

from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("a, b, c, d,", max_tokens=10),
    GreedyExample(
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
        max_tokens=12,
    ),
    GreedyExample("The capital of France is", max_tokens=2),
    GreedyExample("1, 2, 3, 4,", max_tokens=6),
    GreedyExample("I, II, III, IV,", max_tokens=7),
    GreedyExample("2, 4, 6, 8,", max_tokens=3),
]


# 1 -- what padding costs -------------------------------------------------------------------------


def cells_one_by_one(prompt_lengths, answer_lengths):
    """Walk through the rectangle, step by step and row by row."""
    left = behind = 0
    for step in range(max(answer_lengths)):
        width = max(prompt_lengths) if step == 0 else 1
        for prompt, answer in zip(prompt_lengths, answer_lengths, strict=True):
            if step >= answer:
                behind += width
            elif step == 0:
                left += width - prompt
    return left, behind


def check_padding_cells(padding_cells, claim):
    rng = random.Random(1)
    with claim("a request that is alone needs no padding"):
        claim.returns((0, 0), padding_cells, [7], [5])
    with claim("prompts differ: padding on the left only"):
        claim.returns((5 + 0 + 3, 0), padding_cells, [4, 9, 6], [8, 8, 8])
    with claim("answers differ: padding behind the end only"):
        claim.returns((0, 4 + 6 + 0), padding_cells, [5, 5, 5], [3, 1, 7])
    with claim("the longest prompt and the longest answer may be in different rows"):
        claim.returns((0 + 8, 9 + 0), padding_cells, [11, 3], [2, 11])
    with claim("any lengths"):
        for _ in range(5):
            prompts = rng.sample(range(2, 30), 5)
            answers = rng.sample(range(1, 20), 5)
            expected = cells_one_by_one(prompts, answers)
            claim.returns(expected, padding_cells, prompts, answers)


def pads_to_the_longest_sequence(prompt_lengths, answer_lengths):
    totals = [p + a for p, a in zip(prompt_lengths, answer_lengths, strict=True)]
    left = sum(max(prompt_lengths) - p for p in prompt_lengths)
    return left, sum(max(totals) - t for t in totals)


def swaps_the_two(prompt_lengths, answer_lengths):
    return cells_one_by_one(prompt_lengths, answer_lengths)[::-1]


def feeds_the_last_token(prompt_lengths, answer_lengths):
    left, behind = cells_one_by_one(prompt_lengths, answer_lengths)
    return left, behind + sum(a < max(answer_lengths) for a in answer_lengths)


def looks_at_one_row(prompt_lengths, answer_lengths):
    return (
        max(prompt_lengths) - min(prompt_lengths),
        max(answer_lengths) - min(answer_lengths),
    )


# 2 -- finish times -------------------------------------------------------------------------------


def simulate_last_steps(lengths, num_slots, static=False):
    """Step by step: fill the slots, give everybody a token, see who is done."""
    left, last = list(lengths), [None] * len(lengths)
    waiting, running, now = list(range(len(lengths))), [], 0
    while waiting or running:
        if not (static and running):
            room = num_slots - len(running)
            running, waiting = running + waiting[:room], waiting[room:]
        for i in running:
            left[i] -= 1
            last[i] = now
        running = [i for i in running if left[i]]
        now += 1
    return last


def check_last_steps(last_steps, claim):
    rng = random.Random(2)
    with claim("one slot: one after the other"):
        claim.returns([2, 6, 7], last_steps, [3, 4, 1], 1)
    with claim("enough slots: nobody waits"):
        claim.returns([4, 0, 8, 2], last_steps, [5, 1, 9, 3], 4)
    with claim("a slot that becomes free is taken in the next step"):
        claim.returns([1, 5, 5, 8], last_steps, [2, 6, 4, 3], 2)
    with claim("requests start in the order in which they came"):
        claim.returns([8, 2, 10, 11], last_steps, [9, 3, 8, 3], 2)
    with claim("any lengths, any number of slots"):
        for _ in range(6):
            lengths = [rng.randint(1, 12) for _ in range(9)]
            slots = rng.choice([2, 3, 4])
            claim.returns(simulate_last_steps(lengths, slots), last_steps, lengths, slots)


def waits_for_the_slowest(lengths, num_slots):
    return simulate_last_steps(lengths, num_slots, static=True)


def counts_from_one(lengths, num_slots):
    return [step + 1 for step in simulate_last_steps(lengths, num_slots)]


def takes_the_shortest_first(lengths, num_slots):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    steps = simulate_last_steps([lengths[i] for i in order], num_slots)
    return [steps[order.index(i)] for i in range(len(lengths))]


def deals_the_slots_in_turn(lengths, num_slots):
    free, last = [0] * num_slots, []
    for i, length in enumerate(lengths):
        free[i % num_slots] += length
        last.append(free[i % num_slots] - 1)
    return last


def loses_a_step_at_each_change(lengths, num_slots):
    free, last = [0] * num_slots, []
    for length in lengths:
        slot = free.index(min(free))
        last.append(free[slot] + length - 1)
        free[slot] += length + 1
    return last


# 3 -- pack ---------------------------------------------------------------------------------------


def pack_token_by_token(chunks):
    ids, positions, rows = [], [], []
    for token_ids, start, length in chunks:
        for position in range(start, start + length):
            ids.append(token_ids[position])
            positions.append(position)
            if position == len(token_ids) - 1:
                rows.append(len(ids) - 1)
    return ids, positions, rows


def random_chunks(rng, count):
    """Decode steps, whole prompts, and beginnings and middles of prompts."""
    chunks = []
    for _ in range(count):
        tokens = rng.sample(range(1000), rng.randint(4, 12))
        start = rng.choice([0, len(tokens) - 1, rng.randrange(len(tokens))])
        most = len(tokens) - start
        chunks.append((tokens, start, rng.choice([most, rng.randint(1, most)])))
    return chunks


def check_pack_chunks(pack_chunks, claim):
    rng = random.Random(3)
    with claim("a whole prompt: all its ids, positions from 0, logits of the last row"):
        claim.returns(([7, 5, 9], [0, 1, 2], [2]), pack_chunks, [([7, 5, 9], 0, 3)])
    with claim("a decode step: one id, at its own position"):
        claim.returns(([4], [3], [0]), pack_chunks, [([7, 5, 9, 4], 3, 1)])
    with claim("chunks lie end to end, each with positions of its own"):
        chunks = [([7, 5, 9, 4], 3, 1), ([8, 6, 2], 0, 3), ([1, 3], 1, 1)]
        claim.returns(([4, 8, 6, 2, 3], [3, 0, 1, 2, 1], [0, 3, 4]), pack_chunks, chunks)
    with claim("a chunk that ends before its request's tokens do needs no logits"):
        chunks = [([7, 5, 9, 4, 1], 1, 2), ([8, 6], 1, 1)]
        claim.returns(([5, 9, 6], [1, 2, 1], [2]), pack_chunks, chunks)
    with claim("any chunks"):
        for _ in range(6):
            chunks = random_chunks(rng, 5)
            claim.returns(pack_token_by_token(chunks), pack_chunks, chunks)


def counts_positions_through(chunks):
    ids, positions, rows = pack_token_by_token(chunks)
    return ids, list(range(len(positions))), rows


def begins_every_chunk_at_zero(chunks):
    ids, _, rows = pack_token_by_token(chunks)
    return ids, [i for _, _, length in chunks for i in range(length)], rows


def samples_every_chunk(chunks):
    ids, positions, _ = pack_token_by_token(chunks)
    ends = [sum(length for _, _, length in chunks[: i + 1]) for i in range(len(chunks))]
    return ids, positions, [end - 1 for end in ends]


def points_behind_the_chunk(chunks):
    ids, positions, rows = pack_token_by_token(chunks)
    return ids, positions, [row + 1 for row in rows]


def takes_the_first_tokens(chunks):
    _, positions, rows = pack_token_by_token(chunks)
    return [i for tokens, _, length in chunks for i in tokens[:length]], positions, rows


# 4 -- plan a step --------------------------------------------------------------------------------


def plan_token_by_token(running, waiting, num_slots, budget):
    """Everybody who runs gets one token; then the rest of the budget, one by one, in order."""
    given = [1] * len(running)
    rest = budget - len(running)
    for i, wanted in enumerate(running):
        while given[i] < wanted and rest:
            given[i] += 1
            rest -= 1
    newcomers = []
    for wanted in waiting[: num_slots - len(running)]:
        if rest:
            newcomers.append(min(wanted, rest))
            rest -= newcomers[-1]
    return given, newcomers


def check_plan_step(plan_step, claim):
    rng = random.Random(4)

    def compare(running, waiting, num_slots, budget):
        expected = plan_token_by_token(running, waiting, num_slots, budget)
        claim.returns(expected, plan_step, running, waiting, num_slots, budget)

    with claim("decode steps for all who run"):
        compare([1, 1, 1], [], 4, 16)
    with claim("newcomers take what is left, in order, while there are slots"):
        compare([1, 1], [5, 3, 4], 4, 64)
        compare([1, 1, 1], [5], 3, 64)
    with claim("the last newcomer is cut, and the others wait"):
        compare([1], [6, 9, 2], 8, 12)
        compare([1, 1], [6, 2], 8, 8)
    with claim("a full budget admits nobody"):
        compare([1, 1, 1], [4], 8, 3)
    with claim("a long prefill keeps a token for each running request behind it"):
        compare([20, 1, 1], [4], 8, 12)
        compare([1, 20, 7, 1], [], 8, 12)
    with claim("any step"):
        for _ in range(8):
            running = [rng.choice([1, 1, 1, rng.randint(2, 15)]) for _ in range(rng.randint(1, 5))]
            waiting = [rng.randint(2, 12) for _ in range(rng.randint(2, 6))]
            slots = len(running) + rng.randint(0, 4)
            compare(running, waiting, slots, rng.randint(slots, 25))


def keeps_nothing_for_those_behind(running, waiting, num_slots, budget):
    given = []
    for wanted in running:
        given.append(min(wanted, budget - sum(given)))
    newcomers = []
    for wanted in waiting[: num_slots - len(running)]:
        if (rest := budget - sum(given) - sum(newcomers)) > 0:
            newcomers.append(min(wanted, rest))
    return given, newcomers


def admits_whole_prompts_only(running, waiting, num_slots, budget):
    given, newcomers = plan_token_by_token(running, waiting, num_slots, budget)
    return given, [n for n, wanted in zip(newcomers, waiting, strict=False) if n == wanted]


def lets_short_prompts_pass(running, waiting, num_slots, budget):
    given, _ = plan_token_by_token(running, [], num_slots, budget)
    newcomers = []
    for wanted in waiting:
        fits = sum(given) + sum(newcomers) + wanted <= budget
        if fits and len(running) + len(newcomers) < num_slots:
            newcomers.append(wanted)
    return given, newcomers


def ignores_the_slots(running, waiting, num_slots, budget):
    return plan_token_by_token(running, waiting, len(running) + len(waiting), budget)


def gives_newcomers_nothing_as_a_chunk(running, waiting, num_slots, budget):
    given, newcomers = plan_token_by_token(running, waiting, num_slots, budget)
    places = len(waiting[: num_slots - len(running)])
    return given, newcomers + [0] * (places - len(newcomers))


# 5 -- one mask for all ---------------------------------------------------------------------------


def mask_cell_by_cell(query_lens, context_lens):
    queries = [(i, n - q + t) for i, (q, n) in enumerate(zip(query_lens, context_lens, strict=True))
               for t in range(q)]  # fmt: skip
    keys = [(i, t) for i, n in enumerate(context_lens) for t in range(n)]
    return torch.tensor([[i == j and b <= a for j, b in keys] for i, a in queries])


def check_ragged_mask(ragged_mask, claim):
    rng = random.Random(5)
    with claim("one prompt: the triangle of chapter 1"):
        claim.returns(torch.ones(4, 4, dtype=torch.bool).tril(), ragged_mask, [4], [4])
    with claim("one decode step: it sees everything of its own"):
        claim.returns(torch.ones(1, 6, dtype=torch.bool), ragged_mask, [1], [6])
    with claim("two decode steps: nobody sees the other's keys"):
        claim.returns(mask_cell_by_cell([1, 1], [3, 5]), ragged_mask, [1, 1], [3, 5])
    with claim("a chunk behind cached tokens sees them all, and its own part as a triangle"):
        claim.returns(mask_cell_by_cell([3], [7]), ragged_mask, [3], [7])
    with claim("any mixture, in any order"):
        for _ in range(5):
            context_lens = rng.sample(range(3, 12), 4)
            query_lens = [rng.choice([1, n, rng.randint(1, n)]) for n in context_lens]
            expected = mask_cell_by_cell(query_lens, context_lens)
            claim.returns(expected, ragged_mask, query_lens, context_lens)


def forgets_whose_keys_they_are(query_lens, context_lens):
    total = sum(context_lens)
    return torch.ones(sum(query_lens), total, dtype=torch.bool).tril(total - sum(query_lens))


def forgets_the_future(query_lens, context_lens):
    blocks = [torch.ones(q, n) for q, n in zip(query_lens, context_lens, strict=True)]
    return torch.block_diag(*blocks).bool()


def forgets_what_is_cached(query_lens, context_lens):
    blocks = [torch.ones(q, n).tril() for q, n in zip(query_lens, context_lens, strict=True)]
    return torch.block_diag(*blocks).bool()


def does_not_see_itself(query_lens, context_lens):
    pairs = zip(query_lens, context_lens, strict=True)
    return torch.block_diag(*[torch.ones(q, n).tril(n - q - 1) for q, n in pairs]).bool()


def swaps_the_axes(query_lens, context_lens):
    return mask_cell_by_cell(query_lens, context_lens).T


EXERCISES = [
    Exercise(
        "padding_cells",
        check_padding_cells,
        wrong=[
            pads_to_the_longest_sequence,
            swaps_the_two,
            feeds_the_last_token,
            looks_at_one_row,
        ],
    ),
    Exercise(
        "last_steps",
        check_last_steps,
        wrong=[
            waits_for_the_slowest,
            counts_from_one,
            takes_the_shortest_first,
            deals_the_slots_in_turn,
            loses_a_step_at_each_change,
        ],
    ),
    Exercise(
        "pack_chunks",
        check_pack_chunks,
        wrong=[
            counts_positions_through,
            begins_every_chunk_at_zero,
            samples_every_chunk,
            points_behind_the_chunk,
            takes_the_first_tokens,
        ],
    ),
    Exercise(
        "plan_step",
        check_plan_step,
        wrong=[
            keeps_nothing_for_those_behind,
            admits_whole_prompts_only,
            lets_short_prompts_pass,
            ignores_the_slots,
            gives_newcomers_nothing_as_a_chunk,
        ],
    ),
    Exercise(
        "ragged_mask",
        check_ragged_mask,
        wrong=[
            forgets_whose_keys_they_are,
            forgets_the_future,
            forgets_what_is_cached,
            does_not_see_itself,
            swaps_the_axes,
        ],
    ),
]
