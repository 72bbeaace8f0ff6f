"""Checks of chapter 3's exercises, and answers that they must reject.

Lives, byte strings, limits and texts are drawn at random with fixed seeds, so that a check says the
same thing on every run. What is expected is worked out here in another way than in the solutions.
"""

import codecs
import random
from itertools import pairwise

from infer_lab import SamplingParams
from infer_lab.course import Exercise, GreedyExample

GREEDY = [
    GreedyExample("1, 2, 3, 4,", max_tokens=16),
    GreedyExample("a, b, c, d,", max_tokens=10),
    GreedyExample("2, 4, 6, 8,", max_tokens=8),
    GreedyExample("Tell me the capital of France.", max_tokens=32, chat=True),
    GreedyExample("cat 🐱, dog 🐶, cat 🐱, dog 🐶, cat", max_tokens=8),
]


# 1 -- a legal life -------------------------------------------------------------------------------

MOVES = {
    "waiting": ("running", "finished"),
    "running": ("preempted", "finished"),
    "preempted": ("running", "finished"),
    "finished": (),
}


def random_moves(rng):
    """Another table, over the same words; every status can be left, none for itself."""
    return {
        old: tuple(rng.sample([new for new in MOVES if new != old], rng.randint(1, 2)))
        for old in MOVES
    }


def random_life(rng, moves, length):
    life = ["waiting"]
    while len(life) < length and moves[life[-1]]:
        life.append(rng.choice(moves[life[-1]]))
    return life


def first_fault(moves, life):
    """Longest legal beginning, found by trying all of them from the longest on."""
    for end in range(len(life), 0, -1):
        begins_well = life[0] == "waiting"
        if begins_well and all(new in moves[old] for old, new in pairwise(life[:end])):
            return end if end < len(life) else None
    return 0


def check_first_illegal(first_illegal, claim):
    rng = random.Random(1)
    with claim("a legal life has no fault"):
        claim.returns(None, first_illegal, MOVES, ["waiting"])
        claim.returns(None, first_illegal, MOVES, ["waiting", "running", "finished"])
        for _ in range(4):
            moves = random_moves(rng)
            claim.returns(None, first_illegal, moves, random_life(rng, moves, 7))
    with claim("every life begins with waiting"):
        claim.returns(0, first_illegal, MOVES, ["running", "finished"])
        claim.returns(0, first_illegal, MOVES, ["preempted", "running", "finished"])
    with claim("a status isn't followed by itself, unless the table says so"):
        claim.returns(2, first_illegal, MOVES, ["waiting", "running", "running"])
        claim.returns(None, first_illegal, {"waiting": ("waiting",)}, ["waiting"] * 3)
    with claim("nothing follows finished"):
        claim.returns(2, first_illegal, MOVES, ["waiting", "finished", "running", "finished"])
    with claim("the first fault counts, by the table that was given"):
        for _ in range(12):
            moves = random_moves(rng)
            life = random_life(rng, moves, 5) + rng.choices(list(MOVES), k=4)
            claim.returns(first_fault(moves, life), first_illegal, moves, life)


def ignores_the_start(moves, life):
    for i, (old, new) in enumerate(pairwise(life), start=1):
        if new not in moves[old]:
            return i
    return None


def lets_a_status_stay(moves, life):
    if life[0] != "waiting":
        return 0
    for i, (old, new) in enumerate(pairwise(life), start=1):
        if new != old and new not in moves[old]:
            return i
    return None


def points_before_the_fault(moves, life):
    found = first_illegal_by_the_book(moves, life)
    return found - 1 if found else found


def reads_the_table_backwards(moves, life):
    if life[0] != "waiting":
        return 0
    for i, (old, new) in enumerate(pairwise(life), start=1):
        if old not in moves[new]:
            return i
    return None


def knows_only_one_table(moves, life):
    return first_fault(MOVES, life)


def first_illegal_by_the_book(moves, life):
    return first_fault(moves, life)


# 2 -- the state after some events ----------------------------------------------------------------


