"""The plainest way to the same tokens, and what tests of the engine share.

`naive` computes the whole sequence again for every token, one request alone in the world, without
any cache. Whatever the engine does must come to the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from conftest import SMALL, random_model
from infer_lab import Engine, NoCache, SamplingParams, Tokenizer
from infer_lab.model.transformer import Transformer
from infer_lab.prefill import prefill
from infer_lab.sampler import Sampler, SamplingRow
from infer_lab.tokenize import _BYTE_OF

GREEDY = SamplingParams(temperature=0, max_tokens=10)
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, seed=7, max_tokens=10)


def naive(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    index: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
) -> list[int]:
    """The tokens of one sample; each call's work is done once."""
    return [*_naive(model, tuple(prompt), params, index, tokenizer)]


@cache
def _naive(
    model: Transformer,
    prompt: tuple[int, ...],
    params: SamplingParams,
    index: int,
    tokenizer: Tokenizer | None,
) -> tuple[int, ...]:
    output: list[int] = []
    eos = () if params.ignore_eos else model.config.eos_token_ids
    ends = (*eos, *params.stop_token_ids)
    limit = min(params.max_tokens, model.config.max_position_embeddings - len(prompt))
    while len(output) < limit:
        row = SamplingRow(params, params.seed or 0, index, len(output), prompt, output, ends)
        logits = prefill(model, [*prompt, *output], NoCache())
        output.append(Sampler()(logits[None], [row])[0].token_id)
        if len(output) <= params.min_tokens:
            continue
        if output[-1] in ends:
            break
        if tokenizer is not None:
            text = tokenizer.decode(output)
            if any(stop in text for stop in params.stop_strings):
                break
    return tuple(output)


def poison(engine: Engine, *, only_free: bool = False) -> Engine:
    """Fill KV memory that holds nothing with NaN: reading it shows."""
    cache, pool = engine.kv.cache, engine.kv.allocator.pool
    blocks = list(pool.free) if only_free else list(range(cache.num_blocks))
    for memory in (cache.keys, cache.values):
        memory.unflatten(1, (cache.num_blocks, cache.block_size))[:, blocks] = torch.nan
    return engine


def poisoned_engine(
    model: Transformer, tokenizer: Tokenizer | None = None, **options: Any
) -> Engine:
    """An engine whose KV memory is NaN."""
    options = {"num_blocks": 64} | options if "kv_layout" not in options else options
    return poison(Engine(model, tokenizer, **options))


# A small model that speaks bytes ---------------------------------------------------------------

SPECIALS = ("<|end|>", "<|begin|>")
BYTES = [ord(c) for c in "abcdefghijklmnopqrstuvwxyz .,!?:-()0123456789\n<|>"]
BYTES += sorted({*"😀🫠日本語é\u0301€".encode()})
PIECES = [b"ab", b"th", b"the", b" a", b"\n\n", b"<|", b"\xf0\x9f", b"\x98\x80", b"\xe6\x97", b"! "]
BYTE_MODEL = replace(SMALL, vocab_size=2 + len(BYTES) + len(PIECES), eos_token_ids=(0,))


def byte_tokenizer() -> Tokenizer:
    """Special tokens, single bytes, and pieces that cut characters and words anywhere."""
    spelled = {byte: character for character, byte in _BYTE_OF.items()}
    pieces = [bytes([byte]) for byte in BYTES] + PIECES
    vocabulary = {special: i for i, special in enumerate(SPECIALS)}
    for piece in pieces:
        vocabulary["".join(spelled[byte] for byte in piece)] = len(vocabulary)
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    template = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return Tokenizer(raw.to_str(), eos_token_ids=(0,), chat_template=template)


def byte_model(seed: int = 0) -> Transformer:
    """A random model over that vocabulary."""
    return random_model(BYTE_MODEL, seed)
