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

NOT_FINITE = "the logits are not finite: the model's own, or after bias and penalties"


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know about the request behind one row of logits. Ids are below V."""

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
        if logits.device.type == "mps":  # which has no float64
            logits = logits.cpu()
        adjusted = _adjust(logits, rows)
        top_logits, tokens = adjusted.max(dim=-1)  # NaN and +inf win, so one look finds them
        broken = (~top_logits.isfinite()).tolist()
        chosen = tokens.tolist()
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and not broken[i]]
        for filtered in (False, True):  # a row's path must not depend on the other rows
            group = [i for i in drawn if rows[i].params.filters == filtered]
            if group:
                draw = _draw_filtered if filtered else _draw
                own = adjusted.index_select(0, torch.tensor(group, device=adjusted.device))
                picked = draw(own, [rows[i] for i in group]).tolist()
                for i, token in zip(group, picked, strict=True):
                    chosen[i] = token
        logprobs = _logprobs(logits, rows, chosen, broken)
        return [
            Sample(-1, error=NOT_FINITE) if broken[i] else Sample(chosen[i], logprobs.get(i))
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
            bias = list(params.logit_bias.values())
            scores[ids] += torch.tensor(bias, device=out.device, dtype=out.dtype)
        if params.repetition_penalty != 1.0:
            seen = {*row.prompt_token_ids, *row.output_token_ids}
            ids = torch.tensor(list(seen), dtype=torch.long, device=out.device)
            old = scores[ids]
            penalty = params.repetition_penalty
            scores[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if row.output_token_ids and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(row.output_token_ids)
            ids = torch.tensor(list(counts), device=out.device)
            uses = torch.tensor(list(counts.values()), device=out.device, dtype=out.dtype)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * uses
        if row.output_index < params.min_tokens:
            ends = [i for i in row.end_token_ids if i < len(scores)]  # a config may name others
            scores[ends] -= torch.inf  # and NaN stays NaN: it is an error
    return out


def _weights(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """exp(logits / temperature) in float64, with a weight of 1 for the likeliest: (R, N) -> (R, N).

    Weights that add up to a probability of 1 would need the sum over V, and a draw doesn't.
    """
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)
    weights = logits.to(torch.float64, copy=True)
    weights -= weights.amax(-1, keepdim=True)  # at most 0: exp can't overflow
    return weights.div_(temperature.to(logits.device)).exp_()


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from all tokens. logits (R, V) -> token ids (R,)."""
    return _inverse_cdf(_weights(logits, rows), rows)


def _draw_filtered(logits: Tensor, rows: Sequence[SamplingRow], width: int = 128) -> Tensor:
    """Draw from the tokens that survive top-k, top-p and min-p. logits (R, V) -> ids (R,).

    Sorting the vocabulary can take longer than the model, and few tokens survive. So look at the
    `width` likeliest only; rows where the last of them survives try again with more.
    """
    width = min(width, logits.shape[-1])
    best = logits.topk(width).values  # (R, W), from high to low
    weights = _weights(best, rows)
    keep = _survivors(weights, logits, rows)
    rank = _inverse_cdf(weights * keep, rows)[:, None]
    # Which token has that rank? Of those with the same logit the lower id comes first.
    value = best.gather(-1, rank)
    nth = rank - (best > value).sum(-1, keepdim=True)
    where, ids = (logits == value).nonzero(as_tuple=True)  # by row, then by id
    first = torch.searchsorted(where, torch.arange(len(rows), device=where.device))
    tokens = ids[first + nth[:, 0]]
    if width < logits.shape[-1]:
        last = keep[:, -1].tolist()
        more = [i for i, row in enumerate(rows) if last[i] or row.params.top_k > width]
        if more:
            tokens[more] = _draw_filtered(logits[more], [rows[i] for i in more], 32 * width)
    return tokens


def _survivors(weights: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Which of each row's W likeliest tokens, from high to low, every filter keeps: (R, W)."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    top_k = column([min(row.params.top_k or logits.shape[-1], logits.shape[-1]) for row in rows])
    top_p = column([row.params.top_p for row in rows])
    min_p = column([row.params.min_p for row in rows])
    keep = torch.arange(weights.shape[-1], device=logits.device) < top_k
    cumulative = (weights * keep).cumsum(-1)
    whole = cumulative[:, -1:].clone()  # what top_p is a part of: the k tokens, or all of them
    if wide := [i for i, r in enumerate(rows) if r.params.top_p < 1.0 and not r.params.top_k]:
        whole[wide] = _weights(logits[wide], [rows[i] for i in wide]).cumsum_(-1)[:, -1:]
    keep &= cumulative - weights < top_p * whole  # the sum of the likelier ones
    return keep & (weights >= min_p)  # the likeliest has weight 1: one token always survives


def _inverse_cdf(weights: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Where each row's random number falls in its weights, summed in place: (R, N) -> (R,)."""
    draws = [uniform(row.seed, row.output_index, row.sample_index) for row in rows]
    cumulative = weights.cumsum_(-1)
    target = torch.tensor(draws, dtype=weights.dtype, device=weights.device)[:, None]
    # right=True: the first index whose sum exceeds the target, so weight 0 is never drawn.
    return torch.searchsorted(cumulative, target * cumulative[:, -1:], right=True)[:, 0]


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], chosen: list[int], broken: list[bool]
) -> dict[int, TokenLogprobs]:
    """Row index -> log-probabilities, for the rows that ask for them."""
    result = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None and not broken[i]:
            wide = torch.promote_types(logits.dtype, torch.float32)
            logprobs = logits[i].to(wide).log_softmax(-1)  # (V,)
            ids = _likeliest(logits[i], row.params.logprobs)
            top = dict(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
            result[i] = TokenLogprobs(logprobs[chosen[i]].item(), top)
    return result


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """Ids of the k highest of logits (V,), from high to low; all of them when k >= V."""
    least = logits.topk(min(max(k, 1), len(logits))).values[-1]
    ids = (logits >= least).nonzero()[:, 0]  # more than k where some are equal
    return ids[logits[ids].argsort(descending=True, stable=True)[:k]]
