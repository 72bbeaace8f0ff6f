"""Checks of chapter 4's exercises, and answers that they must reject.

Arrivals and lengths are drawn at random and in no convenient order, so that sorting by the wrong
thing shows; the seeds are fixed, so that a check says the same thing on every run.
"""

import random
from dataclasses import dataclass

from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("a, b, c, d,", max_tokens=3),
    GreedyExample("p, q, r, s,", max_tokens=10),
    GreedyExample("f, g, h, i,", max_tokens=2),
    GreedyExample("P, Q, R, S,", max_tokens=4),
    GreedyExample("A, B, C, D,", max_tokens=2),
]


@dataclass(frozen=True)
class ToyRequest:
    """As in the notebook."""

    name: str
    arrival: int
    num_tokens: int
    priority: int = 1


# 1 -- waiting at the bakery ----------------------------------------------------------------------


def waits_step_by_step(arrivals, lengths):
    """A step at a time: whoever is first in the line gets a token."""
    left, first, now = list(lengths), [None] * len(lengths), 0
    while any(left):
        head = next(i for i, tokens in enumerate(left) if tokens)
        if arrivals[head] <= now:
            if first[head] is None:
                first[head] = now
            left[head] -= 1
        now += 1
    return [start - arrival for start, arrival in zip(first, arrivals, strict=True)]


def check_fcfs_waits(fcfs_waits, claim):
    rng = random.Random(1)
    with claim("a request that is alone doesn't wait, whenever it comes"):
        claim.returns([0], fcfs_waits, [0], [5])
        claim.returns([0], fcfs_waits, [7], [3])
    with claim("all there at once: each waits for those before it"):
        claim.returns([0, 4, 6, 13], fcfs_waits, [0, 0, 0, 0], [4, 2, 7, 3])
    with claim("who comes later waits less"):
        claim.returns([0, 3, 2], fcfs_waits, [0, 1, 4], [4, 2, 7])
    with claim("the model may be idle in between"):
        claim.returns([0, 0, 1], fcfs_waits, [0, 9, 11], [2, 3, 4])
    with claim("any arrivals and lengths"):
        for _ in range(5):
            arrivals = sorted(rng.randrange(40) for _ in range(8))
            lengths = [rng.randint(1, 9) for _ in range(8)]
            expected = waits_step_by_step(arrivals, lengths)
            claim.returns(expected, fcfs_waits, arrivals, lengths)


