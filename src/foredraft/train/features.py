"""The target's side of a batch: embeddings, features, and what it would write next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.model.kv_cache import ContiguousKVCache
from foredraft.model.loader import Target
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN
from foredraft.train.feature_store import FeatureStore
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
        keep_in: Folder to keep features in; ``None`` computes them each time.
        keep_bytes: Most bytes of them.
        num_tokens: Of all texts that will be read; no more than theirs is asked of the disk.
        keep_layers: Layers to keep besides, for heads of other kinds.
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        max_len: int,
        max_batch: int = 256,
        keep_in: Path | None = None,
        keep_bytes: int = 0,
        num_tokens: int = 0,
        keep_layers: tuple[int, ...] = (),
    ) -> None:
        """Reserve a cache that each pass fills anew."""
        self._target, self._layers = target, layers
        self._last = int(target.model.config.num_hidden_layers)
        self._cache = ContiguousKVCache(
            target.layers, max_batch, max_len, target.dtype, target.device
        )
        self._slots = [self._cache.allocate() for _ in range(max_batch)]
        self._kept = tuple(sorted({*layers, *keep_layers, self._last}))
        self._size = int(target.model.config.hidden_size)
        self._runner = Runner(target, self._cache, self._kept)
        self.store: FeatureStore | None = None
        if keep_in is not None:
            width = self._size * len(self._kept)
            most = min(keep_bytes, num_tokens * width * torch.bfloat16.itemsize)
            self.store = FeatureStore(keep_in, width, most, self._owner())

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> Batch:
        """The batch of some texts, no more than ``max_batch``."""
        rows = self._rows(texts)
        sizes = [len(text.token_ids) for text in texts]
        most, device = max(sizes), self._target.device
        shape = (len(texts), most)
        token_ids = torch.zeros(shape, dtype=torch.int64)
        is_real = torch.zeros(shape, dtype=torch.bool)
        is_answer = torch.zeros(shape, dtype=torch.bool)
        states = torch.zeros((*shape, self._size * len(self._kept)), device=device)
        for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
            token_ids[row, :size] = torch.from_numpy(text.token_ids)
            is_real[row, :size] = True
            is_answer[row, text.num_prompt : size] = True
            states[row, :size] = rows[row]
        by_layer = dict(zip(self._kept, states.split(self._size, dim=-1), strict=True))
        return Batch(
            token_ids.to(device),
            is_real.to(device),
            is_answer.to(device),
            torch.cat([by_layer[layer] for layer in self._layers], dim=-1),
            by_layer[self._last],
        )

    def _rows(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """The hidden states of each text, side by side, [num_tokens, kept layers * hidden_size]."""
        if self.store is None:
            return self._compute(texts)
        found = [self.store.get(text) for text in texts]
        missing = [index for index, rows in enumerate(found) if rows is None]
        if missing:
            new = [texts[index] for index in missing]
            computed = [rows.to(torch.bfloat16) for rows in self._compute(new)]
            self.store.put(new, [rows.cpu() for rows in computed])
            for index, rows in zip(missing, computed, strict=True):
                found[index] = rows
        return [rows for rows in found if rows is not None]

    def _compute(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """Run the target."""
        segments = []
        plain = SpeculationParams(PLAIN, 0)
        for slot, text in zip(self._slots, texts, strict=False):
            ids = text.token_ids
            request = Request("train", ids, SamplingParams(), plain, 0, len(ids), frozenset())
            segments.append(Segment(request, ids, slot, 0, len(ids), is_decode=False))
        out = self._runner.forward(StepPlan(tuple(segments)), DraftBatch.empty(len(segments)))
        joined = torch.cat([out.hidden_states[layer] for layer in self._kept], dim=-1)
        return list(joined.split([len(text.token_ids) for text in texts]))

    def _owner(self) -> str:
        """What tells these features from another target's, or from another build's."""
        model = self._target.model
        mark = float(model.get_output_embeddings().weight.detach().double().sum())
        return f"{self._target.name} {self._kept} {self._target.dtype} {mark!r} {torch.__version__}"
