"""The one layer that EAGLE and MTP heads have: Llama's, with an input width of its own.

How rows attend to each other is the caller's: drafting keeps keys and values in slots and goes by
trees, training unrolls several levels at once. So attention comes in as an argument.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb


class Attend(Protocol):
    """Attention between rows, some of which may lie elsewhere."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [B, num_heads, n, key_dim], rotated.
            key: [B, num_kv_heads, n, key_dim], rotated.
            value: [B, num_kv_heads, n, value_dim].
            scaling: Factor on the scores; ``None`` is ``key_dim ** -0.5``.

        Returns:
            [B, n, num_heads * value_dim].
        """
        ...


class Projections(nn.Module):
    """Query, key, value and output of a layer.

    Args:
        config: Sizes.
        input_size: Width of what queries, keys and values are made from.
    """

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        """Make them."""
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """Attention of rows [B, n, input_size]; ``rotation`` is cosine and sine, [B, n, dim]."""
        batch, num_rows, _ = x.shape
        query = self.q_proj(x).view(batch, num_rows, self.num_heads, self.head_dim)
        key = self.k_proj(x).view(batch, num_rows, self.num_kv_heads, self.head_dim)
        value = self.v_proj(x).view(batch, num_rows, self.num_kv_heads, self.head_dim)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotation)
        out: torch.Tensor = self.o_proj(attend(query, key, value.transpose(1, 2)))
        return out


class FeedForward(LlamaMLP):
    """Transformers' own, under a name that says what it is."""