def check_state_after(state_after, claim):
    rng = random.Random(2)
    prompt = rng.randint(20, 40)
    with claim("a new request waits; nothing is computed"):
        claim.returns(("waiting", prompt, 0), state_after, prompt, [])
        claim.returns(("running", prompt, 0), state_after, prompt, ["admit"])
    with claim("a step computes what was there before it, and adds a token"):
        claim.returns(("running", prompt + 1, prompt), state_after, prompt, ["admit", "step"])
        steps = rng.randint(4, 8)
        events = ["admit"] + ["step"] * steps
        claim.returns(("running", prompt + steps, prompt + steps - 1), state_after, prompt, events)
    with claim("preemption keeps the tokens and loses the cache"):
        events = ["admit", "step", "step", "step", "preempt"]
        claim.returns(("preempted", prompt + 3, 0), state_after, prompt, events)
    with claim("the first step after it catches up"):
        events = ["admit", "step", "step", "preempt", "admit"]
        claim.returns(("running", prompt + 2, 0), state_after, prompt, events)
        claim.returns(("running", prompt + 3, prompt + 2), state_after, prompt, [*events, "step"])
    with claim("an abort ends it, whatever it was doing"):
        claim.returns(("finished", prompt, 0), state_after, prompt, ["abort"])
        claim.returns(("finished", prompt + 1, 0), state_after, prompt, ["admit", "step", "abort"])
        events = ["admit", "step", "preempt", "abort"]
        claim.returns(("finished", prompt + 1, 0), state_after, prompt, events)
    with claim("what comes after the end changes nothing"):
        events = ["admit", "step", "abort", "step", "step"]
        claim.returns(("finished", prompt + 1, 0), state_after, prompt, events)
        claim.returns(("finished", prompt + 1, 0), state_after, prompt, [*events, "preempt"])
        claim.returns(("finished", prompt + 1, 0), state_after, prompt, [*events, "admit"])


def fold(num_prompt, events, keep_cache=False, restart=False, eager=0, late=False, sticky=False):
    """Right as it stands; the wrong answers below turn one thing each."""
    status, length, computed = "waiting", num_prompt, 0
    for event in events:
        if status == "finished" and not late:
            continue
        if event == "admit":
            status = "running"
        elif event == "step":
            length, computed = length + 1, length + eager
        elif event == "preempt":
            status, computed = "preempted", computed if keep_cache else 0
            length = num_prompt if restart else length
        elif event == "abort":
            status, computed = "finished", computed if sticky else 0
    return status, length, computed


def keeps_what_was_computed(num_prompt, events):
    return fold(num_prompt, events, keep_cache=True)


def starts_over_from_the_prompt(num_prompt, events):
    return fold(num_prompt, events, restart=True)


def counts_the_new_token_as_computed(num_prompt, events):
    return fold(num_prompt, events, eager=1)


def lets_late_events_in(num_prompt, events):
    return fold(num_prompt, events, late=True)


def leaves_the_cache_with_the_dead(num_prompt, events):
    return fold(num_prompt, events, sticky=True)


# 3 -- whole characters ---------------------------------------------------------------------------

CHARACTERS = "aZ 7ñéß日本語–…🦙🙂𝄞"  # of one to four bytes


def check_complete_bytes(complete_bytes, claim):
    rng = random.Random(3)
    with claim("nothing to show yet: no bytes, or the first byte of a character"):
        claim.returns(0, complete_bytes, b"")
        for character in "é日🦙":
            claim.returns(0, complete_bytes, character.encode()[:1])
    with claim("plain ASCII is complete"):
        claim.returns(6, complete_bytes, b"Hello,")
    with claim("a text that ends with a whole character is complete"):
        for character in "é日🦙":
            data = f"so {character}".encode()
            claim.returns(len(data), complete_bytes, data)
    with claim("a character cut anywhere is held back, and nothing else"):
        for character in "é日🦙":
            for cut in range(1, len(character.encode())):
                data = b"ab" + character.encode()[:cut]
                claim.returns(2, complete_bytes, data)
    with claim("any text, cut anywhere"):
        for _ in range(30):
            data = "".join(rng.choices(CHARACTERS, k=rng.randint(2, 6))).encode()
            data = data[: rng.randint(1, len(data))]
            whole = codecs.getincrementaldecoder("utf-8")().decode(data)
            claim.returns(len(whole.encode()), complete_bytes, data)


