"""Attention that reads block tables in place: PyTorch's FlexAttention over all keys of a layer.

One call serves every row of a step. Its keys are the whole store; a block mask says which blocks a
stretch of rows reads at all, and a rule which keys of these a row sees: those of its own request's
blocks, committed ones within the window, and of the step's own rows its ancestors (a prompt's rows
are a chain). A block that several requests share holds the same positions for all of them.

On CUDA the call is compiled, and visits the blocks that are named alone. Elsewhere it is written
out: the plain twin, which tests compare with the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex

from foredraft.model.attention import AttentionOptions
from foredraft.model.kv_cache import KVCache
from foredraft.tree.tree import ancestors, depths
from foredraft.types import Int64Array, StepPlan
from foredraft.upload import upload

_QUERY_ROWS = 128
"""Rows of a stretch for which the blocks are named together."""


@dataclass(frozen=True, slots=True)
class Room:
    """The shape of a pass that is filled up, so that passes of one shape serve many steps.

    Attributes:
        num_rows: Rows; those beyond a step's own repeat its last.
        num_segments: Requests; those beyond a step's own have no rows.
    """

    num_rows: int
    num_segments: int


class PagedAttention:
    """The rows of one step, and what each sees of the blocks.

    Args:
        plan: Who runs.
        trees: Parents of each segment's draft nodes.
        cache: Block tables (``kv_blocks.BlockKVCache``), with the step's rows reserved.
        device: Where the model lies.
        room: To which it is filled up; ``None`` leaves it as it is.
    """

    def __init__(
        self,
        plan: StepPlan,
        trees: Sequence[Int64Array],
        cache: KVCache,
        device: torch.device,
        room: Room | None = None,
    ) -> None:
        """Write down who owns which block, and what a row sees of its own step."""
        self._device = device
        block_rows: int = cache.block_rows  # type: ignore[attr-defined]
        self._block_rows = block_rows
        self._num_keys = cache.flat(0)[0].shape[0]
        sizes = [s.num_rows + len(tree) for s, tree in zip(plan.segments, trees, strict=True)]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        num_rows, widest = int(ends[-1]), max(sizes)
        if room is not None:
            widest = room.num_rows
        num_segments = len(sizes) if room is None else room.num_segments
        owner = np.repeat(np.arange(len(sizes)), sizes)
        position = np.empty(num_rows, dtype=np.int64)
        seen = np.zeros((num_rows, widest), dtype=np.bool_)
        new_depth = np.zeros((num_segments, widest), dtype=np.int64)
        num_blocks = self._num_keys // block_rows
        # A block of a request begins at this row of its text; -1 is not its own.
        begins = np.full((num_segments, num_blocks), -1, dtype=np.int64)
        starts = np.zeros(num_segments, dtype=np.int64)
        blocks: list[Int64Array] = []
        for index, (segment, tree) in enumerate(zip(plan.segments, trees, strict=True)):
            first, size = int(ends[index]), sizes[index]
            below = depths(tree)[1:]
            # Rows of a prompt, or the root, are a chain; draft nodes stand below its last.
            depth = np.concatenate([np.arange(segment.num_rows), segment.num_rows - 1 + below])
            position[first : first + size] = segment.start + depth
            new_depth[index, :size] = depth
            starts[index] = segment.start
            own = seen[first : first + size, :size]
            own[: segment.num_rows, : segment.num_rows] = np.tri(segment.num_rows, dtype=np.bool_)
            if len(tree):
                own[segment.num_rows :, : segment.num_rows] = True
                own[segment.num_rows :, segment.num_rows :] = ancestors(tree)[1:, 1:]
            table = cache.block_table(segment.slot)  # type: ignore[attr-defined]
            used = np.array(table[: -(-(segment.start + size) // block_rows)], dtype=np.int64)
            begins[index, used] = np.arange(len(used)) * block_rows
            blocks.append(used)
        if room is not None:
            owner, position, seen = (filled(rows, room) for rows in (owner, position, seen))
            ends[-1] = room.num_rows
        self._num_rows = len(owner)
        counts, named = _named_blocks(ends, blocks, num_blocks)
        self._owner = self._tensor(owner)
        self._position = self._tensor(position)
        self._seen = self._tensor(seen)
        self._new_depth = self._tensor(new_depth)
        self._begins = self._tensor(begins)
        self._starts = self._tensor(starts)
        self._counts = self._tensor(counts)
        self._named = self._tensor(named)
        self._masks: dict[int | None, Any] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a step's attention goes by; of one shape for all steps of one room."""
        return [
            self._owner,
            self._position,
            self._seen,
            self._new_depth,
            self._begins,
            self._starts,
            self._counts,
            self._named,
        ]

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend to the blocks.

        Args:
            query: [1, num_heads, T, key_dim].
            keys: The layer's store, [N, num_kv_heads, key_dim].
            values: [N, num_kv_heads, value_dim].
            options: What the layer asks.

        Returns:
            [1, T, num_heads, value_dim].
        """
        window = options.sliding_window
        if window not in self._masks:
            self._masks[window] = self.block_mask(window)
        out, aux = _call(query.device.type)(
            query,
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            score_mod=None if options.softcap is None else _capped(options.softcap),
            block_mask=self._masks[window],
            scale=options.scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
            return_aux=flex.AuxRequest(lse=True),
        )
        if options.sinks is not None:  # one more logit in the sum below, which gives nothing
            share = torch.sigmoid(aux.lse - options.sinks.to(aux.lse.dtype).view(1, -1, 1))
            out = out * share[..., None].to(out.dtype)
        found: torch.Tensor = out.transpose(1, 2)
        return found

    def block_mask(self, window: int | None) -> Any:
        """Which blocks each stretch of rows reads, and which of their keys a row sees."""
        return flex.BlockMask.from_kv_blocks(
            self._counts,
            self._named,
            BLOCK_SIZE=(_QUERY_ROWS, self._block_rows),
            mask_mod=self._rule(window),
            seq_lengths=(self._num_rows, self._num_keys),
            compute_q_blocks=False,
        )

    def _rule(self, window: int | None) -> Callable[..., torch.Tensor]:
        """What a row sees, as FlexAttention asks it: for one row and one key of the store."""
        owner, position, seen = self._owner, self._position, self._seen
        begins, starts, new_depth = self._begins, self._starts, self._new_depth
        block_rows, last, widest = self._block_rows, len(position) - 1, seen.shape[1]

        def rule(
            batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            row = row.clamp(max=last)
            who = owner[row]
            begin = begins[who, key // block_rows]
            place = begin + key % block_rows  # the key's row in the request's own text
            new = place - starts[who]  # which of the step's own rows it is, from 0
            own = new.clamp(0, widest - 1)
            is_seen = torch.where(new < 0, True, (new < widest) & seen[row, own])
            at = torch.where(new < 0, place, starts[who] + new_depth[who, own])
            is_seen = is_seen & (begin >= 0)
            return is_seen if window is None else is_seen & (at > position[row] - window)

        return rule

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return upload(array, self._device)


def filled(rows: np.ndarray[Any, Any], room: Room) -> np.ndarray[Any, Any]:
    """Rows [T, ...], the last one repeated until there are ``room.num_rows``."""
    missing = room.num_rows - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def _named_blocks(
    ends: Int64Array, blocks: Sequence[Int64Array], num_blocks: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How many blocks each stretch of rows reads, and which: [1, 1, P], [1, 1, P, num_blocks]."""
    num_stretches = -(-int(ends[-1]) // _QUERY_ROWS)
    counts = np.zeros((1, 1, num_stretches), dtype=np.int32)
    named = np.zeros((1, 1, num_stretches, num_blocks), dtype=np.int32)
    for stretch in range(num_stretches):
        first, end = stretch * _QUERY_ROWS, (stretch + 1) * _QUERY_ROWS
        is_in = (ends[:-1] < end) & (ends[1:] > first)
        own = np.unique(np.concatenate([blocks[i] for i in np.nonzero(is_in)[0].tolist()]))
        counts[0, 0, stretch] = len(own)
        named[0, 0, stretch, : len(own)] = own
    return counts, named


def contained(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which a broken one shows in its own request alone.

    One call reads all requests. A key that is not finite does no harm to those that do not see it:
    their scores are replaced. A value would, for nothing times NaN is NaN; so it becomes zero, and
    its key NaN.

    Shapes: key and value [1, num_kv_heads, T, dim].
    """
    is_broken = ~torch.isfinite(value).all(dim=-1, keepdim=True)
    return key.masked_fill(is_broken, torch.nan), torch.nan_to_num(value, 0.0, 0.0, 0.0)


@functools.cache
def _call(device_type: str) -> Callable[..., Any]:
    """FlexAttention, compiled where there is a kernel to compile it to."""
    if device_type != "cuda":
        return flex.flex_attention
    return torch.compile(flex.flex_attention, dynamic=True)


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped
