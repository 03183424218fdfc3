"""From a hidden state to the target's logits, with what its family does to them on the way.

Most targets multiply by the output layer's weight, and that is all. Some add a bias, some scale
the logits (Granite divides, Cohere multiplies), some cap them (Gemma 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LogitShape:
    """What a family does to logits.

    Attributes:
        scale: Factor.
        cap: They become ``cap * tanh(logits / cap)``; ``None`` leaves them.
    """

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """That of a target's Transformers config."""
        divisor = getattr(config, "logits_scaling", None)
        factor = getattr(config, "logit_scale", None)
        cap = getattr(config, "final_logit_softcapping", None)
        scale = (1 / float(divisor) if divisor else 1.0) * (float(factor) if factor else 1.0)
        return cls(scale, float(cap) if cap else None)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logits."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def behind(self, output: Logits) -> Logits:
        """An output layer, and this."""
        if self == LogitShape():
            return output
        return lambda hidden: self(output(hidden))


@dataclass(frozen=True, slots=True)
class OutputLaw:
    """The whole of it, to learn from.

    Attributes:
        weight: [num_words, hidden_size].
        bias: [num_words], or ``None``.
        shape: Of the logits.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    shape: LogitShape = LogitShape()

    @classmethod
    def of(cls, model: Any) -> OutputLaw:
        """That of a Transformers model, whose layers are as they were loaded."""
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        weight = layer.weight.detach()
        return cls(weight, None if bias is None else bias.detach(), LogitShape.of(model.config))

    def only(self, target_ids: torch.Tensor | None) -> OutputLaw:
        """For some words alone; ``None`` for all."""
        if target_ids is None:
            return self
        bias = None if self.bias is None else self.bias[target_ids]
        return OutputLaw(self.weight[target_ids], bias, self.shape)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to logits [..., num_words]."""
        return self.shape(functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))