def holds_whatever_is_not_ascii(data):
    return next((i for i, byte in enumerate(data) if byte >= 0x80), len(data))


def always_holds_three_back(data):
    return max(0, len(data) - 3)


def looks_at_the_last_byte_only(data):
    return len(data) - 1 if data and data[-1] >= 0xC0 else len(data)


def takes_every_character_for_two_bytes(data):
    if len(data) >= 1 and data[-1] >= 0xC0:
        return len(data) - 1
    if len(data) >= 2 and data[-1] >= 0x80 and data[-2] < 0xC0:
        return len(data) - 1
    return len(data)


def releases_a_character_with_its_last_but_one_byte(data):
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) if back >= max(needed - 1, 2) else len(data) - back
    return len(data)


# 4 -- why it ends --------------------------------------------------------------------------------


def check_finish_reason(finish_reason, claim):
    rng = random.Random(4)
    ids = rng.sample(range(100, 900), 12)
    eos, stop, *words = ids
    end = {"num_prompt": rng.randint(20, 40), "context": 1000, "eos_ids": (eos,)}
    params = SamplingParams(max_tokens=6, stop_token_ids=[stop])
    with claim("it goes on while nothing ends it"):
        claim.returns((None, None), finish_reason, words[:5], params, **end)
    with claim("an end-of-sequence token: stop, without detail"):
        claim.returns(("stop", None), finish_reason, [*words[:3], eos], params, **end)
    with claim("a stop token: stop, and which one"):
        claim.returns(("stop", stop), finish_reason, [*words[:2], stop], params, **end)
    with claim("max_tokens: length, without detail"):
        claim.returns(("length", None), finish_reason, words[:6], params, **end)
    with claim("a full context: length, and its name"):
        tight = end | {"context": end["num_prompt"] + 4}
        claim.returns(("length", "max_model_len"), finish_reason, words[:4], params, **tight)
        claim.returns((None, None), finish_reason, words[:3], params, **tight)
    with claim("several at once: stop goes before length, max_tokens before the context"):
        tight = end | {"context": end["num_prompt"] + 6}
        claim.returns(("stop", None), finish_reason, [*words[:5], eos], params, **tight)
        claim.returns(("stop", stop), finish_reason, [*words[:5], stop], params, **tight)
        claim.returns(("length", None), finish_reason, words[:6], params, **tight)
    with claim("min_tokens: before an end come so many tokens that are none"):
        late = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=[stop])
        claim.returns((None, None), finish_reason, [*words[:2], eos], late, **end)
        claim.returns((None, None), finish_reason, [*words[:2], stop], late, **end)
        claim.returns(("stop", None), finish_reason, [*words[:3], eos], late, **end)
    with claim("ignore_eos: such a token is one like any other"):
        deaf = SamplingParams(max_tokens=6, ignore_eos=True)
        claim.returns((None, None), finish_reason, [words[0], eos], deaf, **end)
        both = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[eos])
        claim.returns(("stop", eos), finish_reason, [words[0], eos], both, **end)


def reason_with(
    output_ids,
    params,
    num_prompt,
    context,
    eos_ids,
    order="stop first",
    slack=0,
    over=0,
    deaf=True,
    name=0,
):
    """Right as it stands; the wrong answers below turn one thing each."""
    last, may_end = output_ids[-1], len(output_ids) + slack > params.min_tokens
    is_eos = last in eos_ids and not (deaf and params.ignore_eos)
    stop = (None, None)
    if may_end and (is_eos or last in params.stop_token_ids):
        stop = ("stop", None if is_eos and not name else last)
    length = (None, None)
    if len(output_ids) >= params.max_tokens:
        length = ("length", None)
    elif num_prompt + len(output_ids) >= context + over:
        length = ("length", "max_model_len")
    first, second = (stop, length) if order == "stop first" else (length, stop)
    return first if first[0] else second


def lets_length_go_first(*args, **kwargs):
    return reason_with(*args, **kwargs, order="length first")


def forbids_an_end_one_token_too_short(*args, **kwargs):
    return reason_with(*args, **kwargs, slack=1)


