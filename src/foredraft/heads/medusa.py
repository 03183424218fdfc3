"""Medusa: several heads beside the target's own, each for a token further ahead.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774. Head ``k`` reads the target's last hidden state (after its last norm) of token
``i`` and guesses token ``i + 2 + k``, knowing nothing of the tokens between. Module names are those
of the public checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from foredraft.heads.shape import HeadShape


class Residual(nn.Module):
    """A square layer beside the identity; it begins as the identity."""

    def __init__(self, size: int) -> None:
        """Make it."""
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same."""
        out: torch.Tensor = x + functional.silu(self.linear(x))
        return out


class MedusaHead(nn.ModuleList):
    """All heads of a target. Exact, like every drafter's; cost: all of them, once a draft.

    Args:
        shape: Of kind ``medusa``; ``num_levels`` heads.

    Attributes:
        shape: Its sizes.
        d2t: int64 [draft_vocab_size], what to add to a word of the heads to get the target's id.
    """

    d2t: torch.Tensor

    def __init__(self, shape: HeadShape) -> None:
        """Make them."""
        size, words = shape.hidden_size, shape.draft_vocab_size
        super().__init__(
            nn.Sequential(Residual(size), nn.Linear(size, words, bias=False))
            for _ in range(shape.num_levels)
        )
        self.shape = shape
        self.register_buffer("d2t", torch.zeros(words, dtype=torch.int64), persistent=False)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft_vocab_size], the target's id of each word of the heads."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to the logits of all heads, [n, num_levels, draft_vocab_size]."""
        return torch.stack([head(features) for head in self], dim=1)
