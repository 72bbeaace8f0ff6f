"""Prefill: run the prompt through the model once, and keep its keys and values.

All tokens of the prompt are known, so they go through together: one pass over the weights serves
every token. Only the last token's logits are needed, since they decide the first new token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer_lab.kv_cache import SequenceCache
from infer_lab.model.transformer import Transformer


@torch.inference_mode()
def prefill(
    model: Transformer,
    token_ids: Sequence[int],
    cache: SequenceCache,
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute token_ids behind what the cache holds; return the last token's logits (V,).

    chunk_size: at most so many tokens a pass (None: all at once). The result is the same; a long
        prompt needs less memory at a time, and an engine can do other work in between. It needs a
        cache that keeps what earlier chunks computed.

    Raises ValueError for no tokens, ids outside the vocabulary, or positions past the context.
    """
    check_token_ids("token_ids", token_ids, model.config.vocab_size)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 or None, got {chunk_size}")
    if (end := cache.length + len(token_ids)) > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise ValueError(f"the model's context holds {limit} tokens, got {end}")
    chunk_size = chunk_size or len(token_ids)
    hidden = torch.empty(0)
    for first in range(0, len(token_ids), chunk_size):
        chunk = torch.tensor(token_ids[first : first + chunk_size], device=model.device)  # (T,)
        start = cache.length
        positions = torch.arange(start, start + len(chunk), device=model.device)  # (T,)
        hidden = model(chunk, positions, cache)  # (T, H)
        cache.advance(len(chunk))
        if cache.length != start + len(chunk) and len(chunk) < len(token_ids):
            raise ValueError("chunk_size needs a cache that keeps tokens; NoCache keeps none")
    return model.logits(hidden[-1:])[0]


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless token_ids is a non-empty sequence of ids of the vocabulary."""
    if len(token_ids) == 0:
        raise ValueError(f"{name} must hold at least one token id, got none")
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{name} must hold ints, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must be ids from 0 to {vocab_size - 1}, got {token_id}")
