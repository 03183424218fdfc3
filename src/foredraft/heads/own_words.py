"""The target's output layer for some of its words alone.

A head that drafts by the target's own output layer reads all of its rows at every level, and most
of them are words that are hardly ever written. Kept for the commonest words alone (FR-Spec, arXiv
2502.14856), it costs a fraction; what it cannot draft the target writes itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_ROWS = 256
"""Inputs that the layer is asked about at once."""


@torch.no_grad()
def output_for(
    output: Callable[[torch.Tensor], torch.Tensor], target_ids: torch.Tensor, like: torch.Tensor
) -> nn.Linear:
    """An output layer for some words.

    The layer is asked for its weights, not read: it may be laid out in any way.

    Args:
        output: The target's, [n, hidden_size] to [n, vocab_size].
        target_ids: int64 [num_words].
        like: [hidden_size, 0] or larger, of the type and on the device that it computes with.
    """
    size = like.shape[0]
    bias = output(like.new_zeros(1, size))[0, target_ids]
    # Beside a bias a weight would be rounded to the bias's precision, so it is asked for large.
    large = 1.0
    if bias.any():
        large = 2.0**8 if like.dtype == torch.float16 else 2.0**16
    found = nn.Linear(size, len(target_ids), device=like.device, dtype=like.dtype)
    for first in range(0, size, _ROWS):
        count = min(_ROWS, size - first)
        inputs = like.new_zeros(count, size)
        inputs[torch.arange(count), first + torch.arange(count)] = large
        asked = (output(inputs)[:, target_ids] - bias).T / large
        found.weight[:, first : first + count] = asked
    if bias.any():
        found.bias.copy_(bias)
    else:
        found.bias = None  # type: ignore[assignment]
    return found.requires_grad_(False)


class SomeWords(nn.Module):
    """An output layer over all words that knows some of them: the others are never said.

    Args:
        inner: Of the words alone.
        target_ids: int64 [num_words], which they are.
        vocab_size: Of all.
    """

    target_ids: torch.Tensor

    def __init__(self, inner: nn.Module, target_ids: torch.Tensor, vocab_size: int) -> None:
        """Hold it."""
        super().__init__()
        self.inner = inner
        self.out_features = vocab_size
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., vocab_size]."""
        found = self.inner(x)
        out = found.new_full((*found.shape[:-1], self.out_features), -torch.inf)
        return out.index_copy_(-1, self.target_ids, found)
