"""Checks of chapter 6's exercises, and answers that they must reject.

Sizes are drawn at random and never alike, so that swapped factors and numbers that are off by one
show; the seeds are fixed, so that a check says the same thing on every run.
"""

import random
from types import SimpleNamespace

import torch

from infer_lab.course import Exercise, GreedyExample
from infer_lab.course.exercises import differs

GREEDY = [
    GreedyExample("1, 2, 3, 4,", max_tokens=12),
    GreedyExample("a, b, c, d,", max_tokens=16),
    GreedyExample("The capital of France is", max_tokens=3),
]


# 1 -- how many slots -----------------------------------------------------------------------------


def random_config(rng):
    """A model's sizes, no two alike, with fewer KV heads than query heads."""
    num_kv_heads = rng.choice([2, 3, 5])
    return SimpleNamespace(
        num_layers=rng.randint(11, 19),
        num_heads=num_kv_heads * 4,
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([6, 10, 14]),
    )


def bytes_of_slot(config, bytes_per_number, length):
    """Counted head by head: a key, then a value."""
    heads = config.num_layers * config.num_kv_heads
    return sum(2 * config.head_size * bytes_per_number * length for _ in range(heads))


def take_away(total, fraction, weights, step, config, bytes_per_number, max_model_len):
    """One slot after the other, until the next one doesn't fit."""
    left, slots = total * fraction - weights - step, 0
    while left >= bytes_of_slot(config, bytes_per_number, max_model_len):
        left -= bytes_of_slot(config, bytes_per_number, max_model_len)
        slots += 1
    return slots


def check_slots_that_fit(slots_that_fit, claim):
    rng = random.Random(1)
    config = random_config(rng)
    slot = bytes_of_slot(config, 4, 50)
    with claim("a memory of exactly three slots holds three"):
        claim.returns(3, slots_that_fit, 3 * slot, 1, 0, 0, config, 4, 50)
    with claim("weights and the largest step go first"):
        claim.returns(3, slots_that_fit, 4 * slot, 1, slot - 1, 1, config, 4, 50)
        claim.returns(2, slots_that_fit, 4 * slot, 1, slot - 1, 2, config, 4, 50)
    with claim("the fraction is one of the whole memory"):
        claim.returns(2, slots_that_fit, 8 * slot, 0.5, slot, slot, config, 4, 50)
    with claim("a number of slots is never negative"):
        claim.returns(0, slots_that_fit, 4 * slot, 0.5, 3 * slot, slot, config, 4, 50)
    with claim("any sizes"):
        for _ in range(6):
            config, number = random_config(rng), rng.choice([1, 2, 4])
            length = rng.randint(20, 90)
            slot = bytes_of_slot(config, number, length)
            total, weights, step = (int(slot * x) for x in (30.3, 7.2, rng.uniform(0.5, 3)))
            sizes = total, rng.choice([0.5, 0.75]), weights, step, config, number, length
            claim.returns(take_away(*sizes), slots_that_fit, *sizes)


def takes_the_fraction_of_the_rest(total, fraction, weights, step, config, size, length):
    return take_away((total - weights - step) * fraction, 1, 0, 0, config, size, length)


def forgets_the_step(total, fraction, weights, step, config, size, length):
    return take_away(total, fraction, weights, 0, config, size, length)


def counts_query_heads(total, fraction, weights, step, config, size, length):
    wrong = SimpleNamespace(**vars(config) | {"num_kv_heads": config.num_heads})
    return take_away(total, fraction, weights, step, wrong, size, length)


