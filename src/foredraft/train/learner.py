"""What a run trains: heads of any kind, or a draft model, behind one face for the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foredraft.heads.checkpoint import save_head
from foredraft.heads.draft_model import KeptLayers, save_draft
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.output_law import OutputLaw
from foredraft.heads.recurrent import RecurrentHead
from foredraft.train.features import Batch
from foredraft.train.parallel import medusa_losses
from foredraft.train.rerun import draft_losses
from foredraft.train.unroll import Losses, Options, losses

if TYPE_CHECKING:
    from foredraft.model.loader import Target


class Learner(ABC):
    """Something that learns to draft for a target.

    Attributes:
        module: Whose parameters that need gradients are learnt.
        feature_layers: Indices into ``hidden_states`` that it reads; the last is at hand anyway.
        num_levels: Levels that it has by itself; 0 where the run decides.
    """

    module: nn.Module
    feature_layers: tuple[int, ...]
    num_levels: int = 0

    def __init__(self, target: Target) -> None:
        """Take hold of the target's two ends."""
        self.target = target
        self._embed = target.model.get_input_embeddings()
        self._output = OutputLaw.of(target.model)

    @property
    @abstractmethod
    def d2t(self) -> torch.Tensor:
        """int64 [draft_vocab_size], its words, as offsets."""

    @abstractmethod
    def losses(self, batch: Batch, options: Options) -> Losses:
        """What comes of a batch."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it so that it can be drafted with."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""


class HeadLearner(Learner):
    """A head.

    Args:
        head: In float32, with what it is to begin from.
        target: Loaded with its layers as they are (``load_target(..., packs=False)``).
    """

    def __init__(self, head: RecurrentHead | MedusaHead, target: Target) -> None:
        """Take it."""
        super().__init__(target)
        self.module = self.head = head
        self.feature_layers = head.shape.feature_layers
        self.num_levels = head.shape.num_levels  # Medusa has as many as heads

    @property
    def d2t(self) -> torch.Tensor:
        """See ``Learner``."""
        return self.head.d2t

    def losses(self, batch: Batch, options: Options) -> Losses:
        """See ``Learner``."""
        if isinstance(self.head, MedusaHead):
            return medusa_losses(self.head, batch, self._output, options)
        return losses(self.head, batch, self._embed, self._output, options)

    def save(self, folder: Path) -> None:
        """See ``Learner``."""
        save_head(self.head, folder, self.target.name, self.target.model.config)

    def identity(self) -> dict[str, Any]:
        """See ``Learner``."""
        shape = self.head.shape
        return {
            "kind": shape.kind,
            "hidden_size": shape.hidden_size,
            "draft_vocab_size": shape.draft_vocab_size,
            "feature_layers": list(shape.feature_layers),
        }


class DraftLearner(Learner):
    """A draft model of some of the target's layers.

    Args:
        draft: It.
        target: As for ``HeadLearner``.
        with_embedding: Write it with its embedding, for other programs, and not without, for
            foredraft alone.
    """

    def __init__(self, draft: KeptLayers, target: Target, with_embedding: bool) -> None:
        """Take it."""
        super().__init__(target)
        self.draft, self._with_embedding = draft, with_embedding
        self.module = draft.model
        self.feature_layers = (int(target.model.config.num_hidden_layers),)

    @property
    def d2t(self) -> torch.Tensor:
        """See ``Learner``."""
        return self.draft.d2t

    def losses(self, batch: Batch, options: Options) -> Losses:
        """See ``Learner``."""
        return draft_losses(self.draft, batch, self._output, options)

    def save(self, folder: Path) -> None:
        """See ``Learner``."""
        save_draft(self.draft, folder, self.target, self._with_embedding)

    def identity(self) -> dict[str, Any]:
        """See ``Learner``."""
        return {
            "kind": "draft-model",
            "kept_layers": list(self.draft.layers),
            "draft_vocab_size": len(self.draft.d2t),
        }
