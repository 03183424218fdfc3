"""What EAGLE, EAGLE-3 and MTP heads have in common: one layer, run again for every level.

Row ``i`` of a text pairs the target's feature of token ``i`` with the embedding of token ``i + 1``
and predicts token ``i + 2``; its rotary position is ``i``. The next level feeds the row's own
output back in place of a feature, with the token that was drafted, one position further.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft.heads.layer import Attend
from foredraft.heads.shape import HeadShape

Output = Callable[[torch.Tensor], torch.Tensor]
"""The target's own output layer: [..., hidden_size] to [..., vocab_size]."""


class RecurrentHead(nn.Module):
    """A head that drafts level by level.

    Args:
        shape: Its sizes.

    Attributes:
        shape: Its sizes.
        d2t: int64 [draft_vocab_size], what to add to a word of the head to get the target's id.
    """

    d2t: torch.Tensor

    def __init__(self, shape: HeadShape) -> None:
        """Make what all have."""
        super().__init__()
        self.shape = shape
        self.rotary = LlamaRotaryEmbedding(shape.as_llama())
        offsets = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", offsets, persistent=False)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft_vocab_size], the target's id of each word of the head."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Key heads of the layer, and the sizes of a key and of a value."""
        return self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """What the layer reads of the target: [..., num_features] to [..., hidden_size].

        A single feature is read as it is.
        """
        return features

    @abstractmethod
    def level(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layer once.

        Args:
            hidden: [B, n, hidden_size], fused features, or what the level before gave.
            embeds: [B, n, hidden_size], the target's embedding of the tokens that came after.
            rotation: Of the rows' positions, see :meth:`rotate`.
            attend: Attention.

        Returns:
            [B, n, hidden_size]: what the next level reads, and :meth:`logits`.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor, output: Output | None) -> torch.Tensor:
        """[..., hidden_size] of a level to [..., draft_vocab_size].

        ``output`` is the target's output layer, for heads that have none of their own.
        """

    def rotate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of positions, int64 [B, n]."""
        like = torch.empty(0, dtype=next(self.parameters()).dtype, device=positions.device)
        cosine, sine = self.rotary(like, positions)
        return cosine, sine

    def forward(self, *args: object) -> torch.Tensor:
        """Heads are run by level."""
        raise NotImplementedError("run level() and logits()")
