"""EAGLE-1 and 2: the target's last feature beside the next token's embedding, and its own output.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077,
and "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv 2406.16858, which
drafts with the same weights. The feature is the one after the target's last norm: what its output
layer reads. The layer has no norm before its attention, and none stands before the output layer.
Module names are those of the public checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.heads.layer import Attend, FeedForward, Projections
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.heads.shape import HeadShape


class FirstLayer(nn.Module):
    """Llama's layer without its first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make it."""
        super().__init__()
        self.self_attn = Projections(config, config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """Run it, [B, n, hidden_size]."""
        hidden = hidden + self.self_attn(hidden, rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(RecurrentHead):
    """An EAGLE head. Exact, like every drafter's; cost: the layer and the target's output, a level.

    Args:
        shape: Of kind ``eagle``, which reads one layer.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Make it."""
        super().__init__(shape)
        size = shape.hidden_size
        self.fc = nn.Linear(size + shape.num_features, size, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList([FirstLayer(shape.as_llama())])

    def level(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layer once; what comes out stands for the target's next feature."""
        out: torch.Tensor = self.layers[0](
            self.fc(torch.cat([embeds, hidden], dim=-1)), rotation, attend
        )
        return out

    def logits(self, hidden: torch.Tensor, output: Output | None) -> torch.Tensor:
        """By the target's output layer."""
        assert output is not None
        return output(hidden)
