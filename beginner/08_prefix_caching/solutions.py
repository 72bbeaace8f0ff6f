"""Solutions of chapter 8's exercises. Try first: the checks tell you what is missing."""


def cached_tokens(known, prompt, block_size):
    # The last token is always computed, and with it its whole block: only blocks that end before
    # the prompt's last token can be found.
    limit = (len(prompt) - 1) // block_size * block_size
    # A block is found if some known text begins with everything up to its end. Known texts have a
    # partly filled block at their end, too; it has no name, hence `<=` on whole blocks.
    found = 0
    for end in range(block_size, limit + 1, block_size):
        if any(text[:end] == prompt[:end] for text in known):
            found = end
    return found


def chain(token_ids, block_size, root, combine):
    names, previous = [], root
    # `range` stops before a block that isn't full: its end would lie behind the text.
    for end in range(block_size, len(token_ids) + 1, block_size):
        # What comes before is in `previous` already; the block's own tokens are enough.
        previous = combine(previous, token_ids[end - block_size : end])
        names.append(previous)
    return names


def prefill_work(turns, block_size):
    work, chat, computed = [], 0, 0
    for added, answered in turns:
        chat += added  # the prompt is the whole chat so far
        # What the turn before has computed begins this prompt; its full blocks are found. At least
        # one token is new, so the rule about the last block never bites.
        work.append(chat - computed // block_size * block_size)
        chat += answered
        computed = chat - 1  # the answer's last token was chosen and not fed
    return work


def found_blocks(requests, num_blocks):
    cached, found = [], []  # names, the longest unused first
    for names in requests:
        hits = 0
        while hits < len(names) and names[hits] in cached:
            hits += 1
        found.append(hits)
        # What the request holds can't be evicted: take it out of the line before anybody goes.
        cached = [name for name in cached if name not in names[:hits]]
        # All its blocks have to fit beside what stays. Free blocks are just what isn't cached.
        too_many = max(0, len(cached) + len(names) - num_blocks)
        # It lets go of its end first, so the end stands nearer to eviction than the beginning.
        cached = cached[too_many:] + names[::-1]
    return found


class RadixTree:
    def __init__(self):
        self.children = {}  # first token of a run -> (run, the tree behind it)

    def insert(self, ids):
        if not ids:
            return
        if ids[0] not in self.children:
            self.children[ids[0]] = (list(ids), RadixTree())
            return
        run, behind = self.children[ids[0]]
        same = _common(run, ids)
        if same < len(run):
            # The text leaves, or ends, inside the run. Split it: the first part stays here, the
            # rest moves one node down and keeps all that was behind it.
            lower = RadixTree()
            lower.children[run[same]] = (run[same:], behind)
            self.children[ids[0]] = (run[:same], lower)
            behind = lower
        behind.insert(ids[same:])

    def match(self, ids):
        # No two runs of a node begin alike, so there is at most one way to go.
        if not ids or ids[0] not in self.children:
            return 0
        run, behind = self.children[ids[0]]
        same = _common(run, ids)
        # Only whoever came to the end of a run may go on behind it.
        return same + (behind.match(ids[same:]) if same == len(run) else 0)

    def edges(self):
        found = []
        for run, behind in self.children.values():
            found += [run, *behind.edges()]
        return found


def _common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
