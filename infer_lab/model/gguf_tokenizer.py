"""The tokenizer inside a GGUF file, as the `tokenizers` library's `tokenizer.json`.

GGUF lists the pieces of a byte-level BPE vocabulary, its merges, and which pieces are special.
How a text is cut into words before the merges apply is not spelled out: the file only names the
cut (`tokenizer.ggml.pre`). `PRE_TOKENIZERS` holds the names that we know to the last detail; with
any other name the ids could be subtly wrong, so it is refused.

Bytes without a piece. A vocabulary need not hold all 256 single bytes: SmolLM2's lacks 21 of them
(0x04, 0xF1, 0xFE, ...). Its model has no unknown token (`unk_token` is null, as in the original
tokenizer; the id in `tokenizer.ggml.unknown_token_id` only fills a role in `tokenizer_config`), so
such a byte is dropped: the text 0x04 has no ids at all. `transformers` does the same.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type


def _byte_level(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,  # True: GPT-2's own expression cuts the words
    }


def _words(digits: str) -> list[Json]:
    """Llama 3's way to cut words, with the given expression for a run of digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, _byte_level(use_regex=False)]


PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}


def tokenizer_json(metadata: Json) -> Json:
    """`tokenizer.json` for the tokenizer that GGUF `metadata` describes.

    Raises:
        ValueError: another kind of tokenizer, an unknown pre-tokenizer, or inconsistent lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {model!r}")
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, got {pre!r}"
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise ValueError("tokenizer.ggml.add_space_prefix must be false for byte-level BPE")
    pieces = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(pieces):
        raise ValueError("tokenizer.ggml.token_type must have one number for each token")
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise ValueError("tokenizer.ggml.tokens holds the same token twice")

    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    for pair in merges:
        if len(pair) != 2 or any(p not in vocabulary for p in (*pair, "".join(pair))):
            raise ValueError(f"{' '.join(pair)!r} in tokenizer.ggml.merges does not make a token")

    added = []
    for token_id, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            added.append(_added_token(token_id, piece, special=kind == CONTROL))
        elif kind not in (NORMAL, UNUSED):
            raise ValueError(f"token {token_id} ({piece!r}) has unsupported type {kind!r}")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _bos_and_eos(metadata),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",  # Llama 3: a word that is a token stays whole
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def tokenizer_config(metadata: Json, max_length: int) -> Json:
    """`tokenizer_config.json`: the roles of special tokens and the chat template.

    The class is the generic one on purpose. A class of an architecture (GPT2Tokenizer ...) would
    rebuild the pre-tokenizer from its own code and, here, lose the rule that splits digits.
    """
    pieces = metadata["tokenizer.ggml.tokens"]
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for role in ("bos", "eos", "pad", "unk"):
        token_id = special_id(metadata, role)
        if token_id is not None:
            config[f"{role}_token"] = pieces[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError("tokenizer.chat_template must be a string")
        config["chat_template"] = template
    return config


def special_id(metadata: Json, role: str) -> int | None:
    """The id of the token with a role: bos, eos, eot and eom (ends of a turn), pad, unk."""
    key = {"pad": "padding", "unk": "unknown"}.get(role, role)
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ValueError(
            f"tokenizer.ggml.{key}_token_id must be an id below {vocab_size}, got {token_id!r}"
        )
    return token_id


def _bos_and_eos(metadata: Json) -> Json | None:
    """The post-processor that puts bos before a text or eos after it, if the file wants them."""
    wanted = {"bos": metadata["tokenizer.ggml.pre"] == "llama-bpe", "eos": False}
    special: Json = {}
    before_after: dict[str, list[str]] = {"bos": [], "eos": []}
    for role, default in wanted.items():
        if not metadata.get(f"tokenizer.ggml.add_{role}_token", default):
            continue
        token_id = special_id(metadata, role)
        if token_id is None:
            raise ValueError(
                f"tokenizer.ggml.add_{role}_token is set, but there is no {role} token"
            )
        token = metadata["tokenizer.ggml.tokens"][token_id]
        special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        before_after[role] = [token]
    if not special:
        return None

    def around(text: str, type_id: int) -> list[Json]:
        def tokens(role: str) -> list[Json]:
            return [{"SpecialToken": {"id": t, "type_id": type_id}} for t in before_after[role]]

        return [*tokens("bos"), {"Sequence": {"id": text, "type_id": type_id}}, *tokens("eos")]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": special,
    }


def _added_token(token_id: int, piece: str, *, special: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": piece, **flags, "special": special}


def _strings(metadata: Json, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key} must be a list of strings")
    return value
