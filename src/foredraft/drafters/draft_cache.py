"""A draft model's own keys and values: what it has read of each request, kept by comparison.

Nothing is rolled back. Before a request drafts, the text that it has now is compared with what lies
in the cache: the committed tokens, and behind them the draft of the last time. What agrees stays,
rows of an accepted branch are moved into place, and what is missing is read, in the same pass that
drafts where it is short, in passes of its own where it is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from foredraft.drafters.vocabulary import Context, Vocabulary
from foredraft.model.kv_cache import ContiguousKVCache
from foredraft.model.runner import Runner
from foredraft.types import DraftBatch, Int64Array, Request, Segment, StepPlan

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_SHORT = 8
"""Most rows of a text that are read in the pass that drafts."""

_MOST_ROWS = 512
"""Rows of a pass that reads alone."""

_NONE = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class DraftState:
    """What is kept of a request.

    Attributes:
        slot: Where its keys and values lie.
        context: Its text in the draft model's tokens.
        ids: int64, the tokens whose rows are in the cache for good.
        nodes: int64, draft tokens whose rows lie behind them, node ``k`` in the k-th row behind.
        parents: int64, their parents, 0 being the last of ``ids``.
    """

    slot: int
    context: Context = field(default_factory=Context)
    ids: Int64Array = field(default_factory=lambda: _NONE)
    nodes: Int64Array = field(default_factory=lambda: _NONE)
    parents: Int64Array = field(default_factory=lambda: _NONE)


@dataclass(slots=True)
class Reading:
    """A request whose text is to be drafted from.

    Attributes:
        request: The request.
        state: What is kept of it.
        ids: int64, its whole text in the draft model's tokens; all but the last few are read.
    """

    request: Request
    state: DraftState
    ids: Int64Array


@dataclass(slots=True)
class Branch:
    """A draft so far, and the rows below which it goes on.

    Attributes:
        reading: The request.
        nodes: int64 [num_nodes], its draft in the draft model's tokens.
        parents: int64 [num_nodes].
        rows: int64, the rows whose logits are wanted: 0 is the end of the text, k the k-th node.
    """

    reading: Reading
    nodes: Int64Array
    parents: Int64Array
    rows: Int64Array


class DraftCache:
    """Runs a draft model over many requests.

    Args:
        model: The draft model.
        vocabulary: How it reads the target's tokens.
        num_slots: Most requests at once.
    """

    def __init__(self, model: Target, vocabulary: Vocabulary, num_slots: int) -> None:
        """Reserve the slots; on a CPU no memory is taken yet."""
        self._vocabulary = vocabulary
        self._cache = ContiguousKVCache(
            model.layers, num_slots, model.max_model_len, model.dtype, model.device
        )
        self._runner = Runner(model, self._cache)
        self._states: dict[str, DraftState] = {}
        self.max_len = model.max_model_len

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values in use."""
        return self._cache.bytes_in_use

    def read(self, segments: Sequence[Segment]) -> list[Reading | None]:
        """Bring requests up to the text that they have in this step, but for the last few tokens.

        Returns:
            For each segment what to draft from; ``None`` where its text is longer than the draft
            model can read, or there is no room.
        """
        names = {segment.request.request_id for segment in segments}
        readings = [self._reading(segment, names) for segment in segments]
        self._read_long([reading for reading in readings if reading is not None])
        return readings

    def grow(self, branches: Sequence[Branch]) -> torch.Tensor:
        """Run one pass; return the logits below the wanted rows of each branch, float32 [n, V]."""
        starts, trees, wanted = [], [], []
        for branch in branches:
            ids, state = branch.reading.ids, branch.reading.state
            length = len(ids)
            if len(state.ids) < length:  # the end of the text is read now
                rest = ids[len(state.ids) + 1 :]
                starts.append(len(state.ids))
                trees.append((rest, np.arange(len(rest), dtype=np.int64)))
                wanted.append(np.array([len(rest)]))
                assert not len(branch.nodes)
                state.ids = ids
                state.nodes = state.parents = _NONE
                continue
            if _goes_on(branch):
                starts.append(length - 1 + len(branch.nodes))
                trees.append((_NONE, _NONE))
                wanted.append(np.zeros(1, dtype=np.int64))
            else:
                starts.append(length - 1)
                trees.append((branch.nodes, branch.parents))
                wanted.append(branch.rows)
            state.nodes, state.parents = branch.nodes, branch.parents
        segments = []
        for branch, start in zip(branches, starts, strict=True):
            reading = branch.reading
            text = reading.ids
            if start >= len(text):
                text = np.concatenate([text, branch.nodes])
            segments.append(
                Segment(
                    reading.request, text[: start + 1], reading.state.slot, start, 1, is_decode=True
                )
            )
        sizes = [len(nodes) for nodes, _ in trees]
        drafts = DraftBatch(
            np.concatenate([nodes for nodes, _ in trees]),
            np.concatenate([parents for _, parents in trees]),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )
        try:
            out = self._runner.forward(StepPlan(tuple(segments)), drafts)
        except BaseException:
            for branch in branches:  # what was written is not known
                branch.reading.state.ids = branch.reading.state.nodes = _NONE
            raise
        rows = np.concatenate(
            [first + rows for first, rows in zip(out.offsets[:-1], wanted, strict=True)]
        )
        if len(rows) == len(out.logits):
            return out.logits
        return out.logits[torch.from_numpy(rows).to(out.logits.device)]

    def forget(self, request_id: str) -> None:
        """Give a request's slot back."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._cache.free(state.slot)

    def _reading(self, segment: Segment, names: set[str]) -> Reading | None:
        name = segment.request.request_id
        state = self._states.pop(name, None)
        if state is None:
            if not self._cache.num_free_slots:
                self._make_room(names)
            if not self._cache.num_free_slots:
                return None
            state = DraftState(self._cache.allocate())
        self._states[name] = state  # the last one used is the last one here
        end = segment.start + segment.num_rows
        ids = self._vocabulary.context(state.context, segment.token_ids[:end])
        if not 0 < len(ids) < self.max_len:
            return None
        self._keep(state, ids)
        return Reading(segment.request, state, ids)

    def _make_room(self, names: set[str]) -> None:
        """Forget the request that has drafted nothing for longest, but none of some."""
        for name in self._states:
            if name not in names:
                self.forget(name)
                return

    def _keep(self, state: DraftState, ids: Int64Array) -> None:
        """Keep of a request's rows those that its text still holds."""
        both = min(len(state.ids), len(ids))
        differs = state.ids[:both] != ids[:both]
        num_same = int(np.argmax(differs)) if differs.any() else both
        if num_same == len(state.ids) and len(state.nodes):
            path = _path(state.nodes, state.parents, ids[num_same:])
            places = np.arange(1, len(path) + 1)
            is_moved = path != places
            if is_moved.any():
                first = int(np.argmax(is_moved))
                self._cache.move_rows(state.slot, num_same - 1 + path[first:], num_same + first)
            num_same += len(path)
        # The last token is read again in any case, for what comes after it.
        state.ids = ids[: min(num_same, len(ids) - 1)]
        state.nodes = state.parents = _NONE

    def _read_long(self, readings: Sequence[Reading]) -> None:
        """Read what is too long for the pass that drafts, all but the last token."""
        while True:
            room = _MOST_ROWS
            segments, states = [], []
            for reading in readings:
                start = len(reading.state.ids)
                num_rows = min(room, len(reading.ids) - 1 - start)
                if num_rows <= 0 or len(reading.ids) - start <= _SHORT:
                    continue
                room -= num_rows
                segments.append(
                    Segment(
                        reading.request,
                        reading.ids,
                        reading.state.slot,
                        start,
                        num_rows,
                        is_decode=False,
                    )
                )
                states.append((reading.state, reading.ids[: start + num_rows]))
            if not segments:
                return
            self._runner.forward(StepPlan(tuple(segments)), DraftBatch.empty(len(segments)))
            for state, ids in states:
                state.ids = ids


def _goes_on(branch: Branch) -> bool:
    """Whether a draft is a chain of which all but the last token lies in the cache."""
    num_nodes, state = len(branch.nodes), branch.reading.state
    return (
        num_nodes > 0
        and len(branch.rows) == 1
        and int(branch.rows[0]) == num_nodes
        and len(state.nodes) == num_nodes - 1
        and bool((branch.parents == np.arange(num_nodes)).all())
        and bool((state.nodes == branch.nodes[:-1]).all())
    )


def _path(nodes: Int64Array, parents: Int64Array, ids: Int64Array) -> Int64Array:
    """Nodes (1-based) along which some tokens lead from the root."""
    path: list[int] = []
    row = 0
    for token in ids.tolist():
        below = np.nonzero((parents == row) & (nodes == token))[0]
        if not len(below):
            break
        row = int(below[0]) + 1
        path.append(row)
    return np.array(path, dtype=np.int64)
