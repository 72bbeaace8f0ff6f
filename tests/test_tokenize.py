"""Text to ids and back, ids to text piece by piece, and chat templates nobody should trust."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from naive import byte_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from infer_lab import Detokenizer, Tokenizer
from infer_lab.chat_template import MAX_RANGE, MAX_TEXT
from infer_lab.text_stream import TextStream

HI = [{"role": "user", "content": "Hi"}]


# Text to ids -----------------------------------------------------------------------------------


def test_special_tokens_in_a_text_are_parsed_or_spelled_out(default_tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<|endoftext|>"
    parsed = default_tokenizer.encode(text)
    spelled = default_tokenizer.encode(text, parse_special=False)
    special = set(default_tokenizer.special_tokens.values())
    assert len(parsed) == 4 and special & set(parsed) == {0, 2}
    assert not special & set(spelled)
    for ids in (parsed, spelled):
        assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert default_tokenizer.decode(parsed) == "ab"
    assert default_tokenizer.encode(text) == parsed  # one way does not change the other


def test_bytes_of_tokens_joined_are_the_text_in_utf8(default_tokenizer: Tokenizer) -> None:
    text = "naïve 日本 😀 e\u0301<|im_end|>\n\n  x"
    ids = default_tokenizer.encode(text)
    assert b"".join(map(default_tokenizer.token_bytes, ids)) == text.encode()
    pieces = default_tokenizer.pieces(ids)
    assert len(pieces) == len(ids) and pieces[0] == "na" and "\ufffd" in "".join(pieces)
    assert default_tokenizer.pieces(default_tokenizer.encode("Hello world")) == ["Hello", " world"]


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"], "\ud83d", "a\udc00b"])
def test_what_is_no_text_is_refused(default_tokenizer: Tokenizer, text: Any) -> None:
    for parse_special in (True, False):
        with pytest.raises(ValueError, match="text must be"):
            default_tokenizer.encode(text, parse_special=parse_special)


@pytest.mark.parametrize("token_id", [-1, 49152, 2**70, 1.0, True, "a", None])
def test_what_is_no_id_is_refused(default_tokenizer: Tokenizer, token_id: Any) -> None:
    for call in (
        lambda: default_tokenizer.decode([5, token_id]),
        lambda: default_tokenizer.pieces([token_id]),
        lambda: default_tokenizer.token_bytes(token_id),
    ):
        with pytest.raises(ValueError, match=r"token_id must be .*0 to 49151"):
            call()


def test_names_of_tokens(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.token_to_id("<|im_end|>") == 2 == default_tokenizer.eos_token_ids[0]
    with pytest.raises(ValueError, match="'<nope>' is not in the vocabulary"):
        default_tokenizer.token_to_id("<nope>")


def test_ids_may_have_gaps() -> None:
    raw = RawTokenizer(models.WordLevel({"a": 0, "b": 1, "z": 9}, unk_token="a"))
    tokenizer = Tokenizer(raw.to_str())
    assert tokenizer.vocab_size == 10 and tokenizer.encode("z") == [9]
    assert tokenizer.decode([9]) == "z" and tokenizer.decode([0, 5]).strip() == "a"
    assert Detokenizer(tokenizer).push(9) == "z" and Detokenizer(tokenizer).push(5) == ""


# From a directory ------------------------------------------------------------------------------


def saved(path: Path, tokenizer_json: str | None = None, **files: Any) -> Path:
    text = tokenizer_json or byte_tokenizer()._tokenizer.to_str()
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_end_comes_from_generation_config_then_config_then_the_tokenizer(
    tmp_path: Path,
) -> None:
    named = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "pad_token": None}
    path = saved(tmp_path, tokenizer_config=named)
    assert Tokenizer.from_pretrained(path).eos_token_ids == (0,)
    saved(tmp_path, config={"eos_token_id": 7})
    assert Tokenizer.from_pretrained(path).eos_token_ids == (7,)
    saved(tmp_path, generation_config={"eos_token_id": [3, 4]})
    assert Tokenizer.from_pretrained(path).eos_token_ids == (3, 4)


def test_a_template_comes_from_its_own_file_or_the_config(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="messages need a chat template"):
        Tokenizer.from_pretrained(path).encode_chat(HI)
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    for template, expected in ((named, "d"), ("{{ bos_token }}", "<|begin|>")):
        config = {"chat_template": template, "bos_token": "<|begin|>"}
        saved(tmp_path, tokenizer_config=config)
        assert Tokenizer.from_pretrained(path).apply_chat_template(HI) == expected
    (path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(path).apply_chat_template(HI) == "from the file"


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(saved(tmp_path, "{not json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(saved(tmp_path, '{"version": "1.0"}'))


# Ids to text, piece by piece -------------------------------------------------------------------


def byte_fallback_tokenizer(decoder: Any) -> Tokenizer:
    """A vocabulary that spells rare characters as <0xF0>, as SentencePiece models do."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "é", "日", "▁日", "!", "\n"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoder
    raw.add_special_tokens([AddedToken(s, special=True) for s in ("<s>", "</s>")])
    return Tokenizer(raw.to_str())


