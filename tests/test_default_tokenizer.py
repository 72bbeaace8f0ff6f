"""The default model's tokenizer is right to the last id, by two independent witnesses."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers import AutoTokenizer

from infer_lab.model.fetch import default_model_gguf
from infer_lab.model.gguf_reader import GGUFFile
from infer_lab.tokenize import Tokenizer

WORDS = (
    "the", "The", "naïve", "café", "don't", "I'LL", "we've", "they're", "it's", "o'clock",
    "GPU", "x86_64", "Straße", "İstanbul", "Zürich", "hello", "HELLO", "supercalifragilistic",
    "Москва", "привет", "Αθήνα", "שלום", "مرحبا", "नमस्ते", "ไทย", "한국어", "日本語", "中文字符",
    "かなカナ", "﷽", "ﬁn", "Ⅷ", "½", "²", "①", "٣٤", "३",
)  # fmt: skip
CODE = (
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i]->c; }\n",
    "SELECT * FROM t WHERE a='b' AND c>=1.50e-3;\r\n",
    '{"k": [1, 2.5, null], "s": "\\u00e9\\n"}',
    "<div class='x'>&nbsp;</div>\n\t\t<!-- - -->",
    "\tif err != nil {\n\t\treturn nil, err\n\t}\n",
)
EMOJI = ("😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "❤️", "1️⃣", "🫠")
COMBINING = ("e\u0301", "n\u0303", "a\u0308\u0304", "Z̸̡̛a̵l̴g̶o", "\u0301", "가", "\u1112\u1161\u11ab")
SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u200b",
)
# Bytes without a piece in the vocabulary (0x04, 0x06, 0x13, 0xF1, 0xF2) among other controls.
CONTROL = ("\x00", "\x04", "\x06", "\x13", "\x1d", "\x1c", "\x7f", "\x85", "\ufeff", "\U00040000")
EDGES = (
    "", " ", "\n", "a", "\x04", "a\x04b", "\x04\x06\x13", "\U00040000", "\U000fffff", "\U0010ffff",
    "<|im_start|>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n", "<|im_end", "<|im_end|>>",
    " <|endoftext|> ", "<|endoftext|><|endoftext|>", "<repo_name>x<file_sep>", "<|IM_END|>",
    "1234567890", "3.14159", "1,000,000", "٣٤٥", "½²Ⅷ", "a1b22c333", " 1 22  333",
    "x" * 5000, " " * 3000, "\n" * 999, "ab" * 2000, "é" * 2000, "😀" * 500, "1" * 2000,
)  # fmt: skip


def varied_strings(seed: int, count: int, specials: list[str]) -> list[str]:
    """Strings of 1 to 12 parts, each from a kind of text that has broken tokenizers."""
    rng = random.Random(seed)

    def letters(low: int, high: int) -> str:
        points = (rng.randint(low, high) for _ in range(rng.randint(1, 8)))
        return "".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF)

    kinds = [
        lambda: rng.choice(WORDS),
        lambda: " " + rng.choice(WORDS),
        lambda: rng.choice(CODE),
        lambda: rng.choice(EMOJI),
        lambda: rng.choice(COMBINING),
        lambda: "".join(rng.choices(SPACES, k=rng.randint(1, 6))),
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 30))),
        lambda: rng.choice(CONTROL),
        lambda: rng.choice(specials),
        lambda: letters(0x20, 0x7E),
        lambda: letters(0x4E00, 0x9FA5),
        lambda: letters(0xA0, 0x24F),
        lambda: letters(0x20, 0x2FFF),
        lambda: letters(0x0, 0x10FFFF),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def strings(default_tokenizer: Tokenizer) -> list[str]:
    specials = list(default_tokenizer.special_tokens)
    return [*EDGES, *varied_strings(seed=1, count=1500, specials=specials)]


@pytest.fixture(scope="module")
def oracle(default_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_dir)


def test_ids_and_text_agree_with_transformers(
    oracle: Any, default_tokenizer: Tokenizer, strings: list[str]
) -> None:
    for text in strings:
        ids = oracle(text).input_ids
        assert default_tokenizer.encode(text) == ids, repr(text)
        for skip in (False, True):
            decoded = default_tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == oracle.decode(ids, skip_special_tokens=skip), repr(text)


def test_special_tokens_as_plain_text_agree_with_transformers(
    oracle: Any, default_tokenizer: Tokenizer, strings: list[str]
) -> None:
    special = set(default_tokenizer.special_tokens.values())
    for text in strings[:400]:
        ids = default_tokenizer.encode(text, parse_special=False)
        assert ids == oracle(text, split_special_tokens=True).input_ids, repr(text)
        assert not special & set(ids), repr(text)


def test_the_chat_template_agrees_with_transformers(
    oracle: Any, default_tokenizer: Tokenizer
) -> None:
    user = {"role": "user", "content": " Two\n\nlines <|im_end|> "}
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Yes."}
    for messages in ([user], [system, user], [user, answer, user]):
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert default_tokenizer.apply_chat_template(messages) == text
        ids = oracle(text, add_special_tokens=False).input_ids
        assert default_tokenizer.encode_chat(messages) == ids


# A second witness, which knows neither tokenizer.json nor the tokenizers library ---------------

# GPT-2's expression. White space as the tokenizers library has it: Unicode's, without 0x1c-0x1f.
_SPACE = r"[\t\n\v\f\r\x20\x85\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_NOT_SPACE = _SPACE.replace("[", "[^", 1)
_WORD = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+"
    rf"| ?(?:(?![\p{{L}}\p{{N}}]){_NOT_SPACE})+|{_SPACE}+(?!{_NOT_SPACE})|{_SPACE}+"
)


class PlainBPE:
    """Byte-level BPE in thirty lines, from the lists in the GGUF file."""

    def __init__(self, path: Path) -> None:
        metadata = GGUFFile(path).metadata
        assert metadata["tokenizer.ggml.pre"] == "smollm"
        pieces = metadata["tokenizer.ggml.tokens"]
        kinds = metadata["tokenizer.ggml.token_type"]
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.ranks = {
            tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])
        }
        specials = sorted((p for p, k in zip(pieces, kinds, strict=True) if k == 3), key=len)
        self.special = regex.compile("|".join(regex.escape(s) for s in reversed(specials)))
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        self.letters = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
        self.merge = cache(self._merge)

    def encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in self.special.finditer(text):
            ids += [*self._plain(text[start : match.start()]), self.ids[match.group()]]
            start = match.end()
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        parts = regex.findall(r"\p{N}|\P{N}+", text)  # each digit alone
        return [i for part in parts for word in _WORD.findall(part) for i in self.merge(word)]

    def _merge(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        parts = [part for part in parts if part in self.ids]  # a byte without a piece is dropped
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in pairwise(parts)]
            best = min(ranks)
            if best == len(self.ranks):
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


def test_ids_agree_with_a_plain_bpe_over_the_merges_of_the_gguf(
    default_tokenizer: Tokenizer, strings: list[str]
) -> None:
    plain = PlainBPE(default_model_gguf(progress=False))
    for text in strings:
        if len(text) < 1000:  # the plain one is quadratic
            assert plain.encode(text) == default_tokenizer.encode(text), repr(text)


# Facts known beforehand ------------------------------------------------------------------------


def test_digits_are_split_one_by_one(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("2024 and 1234567")
    digits = [piece for piece in default_tokenizer.pieces(ids) if piece.strip().isdigit()]
    assert digits == list("20241234567")


def test_special_tokens_and_ends_have_their_known_ids(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.special_tokens["<|endoftext|>"] == 0
    assert default_tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    assert len(default_tokenizer.special_tokens) == 17
    assert default_tokenizer.eos_token_ids == (2,)
    assert default_tokenizer.vocab_size == 49152


def test_no_token_is_put_before_a_text(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.encode("a") == default_tokenizer.encode("a", add_special_tokens=False)


def test_bytes_without_a_piece_are_dropped(default_tokenizer: Tokenizer) -> None:
    a, b = default_tokenizer.encode("a")[0], default_tokenizer.encode("b")[0]
    assert default_tokenizer.encode("a\x04b") == [a, b]
    assert default_tokenizer.encode("\x04\x06") == []


def test_text_without_such_bytes_comes_back_unchanged(
    default_tokenizer: Tokenizer, strings: list[str]
) -> None:
    missing = set(range(256)) - {
        byte
        for token_id in range(17, 17 + 256)
        for byte in default_tokenizer.token_bytes(token_id)
        if len(default_tokenizer.token_bytes(token_id)) == 1
    }
    assert len(missing) == 21
    for text in strings:
        if not missing & set(text.encode()):
            ids = default_tokenizer.encode(text)
            assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
