"""Attention backends: how the queries of a step meet the keys and values in KV memory.

    reference   a plain loop over sequences, written to be obviously right
    sdpa        the same results without that loop, over torch's fused attention

A backend prepares once a step what all layers share (indices, masks), then answers layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from infer_lab.batcher import Batch

BACKENDS = ("reference", "sdpa")


class AttentionBackend(Protocol):
    """Attention over pooled KV memory."""

    def prepare(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> Any:
        """What all layers of this step share; given back to `attend`."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """q (T, Hq, D), keys and values (N, Hkv, D) of all slots -> (T, Hq, D)."""
        ...


def pick_backend(name: str, device: torch.device) -> AttentionBackend:
    """A backend by name; "auto" is the fastest that runs on the device."""
    from infer_lab.kernels.reference import ReferenceBackend
    from infer_lab.kernels.sdpa import SdpaBackend

    if name not in ("auto", *BACKENDS):
        allowed = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention_backend must be one of {allowed}, got {name!r}")
    return ReferenceBackend() if name == "reference" else SdpaBackend()
