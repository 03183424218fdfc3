"""Linear layers whose weights are laid out for oneDNN once, at load.

A bfloat16 decode step on a CPU is bound by reading weights, and ``F.linear`` reads a bfloat16
matrix in its stored layout at a fraction of the memory's speed. The same product with the weight
reordered once reads it several times faster. Same operands, same accumulation in float32; only
the order of the sum, and so the last bit, may differ from ``F.linear``, for plain and speculative
steps alike.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Drop-in for a bfloat16 ``nn.Linear`` on a CPU; inference only.

    Args:
        linear: The layer whose weight is reordered (its own copy can then be freed).
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Reorder the weight."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self.bias, "none", [], ""
        )
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed bfloat16 layers exist on this machine."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linear_layers(module: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` below ``module``; return how many were replaced."""
    num_packed = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
            num_packed += 1
        else:
            num_packed += pack_linear_layers(child)
    return num_packed
