"""Decode: from the logits choose a token, feed it back, repeat.

    tokens   The | capital | of | France | is | Paris | .
             <------- prompt: 5 in ------->   1 in     1 in

One line carries the whole loop: a step feeds the tokens that the cache does not hold yet,
`tokens[cache.length:]`. With a cache that is the prompt first and one token from then on; with
`NoCache` it is everything, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor

from infer_lab.kv_cache import SequenceCache
from infer_lab.model.transformer import Transformer
from infer_lab.prefill import check_token_ids, prefill
from infer_lab.trace import Trace


def decode_step(model: Transformer, token_id: int, cache: SequenceCache) -> Tensor:
    """Compute one more token behind what the cache holds; return its logits (V,)."""
    return prefill(model, [token_id], cache)


def argmax(logits: Tensor) -> int:
    """The likeliest token of logits (V,): greedy decoding. The lowest id wins a tie."""
    return int(logits.argmax())


def generate_tokens(
    model: Transformer,
    prompt_ids: Sequence[int],
    cache: SequenceCache,
    *,
    max_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    choose: Callable[[Tensor], int] = argmax,
    chunk_size: int | None = None,
    trace: Trace | None = None,
) -> Iterator[int]:
    """Yield the new tokens of one sequence, one at a time, the stop token included.

    cache: what it holds already counts as the first tokens of the prompt and isn't computed again.
    stop_token_ids: end after one of these (None: the model's end-of-sequence ids).
    choose: from logits (V,) to a token id.
    chunk_size: see `prefill`.
    trace: where to record every step.

    Raises ValueError for a bad argument; also ends when the model's context is full.
    """
    check_token_ids("prompt_ids", prompt_ids, model.config.vocab_size)
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    if cache.length >= len(prompt_ids):
        raise ValueError(
            f"the cache must hold less than the prompt's {len(prompt_ids)} tokens,"
            f" got {cache.length}; take a new cache for a new sequence"
        )
    return _generate(
        model,
        list(prompt_ids),
        cache,
        min(len(prompt_ids) + max_tokens, model.config.max_position_embeddings + 1),
        model.config.eos_token_ids if stop_token_ids is None else stop_token_ids,
        choose,
        chunk_size,
        Trace() if trace is None else trace,
    )


def _generate(
    model: Transformer,
    tokens: list[int],
    cache: SequenceCache,
    max_length: int,
    stop_token_ids: Collection[int],
    choose: Callable[[Tensor], int],
    chunk_size: int | None,
    trace: Trace,
) -> Iterator[int]:
    num_prompt = len(tokens)
    while len(tokens) < max_length:
        new = tokens[cache.length :]
        phase = "prefill" if len(tokens) == num_prompt else "decode"
        with trace.step(phase, cache, len(new)) as step:
            logits = prefill(model, new, cache, chunk_size=chunk_size)
            step.output_shape = tuple(logits.shape)
        tokens.append(choose(logits))
        yield tokens[-1]
        if tokens[-1] in stop_token_ids:
            return
