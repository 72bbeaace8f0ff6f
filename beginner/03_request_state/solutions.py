"""Solutions of chapter 3's exercises. Try first: the checks tell you what is missing."""

from itertools import pairwise


def first_illegal(moves, life):
    # No arrow leads to "waiting", so a life that begins anywhere else has no beginning.
    if life[0] != "waiting":
        return 0
    for i, (old, new) in enumerate(pairwise(life), start=1):
        # `new` is the status that could not follow: its index, not that of `old`.
        if new not in moves[old]:
            return i
    return None


def state_after(num_prompt, events):
    status, num_tokens, num_computed = "waiting", num_prompt, 0
    for event in events:
        # An end is final: results of a step that was under way are dropped.
        if status == "finished":
            break
        if event == "admit":
            status = "running"
        elif event == "step":
            # The step computes all tokens that were there; the new one comes out of it, and is
            # computed by the next. So a running request is always one token behind.
            num_computed = num_tokens
            num_tokens += 1
        elif event == "preempt":
            # Tokens are information, the cache is only work: work can be done again.
            status, num_computed = "preempted", 0
        elif event == "abort":
            status, num_computed = "finished", 0
    return status, num_tokens, num_computed


def complete_bytes(data):
    # The first byte of a character says how many there are: 0xxxxxxx one, 110xxxxx two, 1110xxxx
    # three, 11110xxx four. All others are 10xxxxxx. So walk back over at most three of those to
    # the last first byte, and see whether its character is all there.
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back == needed else len(data) - back
        if byte < 0x80:  # ASCII, complete by itself
            break
    return len(data)


def finish_reason(output_ids, params, num_prompt, context, eos_ids):
    last = output_ids[-1]
    # `min_tokens` tokens have to come before the one that ends it, and that one is in output_ids.
    if len(output_ids) > params.min_tokens:
        if last in eos_ids and not params.ignore_eos:
            return "stop", None
        if last in params.stop_token_ids:  # may hold an ignored end of sequence: then it counts
            return "stop", last
    # Stop goes first: a text that ended by itself wasn't cut, even if there was no room for more.
    if len(output_ids) >= params.max_tokens:
        return "length", None
    if num_prompt + len(output_ids) >= context:
        return "length", "max_model_len"
    return None, None


def cut_at_stop(text, stops):
    # Where each one is first complete. The smallest end wins: a stream would have seen it first,
    # however the tokens split the text. With the same end the smallest beginning wins, since all
    # of a stop string has to stay hidden.
    found = []
    for stop in stops:
        begin = text.find(stop)
        if begin >= 0:
            found.append((begin + len(stop), begin, stop))
    if not found:
        return text, None
    _, begin, stop = min(found)
    return text[:begin], stop
