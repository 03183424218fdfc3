"""The target's side of a batch: embeddings, features, and what it would write next."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        max_batch: Texts that the target reads at once.
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
        self.owner = f"{target.name} {self._kept} {_mark(target.model)} {target.dtype}"
        self._runner = Runner(target, self._cache, self._kept)
        self.store: FeatureStore | None = None
        if keep_in is not None:
            width = self._size * len(self._kept)
            new_bytes = num_tokens * width * torch.bfloat16.itemsize
            self.store = FeatureStore(keep_in, width, keep_bytes, new_bytes, self.owner)

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> Batch:
        """The batch of some texts."""
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
        """Run the target over all texts, as many at once as there are slots."""
        most = len(self._slots)
        parts = [texts[first : first + most] for first in range(0, len(texts), most)]
        return [rows for part in parts for rows in self._run(part)]

    def _run(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        segments = []
        plain = SpeculationParams(PLAIN, 0)
        for slot, text in zip(self._slots[: len(texts)], texts, strict=True):
            ids = text.token_ids
            request = Request("train", ids, SamplingParams(), plain, 0, len(ids), frozenset())
            segments.append(Segment(request, ids, slot, 0, len(ids), is_decode=False))
        out = self._runner.forward(StepPlan(tuple(segments)), DraftBatch.empty(len(segments)))
        joined = torch.cat([out.hidden_states[layer] for layer in self._kept], dim=-1)
        return list(joined.split([len(text.token_ids) for text in texts]))


def _mark(model: Any) -> str:
    """Tells a model's weights from others': a hash of some numbers of every tensor."""
    found = hashlib.sha256(torch.__version__.encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // 61)].float().cpu().contiguous()
        found.update(name.encode())
        found.update(some.numpy().tobytes())
    return found.hexdigest()[:24]