def tokenizers_to_try(default_tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    space = decoders.Replace("▁", " ")
    fallback = [space, decoders.ByteFallback(), decoders.Fuse()]
    return {
        "default": default_tokenizer,
        "bytes": byte_tokenizer(),
        "Llama 2": byte_fallback_tokenizer(
            decoders.Sequence([*fallback, decoders.Strip(" ", 1, 0)])
        ),
        "Mistral": byte_fallback_tokenizer(decoders.Sequence(fallback)),
        "Metaspace": byte_fallback_tokenizer(decoders.Metaspace()),
    }


def random_ids(tokenizer: Tokenizer, rng: random.Random, common: list[list[int]]) -> list[int]:
    """Anything, with parts of characters cut at any place."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 10)):
        kind = rng.random()
        if kind < 0.4:
            ids.append(rng.randrange(tokenizer.vocab_size))
        elif kind < 0.5:
            ids.append(rng.choice([*tokenizer.special_tokens.values()]))
        else:
            part = rng.choice(common)
            ids += part[: rng.randint(1, len(part))]
    return ids


@pytest.mark.parametrize("name", ["default", "bytes", "Llama 2", "Mistral", "Metaspace"])
def test_deltas_joined_are_the_decoded_whole(default_tokenizer: Tokenizer, name: str) -> None:
    tokenizer = tokenizers_to_try(default_tokenizer)[name]
    texts = [
        "😀",
        "👩‍👩‍👧",
        "日本語",
        "e\u0301",
        "한국",
        " ",
        "\ufffd",
        "नमस्ते",
        "  ",
        "\n",
        "€uro",
        "ab é",
    ]
    if name in ("default", "bytes"):
        common = [ids for text in texts if (ids := tokenizer.encode(text))]
        halves = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.pieces([i])[0]]
        common += [[i] for i in halves]
    else:
        common = [[3 + byte for byte in text.encode()] for text in texts]
    rng = random.Random(0)
    for _ in range(1500):
        ids = random_ids(tokenizer, rng, common)
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.push(i) for i in ids]
        whole = tokenizer.decode(ids)
        for end in range(len(deltas) + 1):  # what was shown is never taken back
            assert whole.startswith("".join(deltas[:end])), (ids, deltas)
        assert "".join(deltas) + detokenizer.finish() == whole, (ids, deltas)
        assert detokenizer.finish() == ""


def test_text_comes_as_soon_as_its_characters_are_complete(default_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    ids = default_tokenizer.encode("Hi 🫠!")
    deltas = [detokenizer.push(i) for i in ids]
    assert deltas == ["Hi", *[""] * (len(ids) - 3), " 🫠", "!"]
    assert detokenizer.finish() == ""


def test_special_and_unknown_ids_add_nothing(default_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    (a,) = default_tokenizer.encode("a")
    assert [detokenizer.push(i) for i in (1, a, 2, 49152, 10**6, a)] == ["", "a", "", "", "", "a"]


def test_a_long_stream_costs_the_same_per_token(default_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(default_tokenizer)
    for token_id in default_tokenizer.encode("Many words, one after another. " * 500):
        detokenizer.push(token_id)
        assert len(detokenizer._ids) < 10


@pytest.mark.parametrize("name", ["default", "bytes", "Llama 2", "Mistral"])
def test_no_character_of_a_stop_string_leaks(default_tokenizer: Tokenizer, name: str) -> None:
    """The text shown is the whole text up to the first stop string, however tokens split it."""
    tokenizer = tokenizers_to_try(default_tokenizer)[name]
    rng = random.Random(1)
    texts = ["stop", "\n\n", "😀", "ab", "日本", "<|", "a", " b", "é!"]
    if name in ("default", "bytes"):
        common = [tokenizer.encode(text) for text in texts]
    else:
        common = [[3 + byte for byte in text.encode()] for text in texts]
    cut = 0
    for _ in range(1500):
        ids = [i for _ in range(6) for i in random_ids(tokenizer, rng, common)]
        whole = tokenizer.decode(ids)
        stops = rng.sample([*texts, "a\n", "😀😀", "b日"], rng.randint(1, 3))
        if rng.random() < 0.5:
            start = rng.randrange(len(whole) + 1)
            stops += [whole[start : start + rng.randint(1, 4)] or "x"]
        stream = TextStream(Detokenizer(tokenizer), stops)
        shown = ""
        for token_id in ids:
            shown += stream.push(token_id)
            assert not any(stop in shown for stop in stops)
            if stream.stopped_by is not None:
                break
        else:
            shown += stream.finish()
        # the one that is complete first ends the text; of several, the longest
        ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        assert shown == (whole[: min(ends)[1]] if ends else whole), (ids, stops)
        assert (stream.stopped_by is not None) == bool(ends)
        cut += bool(ends)
    assert cut > 300


# Chat templates --------------------------------------------------------------------------------


def with_template(template: str | None) -> Tokenizer:
    raw = byte_tokenizer()._tokenizer.to_str()
    return Tokenizer(raw, chat_template=template, named_tokens={"eos_token": "<|end|>"})


def test_a_template_may_indent_json() -> None:
    assert with_template("{{ [1] | tojson(indent=4) }}").apply_chat_template(HI) == "[\n    1\n]"


def test_a_template_writes_the_chat() -> None:
    template = """{% for m in messages %}
    {%- if loop.first and m['role'] != 'system' %}{{ 'be good\n' }}{% endif %}
{{ m.role + ': ' + m.content | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
answer:{% endif %}"""
    tokenizer = with_template(template)
    assert tokenizer.apply_chat_template(HI) == "be good\nuser: Hi<|end|>\nanswer:"
    assert not tokenizer.apply_chat_template(HI, add_generation_prompt=False).endswith("answer:")
    assert (
        with_template("{{ messages | tojson }}").apply_chat_template(
            [{"role": "user", "content": "<é>"}]
        )
        == '[{"role": "user", "content": "<é>"}]'
    )
    assert with_template("{{ strftime_now('%Y') }}").apply_chat_template(HI).isdigit()
    break_ = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert with_template(break_).apply_chat_template(HI) == "01"


ATTACKS = {
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "internals of a function": "{{ raise_exception.__globals__ }}",
    "internals by filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "internals by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "internals of the loop": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "a changed list": "{{ messages.append(1) }}",
    "a changed message": "{{ messages[0].update({'role': 'system'}) }}",
    "an emptied list": "{% set x = messages.clear() %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "an endless range": "{% for i in range(10**12) %}{% endfor %}",
    "ranges in ranges": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"
    "{% endfor %}",
    "an endless power": "{{ 10**10**10 }}",
    "a power of powers": "{% set x = 9**64 %}{{ x**64 }}",
    "an endless string": "{{ 'a' * 10**10 }}",
    "an endless list": "{{ ([0] * 10**9) | length }}",
    "endless text": "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
    "endless lorem ipsum": "{{ lipsum(10**9) }}",
    "endless recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a type error": "{{ 1 + 'a' }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a missing name": "{{ nothing.at.all }}",
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
    "bad syntax": "{% for %}",
    "a wide indent": "{{ [1, 2] | tojson(indent=10**9) }}",
    "a wide format filter": "{{ '%999999999d' | format(1) }}",
    "a wide format method": "{{ '{:>999999999}'.format(1) }}",
    "a wide format operator": "{{ '%999999999d' % 1 }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "zeros in front": "{{ 'a'.zfill(10**9) }}",
    "wide tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "a centred word": "{{ 'x' | center(10**9) }}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_template_is_refused(attack: str) -> None:
    messages = [dict(message) for message in HI]
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the chat template refused the messages: ."):
        with_template(ATTACKS[attack]).encode_chat(messages)
    assert messages == HI
    assert time.monotonic() - began < 5


def test_one_rendering_does_not_use_up_the_next_ones_ranges() -> None:
    tokenizer = with_template(f"{{% for i in range({MAX_RANGE}) %}}{{% endfor %}}ok")
    assert [tokenizer.apply_chat_template(HI) for _ in range(3)] == ["ok"] * 3


def test_a_long_chat_is_not_an_attack() -> None:
    content = "x" * (MAX_TEXT // 2)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": content}]
    assert with_template(template).apply_chat_template(messages) == content
    with pytest.raises(ValueError, match="longer than"):
        with_template(template).apply_chat_template(messages * 3)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        (None, "must be a list of dicts, got NoneType"),
        ("hi", "must be a list of dicts, got str"),
        ({"role": "user", "content": "a"}, "must be a list of dicts, got dict"),
        (["hi"], "role and content, got 'hi'"),
        ([{"role": "user"}], "role and content"),
        ([{"content": "a"}], "role and content"),
        ([{"role": "user", "content": None}], "content must be a str, got None"),
        ([{"role": 5, "content": "a"}], "role must be a str, got 5"),
        ([{"role": "user", "content": ["a" * 999]}], "content must be a str"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        byte_tokenizer().apply_chat_template(messages)
    assert len(str(caught.value)) < 400


def test_a_chat_becomes_ids_without_added_tokens(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode_chat(HI)
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == (
        default_tokenizer.apply_chat_template(HI)
    )
    assert default_tokenizer.apply_chat_template(HI).endswith("<|im_start|>assistant\n")