def keeps_keys_only(total, fraction, weights, step, config, size, length):
    room = total * fraction - weights - step
    return max(0, int(2 * room // bytes_of_slot(config, size, length)))


def may_be_negative(total, fraction, weights, step, config, size, length):
    room = total * fraction - weights - step
    return int(room // bytes_of_slot(config, size, length))


# 2 -- kinds of waste -----------------------------------------------------------------------------


def waste_token_by_token(num_prompt, num_answer, slot_length):
    """Look at every place of the slot in every step."""
    used = later = never = 0
    longest = num_prompt + num_answer - 1
    for step in range(num_answer):
        for place in range(slot_length):
            used += place < num_prompt + step
            later += num_prompt + step <= place < longest
            never += place >= longest
    return used, later, never


def check_waste(waste, claim):
    rng = random.Random(2)
    with claim("an answer of one token takes one step, and only the prompt is kept"):
        claim.returns((7, 0, 13), waste, 7, 1, 20)
    with claim("a request that fills its slot needs all of it, sooner or later"):
        claim.returns((5 + 6 + 7 + 8, 3 + 2 + 1, 0), waste, 5, 4, 8)
    with claim("what lies behind its longest is never needed, in any step"):
        claim.returns((5 + 6 + 7 + 8, 3 + 2 + 1, 4 * 2), waste, 5, 4, 10)
    with claim("any lengths"):
        for _ in range(6):
            prompt, answer = rng.randint(3, 20), rng.randint(2, 15)
            slot = prompt + answer + rng.randint(0, 30)
            expected = waste_token_by_token(prompt, answer, slot)
            claim.returns(expected, waste, prompt, answer, slot)


def keeps_the_last_token_too(num_prompt, num_answer, slot_length):
    used = sum(num_prompt + step for step in range(1, num_answer + 1))
    later = sum(num_answer - step for step in range(1, num_answer + 1))
    return used, later, num_answer * (slot_length - num_prompt - num_answer)


def counts_a_step_for_the_prompt_alone(num_prompt, num_answer, slot_length):
    used, later, never = waste_token_by_token(num_prompt, num_answer, slot_length)
    longest = num_prompt + num_answer - 1
    return used + num_prompt, later + longest - num_prompt, never + slot_length - longest


def looks_at_the_end_only(num_prompt, num_answer, slot_length):
    longest = num_prompt + num_answer - 1
    return longest * num_answer, 0, (slot_length - longest) * num_answer


def swaps_later_and_never(num_prompt, num_answer, slot_length):
    used, later, never = waste_token_by_token(num_prompt, num_answer, slot_length)
    return used, never, later


# 3 -- best fit -----------------------------------------------------------------------------------


def gaps_place_by_place(runs, size):
    """(start, length) of each gap, found by walking over every place."""
    taken = {place for start, length in runs for place in range(start, start + length)}
    gaps = []
    for place in range(size):
        if place in taken:
            continue
        if place == 0 or place - 1 in taken:
            gaps.append((place, 0))
        gaps[-1] = gaps[-1][0], gaps[-1][1] + 1
    return gaps


def best_gap(runs, size, length):
    fits = [(n, start) for start, n in gaps_place_by_place(runs, size) if n >= length]
    return min(fits)[1] if fits else None


def random_runs(rng, size):
    """Runs in any order, some of them touching."""
    runs, place = [], rng.choice([0, 3])
    while place + 12 < size:
        length = rng.randint(2, 9)
        runs.append((place, length))
        place += length + rng.choice([0, 2, 4, 5, 7, 11])
    rng.shuffle(runs)
    return runs


def check_best_fit(best_fit, claim):
    rng = random.Random(3)
    with claim("an empty memory gives its start, if it is long enough"):
        claim.returns(0, best_fit, [], 20, 20)
        claim.returns(None, best_fit, [], 20, 21)
    with claim("the smallest gap that is long enough, not the first one"):
        claim.returns(25, best_fit, [(10, 15), (30, 10)], 50, 4)
        claim.returns(0, best_fit, [(10, 15), (30, 10)], 50, 6)
    with claim("a gap of exactly the right length is long enough"):
        claim.returns(25, best_fit, [(10, 15), (30, 10)], 50, 5)
    with claim("of equals the first"):
        claim.returns(4, best_fit, [(0, 4), (9, 6), (20, 30)], 50, 3)
    with claim("the room behind the last run is a gap, too"):
        claim.returns(42, best_fit, [(10, 32)], 50, 8)
    with claim("runs in any order, and touching ones"):
        claim.returns(12, best_fit, [(20, 30), (0, 5), (5, 7)], 50, 7)
        for _ in range(12):
            runs, length = random_runs(rng, 90), rng.randint(2, 12)
            claim.returns(best_gap(runs, 90, length), best_fit, list(runs), 90, length)


def takes_the_first_gap(runs, size, length):
    return next((s for s, n in gaps_place_by_place(runs, size) if n >= length), None)


def takes_the_largest_gap(runs, size, length):
    fits = [(-n, start) for start, n in gaps_place_by_place(runs, size) if n >= length]
    return min(fits)[1] if fits else None


def forgets_the_end(runs, size, length):
    end = max((start + n for start, n in runs), default=size)
    return best_gap(runs, end, length)


def wants_room_to_spare(runs, size, length):
    return best_gap(runs, size, length + 1)


def trusts_the_order(runs, size, length):
    fits, end = [], 0
    for start, n in [*runs, (size, 0)]:
        if start - end >= length:
            fits.append((start - end, end))
        end = start + n
    return min(fits)[1] if fits else None


# 4 -- the door -----------------------------------------------------------------------------------


def door_by_definition(waiting, free, room):
    claims = [prompt + most for prompt, most in waiting]
    refused = [i for i, claim in enumerate(claims) if claim > room]
    rest = [i for i in range(len(waiting)) if i not in refused]
    count = max(n for n in range(len(rest) + 1) if sum(claims[i] for i in rest[:n]) <= free)
    return rest[:count], rest[count:], refused


def check_at_the_door(at_the_door, claim):
    rng = random.Random(4)
    with claim("nobody waits: nothing to decide"):
        claim.returns(([], [], []), at_the_door, [], 30, 50)
    with claim("who fits is admitted, also into exactly what is free"):
        claim.returns(([0, 1], [], []), at_the_door, [(7, 8), (6, 9)], 30, 50)
    with claim("the first who has to wait makes all behind it wait"):
        claim.returns(([0], [1, 2], []), at_the_door, [(7, 8), (6, 20), (2, 3)], 30, 50)
    with claim("never and later are different: what counts is the whole room, not what is free"):
        claim.returns(([], [0], []), at_the_door, [(20, 30)], 10, 50)
        claim.returns(([], [], [0]), at_the_door, [(20, 31)], 50, 50)
    with claim("who can never run is refused wherever it stands, and blocks nobody"):
        claim.returns(([1], [], [0]), at_the_door, [(30, 30), (4, 5)], 30, 50)
        line = [(6, 9), (20, 15), (40, 11), (2, 1)]
        claim.returns(([0], [1, 3], [2]), at_the_door, line, 30, 50)
    with claim("any line"):
        for _ in range(8):
            line = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(rng.randint(5, 9))]
            free = rng.randint(30, 90)
            claim.returns(door_by_definition(line, free, 45), at_the_door, list(line), free, 45)


def lets_small_ones_pass(waiting, free, room):
    admitted, later, refused = [], [], []
    for i, (prompt, most) in enumerate(waiting):
        if prompt + most > room:
            refused.append(i)
        elif prompt + most <= free:
            free -= prompt + most
            admitted.append(i)
        else:
            later.append(i)
    return admitted, later, refused


def refuses_what_does_not_fit_now(waiting, free, room):
    return door_by_definition(waiting, free, min(free, room))


def claims_the_prompt_only(waiting, free, room):
    return door_by_definition([(prompt, 0) for prompt, _ in waiting], free, room)


def lets_the_impossible_wait(waiting, free, room):
    admitted, later, _ = door_by_definition(waiting, free, 10**9)
    return admitted, later, []


def looks_at_the_head_only(waiting, free, room):
    admitted, later, refused = [], [], []
    for i, (prompt, most) in enumerate(waiting):
        if later:
            later.append(i)
        elif prompt + most > room:
            refused.append(i)
        elif prompt + most <= free:
            free -= prompt + most
            admitted.append(i)
        else:
            later.append(i)
    return admitted, later, refused


# 5 -- int4, packed -------------------------------------------------------------------------------


def pack_one_by_one(x):
    """(bytes, scales), a number at a time."""
    tokens, heads, size = x.shape
    packed = torch.zeros(tokens, heads, size // 2, dtype=torch.uint8)
    scales = torch.ones(tokens, heads, 1, dtype=x.dtype)
    for t in range(tokens):
        for h in range(heads):
            largest = x[t, h].abs().max()
            if largest > 0:
                scales[t, h] = largest / 7
            for i in range(size // 2):
                pair = x[t, h, 2 * i : 2 * i + 2] / scales[t, h]
                low, high = (int(code) + 8 for code in pair.round().tolist())
                packed[t, h, i] = low + 16 * high
    return packed, scales


def numbers(seed, *shape):
    """Random numbers whose quotients by the scale stay away from .5, where rounding may differ."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-7, 8, shape, generator=generator).double()
    codes[..., 3] = 7  # the scale is what we multiply by
    shifts = 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.4
    shifts[codes.abs() == 7] = 0
    scales = 0.1 + torch.rand(*shape[:2], 1, generator=generator, dtype=torch.float64)
    return (codes + shifts) * scales


def check_pack_int4(pack_int4, claim):
    def compare(x, parts=(True, True)):
        got, right = pack_int4(x.clone()), pack_one_by_one(x)
        claim.true(
            isinstance(got, tuple | list) and len(got) == 2,
            f"expected (bytes, scales), got {type(got)}",
        )
        for name, mine, expected, wanted in zip(
            ("bytes", "scales"), got, right, parts, strict=True
        ):
            difference = differs(mine, expected) if wanted else ""
            claim.true(not difference, f"{name} of x {tuple(x.shape)}: {difference}")

    with claim("shapes, and one byte for two numbers"):
        packed, scales = pack_int4(numbers(1, 5, 3, 8))
        claim.true(packed.dtype == torch.uint8, f"expected uint8, got {packed.dtype}")
        shapes = tuple(packed.shape), tuple(scales.shape)
        claim.true(
            shapes == ((5, 3, 4), (5, 3, 1)),
            f"x (5, 3, 8): expected (5, 3, 4) and (5, 3, 1), got {shapes[0]} and {shapes[1]}",
        )
    with claim("a scale for each token and head: the largest number becomes 7"):
        compare(numbers(2, 4, 3, 10), parts=(False, True))
    with claim("neighbours share a byte, the first one in the lower half"):
        compare(torch.tensor([[[7.0, -7.0, 1.0, 3.0, -2.0, 0.0]]], dtype=torch.float64))
    with claim("rounded to the nearest, on both sides of zero"):
        compare(torch.tensor([[[7.0, 1.6, -1.6, 1.4, -1.4, -6.7]]], dtype=torch.float64))
    with claim("any numbers"):
        for seed in range(3, 7):
            compare(numbers(seed, 6, 3, 12))
    with claim("a row of zeros stays zeros"):
        x = numbers(7, 3, 2, 8)
        x[1, 1] = 0
        compare(x)


def _packed(codes, scales):
    codes = (codes + 8).to(torch.uint8)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scales


def _scales(x, dim=-1):
    largest = x.abs().amax(dim=dim, keepdim=True) / 7
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def cuts_instead_of_rounding(x):
    return _packed((x / _scales(x)).trunc(), _scales(x))


def puts_the_first_on_top(x):
    packed, scales = pack_one_by_one(x)
    return packed // 16 + 16 * (packed % 16), scales


def pairs_the_halves(x):
    first, second = ((x / _scales(x)).round() + 8).to(torch.uint8).chunk(2, dim=-1)
    return first + 16 * second, _scales(x)


def one_scale_per_token(x):
    scales = _scales(x, dim=(-2, -1)).expand(*x.shape[:2], 1)
    return _packed((x / scales).round(), scales)


def divides_by_zero(x):
    scales = x.abs().amax(dim=-1, keepdim=True) / 7
    return _packed((x / scales).round().nan_to_num(), scales)


EXERCISES = [
    Exercise(
        "slots_that_fit",
        check_slots_that_fit,
        wrong=[
            takes_the_fraction_of_the_rest,
            forgets_the_step,
            counts_query_heads,
            keeps_keys_only,
            may_be_negative,
        ],
    ),
    Exercise(
        "waste",
        check_waste,
        wrong=[
            keeps_the_last_token_too,
            counts_a_step_for_the_prompt_alone,
            looks_at_the_end_only,
            swaps_later_and_never,
        ],
    ),
    Exercise(
        "best_fit",
        check_best_fit,
        wrong=[
            takes_the_first_gap,
            takes_the_largest_gap,
            forgets_the_end,
            wants_room_to_spare,
            trusts_the_order,
        ],
    ),
    Exercise(
        "at_the_door",
        check_at_the_door,
        wrong=[
            lets_small_ones_pass,
            refuses_what_does_not_fit_now,
            claims_the_prompt_only,
            lets_the_impossible_wait,
            looks_at_the_head_only,
        ],
    ),
    Exercise(
        "pack_int4",
        check_pack_int4,
        wrong=[
            cuts_instead_of_rounding,
            puts_the_first_on_top,
            pairs_the_halves,
            one_scale_per_token,
            divides_by_zero,
        ],
    ),
]
