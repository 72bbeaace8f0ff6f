"""Solutions of chapter 4's exercises. Try first: the checks tell you what is missing."""


def fcfs_waits(arrivals, lengths):
    waits, free = [], 0  # the step from which on the model is free
    for arrival, length in zip(arrivals, lengths, strict=True):
        # Whoever comes to an idle model starts at once; time doesn't run backwards, hence `max`.
        start = max(free, arrival)
        waits.append(start - arrival)
        free = start + length
    return waits


def empty_places(lengths, num_slots):
    batches = [lengths[i : i + num_slots] for i in range(0, len(lengths), num_slots)]
    # A batch lasts as long as its longest member, and holds all slots for that time: those of
    # members that have finished, and those that nobody took.
    offered = sum(max(batch) * num_slots for batch in batches)
    return offered - sum(lengths)


def next_batch(waiting, key, num_slots):
    # `sorted` makes a new list and is stable: equals keep their order, which is that of arrival.
    batch = sorted(waiting, key=key)[:num_slots]
    # Going through `waiting` again keeps the others in order of arrival. Compare by identity:
    # two requests may look alike.
    chosen = {id(request) for request in batch}
    return batch, [request for request in waiting if id(request) not in chosen]


def aged_key(request, rate):
    # At step `now` a request counts as num_tokens - rate * (now - arrival). The part with `now`,
    # -rate * now, is the same for everybody, so it changes no order: leave it out. What remains
    # is fixed at arrival. Later arrivals start with a larger key, so a request of n tokens is
    # passed only by those that come within n / rate steps: nobody starves.
    return request.num_tokens + rate * request.arrival


def shortest_remaining(requests):
    left = {request.name: request.num_tokens for request in requests}
    ran = []
    while any(left.values()):
        now = len(ran)  # one entry for each step, idle ones too
        there = [r for r in requests if r.arrival <= now and left[r.name]]
        # `min` returns the first of equals. What counts is what is left, not the whole length.
        chosen = min(there, key=lambda r: left[r.name], default=None)
        if chosen is None:
            ran.append(None)
            continue
        left[chosen.name] -= 1
        ran.append(chosen.name)
    return ran
