"""Multi-token prediction: a whole layer of the target's kind over both inputs, each normalised.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. One module, run again
for every level (FastMTP trains it that way, arXiv 2509.18362). What the checkpoints disagree on is
which of the two inputs the projection reads first: ``HeadShape.hidden_first``. The next level reads
the hidden state from before the last norm.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.heads.eagle import FirstLayer
from foredraft.heads.layer import Attend
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.heads.shape import HeadShape


class MtpLayer(FirstLayer):
    """Llama's layer with its first norm."""

    def __init__(self, shape: HeadShape) -> None:
        """Make it."""
        config = shape.as_llama()
        super().__init__(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """Run it, [B, n, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class MtpHead(RecurrentHead):
    """An MTP module. Exact, like every drafter's; cost: the layer and the output layer, a level.

    Args:
        shape: Of kind ``mtp``, which reads one layer.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Make it."""
        super().__init__(shape)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm = LlamaRMSNorm(size, eps)
        self.hnorm = LlamaRMSNorm(shape.num_features, eps)
        self.eh_proj = nn.Linear(size + shape.num_features, size, bias=False)
        self.layer = MtpLayer(shape)
        self.norm = LlamaRMSNorm(size, eps)

    def level(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layer once; what comes out is not normalised."""
        parts = [self.enorm(embeds), self.hnorm(hidden)]
        if self.shape.hidden_first:
            parts.reverse()
        out: torch.Tensor = self.layer(self.eh_proj(torch.cat(parts, dim=-1)), rotation, attend)
        return out

    def logits(self, hidden: torch.Tensor, output: Output | None) -> torch.Tensor:
        """By the target's output layer, after a norm of its own."""
        assert output is not None
        return output(self.norm(hidden))
