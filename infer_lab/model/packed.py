"""Weights laid out for the CPU's matrix kernels, once, instead of at every product.

A matrix product reads its weights in tiles. oneDNN, the library for products that comes with
torch, can keep a matrix tile by tile: what one inner loop needs lies together. torch's own path
(`F.linear`, over MKL) takes rows as they are and rearranges them in every call, which costs most
when few tokens go in: in decode.

`pack_linears(model)` replaces each `nn.Linear` of a model on an x86 CPU; the model doesn't notice.
The results differ from `F.linear` by rounding alone.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """x (..., in) -> x W^T + b (..., out), with W in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # No module state: an opaque layout can be neither moved to a device nor saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) in rows, a copy."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` in a module, where this machine and its dtype have the kernel."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if can_pack(child.weight):
                setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed products are there for a weight of this dtype on this device."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32  # torch packs bfloat16 by itself where that is fast
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