def forgets_that_time_passes_when_idle(arrivals, lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [max(0, s - a) for s, a in zip(starts, arrivals, strict=True)]


def returns_the_starts(arrivals, lengths):
    starts = waits_step_by_step(arrivals, lengths)
    return [wait + arrival for wait, arrival in zip(starts, arrivals, strict=True)]


def counts_the_own_answer(arrivals, lengths):
    waits = waits_step_by_step(arrivals, lengths)
    return [wait + length for wait, length in zip(waits, lengths, strict=True)]


def waits_for_the_one_before_only(arrivals, lengths):
    waits = [0]
    for i in range(1, len(lengths)):
        waits.append(max(0, arrivals[i - 1] + lengths[i - 1] - arrivals[i]))
    return waits


# 2 -- empty places -------------------------------------------------------------------------------


def places_one_by_one(lengths, num_slots):
    """Look at every slot in every step."""
    empty, rest = 0, list(lengths)
    while rest:
        batch, rest = rest[:num_slots], rest[num_slots:]
        for step in range(max(batch)):
            for slot in range(num_slots):
                empty += slot >= len(batch) or step >= batch[slot]
    return empty


def check_empty_places(empty_places, claim):
    rng = random.Random(2)
    with claim("a single slot is never empty"):
        claim.returns(0, empty_places, [5, 2, 9], 1)
    with claim("equal lengths that fill all batches leave nothing empty"):
        claim.returns(0, empty_places, [6, 6, 3, 3], 2)
    with claim("who finishes early leaves its slot empty until the batch ends"):
        claim.returns(7 + 5, empty_places, [2, 9, 4], 3)
    with claim("a slot that nobody took is empty too"):
        claim.returns(4, empty_places, [4], 2)
        claim.returns(3 + 2 * 7, empty_places, [5, 8, 8, 7], 3)
    with claim("batches are formed in the order given"):
        claim.returns(8 + 6, empty_places, [9, 1, 2, 8], 2)
    with claim("any lengths, any number of slots"):
        for _ in range(5):
            lengths = [rng.randint(1, 12) for _ in range(rng.randint(7, 11))]
            slots = rng.choice([2, 3, 4])
            claim.returns(places_one_by_one(lengths, slots), empty_places, lengths, slots)


def ignores_slots_that_nobody_took(lengths, num_slots):
    batches = [lengths[i : i + num_slots] for i in range(0, len(lengths), num_slots)]
    return sum(max(batch) * len(batch) for batch in batches) - sum(lengths)


def sorts_first(lengths, num_slots):
    return places_one_by_one(sorted(lengths), num_slots)


def refills_slots_at_once(lengths, num_slots):
    busy_until = [0] * num_slots
    for length in lengths:
        slot = busy_until.index(min(busy_until))
        busy_until[slot] += length
    return max(busy_until) * num_slots - sum(lengths)


def drops_the_last_batch(lengths, num_slots):
    whole = len(lengths) - len(lengths) % num_slots
    return places_one_by_one(lengths[:whole], num_slots)


# 3 -- form a batch -------------------------------------------------------------------------------


def a_line(rng, count):
    """Requests in order of arrival; few different lengths and priorities, so that many tie."""
    names = rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", count)
    arrivals = sorted(rng.randrange(30) for _ in range(count))
    return [
        ToyRequest(name, arrival, rng.randint(2, 5), rng.randint(0, 2))
        for name, arrival in zip(names, arrivals, strict=True)
    ]


def batch_by_ranks(waiting, key, num_slots):
    """A request is in the batch if fewer than num_slots go before it."""

    def rank(i):
        mine = key(waiting[i]), i
        return sum((key(other), j) < mine for j, other in enumerate(waiting))

    ranks = [rank(i) for i in range(len(waiting))]
    batch = [waiting[ranks.index(r)] for r in range(min(num_slots, len(waiting)))]
    return batch, [r for r, place in zip(waiting, ranks, strict=True) if place >= num_slots]


def check_next_batch(next_batch, claim):
    rng = random.Random(3)
    by_length, by_priority = (lambda r: r.num_tokens), (lambda r: r.priority)

    def compare(waiting, key, num_slots):
        before = list(waiting)
        got = next_batch(waiting, key, num_slots)
        claim.true(
            isinstance(got, tuple) and len(got) == 2, f"expected (batch, rest), got {type(got)}"
        )
        for text, mine, right in zip(
            ("batch", "rest"), got, batch_by_ranks(before, key, num_slots), strict=True
        ):
            names = [[r.name for r in requests] for requests in (mine, right)]
            claim.true(
                names[0] == names[1],
                f"{num_slots} slots, waiting {[(r.name, key(r)) for r in before]} (name, key):"
                f" expected {text} {names[1]}, got {names[0]}",
            )

    with claim("the smallest keys go first"):
        line = [ToyRequest(n, i, t) for i, (n, t) in enumerate([("A", 7), ("B", 3), ("C", 5)])]
        compare(line, by_length, 1)
        compare(line, by_length, 2)
    with claim("equals go in order of arrival, and the rest stays in that order"):
        for key in (lambda r: 0, by_length, by_priority):
            for num_slots in (1, 3, 4):
                compare(a_line(rng, 9), key, num_slots)
    with claim("fewer requests than slots: all of them"):
        compare(a_line(rng, 3), by_priority, 5)
        compare([], by_priority, 5)
    with claim("the list that was given stays as it is"):
        line = a_line(rng, 7)
        names = [r.name for r in line]
        next_batch(line, by_length, 3)
        claim.true(
            [r.name for r in line] == names,
            f"waiting was {names} before the call, and {[r.name for r in line]} after it",
        )


def leaves_the_rest_sorted(waiting, key, num_slots):
    line = sorted(waiting, key=key)
    return line[:num_slots], line[num_slots:]


def sorts_in_place(waiting, key, num_slots):
    batch, rest = batch_by_ranks(list(waiting), key, num_slots)
    waiting.sort(key=key)
    return batch, rest


def takes_the_largest(waiting, key, num_slots):
    return batch_by_ranks(waiting, lambda request: -key(request), num_slots)


def breaks_ties_by_name(waiting, key, num_slots):
    batch = sorted(waiting, key=lambda r: (key(r), r.name))[:num_slots]
    return batch, [r for r in waiting if r not in batch]


def takes_who_came_first(waiting, key, num_slots):
    return sorted(waiting[:num_slots], key=key), waiting[num_slots:]


# 4 -- aging --------------------------------------------------------------------------------------


def order_at(requests, rate, now):
    """By the definition: each step of waiting counts as `rate` tokens."""
    return sorted(requests, key=lambda r: r.num_tokens - rate * (now - r.arrival))


def check_aged_key(aged_key, claim):
    rng = random.Random(4)

    def compare(requests, rate, now):
        got = sorted(requests, key=lambda request: aged_key(request, rate))
        right = order_at(requests, rate, now)
        facts = [(r.name, r.arrival, r.num_tokens) for r in requests]
        claim.true(
            got == right,
            f"rate {rate}, at step {now} wait {facts} (name, arrival, tokens): expected order"
            f" {[r.name for r in right]}, got {[r.name for r in got]}",
        )

    def crowd(rate):
        """No two of them ever count the same."""
        found = {}
        while len(found) < 7:
            r = ToyRequest(f"r{len(found)}", rng.randrange(20), rng.randint(1, 60))
            found.setdefault(r.num_tokens + rate * r.arrival, r)
        return sorted(found.values(), key=lambda r: r.arrival)

    with claim("at rate 0 it is shortest first"):
        compare(crowd(0), 0, now=25)
    with claim("at a rate beyond all lengths it is first come, first served"):
        early, late = ToyRequest("early", 3, 50), ToyRequest("late", 4, 2)
        compare([late, early], 100, now=30)
    with claim("in between it has the right order at any step"):
        for rate in (0.25, 0.5, 2, 3):
            for now in (20, 31, 500):
                compare(crowd(rate), rate, now)
    with claim("a long request isn't passed by short ones that come late enough"):
        long = ToyRequest("L", 0, 9)
        for arrival in range(1, 12):
            if arrival != 7:  # where both count the same
                compare([long, ToyRequest("s", arrival, 2)], 1, now=12)


def rewards_coming_late(request, rate):
    return request.num_tokens - rate * request.arrival


def does_not_age(request, rate):
    return request.num_tokens


def ages_at_rate_one(request, rate):
    return request.num_tokens + request.arrival


def weighs_the_tokens(request, rate):
    return rate * request.num_tokens + request.arrival


def forgets_the_tokens(request, rate):
    return rate * request.arrival


# 5 -- choose again in every step -----------------------------------------------------------------


def run_each_step(requests, key):
    """Who runs in each step if `key(request, tokens left)` decides anew in each."""
    left, ran, now = [r.num_tokens for r in requests], [], 0
    while sum(left):
        there = [i for i, r in enumerate(requests) if left[i] and r.arrival <= now]
        best = None
        for i in there:
            if best is None or key(requests[i], left[i]) < key(requests[best], left[best]):
                best = i
        if best is not None:
            left[best] -= 1
        ran.append(None if best is None else requests[best].name)
        now += 1
    return ran


def check_shortest_remaining(shortest_remaining, claim):
    rng = random.Random(5)

    def compare(*requests):
        requests = list(requests)
        expected = run_each_step(requests, lambda request, left: left)
        facts = [(r.name, r.arrival, r.num_tokens) for r in requests]
        got = shortest_remaining(requests)
        claim.true(
            got == expected,
            f"requests {facts} (name, arrival, tokens): expected {expected}, got {got}",
        )

    with claim("a request that is alone gets every step"):
        compare(ToyRequest("A", 0, 4))
    with claim("a shorter one interrupts, and the longer one goes on afterwards"):
        compare(ToyRequest("A", 0, 6), ToyRequest("B", 2, 2))
    with claim("what counts is what is left, not the whole length"):
        compare(ToyRequest("A", 0, 6), ToyRequest("B", 4, 4))
    with claim("equals go by their order in the list"):
        compare(ToyRequest("A", 0, 3), ToyRequest("B", 0, 3))
        compare(ToyRequest("A", 0, 5), ToyRequest("B", 2, 3))
    with claim("where nobody is there the step is None"):
        compare(ToyRequest("A", 2, 1), ToyRequest("B", 5, 2))
    with claim("any requests"):
        for _ in range(6):
            arrivals = sorted(rng.randrange(25) for _ in range(6))
            lengths = [rng.randint(1, 8) for _ in range(6)]
            names = rng.sample("ABCDEFGH", 6)
            compare(*map(ToyRequest, names, arrivals, lengths))


def never_interrupts(requests):
    ran, waiting = [], list(requests)
    while waiting:
        there = [r for r in waiting if r.arrival <= len(ran)]
        if not there:
            ran.append(None)
            continue
        chosen = min(there, key=lambda r: r.num_tokens)
        waiting.remove(chosen)
        ran += [chosen.name] * chosen.num_tokens
    return ran


def looks_at_the_whole_length(requests):
    return run_each_step(requests, lambda request, left: request.num_tokens)


def prefers_the_newest_of_equals(requests):
    return run_each_step(requests, lambda request, left: (left, -requests.index(request)))


def skips_idle_steps(requests):
    ran = run_each_step(requests, lambda request, left: left)
    return [name for name in ran if name is not None]


def serves_who_has_not_come_yet(requests):
    there = [ToyRequest(r.name, 0, r.num_tokens) for r in requests]
    return run_each_step(there, lambda request, left: left)


EXERCISES = [
    Exercise(
        "fcfs_waits",
        check_fcfs_waits,
        wrong=[
            forgets_that_time_passes_when_idle,
            returns_the_starts,
            counts_the_own_answer,
            waits_for_the_one_before_only,
        ],
    ),
    Exercise(
        "empty_places",
        check_empty_places,
        wrong=[
            ignores_slots_that_nobody_took,
            sorts_first,
            refills_slots_at_once,
            drops_the_last_batch,
        ],
    ),
    Exercise(
        "next_batch",
        check_next_batch,
        wrong=[
            leaves_the_rest_sorted,
            sorts_in_place,
            takes_the_largest,
            breaks_ties_by_name,
            takes_who_came_first,
        ],
    ),
    Exercise(
        "aged_key",
        check_aged_key,
        wrong=[
            rewards_coming_late,
            does_not_age,
            ages_at_rate_one,
            weighs_the_tokens,
            forgets_the_tokens,
        ],
    ),
    Exercise(
        "shortest_remaining",
        check_shortest_remaining,
        wrong=[
            never_interrupts,
            looks_at_the_whole_length,
            prefers_the_newest_of_equals,
            skips_idle_steps,
            serves_who_has_not_come_yet,
        ],
    ),
]
