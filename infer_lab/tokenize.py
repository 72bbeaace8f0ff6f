"""Text to token ids and back.

`Tokenizer` is a thin layer over the `tokenizers` library: encode, decode, and the chat template
(see `chat_template`). `Detokenizer` turns a stream of ids into a stream of text, and never emits
half a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from infer_lab.chat_template import Message, render_chat
from infer_lab.model.config import eos_ids, read_json
from infer_lab.model.fetch import resolve
from infer_lab.model.gguf import GGUFModel

__all__ = ["Detokenizer", "Message", "Tokenizer"]


class Tokenizer:
    """Byte-level BPE or whatever else a `tokenizer.json` describes."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        named_tokens: dict[str, str] | None = None,
    ) -> None:
        """named_tokens are what the chat template may use: bos_token, eos_token and so on.

        `vocab_size` is the number of ids, special tokens and gaps included.
        """
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the vocabulary's size is not the number of its pieces.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=0)  # in characters
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self._named_tokens = named_tokens or {}

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path | None = None) -> Tokenizer:
        """The tokenizer of a model; names are those of `load_model`.

        Raises ValueError when the directory has no readable `tokenizer.json`.
        """
        path = resolve(name_or_path)
        if path.suffix == ".gguf":
            gguf = GGUFModel(path)
            text, config = json.dumps(gguf.tokenizer_json), gguf.tokenizer_config
            eos = eos_ids(gguf.generation_config) or eos_ids(gguf.config)
        else:
            file = path / "tokenizer.json"
            if not file.is_file():
                raise ValueError(f"{file} does not exist; save it with transformers' AutoTokenizer")
            text = file.read_text(encoding="utf-8")
            config = _optional_json(path, "tokenizer_config")
            eos = eos_ids(_optional_json(path, "generation_config"))
            eos = eos or eos_ids(_optional_json(path, "config"))
        named = {key: _token_text(config[key]) for key in config if key.endswith("_token")}
        try:
            tokenizer = cls(
                text,
                eos_token_ids=eos,
                chat_template=_chat_template(path, config),
                named_tokens={key: token for key, token in named.items() if token is not None},
            )
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ValueError(f"{path}: tokenizer.json cannot be read: {error}") from error
        if not eos and (token := named.get("eos_token")) is not None:
            tokenizer.eos_token_ids = (tokenizer.token_to_id(token),)
        return tokenizer

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second copy, for text whose special tokens must stay plain text."""
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that mark structure instead of spelling text, such as `<|im_end|>`."""
        return {token.content: i for i, token in sorted(self._added.items()) if token.special}

    def token_to_id(self, token: str) -> int:
        """The id of a piece, by its spelling in the vocabulary. Raises ValueError if unknown."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"token {token!r} is not in the vocabulary")
        return token_id

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Text -> ids.

        add_special_tokens: also what the model wants around every text (often a start token).
        parse_special: `<|im_end|>` in the text becomes that token. False spells it out instead:
            the choice for text from people who must not steer the model with it.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, got {type(text).__name__}")
        try:
            tokenizer = self._tokenizer if parse_special else self._plain
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"text must be valid Unicode: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids -> text; bytes that are no UTF-8 become U+FFFD. ValueError for unknown ids."""
        for token_id in token_ids:
            self._check_id(token_id)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each id alone as text, for reading; half characters show as U+FFFD."""
        return [self.decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id of a byte-level vocabulary stands for."""
        self._check_id(token_id)
        piece = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._added:
            return piece.encode()
        unknown = sorted({character for character in piece if character not in _BYTE_OF})
        if unknown:
            raise ValueError(f"token_id {token_id}: this vocabulary is not byte-level ({unknown})")
        return bytes(_BYTE_OF[character] for character in piece)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Messages ({"role", "content"}) -> the text that the model was trained to continue.

        Raises ValueError without a template, for malformed messages, or when the template refuses.
        """
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            named_tokens=self._named_tokens,
        )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages -> ids that end where the assistant's answer begins."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def _check_id(self, token_id: int) -> None:
        is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_int or not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token_id must be 0 to {self.vocab_size - 1}, got {token_id!r}")


class Detokenizer:
    """Ids in, one at a time; whole characters out as soon as they are complete.

    One emoji may be four tokens: the first three give "", the fourth gives the emoji. Ids past the
    vocabulary add nothing: some models pad their output head beyond it.

    How a token reads may depend on the one before it (a space, half a character), so the text is
    decoded from the tokens that gave the last text, and what they gave alone is cut off:

        tokens   ...  Hel  lo  |  wor  ld  |  F0 9F  98     given out up to the second bar;
                              start        end              held: half a character
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from `start` on
        self._end = 0  # how many of them have been given out
        self._given = ""  # as this text

    def push(self, token_id: int) -> str:
        """The text that this id completes; may be empty."""
        added = self._tokenizer._added.get(token_id)
        if token_id >= self._tokenizer.vocab_size or (added is not None and added.special):
            return ""
        self._ids.append(token_id)
        # Some vocabularies spell rare characters as bytes, <0xF0>, and read a run of them as a
        # whole: one wrong byte changes what the others give. So a run is held until it ends.
        if _RAW_BYTE.fullmatch(self._tokenizer._tokenizer.id_to_token(token_id) or ""):
            return ""
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):  # half a character
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What is left when no more ids come: a character cut short shows as U+FFFD."""
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            self._ids = self._ids[self._end :]
            self._end = len(self._ids)
            self._given = self._decode(self._ids)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer._tokenizer.decode(token_ids, skip_special_tokens=False)


_RAW_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character (Radford et al. 2019, GPT-2).

    Printable Latin-1 stands for itself; the other bytes get the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _optional_json(directory: Path, stem: str) -> dict[str, Any]:
    path = directory / f"{stem}.json"
    return read_json(path) if path.is_file() else {}


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
