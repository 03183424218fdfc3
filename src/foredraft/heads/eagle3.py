"""EAGLE-3: low, middle and high features fused, words of its own, fed back before its norm.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv 2503.01840. Module names are those of the public checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.heads.layer import Attend, FeedForward, Projections
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.heads.shape import HeadShape


class MidLayer(nn.Module):
    """The layer: attention reads the normalised embedding beside the normalised hidden state."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        """Make it."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Projections(config, 2 * size)
        self.mlp = FeedForward(config)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self._norm_before_residual = norm_before_residual

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run it, [B, n, hidden_size]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        hidden = residual + self.self_attn(both, rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(RecurrentHead):
    """An EAGLE-3 head. Exact, like every drafter's; cost: the layer and its words, once a level.

    Args:
        shape: Of kind ``eagle3``.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Make it."""
        super().__init__(shape)
        size, width = shape.hidden_size, shape.target_hidden_size
        self.fc = nn.Linear(shape.num_features, size, bias=False)
        self.midlayer = MidLayer(shape.as_llama(), shape.norm_before_residual)
        self.norm = LlamaRMSNorm(size, shape.rms_norm_eps)
        if not shape.shares_output:
            self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = LlamaRMSNorm(shape.num_features, shape.rms_norm_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(width, shape.rms_norm_eps) for _ in shape.feature_layers
            )

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Three features of a token become one."""
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm:
            parts = features.split(self.shape.target_hidden_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def level(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layer once; what comes out is normalised where ``norm_output`` says so alone."""
        out: torch.Tensor = self.midlayer(hidden, embeds, rotation, attend)
        return self.norm(out) if self.shape.norm_output else out

    def logits(self, hidden: torch.Tensor, output: Output | None) -> torch.Tensor:
        """By its own words, or by the target's output layer."""
        hidden = hidden if self.shape.norm_output else self.norm(hidden)
        if self.shape.has_output:
            found: torch.Tensor = self.lm_head(hidden)
            return found
        assert output is not None
        return output(hidden)
