"""A request's life, the ways it can end, and the text that it shows on the way."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
from fakes import FakeDecoder, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from infer_lab.request import FinishReason, Request, Status
from infer_lab.text_stream import TextStream

W, R, P, F = Status.WAITING, Status.RUNNING, Status.PREEMPTED, Status.FINISHED
LEGAL = {(W, R), (W, F), (R, P), (R, F), (P, R), (P, F)}
REPRODUCIBLE = settings(derandomize=True, deadline=None, database=None, max_examples=300)

# Token ids of the requests below; the text of each one.
EOS, STOP, A, B, AB = range(5)
TEXTS = [b"<eos>", b"<stop>", b"a", b"b", b"ab"]


def request_with(stop: tuple[str, ...] = (), **wishes: object) -> Request:
    stream = TextStream(FakeDecoder(TEXTS), stop)
    wishes = {"max_tokens": 9, "eos_token_ids": (EOS,), "stop": stop, **wishes}
    return make_request([A, A, A], stream=stream, **wishes)


def feed(request: Request, *token_ids: int) -> Request:
    for token_id in token_ids:
        assert request.finish_reason is None
        request.append(token_id)
    return request


@pytest.mark.parametrize("start, end", list(product(Status, Status)))
def test_only_the_moves_of_the_picture_are_possible(start: Status, end: Status) -> None:
    request = request_with()
    request.status = start
    if (start, end) in LEGAL:
        request.move(end)
        assert request.status is end
    else:
        with pytest.raises(AssertionError, match=str(end)):
            request.move(end)
        assert request.status is start
    assert request.is_finished == (request.status is F)


def test_a_request_is_equal_to_itself_only() -> None:
    one, other = request_with(), request_with()
    assert one == one and one != other and len({one, other}) == 2


def test_numbers_of_tokens() -> None:
    request = feed(request_with(), B, B)
    assert (request.num_prompt, request.num_output, request.num_tokens) == (3, 2, 5)
    assert request.output_token_ids == [B, B] and request.token_ids == [A, A, A, B, B]
    request.output_token_ids.clear()
    assert request.num_output == 2 and request.prompt_token_ids == (A, A, A)


def test_max_length_is_the_smaller_of_wish_and_context() -> None:
    assert request_with().max_length == 12
    assert request_with(max_model_len=12).max_length == 12
    assert request_with(max_model_len=11).max_length == 11


def test_samples_have_names_of_their_own() -> None:
    assert request_with().name == "r"
    assert request_with(n=3, index=2).name == "r[2]"


# How it ends --------------------------------------------------------------------------------------


def test_the_ways_to_end_are_told_apart() -> None:
    def end_of(request: Request) -> tuple[str | None, int | str | None, str]:
        assert request.status is Status.WAITING  # whoever runs it moves it
        return request.finish_reason, request.stop_reason, request.text

    eos = request_with(stop_token_ids=[STOP])
    assert end_of(feed(eos, A, EOS)) == ("stop", None, "a")
    token = request_with(stop_token_ids=[STOP])
    assert end_of(feed(token, A, STOP)) == ("stop", STOP, "a")
    string = request_with(stop=("bb", "ba"))
    assert end_of(feed(string, A, AB, A)) == ("stop", "ba", "aa")
    length = request_with(max_tokens=2)
    assert end_of(feed(length, A, B)) == ("length", None, "ab")
    context = request_with(max_model_len=5)
    assert end_of(feed(context, A, B)) == ("length", "max_model_len", "ab")
    assert end_of(feed(request_with(), A, B)) == (None, None, "ab")


@pytest.mark.parametrize(
    "eos, token, string, length, context", list(product((False, True), repeat=5))
)
def test_reasons_that_meet_on_one_token_count_in_order(
    eos: bool, token: bool, string: bool, length: bool, context: bool
) -> None:
    request = request_with(
        stop=("aab",) if string else (),
        eos_token_ids=(AB,) if eos else (),
        stop_token_ids=[AB] if token else [],
        max_tokens=2 if length else 9,
        max_model_len=5 if context else 99,
    )
    feed(request, A, AB)
    if eos:
        expected = ("stop", None)
    elif token:
        expected = ("stop", AB)
    elif string:
        expected = ("stop", "aab")
    elif length:
        expected = ("length", None)
    elif context:
        expected = ("length", "max_model_len")
    else:
        expected = (None, None)
    assert (request.finish_reason, request.stop_reason) == expected
    assert request.text == ("a" if eos or token else "" if string else "aab")
    assert request.output_token_ids == [A, AB]


def test_ignore_eos_makes_it_a_token_like_any_other() -> None:
    request = feed(request_with(ignore_eos=True), EOS, A)
    assert request.finish_reason is None and request.text == "<eos>a"
    assert request.end_token_ids == set()


def test_an_ignored_eos_still_ends_a_request_as_its_stop_token() -> None:
    request = feed(request_with(ignore_eos=True, stop_token_ids=[EOS]), A, EOS)
    assert (request.finish_reason, request.stop_reason) == ("stop", EOS)


def test_end_tokens_are_eos_and_stop_tokens() -> None:
    assert request_with(stop_token_ids=[STOP]).end_token_ids == {EOS, STOP}


@pytest.mark.parametrize("token_id, stop", [(EOS, ()), (STOP, ()), (B, ("b",))])
def test_nothing_ends_a_request_before_min_tokens(token_id: int, stop: tuple[str, ...]) -> None:
    request = request_with(stop, min_tokens=2, stop_token_ids=[STOP])
    feed(request, token_id, token_id)
    assert request.finish_reason is None and request.text == 2 * TEXTS[token_id].decode()
    feed(request, token_id)
    assert request.finish_reason == "stop" and request.num_output == 3
    assert request.text == 2 * TEXTS[token_id].decode()


def test_max_tokens_ends_a_request_that_has_just_reached_min_tokens() -> None:
    request = feed(request_with(min_tokens=2, max_tokens=2, eos_token_ids=(B,)), B, B)
    assert (request.finish_reason, request.stop_reason) == ("length", None)


def test_a_stop_string_that_only_the_last_flush_completes_is_still_the_reason() -> None:
    # Half a character becomes U+FFFD when no more tokens come.
    stream = TextStream(FakeDecoder([b"a", b"\xf0\x9f"]), ["a\ufffd"])
    request = make_request([0], stream=stream, stop=["a\ufffd"], max_tokens=2)
    request.append(0)
    request.append(1)
    assert (request.finish_reason, request.stop_reason) == ("stop", "a\ufffd")
    assert request.text == ""


def test_an_abort_stays_an_abort_when_the_last_flush_completes_a_stop_string() -> None:
    stream = TextStream(FakeDecoder([b"a", b"\xf0\x9f"]), ["\ufffd"])
    request = make_request([0], stream=stream, stop=["\ufffd"], max_tokens=5)
    request.append(1)
    request.finish(FinishReason.ABORT)
    assert (request.finish_reason, request.stop_reason, request.text) == ("abort", None, "")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_ending_from_outside_gives_out_what_was_held_back(reason: FinishReason) -> None:
    request = feed(request_with(stop=("abb",)), A, AB)
    assert request.text == "a"
    request.finish(reason, "why")
    assert (request.finish_reason, request.stop_reason, request.text) == (reason, "why", "aab")


def test_a_request_ends_once() -> None:
    request = feed(request_with(), EOS)
    with pytest.raises(AssertionError, match="ends twice"):
        request.finish(FinishReason.ABORT)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    request = make_request([A], max_tokens=2)
    request.append(A)
    request.append(B)
    assert (request.finish_reason, request.text, request.output_token_ids) == ("length", "", [A, B])


# Deltas and the whole result ----------------------------------------------------------------------


def test_a_delta_is_what_is_new_and_the_last_one_is_given_once() -> None:
    request = request_with(stop=("bb",), max_tokens=3)
    assert request.take_delta() is None
    feed(request, A)
    first = request.take_delta()
    assert first is not None and (first.text, first.token_ids) == ("a", (A,))
    assert (first.finish_reason, first.stop_reason, first.logprobs) == (None, None, None)
    assert (first.request_id, first.index) == ("r", 0)
    assert request.take_delta() is None
    feed(request, AB)
    second = request.take_delta()
    assert second is not None and (second.text, second.token_ids) == ("a", (AB,))  # "b" is held
    feed(request, A)
    request.move(Status.RUNNING)
    request.move(Status.FINISHED)
    last = request.take_delta()
    assert last is not None and (last.text, last.token_ids) == ("ba", (A,))
    assert last.finish_reason == "length"
    assert request.take_delta() is None


def test_an_end_without_news_is_still_told() -> None:
    request = request_with()
    request.finish(FinishReason.ABORT)
    request.move(Status.FINISHED)
    delta = request.take_delta()
    assert delta is not None and (delta.text, delta.token_ids) == ("", ())
    assert delta.finish_reason == "abort" and request.take_delta() is None


def test_logprobs_go_with_their_tokens_when_asked_for() -> None:
    request = request_with(logprobs=1, max_tokens=3)
    request.append(A, "of a")  # type: ignore[arg-type]
    first = request.take_delta()
    request.append(B, "of b")  # type: ignore[arg-type]
    request.append(A, "of the second a")  # type: ignore[arg-type]
    rest = request.take_delta()
    assert first is not None and first.logprobs == ("of a",)
    assert rest is not None and rest.logprobs == ("of b", "of the second a")
    assert request.completion().logprobs == ("of a", "of b", "of the second a")


def test_a_completion_is_the_whole_result() -> None:
    request = request_with(stop_token_ids=[STOP], n=2, index=1)
    with pytest.raises(AssertionError, match="has not finished"):
        request.completion()
    feed(request, A, STOP)
    completion = request.completion()
    assert (completion.request_id, completion.index) == ("r", 1)
    assert completion.prompt_token_ids == (A, A, A) and completion.token_ids == (A, STOP)
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert completion.stop_reason == STOP and completion.logprobs is None
    assert completion.metrics is request.metrics


# Text ---------------------------------------------------------------------------------------------

CHARACTERS = "aabé😀\n"


@st.composite
def texts_in_tokens(draw: st.DrawFn) -> list[bytes]:
    """A text as bytes, cut anywhere, also in the middle of characters and of the last one."""
    data = draw(st.text(CHARACTERS, min_size=1, max_size=24)).encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=16)))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    is_cut_short = len(tokens) > 1 and draw(st.integers(0, 3)) == 0
    return [token for token in tokens[: -1 if is_cut_short else None] if token]


STOPS = st.lists(st.text(CHARACTERS + "\ufffd", min_size=1, max_size=5), max_size=4)


def expected_end(
    tokens: list[bytes], stops: list[str], min_tokens: int
) -> tuple[str, int, str | None]:
    """The text to show, the number of tokens it takes and the stop string, from the whole text."""
    whole = b"".join(tokens)
    text = whole.decode(errors="replace")
    arrived = []  # with which token each character is complete
    for end in range(1, len(text) + 1):
        num_bytes = min(len(text[:end].encode()), len(whole))
        lengths = [len(b"".join(tokens[: i + 1])) for i in range(len(tokens))]
        arrived.append(next(i for i, length in enumerate(lengths) if length >= num_bytes))
    try:
        whole.decode()
    except UnicodeDecodeError:  # its character is shown by the flush after the last token
        arrived[-1] = len(tokens) - 1
    found = []
    for stop in stops:
        for at in range(len(text) - len(stop) + 1):
            end = at + len(stop)
            if text.startswith(stop, at) and arrived[end - 1] >= min_tokens:
                found.append((end, at, stop))
    if not found:
        return text, len(tokens), None
    end, at, stop = min(found)
    return text[:at], arrived[end - 1] + 1, stop


@REPRODUCIBLE
@given(texts_in_tokens(), STOPS, st.just(0) | st.integers(0, 6))
def test_what_is_shown_is_the_text_up_to_the_stop_string_that_is_complete_first(
    tokens: list[bytes], stops: list[str], min_tokens: int
) -> None:
    min_tokens = min(min_tokens, len(tokens))
    text, num_tokens, stop = expected_end(tokens, stops, min_tokens)
    wishes = {"stop": stops, "max_tokens": len(tokens), "min_tokens": min_tokens}
    stream = TextStream(FakeDecoder(tokens), stops)
    request = make_request([0], stream=stream, **wishes)
    shown = ""
    for token_id in range(len(tokens)):
        request.append(token_id)
        delta = request.take_delta()
        assert delta is not None and delta.token_ids == (token_id,)
        shown += delta.text
        assert text.startswith(shown), "part of a stop string was shown"
        if request.finish_reason is not None:
            break
    assert shown == request.text == text
    assert request.num_output == num_tokens
    expected = ("length", None) if stop is None else ("stop", stop)
    assert (request.finish_reason, request.stop_reason) == expected


@REPRODUCIBLE
@given(texts_in_tokens(), STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(
    tokens: list[bytes], stops: list[str]
) -> None:
    stream, plain = TextStream(FakeDecoder(tokens), stops), FakeDecoder(tokens)
    shown = text = ""
    for token_id in range(len(tokens)):
        shown += stream.push(token_id)
        text += plain.push(token_id)
        if stream.stopped_by is not None:
            assert stream.finish() == ""
            return
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(s) for s in beginnings if text.endswith(s)), default=0)
        assert shown == text[: len(text) - held]


def test_of_stop_strings_complete_at_once_the_longest_is_cut() -> None:
    stream = TextStream(FakeDecoder([b"xab", b"c"]), ["c", "abc", "bc"])
    assert stream.push(0) + stream.push(1) == "x" and stream.stopped_by == "abc"


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    request = request_with(stop=("ab",), min_tokens=1)
    assert feed(request, A, B).text == "" and request.stop_reason == "ab"


def test_a_stop_string_complete_before_min_tokens_is_not_found_later() -> None:
    request = request_with(stop=("b", "abab"), min_tokens=1)
    feed(request, AB, A)  # "ab" could become "abab", so it is held back; its "b" does not count
    assert request.finish_reason is None
    assert feed(request, A).text == "aba" and request.finish_reason is None


def test_deciding_needs_no_tensors() -> None:
    modules = "scheduler waiting_queue allocator prefix_cache request text_stream sampling_params"
    code = f"import sys, {', '.join('infer_lab.' + name for name in modules.split())}\n"
    code += "assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
