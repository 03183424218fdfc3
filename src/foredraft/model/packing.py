"""One step as one flat, ragged pass: which rows belong to whom, who sees what, where KV goes.

Rows come in segment order; a segment's rows are its committed tokens and then its draft nodes.
Decode segments whose slots can be read together share one attention call; a prompt chunk has its
own. Where blocks are read in place (``paged_attention``), one call serves all.
Masks are made once a step and window, not once a layer, and windows are measured in positions.

Decode rows attend to their keys rounded up to whole blocks, the rest masked. The kernels add up the
keys of a block in a fixed order, so a row's result then does not depend, to the last bit, on how
many draft nodes stand behind it. With matrix products of which the same holds (oneDNN's bfloat16
products on AMX, up to 32 rows, as measured) a pass over a draft gives the very bits of plain
decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.model.attention import AttentionOptions, attend_causal, attend_folded
from foredraft.model.kv_cache import ROW_BLOCK, KVCache
from foredraft.model.paged_attention import PagedAttention, Room, contained, filled
from foredraft.tree.tree import ancestors, depths
from foredraft.types import DraftBatch, Int64Array, StepPlan
from foredraft.upload import upload

_CALL_COST = 8192
"""What an attention call costs beside its work, in pairs of a row and a key: requests share a call
where padding them to one shape costs less than a call of their own. Measured with nine heads of 64;
larger models gain by more calls than this makes, smaller ones by fewer."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prompt chunk: ``num_rows`` rows from ``first_row`` of the pass, from position ``start``."""

    slot: int
    first_row: int
    num_rows: int
    start: int


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode segments whose slots are read together: ``segments`` indexes the plan."""

    slots: tuple[int, ...]
    segments: tuple[int, ...]
    first_row: int
    num_rows: tuple[int, ...]
    num_keys: tuple[int, ...]

    @property
    def most_rows(self) -> int:
        return max(self.num_rows)

    @property
    def most_keys(self) -> int:
        """Keys that the attention call reads: the most of any segment, in whole blocks."""
        return -(-max(self.num_keys) // ROW_BLOCK) * ROW_BLOCK

    @property
    def is_even(self) -> bool:
        return len(set(self.num_rows)) == 1


class PackedPass:
    """The rows of one step, and the attention between them and the cache.

    Args:
        plan: Who runs.
        drafts: What was proposed.
        cache: Where keys and values lie.
        device: Where the model lies.
        dtype: Of the model.
        is_paged: Whether attention reads block tables in place.
        room: To which a pass of decode segments that reads block tables is filled up; all of its
            rows have logits, the plan's own first.

    Raises:
        MemoryError: The cache has no room for the rows.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T].
        wanted_rows: int64 [R], rows whose logits are wanted: roots and draft nodes, then those of
            ``prompt_rows``; ``None`` where it is all of them, each once.
        logit_offsets: int64 [num_segments + 1] into the roots and draft nodes of R.
        prompt_rows: For segments whose prompt's log-probabilities are wanted, by index: their first
            row and the one behind their last.
        row_offsets: int64 [num_segments + 1] into the T rows.
    """

    def __init__(
        self,
        plan: StepPlan,
        drafts: DraftBatch,
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        is_paged: bool = False,
        room: Room | None = None,
    ) -> None:
        """Lay the rows out, and reserve them in the cache."""
        self._cache = cache
        self._device = device
        self._dtype = dtype
        trees = [
            drafts.parents[drafts.offsets[i] : drafts.offsets[i + 1]]
            for i in range(len(plan.segments))
        ]
        ids, positions, kv_rows, wanted = [], [], [], []
        row_offsets = [0]
        logit_offsets = [0]
        self.prompt_rows: dict[int, tuple[int, int]] = {}
        for index, segment in enumerate(plan.segments):
            tree = trees[index]
            first, num_nodes = row_offsets[-1], len(tree)
            end = segment.start + segment.num_rows
            ids.append(segment.token_ids[segment.start : end])
            positions.append(np.arange(segment.start, end))
            if num_nodes:
                ids.append(drafts.token_ids[drafts.offsets[index] : drafts.offsets[index + 1]])
                positions.append(segment.root_position + depths(tree)[1:])
            num_rows = segment.num_rows + num_nodes
            cache.reserve(segment.slot, segment.start, segment.start + num_rows)
            kv_rows.append(cache.flat_rows(segment.slot, segment.start, segment.start + num_rows))
            row_offsets.append(first + num_rows)
            if segment.wants_prompt_logits:
                self.prompt_rows[index] = (first, first + segment.num_rows)
            if segment.wants_pick:
                wanted.append(np.arange(first + segment.num_rows - 1, first + num_rows))
                logit_offsets.append(logit_offsets[-1] + 1 + num_nodes)
            else:
                logit_offsets.append(logit_offsets[-1])
        self.row_offsets: Int64Array = np.array(row_offsets, dtype=np.int64)
        self.logit_offsets: Int64Array = np.array(logit_offsets, dtype=np.int64)
        rows = [np.concatenate(part) for part in (ids, positions, kv_rows)]
        is_draft = self._which_are_drafts(trees)
        has_drafts = any(len(tree) for tree in trees)
        if room is not None:
            rows = [filled(part, room) for part in rows]
            is_draft = filled(is_draft, room)
        self.input_ids = self._tensor(rows[0][None])
        self.position_ids = self._tensor(rows[1][None])
        none = np.empty(0, dtype=np.int64)
        self.wanted_rows: torch.Tensor | None = None
        num_wanted = sum(len(part) for part in wanted)
        if room is None and (num_wanted < row_offsets[-1] or self.prompt_rows):
            spans = [np.arange(first, end) for first, end in self.prompt_rows.values()]
            self.wanted_rows = self._tensor(np.concatenate([none, *wanted, *spans]))
        self._kv_rows = self._tensor(rows[2]) if room is not None else self._stretch(rows[2])
        self._is_draft = self._tensor(is_draft) if has_drafts or room is not None else None
        self._paged: PagedAttention | None = None
        if is_paged:  # nothing of the plan is kept
            self._paged = PagedAttention(plan, trees, cache, device, room)
            return
        self._plan = plan
        self._trees = trees
        self._chunks, self._groups = self._group()
        self._places = [cache.locate(group.slots, group.most_keys) for group in self._groups]
        self._chunk_places = [
            cache.locate((chunk.slot,), chunk.start + chunk.num_rows) for chunk in self._chunks
        ]
        self._pad_rows = [None if g.is_even else self._padding(g) for g in self._groups]
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a pass with a room goes by; of one shape for all steps of that room."""
        assert self._paged is not None
        assert isinstance(self._kv_rows, torch.Tensor)
        assert self._is_draft is not None
        own = [self.input_ids, self.position_ids, self._kv_rows, self._is_draft]
        return own + self._paged.tensors

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the pass's keys and values of a layer and attend; see ``attention.Pass``."""
        keys, values = self._cache.flat(layer)
        if self._paged is not None:
            key, value = contained(key, value)
        self._write(keys, key)
        self._write(values, value)
        if self._paged is not None:
            return self._paged.attend(query, keys, values, options)
        num_heads, num_rows = query.shape[1], query.shape[2]
        if len(self._groups) == 1 and not self._chunks:
            return self._attend_group(0, query, layer, options)
        out = query.new_empty(1, num_rows, num_heads, values.shape[-1])
        for index, group in enumerate(self._groups):
            rows = slice(group.first_row, group.first_row + sum(group.num_rows))
            out[:, rows] = self._attend_group(index, query[:, :, rows], layer, options)
        for index, chunk in enumerate(self._chunks):
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            out[:, rows] = self._attend_chunk(
                index, query[:, :, rows], key[:, :, rows], value[:, :, rows], layer, options
            )
        return out

    def _write(self, store: torch.Tensor, new: torch.Tensor) -> None:
        """Write a layer's new keys or values; draft rows that are not finite count as zero.

        A masked key weighs nothing, but nothing times NaN is NaN: without this a wild draft token
        could spoil the rows beside it, which must not know of it.
        """
        rows = new[0].transpose(0, 1)
        if self._is_draft is not None:
            rows = torch.where(self._is_draft, torch.nan_to_num(rows, 0.0, 0.0, 0.0), rows)
        if isinstance(self._kv_rows, slice):
            store[self._kv_rows] = rows
        else:
            store.index_copy_(0, self._kv_rows, rows)

    def _stretch(self, kv_rows: Int64Array) -> slice | torch.Tensor:
        """Where the pass's rows are written: a slice where they lie one behind the other."""
        first, last = int(kv_rows[0]), int(kv_rows[-1])
        if last - first + 1 == len(kv_rows) and (np.diff(kv_rows) == 1).all():
            return slice(first, last + 1)
        return self._tensor(kv_rows)

    def _which_are_drafts(self, trees: Sequence[Int64Array]) -> NDArray[np.bool_]:
        """Which rows hold draft nodes, [T, 1, 1]."""
        is_draft = np.zeros((int(self.row_offsets[-1]), 1, 1), dtype=np.bool_)
        for end, tree in zip(self.row_offsets[1:], trees, strict=True):
            is_draft[end - len(tree) : end] = True
        return is_draft

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return upload(array, self._device)

    def _group(self) -> tuple[list[_Chunk], list[_DecodeGroup]]:
        chunks: list[_Chunk] = []
        groups: list[_DecodeGroup] = []
        run: list[int] = []

        def close() -> None:
            if not run:
                return
            segments = [self._plan.segments[i] for i in run]
            rows = [1 + len(self._trees[i]) for i in run]
            keys = [s.start + n for s, n in zip(segments, rows, strict=True)]
            ends = _split(np.array(rows), np.array(keys), _CALL_COST).tolist()
            begin = 0
            for end in ends:
                groups.append(
                    _DecodeGroup(
                        tuple(segment.slot for segment in segments[begin:end]),
                        tuple(run[begin:end]),
                        int(self.row_offsets[run[begin]]),
                        tuple(rows[begin:end]),
                        tuple(keys[begin:end]),
                    )
                )
                begin = end
            run.clear()

        for index, segment in enumerate(self._plan.segments):
            num_rows = int(self.row_offsets[index + 1] - self.row_offsets[index])
            if not segment.is_decode:
                close()
                first_row = int(self.row_offsets[index])
                chunks.append(_Chunk(segment.slot, first_row, num_rows, segment.start))
                continue
            is_next = not run or self._plan.segments[run[-1]].slot + 1 == segment.slot
            if self._cache.is_contiguous and not is_next:
                close()
            run.append(index)
        close()
        return chunks, groups

    def _padding(self, group: _DecodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a ragged group padded to even, and where the real ones lie in the padded."""
        most = group.most_rows
        padded, real, first = [], [], 0
        for index, num_rows in enumerate(group.num_rows):
            padded.append(first + np.minimum(np.arange(most), num_rows - 1))
            real.append(index * most + np.arange(num_rows))
            first += num_rows
        return self._tensor(np.concatenate(padded)), self._tensor(np.concatenate(real))

    def _attend_group(
        self,
        index: int,
        query: torch.Tensor,
        layer: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Decode rows [1, num_heads, T, dim] of one group; returns [1, T, num_heads, dim]."""
        group = self._groups[index]
        padding = self._pad_rows[index]
        batch, most = len(group.segments), group.most_rows
        num_heads, dim = query.shape[1], query.shape[3]
        keys, values = self._cache.read(layer, self._places[index])
        key, value = keys.transpose(1, 2), values.transpose(1, 2)
        num_kv_heads = key.shape[1]
        share = num_heads // num_kv_heads
        if padding is not None:
            query = query.index_select(2, padding[0])
        if batch == 1:
            folded = query.reshape(1, num_kv_heads, share * most, dim)
        else:
            folded = query.view(num_kv_heads, share, batch, most, dim).permute(2, 0, 1, 3, 4)
            folded = folded.reshape(batch, num_kv_heads, share * most, dim)
        mask = self._group_mask(index, options.sliding_window, share)
        out = attend_folded(folded, key, value, mask, options)
        out = out.view(batch, num_kv_heads, share, most, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(1, batch * most, num_heads, -1)
        return out if padding is None else out.index_select(1, padding[1])

    def _group_mask(self, index: int, window: int | None, share: int) -> torch.Tensor:
        """Additive [B, 1, share * most_rows, most_keys]."""
        name = (index, window, share)
        if name not in self._masks:
            group = self._groups[index]
            shape = (len(group.segments), group.most_rows, group.most_keys)
            seen = np.zeros(shape, dtype=np.bool_)
            for i, segment_index in enumerate(group.segments):
                segment = self._plan.segments[segment_index]
                tree = self._trees[segment_index]
                _fill_seen(
                    seen[i], segment.start, ancestors(tree), depths(tree), _no_window(window)
                )
            self._masks[name] = self._additive(seen)[:, None].repeat(1, 1, share, 1)
        return self._masks[name]

    def _attend_chunk(
        self,
        index: int,
        query: torch.Tensor,
        new_key: torch.Tensor,
        new_value: torch.Tensor,
        layer: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        chunk = self._chunks[index]
        num_keys = chunk.start + chunk.num_rows
        window = options.sliding_window
        is_plain = options.softcap is None and options.sinks is None
        if chunk.start == 0 and is_plain and (window is None or window >= num_keys):
            return attend_causal(query, new_key, new_value, options).transpose(1, 2)
        keys, values = self._cache.read(layer, self._chunk_places[index])
        key, value = keys.transpose(1, 2), values.transpose(1, 2)
        num_heads, dim = query.shape[1], query.shape[3]
        num_kv_heads = key.shape[1]
        share = num_heads // num_kv_heads
        folded = query.reshape(1, num_kv_heads, share * chunk.num_rows, dim)
        name = (-1 - index, window, share)
        if name not in self._masks:
            position = np.arange(chunk.start, num_keys)[:, None]
            column = np.arange(num_keys)[None]
            seen = (column <= position) & (column > position - _no_window(window))
            self._masks[name] = self._additive(seen[None])[:, None].repeat(1, 1, share, 1)
        out = attend_folded(folded, key, value, self._masks[name], options)
        return out.view(1, num_heads, chunk.num_rows, -1).transpose(1, 2)

    def _additive(self, seen: NDArray[np.bool_]) -> torch.Tensor:
        visible = self._tensor(seen)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~visible, -torch.inf)


def _no_window(window: int | None) -> int:
    """A window so wide that it never hides anything, where there is none."""
    return np.iinfo(np.int64).max // 2 if window is None else window


@numba.njit(cache=True)
def _split(num_rows, num_keys, call_cost):
    """Ends of the groups that cost least: each is padded to its most rows and most keys."""
    size = num_rows.size
    best = np.full(size + 1, np.inf)
    begins = np.zeros(size + 1, dtype=np.int64)
    best[0] = 0.0
    for end in range(1, size + 1):
        most_rows = most_keys = 0
        for begin in range(end - 1, -1, -1):
            most_rows = max(most_rows, num_rows[begin])
            most_keys = max(most_keys, num_keys[begin])
            cost = best[begin] + (end - begin) * most_rows * most_keys + call_cost
            if cost < best[end]:
                best[end] = cost
                begins[end] = begin
    ends = np.empty(size, dtype=np.int64)
    count = 0
    end = size
    while end > 0:
        ends[count] = end
        count += 1
        end = begins[end]
    return ends[:count][::-1].copy()


@numba.njit(cache=True)
def _fill_seen(seen, start, ancestry, depth, window):
    """Fill [most_rows, most_keys] for one request; padded rows see what the last real one sees."""
    num_rows = ancestry.shape[0]
    for row in range(seen.shape[0]):
        real = min(row, num_rows - 1)
        least = start + depth[real] - window
        for column in range(start):
            seen[row, column] = column > least
        for column in range(num_rows):
            seen[row, start + column] = ancestry[real, column] and start + depth[column] > least
