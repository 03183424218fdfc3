"""The target's side of a batch: embeddings, features, and what it would write next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.model.kv_cache import ContiguousKVCache
from foredraft.model.loader import Target
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN
from foredraft.train.texts import Text
from foredraft.types import DraftBatch, Request, Segment, StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts, padded on the right, and what the target makes of them.

    Attributes:
        token_ids: int64 [B, n].
        is_real: bool [B, n].
        is_answer: bool [B, n], tokens of answers.
        features: [B, n, num_features].
        final: [B, n, hidden_size], what the target's output layer reads.
    """

    token_ids: torch.Tensor
    is_real: torch.Tensor
    is_answer: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor


class FeatureReader:
    """Runs the target over whole texts.

    Args:
        target: Loaded.
        layers: Indices into ``hidden_states`` that a head reads.
        max_len: Longest text.
        max_batch: Most texts at once.
    """

    def __init__(
        self, target: Target, layers: tuple[int, ...], max_len: int, max_batch: int = 256
    ) -> None:
        """Reserve a cache that each pass fills anew."""
        self._target, self._layers = target, layers
        self._last = int(target.model.config.num_hidden_layers)
        self._cache = ContiguousKVCache(
            target.layers, max_batch, max_len, target.dtype, target.device
        )
        self._slots = [self._cache.allocate() for _ in range(max_batch)]
        wanted = tuple(sorted({*layers, self._last}))
        self._runner = Runner(target, self._cache, wanted)

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> Batch:
        """The batch of some texts, no more than ``max_batch``."""
        segments = []
        plain = SpeculationParams(PLAIN, 0)
        for slot, text in zip(self._slots, texts, strict=False):
            ids = text.token_ids
            request = Request("train", ids, SamplingParams(), plain, 0, len(ids), frozenset())
            segments.append(Segment(request, ids, slot, 0, len(ids), is_decode=False))
        out = self._runner.forward(StepPlan(tuple(segments)), DraftBatch.empty(len(segments)))
        sizes = [len(text.token_ids) for text in texts]
        most, device = max(sizes), self._target.device
        shape = (len(texts), most)
        token_ids = torch.zeros(shape, dtype=torch.int64)
        is_real = torch.zeros(shape, dtype=torch.bool)
        is_answer = torch.zeros(shape, dtype=torch.bool)
        for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
            token_ids[row, :size] = torch.from_numpy(text.token_ids)
            is_real[row, :size] = True
            is_answer[row, text.num_prompt : size] = True
        joined = torch.cat([out.hidden_states[layer] for layer in self._layers], dim=-1)
        return Batch(
            token_ids.to(device),
            is_real.to(device),
            is_answer.to(device),
            _padded(joined, sizes, most),
            _padded(out.hidden_states[self._last], sizes, most),
        )


def _padded(rows: torch.Tensor, sizes: Sequence[int], most: int) -> torch.Tensor:
    """Rows [T, d] of texts, one behind the other, as [B, most, d] in float32."""
    found = rows.new_zeros((len(sizes), most, rows.shape[-1]), dtype=torch.float32)
    ends = np.cumsum(sizes).tolist()
    for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        found[index, :size] = rows[end - size : end]
    return found
