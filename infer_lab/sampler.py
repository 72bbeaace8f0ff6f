"""Which token comes next: from logits (R, V) to one token a row, each row by its own parameters.

    logits -> bias, penalties -> temperature -> top-k -> top-p -> min-p -> one draw

The order matters, and this one has reasons. Bias and penalties speak of the model's logits, so they
come first, and greedy rows see them too. Temperature comes before the filters, because top-p and
min-p ask about the probabilities that will be drawn from. Top-k before top-p: the k that remain
are the whole that p is a part of. min-p compares with the likeliest token only, so it would remove
the same tokens anywhere after temperature. transformers applies them in this order as well.

Ties are broken by the lower id everywhere, so exactly k survive top-k and k = 1 is greedy.

R rows, V vocabulary. Sources: top-k (Fan et al. 2018), repetition penalty (Keskar et al. 2019,
CTRL), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer_lab.sampling_params import SamplingParams

__all__ = ["Sample", "Sampler", "SamplingParams", "SamplingRow", "TokenLogprobs", "uniform"]


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know about the request behind one row of logits."""

    params: SamplingParams
    seed: int
    sample_index: int = 0
    output_index: int = 0  # how many tokens it has generated
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    end_token_ids: Sequence[int] = ()  # what min_tokens forbids


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the model's own probabilities, before penalties, temperature and filters."""

    logprob: float  # of the chosen token
    top: dict[int, float]  # of the likeliest ones, likeliest first


@dataclass(frozen=True)
class Sample:
    """One row's outcome: a token, or an error that concerns this row alone."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Stateless: all randomness comes from the rows' seeds."""

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sample]:
        """logits (R, V) and R rows -> R samples. A row of NaN or infinity gets an error."""
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(
                f"logits must be ({len(rows)}, V) for {len(rows)} rows, got {tuple(logits.shape)}"
            )
        adjusted = _adjust(logits, rows)
        top_logits, tokens = adjusted.max(dim=-1)  # NaN and +inf win, so one look finds them
        broken = (~top_logits.isfinite()).tolist()
        chosen = tokens.tolist()
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and not broken[i]]
        for filtered in (False, True):  # a row's path must not depend on the other rows
            group = [i for i in drawn if rows[i].params.filters == filtered]
            if group:
                draw = _draw_filtered if filtered else _draw
                picked = draw(adjusted[group], [rows[i] for i in group]).tolist()
                for i, token in zip(group, picked, strict=True):
                    chosen[i] = token
        logprobs = _logprobs(logits, rows, chosen, broken)
        return [
            Sample(-1, error="the model's logits are not finite")
            if broken[i]
            else Sample(chosen[i], logprobs.get(i))
            for i in range(len(rows))
        ]


def uniform(seed: int, output_index: int, sample_index: int = 0) -> float:
    """The one random number in (0, 1) that decides a token of a request.

    It depends on nothing but its arguments: not on batch-mates, arrival order or preemption, and
    not on the version of any library. 32 bits, never 0 or 1.
    """
    key = struct.pack("<qQQ", (seed + 2**63) % 2**64 - 2**63, output_index, sample_index)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") + 0.5) / 2**32


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply bias, penalties and min_tokens. Returns logits itself when no row asks for any."""
    if not any(row.params.adjusts_logits for row in rows):
        return logits
    out = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for scores, row in zip(out, rows, strict=True):  # scores (V,): a view, changed in place
        params = row.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=out.device)
            bias = torch.tensor(list(params.logit_bias.values()), device=out.device)
            scores[ids] += bias.to(out.dtype)
        if params.repetition_penalty != 1.0:
            seen = {*row.prompt_token_ids, *row.output_token_ids}
            ids = torch.tensor(sorted(seen), dtype=torch.long, device=out.device)
            old = scores[ids]
            penalty = params.repetition_penalty
            scores[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if row.output_token_ids and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(row.output_token_ids)
            ids = torch.tensor(list(counts), device=out.device)
            uses = torch.tensor(list(counts.values()), device=out.device, dtype=out.dtype)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * uses
        if row.output_index < params.min_tokens:
            scores[list(row.end_token_ids)] = -torch.inf
    return out


def _scaled(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide by temperature, in float64. The maximum becomes 0: nothing can overflow."""
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)
    logits = logits.double()
    return (logits - logits.amax(-1, keepdim=True)) / temperature.to(logits.device)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from all tokens. logits (R, V) -> token ids (R,)."""
    return _inverse_cdf(_scaled(logits, rows).softmax(-1), rows)


def _draw_filtered(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from the tokens that survive top-k, top-p and min-p. logits (R, V) -> ids (R,)."""
    scores, ids = _scaled(logits, rows).sort(dim=-1, descending=True, stable=True)
    rank = _inverse_cdf(_survivors(scores, rows), rows)
    return ids.gather(-1, rank[:, None])[:, 0]


def _survivors(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Probabilities (R, V) of scores sorted from high to low; 0 for what a filter removed."""
    vocab_size = scores.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    top_k = column([row.params.top_k or vocab_size for row in rows])
    top_p = column([row.params.top_p for row in rows])
    min_p = column([row.params.min_p for row in rows])
    rank = torch.arange(vocab_size, device=scores.device)
    probs = scores.masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs  # what the likelier tokens make up together
    keep = (before < top_p) | (top_p >= 1.0)
    keep &= probs >= min_p * probs[:, :1]
    keep[:, 0] = True  # a likeliest token always survives
    return probs * keep


def _inverse_cdf(weights: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Where each row's uniform number falls in the cumulative weights. (R, V) -> (R,)."""
    draws = [uniform(row.seed, row.output_index, row.sample_index) for row in rows]
    cumulative = weights.cumsum(-1)
    target = torch.tensor(draws, dtype=weights.dtype, device=weights.device)[:, None]
    # right=True: the first index whose sum exceeds the target, so weight 0 is never drawn.
    return torch.searchsorted(cumulative, target * cumulative[:, -1:], right=True)[:, 0]


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], chosen: list[int], broken: list[bool]
) -> dict[int, TokenLogprobs]:
    """Row index -> log-probabilities, for the rows that ask for them."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and not broken[i]]
    if not asked:
        return {}
    logprobs = logits[asked].float().log_softmax(-1)  # (rows that ask, V)
    most = min(max(rows[i].params.logprobs or 0 for i in asked), logits.shape[-1])
    values, ids = logprobs.topk(most, dim=-1)
    own = logprobs.gather(-1, torch.tensor([[chosen[i]] for i in asked], device=logits.device))
    result = {}
    for i, logprob, top_ids, top in zip(
        asked, own[:, 0].tolist(), ids.tolist(), values.tolist(), strict=True
    ):
        k = rows[i].params.logprobs or 0
        result[i] = TokenLogprobs(logprob, dict(zip(top_ids[:k], top[:k], strict=True)))
    return result
