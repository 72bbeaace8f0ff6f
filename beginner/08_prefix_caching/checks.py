"""Checks of chapter 8's exercises, and answers that they must reject.

Texts are drawn at random over few tokens, so that they often begin alike and equal blocks turn up
in different places; the seeds are fixed, so that a check says the same thing on every run.
"""

import random

from infer_lab.course import Exercise, GreedyExample

_FACTS = "The capital of France is Paris. The capital of Japan is Tokyo. The capital of"
GREEDY = [
    GreedyExample(f"{_FACTS} Italy is", max_tokens=4),
    GreedyExample(f"{_FACTS} Austria is", max_tokens=4),
    GreedyExample(f"{_FACTS} Italy is Rome. The capital of Russia is", max_tokens=4),
    GreedyExample("The capital of France is Paris. The capital of Cuba is", max_tokens=4),
    GreedyExample(f"So: {_FACTS} Italy is", max_tokens=4),
    GreedyExample("Some letters: x, a, b, c, d, p, q, r, s,", max_tokens=4),
    GreedyExample("Some letters: x, p, q, r, s, a, b, c, d,", max_tokens=4),
]


def some_texts(rng, count, longest):
    """Texts of which many begin alike."""
    texts = [[rng.randrange(3) for _ in range(longest)]]
    while len(texts) < count:
        old = rng.choice(texts)
        kept = old[: rng.randint(0, len(old))]
        texts.append(kept + [rng.randrange(3) for _ in range(rng.randint(1, longest // 2))])
    rng.shuffle(texts)
    return texts


# 1 -- how much is found? -------------------------------------------------------------------------


def tokens_found_by_names(known, prompt, block_size):
    """Name every full block by all tokens up to its end, then look up one by one."""
    names = set()
    for text in known:
        names |= {tuple(text[: block_size * (i + 1)]) for i in range(len(text) // block_size)}
    found = 0
    while found + block_size < len(prompt) and tuple(prompt[: found + block_size]) in names:
        found += block_size
    return found


def check_cached_tokens(cached_tokens, claim):
    rng = random.Random(1)

    def compare(known, prompt, block_size):
        expected = tokens_found_by_names(known, prompt, block_size)
        claim.returns(expected, cached_tokens, known, prompt, block_size)

    with claim("nothing is known, nothing is found"):
        compare([], [5, 6, 7, 8, 9], 2)
    with claim("whole blocks only"):
        compare([[1, 2, 3, 4, 5, 6, 7]], [1, 2, 3, 4, 5, 9, 9, 9], 3)
    with claim("a known text's last block counts only if it is full"):
        compare([[1, 2, 3, 4, 5]], [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    with claim("never all of the prompt: its last block is computed again"):
        compare([[4, 3, 2, 1, 4, 3, 2, 1]], [4, 3, 2, 1, 4, 3], 3)
        compare([[4, 3, 2, 1]], [4, 3, 2, 1], 4)
    with claim("the best of many known texts counts"):
        compare([[1, 2, 9, 9, 9], [1, 2, 3, 4, 5, 6], [1, 1, 1, 1]], [1, 2, 3, 4, 5, 6, 7], 2)
    with claim("equal tokens further on don't help"):
        compare([[1, 2, 3, 4, 5, 6, 7, 8]], [3, 4, 5, 6, 7, 8, 9], 2)
        compare([[1, 2, 3, 4, 5, 6, 7, 8]], [0, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    with claim("any texts"):
        for _ in range(30):
            *known, prompt = some_texts(rng, 5, 20)
            compare(known, prompt, rng.choice([2, 3, 4]))


def finds_the_whole_prompt(known, prompt, block_size):
    return max((_common(text, prompt) // block_size * block_size for text in known), default=0)


def counts_single_tokens(known, prompt, block_size):
    return max((min(_common(text, prompt), len(prompt) - 1) for text in known), default=0)


def finds_equal_blocks_anywhere(known, prompt, block_size):
    blocks = {
        tuple(text[i : i + block_size])
        for text in known
        for i in range(0, len(text) // block_size * block_size, block_size)
    }
    starts = range(0, (len(prompt) - 1) // block_size * block_size, block_size)
    return block_size * sum(tuple(prompt[i : i + block_size]) in blocks for i in starts)


def looks_at_the_last_text_only(known, prompt, block_size):
    return tokens_found_by_names(known[-1:], prompt, block_size)


def computes_one_token_again(known, prompt, block_size):
    found = finds_the_whole_prompt(known, prompt, block_size)
    return min(found, len(prompt) - 1)


def _common(a, b):
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


# 2 -- chained names ------------------------------------------------------------------------------


def chain_from_the_end(token_ids, block_size, root, combine):
    """The name of the last full block needs that of the one before, and so on."""

    def name(i):
        before = name(i - 1) if i else root
        return combine(before, token_ids[i * block_size : (i + 1) * block_size])

    return [name(i) for i in range(len(token_ids) // block_size)]


def spelled_out(previous, token_ids):
    """A combination that one can read."""
    return f"{previous}<{' '.join(map(str, token_ids))}"


def check_chain(chain, claim):
    rng = random.Random(2)

    def compare(token_ids, block_size, root):
        expected = chain_from_the_end(token_ids, block_size, root, spelled_out)
        got = chain(list(token_ids), block_size, root, spelled_out)
        facts = f"tokens {token_ids}, blocks of {block_size}, root {root!r}"
        claim.true(got == expected, f"{facts}: expected {expected}, got {got}")

    with claim("the first block follows the root"):
        compare([7, 8, 9], 3, "R")
    with claim("each block follows the name of the one before"):
        compare([7, 8, 9, 4, 5, 6], 3, "R")
        compare([1, 2, 3, 4, 5, 6, 7, 8], 2, "")
    with claim("a block that isn't full has no name"):
        compare([7, 8, 9, 4, 5], 3, "R")
        compare([7, 8], 3, "R")
        compare([], 3, "R")
    with claim("any text"):
        for _ in range(10):
            text = [rng.randrange(50) for _ in range(rng.randint(5, 20))]
            compare(text, rng.choice([2, 3, 4]), rng.choice(["a", "b"]))


def forgets_the_past(token_ids, block_size, root, combine):
    starts = range(0, len(token_ids) // block_size * block_size, block_size)
    return [combine(root, token_ids[i : i + block_size]) for i in starts]


def names_the_rest_too(token_ids, block_size, root, combine):
    names, previous = [], root
    for i in range(0, len(token_ids), block_size):
        previous = combine(previous, token_ids[i : i + block_size])
        names.append(previous)
    return names


def writes_whole_prefixes(token_ids, block_size, root, combine):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [combine(root, token_ids[:end]) for end in ends]


def leaves_the_root_away(token_ids, block_size, root, combine):
    return chain_from_the_end(token_ids, block_size, "", combine)


# 3 -- the price of a chat ------------------------------------------------------------------------


def work_with_a_cache_of_texts(turns, block_size):
    """Play it: the chat is a list of numbers, all that is computed is kept."""
    work, chat, known = [], [], []
    for added, answered in turns:
        chat += range(len(chat), len(chat) + added)
        work.append(len(chat) - tokens_found_by_names(known, chat, block_size))
        chat += range(len(chat), len(chat) + answered)
        known.append(chat[:-1])
    return work


def check_prefill_work(prefill_work, claim):
    rng = random.Random(3)

    def compare(turns, block_size):
        expected = work_with_a_cache_of_texts(turns, block_size)
        claim.returns(expected, prefill_work, turns, block_size)

    with claim("the first turn pays for all of its prompt"):
        compare([(37, 5)], 16)
    with claim("a later turn pays for what is new, and for the rest of a block"):
        compare([(37, 20), (11, 3)], 16)
        compare([(9, 7), (6, 8), (5, 2)], 5)
    with claim("the last token of an answer isn't in memory yet"):
        compare([(10, 6), (4, 1)], 8)
        compare([(5, 3), (1, 4), (3, 1)], 4)
    with claim("any chat"):
        for _ in range(15):
            turns = [(rng.randint(1, 40), rng.randint(1, 40)) for _ in range(rng.randint(2, 6))]
            compare(turns, rng.choice([4, 8, 16]))


def has_no_cache(turns, block_size):
    work, chat = [], 0
    for added, answered in turns:
        work.append(chat + added)
        chat += added + answered
    return work


def counts_the_last_token(turns, block_size):
    work, chat = [], 0
    for added, answered in turns:
        work.append(chat % block_size + added)
        chat += added + answered
    return work


def finds_prompts_only(turns, block_size):
    work, chat, before = [], 0, 0
    for added, answered in turns:
        chat += added
        work.append(chat - before // block_size * block_size)
        before = chat
        chat += answered
    return work


def forgets_about_blocks(turns, block_size):
    return [added + (i > 0) for i, (added, _) in enumerate(turns)]


# 4 -- LRU ----------------------------------------------------------------------------------------


def found_by_clock(requests, num_blocks, refresh=True, end_first=True, protect=True):
    """Each name has the time at which it was let go; the smallest goes first."""
    let_go, clock, found = {}, 0, []
    for names in requests:
        hits = 0
        while hits < len(names) and names[hits] in let_go:
            hits += 1
        found.append(hits)
        held = set(names[:hits]) if protect else set()
        for name in names[hits:]:
            let_go.pop(name, None)
        for _ in range(len(let_go) + len(names) - hits - num_blocks):
            del let_go[min((n for n in let_go if n not in held), key=let_go.get)]
        for name in reversed(names) if end_first else names:
            clock += 1
            if refresh or name not in let_go:
                let_go[name] = clock
    return found


def some_requests(rng, count, longest):
    """Names that say where they come from, so that a name has one beginning."""
    texts = [[rng.randrange(2) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [["".join("ab"[t] for t in text[: i + 1]) for i in range(len(text))] for text in texts]


def check_found_blocks(found_blocks, claim):
    rng = random.Random(4)

    def compare(requests, num_blocks):
        given = [list(names) for names in requests]
        claim.returns(found_by_clock(requests, num_blocks), found_blocks, given, num_blocks)

    with claim("with room for everything, all that was there is found"):
        compare([["a", "ab", "aba"], ["a", "ab", "abb"], ["a", "ab", "aba"]], 10)
    with claim("what follows a missing block isn't found"):
        compare([["a", "ab"], ["b", "bb"], ["b", "ba"]], 10)
    with claim("the longest unused goes first"):
        compare([["a"], ["b"], ["c"], ["b"], ["a"]], 2)
    with claim("being used again makes a block fresh"):
        compare([["a"], ["b"], ["a"], ["c"], ["a"], ["b"]], 2)
    with claim("of one request the end goes before the beginning"):
        compare([["a", "ab", "aba"], ["c"], ["a", "ab", "aba"]], 3)
    with claim("what a request has found isn't evicted for it"):
        compare([["a", "ab"], ["c"], ["a", "ab", "aba"], ["c"]], 3)
    with claim("any requests"):
        for _ in range(25):
            compare(some_requests(rng, 12, 4), rng.randint(4, 8))


def never_refreshes(requests, num_blocks):
    return found_by_clock(requests, num_blocks, refresh=False)


def lets_go_of_the_beginning_first(requests, num_blocks):
    return found_by_clock(requests, num_blocks, end_first=False)


def never_evicts(requests, num_blocks):
    return found_by_clock(requests, 10**6)


def forgets_that_hits_take_blocks(requests, num_blocks):
    """Evicts as many as are computed, even if some of them are free."""
    cached, found = [], []
    for names in requests:
        hits = 0
        while hits < len(names) and names[hits] in cached:
            hits += 1
        found.append(hits)
        room = num_blocks - len(names[hits:])
        cached = [name for name in cached[-room:] if name not in names] if room else []
        cached += reversed(names)
    return found


def evicts_the_freshest(requests, num_blocks):
    cached, found = [], []
    for names in requests:
        hits = 0
        while hits < len(names) and names[hits] in cached:
            hits += 1
        found.append(hits)
        cached = [name for name in cached if name not in names]
        cached = cached[: num_blocks - len(names)] + names[::-1]
    return found


# 5 -- a radix tree -------------------------------------------------------------------------------


class ReferenceTree:
    """Keeps the texts, and reads the edges off their beginnings."""

    def __init__(self):
        self.texts = set()

    def insert(self, ids):
        self.texts.add(tuple(ids))

    def match(self, ids):
        return max((_common(text, ids) for text in self.texts), default=0)

    def edges(self):
        next_tokens = {}
        for text in self.texts:
            for i in range(len(text)):
                next_tokens.setdefault(text[:i], set()).add(text[i])
        nodes = {p for p, n in next_tokens.items() if len(n) > 1} | self.texts | {()}
        found = []
        for node in nodes - {()}:
            above = max((p for p in nodes if p == node[: len(p)] and p != node), key=len)
            found.append(list(node[len(above) :]))
        return found


def check_radix_tree(radix_tree, claim):
    rng = random.Random(5)

    def grown(texts):
        tree, reference = radix_tree(), ReferenceTree()
        for text in texts:
            tree.insert(list(text))
            reference.insert(text)
        return tree, reference

    def compare_match(texts, *asked):
        tree, reference = grown(texts)
        for ids in asked:
            got, expected = tree.match(list(ids)), reference.match(ids)
            claim.true(
                got == expected, f"inserted {texts}: match({ids}) must be {expected}, got {got}"
            )

    def compare_edges(texts):
        tree, reference = grown(texts)
        got, expected = (sorted(map(list, t.edges())) for t in (tree, reference))
        claim.true(got == expected, f"inserted {texts}: the edges must be {expected}, got {got}")

    with claim("an empty tree has nothing in common with anybody"):
        compare_match([], [1, 2])
    with claim("a text is found, and so is each beginning of it"):
        compare_match([[5, 6, 7, 8]], [5, 6, 7, 8], [5, 6, 7, 8, 9], [5, 6], [5, 6, 9], [6, 7])
    with claim("a text is one edge, until another one leaves it"):
        compare_edges([[5, 6, 7, 8]])
        compare_edges([[5, 6, 7, 8], [5, 6, 9]])
    with claim("after a split nothing is lost"):
        compare_match([[1, 2, 3, 4], [1, 2, 5]], [1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 4])
        compare_match(
            [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7]], [1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7, 1]
        )
    with claim("a text that ends inside an edge splits it, too"):
        compare_edges([[1, 2, 3, 4], [1, 2]])
        compare_edges([[1, 2], [1, 2, 3, 4], [1, 2]])
    with claim("any texts"):
        for _ in range(15):
            texts = some_texts(rng, 7, 12)
            compare_match(texts[:-2], *texts)
            compare_edges(texts)


class OneTokenAnEdge:
    """A plain trie."""

    def __init__(self):
        self.children = {}

    def insert(self, ids):
        if ids:
            self.children.setdefault(ids[0], OneTokenAnEdge()).insert(ids[1:])

    def match(self, ids):
        if not ids or ids[0] not in self.children:
            return 0
        return 1 + self.children[ids[0]].match(ids[1:])

    def edges(self):
        found = []
        for token, behind in self.children.items():
            found += [[token], *behind.edges()]
        return found


class NeverSplits(ReferenceTree):
    """Right about matches, but every text is an edge of its own."""

    def edges(self):
        return [list(text) for text in self.texts]


class MatchesWholeEdgesOnly(ReferenceTree):
    """Looks at the nodes only."""

    def match(self, ids):
        tree = ReferenceTree()
        tree.texts = self.texts
        ends = [()]
        for text in self.texts:
            ends += [text[:i] for i in range(1, len(text) + 1)]
        branches = {e for e in ends if len({t[len(e)] for t in self.texts if t[: len(e)] == e
                                            and len(t) > len(e)}) > 1}  # fmt: skip
        nodes = branches | self.texts
        return max((len(n) for n in nodes if tuple(ids[: len(n)]) == n), default=0)


class LosesTheRest:
    """Splits an edge, and drops what was behind it."""

    def __init__(self):
        self.children = {}

    def insert(self, ids):
        if not ids:
            return
        run, behind = self.children.get(ids[0], (list(ids), LosesTheRest()))
        same = _common(run, ids)
        if same < len(run):
            lower = LosesTheRest()
            lower.children[run[same]] = (run[same:], LosesTheRest())
            run, behind = run[:same], lower
        self.children[ids[0]] = (run, behind)
        behind.insert(ids[same:])

    def match(self, ids):
        if not ids or ids[0] not in self.children:
            return 0
        run, behind = self.children[ids[0]]
        same = _common(run, ids)
        return same + (behind.match(ids[same:]) if same == len(run) else 0)

    def edges(self):
        found = []
        for run, behind in self.children.values():
            found += [run, *behind.edges()]
        return found


EXERCISES = [
    Exercise(
        "cached_tokens",
        check_cached_tokens,
        wrong=[
            finds_the_whole_prompt,
            counts_single_tokens,
            finds_equal_blocks_anywhere,
            looks_at_the_last_text_only,
            computes_one_token_again,
        ],
    ),
    Exercise(
        "chain",
        check_chain,
        wrong=[
            forgets_the_past,
            names_the_rest_too,
            writes_whole_prefixes,
            leaves_the_root_away,
        ],
    ),
    Exercise(
        "prefill_work",
        check_prefill_work,
        wrong=[
            has_no_cache,
            counts_the_last_token,
            finds_prompts_only,
            forgets_about_blocks,
        ],
    ),
    Exercise(
        "found_blocks",
        check_found_blocks,
        wrong=[
            never_refreshes,
            lets_go_of_the_beginning_first,
            never_evicts,
            forgets_that_hits_take_blocks,
            evicts_the_freshest,
        ],
    ),
    Exercise(
        "RadixTree",
        check_radix_tree,
        wrong=[OneTokenAnEdge, NeverSplits, MatchesWholeEdgesOnly, LosesTheRest],
    ),
]
