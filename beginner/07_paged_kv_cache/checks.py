"""Checks of chapter 7's exercises, and answers that they must reject.

Tables are drawn at random and never in ascending order, and no two sizes are alike, so that a
block mistaken for its index shows; the seeds are fixed, so that a check says the same on every run.
"""

import math
import random
from collections import deque

import torch

from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("a, b, c, d,", max_tokens=12),
    GreedyExample(
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
        max_tokens=10,
    ),
    GreedyExample("1, 2, 3, 4,", max_tokens=8),
    GreedyExample("p, q, r, s,", max_tokens=12),
]


def random_table(rng, num_blocks, length):
    """Distinct blocks, in an order that isn't ascending."""
    while True:
        table = rng.sample(range(num_blocks), length)
        if length < 2 or table != sorted(table):
            return table


# 1 -- slot mapping -------------------------------------------------------------------------------


def places_one_by_one(table, start, end, block_size):
    """Walk through the request's tokens, block after block."""
    walk = [(block, offset) for block in table for offset in range(block_size)]
    return [block * block_size + offset for block, offset in walk[start:end]]


def check_slot_mapping(slot_mapping, claim):
    rng = random.Random(1)
    with claim("tokens of one block lie side by side"):
        claim.returns([21, 22, 23], slot_mapping, [7], 0, 3, 3)
    with claim("where a block ends the table says where to go on"):
        claim.returns([29, 10, 11], slot_mapping, [5, 2], 4, 7, 5)
    with claim("a decode step has one place"):
        claim.returns([33], slot_mapping, [9, 1, 8], 9, 10, 4)
    with claim("any table, any tokens, any block size"):
        for _ in range(6):
            size = rng.choice([3, 5, 6, 7])
            table = random_table(rng, 20, 6)
            start = rng.randrange(1, 2 * size)
            end = rng.randrange(start + size, 6 * size)
            expected = places_one_by_one(table, start, end, size)
            claim.returns(expected, slot_mapping, table, start, end, size)


def forgets_the_table(table, start, end, block_size):
    return list(range(start, end))


