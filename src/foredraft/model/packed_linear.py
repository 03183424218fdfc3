"""Linear layers whose weights are laid out for oneDNN once, at load.

A decode step on a CPU is bound by reading weights, and ``F.linear`` reads a matrix in its stored
layout at a fraction of the memory's speed. With the weight reordered once, the same product of up
to 32 rows was measured 1.2 to 2 times as fast in bfloat16 (AMX), and 1.1 to 2.9 times in float32
(AVX2), most at two to four rows: just where a draft is verified. Same operands, same accumulation
in float32; only the order of the sum, and so the last bit, may differ from ``F.linear``, for plain
and speculative steps alike.

At a few rows a small product costs more to start than to compute, so layers that read the same
input (query, key and value; gate and up) are computed as one product: measured a sixth to a third
of their time less.
"""

from __future__ import annotations

import torch
from torch import nn

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that Transformers' classes give to the layers of one block that read the same tensor."""


class SharedInput:
    """One product for layers that read the same input: the first asked computes for the others.

    A layer called with another tensor than the one last computed, or a second time, computes anew,
    so each is right however it is called. The input must not be changed in place between the calls.

    Args:
        linears: One or more layers with the same ``in_features``, and a bias each or none.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        """Join the weights, one above the other, and reorder them."""
        self.sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears]).contiguous()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._input: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., sizes[index]], which may be a view of a wider tensor."""
        if x is self._input:
            out = self._waiting.pop(index, None)
            if not self._waiting:
                self._input = None
            if out is not None:
                return out
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.sizes[index])
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        if len(self.sizes) == 1:
            return product
        self._waiting = dict(enumerate(product.split(self.sizes, dim=-1)))
        self._input = x
        return self._waiting.pop(index)


class PackedLinear(nn.Module):
    """Drop-in for an ``nn.Linear`` on a CPU; inference only.

    Args:
        linear: The layer it replaces, whose weight can then be freed.
        shared: The product that holds its reordered weight.
        index: Its place there.
    """

    def __init__(self, linear: nn.Linear, shared: SharedInput, index: int) -> None:
        """Remember where the weight is."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._shared = shared
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._shared.output(self._index, x)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed layers of this type exist on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        has_check = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        return has_check and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linear_layers(module: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` below ``module``; return how many were replaced."""
    linears = {n: child for n, child in module.named_children() if type(child) is nn.Linear}
    num_packed = len(linears)
    for names in _SAME_INPUT:
        group = [linears[name] for name in names if name in linears]
        if len(group) == len(names) and _can_join(group):
            _pack(module, {name: linears.pop(name) for name in names})
    for name, linear in linears.items():
        _pack(module, {name: linear})
    for child in module.children():
        num_packed += pack_linear_layers(child)
    return num_packed


def _can_join(linears: list[nn.Linear]) -> bool:
    """Whether layers can be one product."""
    first = linears[0]
    return all(
        one.in_features == first.in_features and (one.bias is None) == (first.bias is None)
        for one in linears
    )


def _pack(module: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Replace layers of ``module`` by ones that share a product."""
    shared = SharedInput(list(linears.values()))
    for index, (name, linear) in enumerate(linears.items()):
        setattr(module, name, PackedLinear(linear, shared, index))