def goes_one_token_past_the_context(*args, **kwargs):
    return reason_with(*args, **kwargs, over=1)


def always_hears_the_end(*args, **kwargs):
    return reason_with(*args, **kwargs, deaf=False)


def names_the_end_of_sequence(*args, **kwargs):
    return reason_with(*args, **kwargs, name=1)


# 5 -- which stop string --------------------------------------------------------------------------


def cut_by_growing(text, stops):
    """As a stream of single characters would: the first one that is complete ends it."""
    for end in range(1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def check_cut_at_stop(cut_at_stop, claim):
    rng = random.Random(5)
    with claim("no stop string in it: the whole text"):
        claim.returns(("abab", None), cut_at_stop, "abab", ["ba!", "c"])
        claim.returns(("abab", None), cut_at_stop, "abab", [])
    with claim("one stop string: cut where it first begins"):
        claim.returns(("5", ", 6"), cut_at_stop, "5, 6, 6, 7", [", 6"])
    with claim("of two, the one that is complete first"):
        claim.returns(("ab", "cd"), cut_at_stop, "abcdefg", ["bcdef", "cd"])
        claim.returns(("a", "b"), cut_at_stop, "abc", ["c", "b"])
    with claim("complete with the same character: the one that begins first"):
        claim.returns(("a", "bcd"), cut_at_stop, "abcdefg", ["d", "bcd", "cd"])
    with claim("the order of the list does not matter"):
        claim.returns(("ab", "cd"), cut_at_stop, "abcdefg", ["cd", "bcdef"])
        claim.returns(("a", "bcd"), cut_at_stop, "abcdefg", ["bcd", "cd", "d"])
    with claim("always what a stream of single characters would have shown"):
        for _ in range(40):
            text = "".join(rng.choices("abc", k=12))
            stops = ["".join(rng.choices("abc", k=rng.randint(2, 4))) for _ in range(3)]
            claim.returns(cut_by_growing(text, stops), cut_at_stop, text, stops)


def takes_the_first_of_the_list(text, stops):
    for stop in stops:
        if stop in text:
            return text[: text.index(stop)], stop
    return text, None


def takes_the_one_that_begins_first(text, stops):
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[0]], min(found)[1]) if found else (text, None)


def takes_the_shortest(text, stops):
    found = [(text.index(stop) + len(stop), len(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[0] - min(found)[1]], min(found)[2]) if found else (text, None)


def leaves_the_stop_string_in(text, stops):
    shown, stop = cut_by_growing(text, stops)
    return shown + (stop or ""), stop


def takes_the_last_occurrence(text, stops):
    found = [
        (text.rindex(stop) + len(stop), text.rindex(stop), stop) for stop in stops if stop in text
    ]
    return (text[: min(found)[1]], min(found)[2]) if found else (text, None)


EXERCISES = [
    Exercise(
        "first_illegal",
        check_first_illegal,
        wrong=[
            ignores_the_start,
            lets_a_status_stay,
            points_before_the_fault,
            reads_the_table_backwards,
            knows_only_one_table,
        ],
    ),
    Exercise(
        "state_after",
        check_state_after,
        wrong=[
            keeps_what_was_computed,
            starts_over_from_the_prompt,
            counts_the_new_token_as_computed,
            lets_late_events_in,
            leaves_the_cache_with_the_dead,
        ],
    ),
    Exercise(
        "complete_bytes",
        check_complete_bytes,
        wrong=[
            holds_whatever_is_not_ascii,
            always_holds_three_back,
            looks_at_the_last_byte_only,
            takes_every_character_for_two_bytes,
            releases_a_character_with_its_last_but_one_byte,
        ],
    ),
    Exercise(
        "finish_reason",
        check_finish_reason,
        wrong=[
            lets_length_go_first,
            forbids_an_end_one_token_too_short,
            goes_one_token_past_the_context,
            always_hears_the_end,
            names_the_end_of_sequence,
        ],
    ),
    Exercise(
        "cut_at_stop",
        check_cut_at_stop,
        wrong=[
            takes_the_first_of_the_list,
            takes_the_one_that_begins_first,
            takes_the_shortest,
            leaves_the_stop_string_in,
            takes_the_last_occurrence,
        ],
    ),
]
