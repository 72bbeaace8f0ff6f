"""Solutions of chapter 2's exercises. Try first: the checks tell you what is missing."""

import math

import torch


def temperature_for(first, second, odds):
    # The softmax divides both weights by the same sum, so the odds are
    # exp(first / t) / exp(second / t) = exp((first - second) / t). Take the logarithm, solve for t.
    return (first - second) / math.log(odds)


def exactly_top_k(logits, k):
    k = k or len(logits)  # 0 stands for no filter
    # A threshold can't tell equals apart; ranks can. A stable sort leaves equals in the order of
    # their ids, so the lower ids come first. Slicing past the end is harmless: k may exceed V.
    order = logits.argsort(descending=True, stable=True)
    keep = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    keep[order[:k]] = True
    return keep


def text_logprob(all_logits, token_ids):
    # Row t is what the model said after token t, so it speaks of token t + 1. The last row speaks
    # of a token that isn't there; nothing speaks of the first one.
    # log_softmax subtracts the largest logit before `exp`, so that large ones do no harm.
    logprobs = all_logits[:-1].log_softmax(dim=-1)  # (T - 1, V)
    following = torch.as_tensor(token_ids, device=all_logits.device)[1:, None]  # (T - 1, 1)
    # Logs are added, not probabilities multiplied: 500 factors can be too small for any float.
    return float(logprobs.gather(-1, following).sum())


def draw_by_weight(weights, u):
    # Float64 has room for 50,000 additions and for every u below 1.
    sums = weights.double().cumsum(dim=0)
    # Scale u to what the sum is, instead of trusting that it is 1. A Python float times a float64
    # tensor stays float64. As u is at most 1 - 2**-33, the target is below the last sum.
    target = u * sums[-1]
    # right=True: the first sum above the target. A token of weight 0 has the same sum as the token
    # before it, so it is never the first one above anything.
    return int(torch.searchsorted(sums, target, right=True))


def keep_top_p_rows(p, top_p):
    values, order = p.sort(dim=-1, descending=True, stable=True)  # (R, V), each row by itself
    # What the likelier tokens sum up to, without the token itself: so the one that crosses
    # survives, and the first one always does. top_p as a column meets each row with its own p.
    keep = values.cumsum(dim=-1) - values < top_p[:, None]
    # keep[r, i] belongs to token order[r, i]; scatter writes it there.
    return torch.zeros_like(keep).scatter(-1, order, keep)
