"""Attention sequence by sequence, as the formula says it. Slow, and the judge of all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer_lab.batcher import Batch


@dataclass(frozen=True)
class _Sequence:
    tokens: slice  # its rows in the flat run
    slots: Tensor  # (N,) where its keys and values lie, in order


class ReferenceBackend:
    """softmax(q k^T / sqrt(D)) v for one sequence after another."""

    def prepare(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> list[_Sequence]:
        """The rows and slots of each sequence."""
        plan = []
        for i, (start, length) in enumerate(zip(batch.query_starts, batch.query_lens, strict=True)):
            slots = batch.token_slots(np.array(i), np.arange(batch.context_lens[i]))
            tokens = slice(int(start), int(start + length))
            plan.append(_Sequence(tokens, torch.from_numpy(slots).to(device)))
        return plan

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: list[_Sequence]) -> Tensor:
        """q (T, Hq, D), keys and values (N, Hkv, D) of all slots -> (T, Hq, D)."""
        out = torch.empty_like(q)
        group = q.shape[1] // keys.shape[1]  # query heads that share a KV head
        for sequence in plan:
            queries = q[sequence.tokens]  # (T', Hq, D)
            k = keys[sequence.slots].repeat_interleave(group, dim=1)  # (N', Hq, D)
            v = values[sequence.slots].repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,nhd->htn", queries, k) / math.sqrt(q.shape[-1])
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
            hidden = hidden.triu(1 + k.shape[0] - queries.shape[0])  # a query's own future
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[sequence.tokens] = torch.einsum("htn,nhd->thd", weights, v)
        return out