def goes_on_beside_the_first_block(table, start, end, block_size):
    first = table[start // block_size] * block_size + start % block_size
    return list(range(first, first + end - start))


def swaps_block_and_offset(table, start, end, block_size):
    return [table[p // block_size] + p % block_size * len(table) for p in range(start, end)]


def starts_at_the_tables_beginning(table, start, end, block_size):
    return places_one_by_one(table, 0, end - start, block_size)


def includes_the_end(table, start, end, block_size):
    return places_one_by_one(table, start, end + 1, block_size)


# 2 -- what sharing saves -------------------------------------------------------------------------


def blocks_step_by_step(num_prompt, num_output, n, block_size):
    """Fork, then write token by token, with counts."""
    references = []

    def take():
        references.append(1)
        return len(references) - 1

    def write(table, position):
        index = position // block_size
        if index == len(table):
            table.append(take())
        elif references[table[index]] > 1:
            references[table[index]] -= 1
            table[index] = take()

    parent = []
    for position in range(num_prompt):
        write(parent, position)
    tables = [parent]
    for _ in range(n - 1):
        tables.append(parent[: -(-(num_prompt - 1) // block_size)])
        for block in tables[-1]:
            references[block] += 1
    for sample, table in enumerate(tables):
        first = num_prompt - (sample > 0)
        for position in range(first, num_prompt + num_output - 1):
            write(table, position)
    return len({block for table in tables for block in table})


def check_blocks_of_samples(blocks_of_samples, claim):
    rng = random.Random(2)

    def compare(*sizes):
        claim.returns(blocks_step_by_step(*sizes), blocks_of_samples, *sizes)

    with claim("a single sample holds what its tokens need"):
        compare(9, 5, 1, 4)
        compare(10, 8, 1, 5)
    with claim("full blocks of the prompt count once"):
        compare(13, 3, 4, 4)
    with claim("the prompt's last block, if partly filled, counts for each sample"):
        compare(10, 4, 3, 4)
    with claim("so it does if the prompt fills it: its last token is computed again"):
        compare(12, 4, 3, 4)
        compare(15, 6, 2, 5)
    with claim("the last token of an answer isn't in memory yet"):
        compare(6, 3, 2, 4)
    with claim("any sizes"):
        for _ in range(12):
            compare(
                rng.randint(3, 30), rng.randint(2, 20), rng.randint(2, 5), rng.choice([3, 4, 5, 7])
            )


def _up(tokens, block_size):
    return -(-tokens // block_size)


def shares_nothing(num_prompt, num_output, n, block_size):
    return n * _up(num_prompt + num_output - 1, block_size)


def shares_the_whole_prompt(num_prompt, num_output, n, block_size):
    return _up(num_prompt, block_size) + n * _up(num_output - 1, block_size)


def counts_the_last_token(num_prompt, num_output, n, block_size):
    shared = (num_prompt - 1) // block_size if n > 1 else 0
    return shared + n * (_up(num_prompt + num_output, block_size) - shared)


def keeps_the_last_full_block_shared(num_prompt, num_output, n, block_size):
    shared = num_prompt // block_size
    return shared + n * (_up(num_prompt + num_output - 1, block_size) - shared)


# 3 -- attention over pages -----------------------------------------------------------------------


def attention_head_by_head(q, keys, values, table, length, block_size):
    """One head and one place after another."""
    where = places_one_by_one(table, 0, length, block_size)
    group = q.shape[0] // keys.shape[1]
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        scores = [float(q[head] @ keys[p, head // group]) / math.sqrt(q.shape[1]) for p in where]
        weights = [math.exp(score - max(scores)) for score in scores]
        for p, weight in zip(where, weights, strict=True):
            out[head] += weight / sum(weights) * values[p, head // group]
    return out


def check_paged_attention(paged_attention, claim):
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)

    def compare(table, length, block_size, heads=6, kv_heads=2):
        def tensor(*shape):
            return torch.randn(*shape, 5, generator=generator, dtype=torch.float64)

        q = tensor(heads)
        keys, values = tensor(11 * block_size, kv_heads), tensor(11 * block_size, kv_heads)
        args = (q, keys, values, table, length, block_size)
        claim.returns(attention_head_by_head(*args), paged_attention, *args)

    with claim("a single token gets its own value"):
        compare([7], 1, 4, heads=2)
    with claim("tokens are found in the blocks of the table"):
        compare([9, 2, 6], 12, 4, heads=3, kv_heads=3)
    with claim("what lies behind `length` isn't seen"):
        compare([8, 3, 10], 10, 4, heads=3, kv_heads=3)
        compare([8, 3, 10, 1], 7, 3, heads=3, kv_heads=3)
    with claim("neighbouring query heads share a KV head"):
        compare([5, 0, 7], 12, 4)
    with claim("any sizes"):
        for _ in range(5):
            size, kv_heads = rng.choice([2, 3, 5]), rng.choice([2, 3])
            table = random_table(rng, 11, 4)
            length = rng.randint(2 * size + 1, 4 * size - 1)
            compare(table, length, size, kv_heads * rng.choice([2, 4]), kv_heads)


def _attend(q, k, v, group_first=False):
    group = q.shape[0] // k.shape[1]
    if group_first:
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    else:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    weights = (torch.einsum("hd,nhd->hn", q, k) / math.sqrt(q.shape[1])).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def reads_one_run(q, keys, values, table, length, block_size):
    return _attend(q, keys[:length], values[:length])


def sees_whole_blocks(q, keys, values, table, length, block_size):
    where = places_one_by_one(table, 0, len(table) * block_size, block_size)
    return _attend(q, keys[where], values[where])


def shares_heads_the_other_way(q, keys, values, table, length, block_size):
    where = places_one_by_one(table, 0, length, block_size)
    return _attend(q, keys[where], values[where], group_first=True)


def misses_itself(q, keys, values, table, length, block_size):
    where = places_one_by_one(table, 0, max(1, length - 1), block_size)
    return _attend(q, keys[where], values[where])


def averages_over_blocks(q, keys, values, table, length, block_size):
    where = places_one_by_one(table, 0, length, block_size)
    parts = [where[i : i + block_size] for i in range(0, length, block_size)]
    return torch.stack([_attend(q, keys[p], values[p]) for p in parts]).mean(dim=0)


# 4 -- who gives way? -----------------------------------------------------------------------------


def preempt_one_by_one(held, wanted, free):
    """As the notebook's plan does, with numbers for blocks."""
    running, preempted = list(range(len(held))), []
    for request in range(len(held)):
        while request in running and wanted[request] > free:
            newest = running.pop()
            free += held[newest]
            preempted.append(newest)
        if request in running:
            free -= wanted[request]
    return preempted


def check_give_way(give_way, claim):
    rng = random.Random(4)

    def compare(held, wanted, free):
        claim.returns(preempt_one_by_one(held, wanted, free), give_way, held, wanted, free)

    with claim("if there is enough for all, nobody gives way"):
        compare([3, 5, 2], [1, 0, 1], 2)
    with claim("the newest gives way first"):
        compare([3, 5, 2], [1, 1, 0], 1)
    with claim("one after the other, as many as it takes and no more"):
        compare([4, 3, 1, 2, 1], [4, 0, 0, 0, 0], 1)
    with claim("what is set free serves all who follow"):
        compare([2, 2, 2, 5], [1, 1, 1, 0], 0)
    with claim("a request may have to preempt itself, and then hands out nothing"):
        compare([4, 2, 3], [0, 0, 1], 0)
        compare([4, 2, 3], [0, 4, 1], 0)
    with claim("who was preempted needs nothing any more"):
        compare([3, 2, 4], [1, 3, 2], 0)
    with claim("any requests"):
        for _ in range(20):
            count = rng.randint(3, 7)
            held = [rng.randint(1, 5) for _ in range(count)]
            compare(held, [rng.choice([0, 1, 1, 2, 3]) for _ in held], rng.randint(0, 3))


def the_oldest_gives_way(held, wanted, free):
    last = len(held) - 1
    return [last - i for i in preempt_one_by_one(held[::-1], wanted[::-1], free)]


def the_largest_gives_way(held, wanted, free):
    running, preempted = list(range(len(held))), []
    for request in range(len(held)):
        while request in running and wanted[request] > free:
            largest = max(running, key=lambda i: held[i])
            running.remove(largest)
            free += held[largest]
            preempted.append(largest)
        if request in running:
            free -= wanted[request]
    return preempted


def looks_at_the_sum_only(held, wanted, free):
    missing, preempted = sum(wanted) - free, []
    for newest in reversed(range(len(held))):
        if missing <= 0:
            break
        missing -= held[newest]
        preempted.append(newest)
    return preempted


def forgets_what_is_set_free(held, wanted, free):
    preempted = []
    for request in range(len(held)):
        if request in preempted:
            break
        gained = 0
        while wanted[request] > free + gained and request not in preempted:
            newest = len(held) - 1 - len(preempted)
            gained += held[newest]
            preempted.append(newest)
        free = max(0, free - wanted[request])
    return preempted


# 5 -- reserve ------------------------------------------------------------------------------------


def reserve_one_by_one(table, references, free, start, end, block_size):
    """Try it on copies, block by block; give them out only if all went well."""
    mine, counts, rest, copies = list(table), list(references), deque(free), []
    for index in range(start // block_size, (end - 1) // block_size + 1):
        if index < len(mine) and counts[mine[index]] == 1:
            continue
        if not rest:
            return None
        block = rest.popleft()
        counts[block] = 1
        if index < len(mine):
            counts[mine[index]] -= 1
            copies.append((mine[index], block))
            mine[index] = block
        else:
            mine.append(block)
    table[:], references[:] = mine, counts
    free.clear()
    free.extend(rest)
    return copies


def check_reserve(reserve, claim):
    rng = random.Random(5)

    def compare(table, references, free, start, end, block_size):
        right = [list(table), list(references), deque(free)]
        mine = [list(table), list(references), deque(free)]
        expected = reserve_one_by_one(*right, start, end, block_size)
        got = reserve(*mine, start, end, block_size)
        call = f"table {table}, references {references}, free {free}, tokens {start} to {end - 1},"
        call += f" blocks of {block_size}:"
        same = got == expected and type(got) is type(expected)
        claim.true(same, f"{call} expected {expected}, got {got}")
        for name, should, done in zip(("table", "references", "free"), right, mine, strict=True):
            claim.true(
                list(should) == list(done),
                f"{call} expected {name} {list(should)} afterwards, got {list(done)}",
            )

    with claim("nothing to do where there is room and nobody else"):
        compare([3, 1], [0, 1, 0, 1], [2, 0], 5, 6, 4)
    with claim("new blocks are taken from the left of `free`, with one reference"):
        compare([3], [0, 0, 0, 1, 0], [2, 4, 0, 1], 3, 9, 4)
    with claim("a shared block that is written is replaced by a copy, and held by one less"):
        compare([2, 5], [0, 0, 3, 0, 0, 2], [4, 0, 3, 1], 6, 7, 4)
    with claim("a shared block that is only read stays"):
        compare([2, 5], [0, 0, 2, 0, 0, 1], [4, 0, 3, 1], 7, 10, 4)
    with claim("copies first and new blocks together, in the table's order"):
        compare([6, 2, 5], [0, 0, 3, 0, 0, 2, 2], [4, 0, 3, 1], 5, 15, 4)
    with claim("if blocks don't suffice: None, and nothing has changed"):
        compare([6, 2, 5], [1, 1, 3, 1, 0, 2, 2], [4], 5, 12, 4)
        compare([6, 2, 5], [1, 1, 1, 1, 0, 2, 1], [4], 8, 15, 4)
    with claim("any books"):
        for _ in range(25):
            size, num_blocks = rng.choice([3, 4, 5]), 12
            table = random_table(rng, num_blocks, rng.randint(2, 5))
            references = [rng.choice([0, 1, 2]) for _ in range(num_blocks)]
            for block in table:
                references[block] = rng.choice([1, 1, 2, 3])
            free = [block for block in range(num_blocks) if references[block] == 0]
            rng.shuffle(free)
            start = rng.randrange(size, len(table) * size)
            compare(table, references, free, start, start + rng.randint(1, 3 * size), size)


def never_copies(table, references, free, start, end, block_size):
    missing = _up(end, block_size) - len(table)
    if missing > len(free):
        return None
    for _ in range(missing):
        table.append(free.popleft())
        references[table[-1]] = 1
    return []


def copies_all_shared_blocks(table, references, free, start, end, block_size):
    shared = [i for i in range(len(table)) if references[table[i]] > 1]
    return _replace(table, references, free, shared, _up(end, block_size))


def forgets_that_copies_take_blocks(table, references, free, start, end, block_size):
    if _up(end, block_size) - len(table) > len(free):
        return None
    return _replace(table, references, free, _written(table, references, start, block_size),
                    _up(end, block_size), check=False)  # fmt: skip


def keeps_the_old_reference(table, references, free, start, end, block_size):
    old = list(table)
    copies = reserve_one_by_one(table, references, free, start, end, block_size)
    for source, _ in copies or ():
        references[source] += 1
    assert len(table) >= len(old)
    return copies


def is_not_all_or_nothing(table, references, free, start, end, block_size):
    shared = _written(table, references, start, block_size)
    copies = []
    for i in shared:
        if not free:
            return None
        copies += _replace(table, references, free, [i], len(table))
    while len(table) < _up(end, block_size):
        if not free:
            return None
        table.append(free.popleft())
        references[table[-1]] = 1
    return copies


def _written(table, references, start, block_size):
    return [i for i in range(start // block_size, len(table)) if references[table[i]] > 1]


def _replace(table, references, free, indices, num_blocks, check=True):
    if check and len(indices) + max(0, num_blocks - len(table)) > len(free):
        return None
    copies = []
    for i in indices:
        copy = free.popleft()
        references[copy] = 1
        references[table[i]] -= 1
        copies.append((table[i], copy))
        table[i] = copy
    while len(table) < num_blocks:
        table.append(free.popleft())
        references[table[-1]] = 1
    return copies


EXERCISES = [
    Exercise(
        "slot_mapping",
        check_slot_mapping,
        wrong=[
            forgets_the_table,
            goes_on_beside_the_first_block,
            swaps_block_and_offset,
            starts_at_the_tables_beginning,
            includes_the_end,
        ],
    ),
    Exercise(
        "blocks_of_samples",
        check_blocks_of_samples,
        wrong=[
            shares_nothing,
            shares_the_whole_prompt,
            counts_the_last_token,
            keeps_the_last_full_block_shared,
        ],
    ),
    Exercise(
        "paged_attention",
        check_paged_attention,
        wrong=[
            reads_one_run,
            sees_whole_blocks,
            shares_heads_the_other_way,
            misses_itself,
            averages_over_blocks,
        ],
    ),
    Exercise(
        "give_way",
        check_give_way,
        wrong=[
            the_oldest_gives_way,
            the_largest_gives_way,
            looks_at_the_sum_only,
            forgets_what_is_set_free,
        ],
    ),
    Exercise(
        "reserve",
        check_reserve,
        wrong=[
            never_copies,
            copies_all_shared_blocks,
            forgets_that_copies_take_blocks,
            keeps_the_old_reference,
            is_not_all_or_nothing,
        ],
    ),
]
