"""A draft model's own keys and values: what it has read of each request, kept by comparison.

Nothing is rolled back. Before a request drafts, the text that it has now is compared with what lies
in the cache: the committed tokens, and behind them the draft of the last time. What agrees stays,
rows of an accepted branch are moved into place, and what is missing is read, in the same pass that
drafts where it is short, in passes of its own where it is long.

Texts that have ended are kept until their slots are wanted, so that a request that begins alike
begins with what was read of them, as it does in the target's own cache.
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
from foredraft.upload import upload

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_SHORT = 8
"""Most rows of a text that are read in the pass that drafts."""

_MOST_ROWS = 512
"""Rows of a pass that reads alone."""

_WORTH_KEEPING = 32
"""Tokens that two texts must have in common for one to begin from the other."""

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
        self._ended: list[DraftState] = []  # the one used longest ago first
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
        return out.logits[upload(rows, out.logits.device)]

    def forget(self, request_id: str) -> None:
        """Keep what was read of a request for others that begin alike."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        if len(state.ids) < _WORTH_KEEPING:
            self._cache.free(state.slot)
            return
        state.nodes = state.parents = _NONE
        self._cache.shorten(state.slot, len(state.ids))
        self._ended.append(state)

    def _reading(self, segment: Segment, names: set[str]) -> Reading | None:
        name = segment.request.request_id
        state = self._states.pop(name, None)
        context = Context() if state is None else state.context
        end = segment.start + segment.num_rows
        ids = self._vocabulary.context(context, segment.token_ids[:end])
        if state is None:
            state = self._new_state(context, ids, names)
            if state is None:
                return None
        self._states[name] = state  # the last one used is the last one here
        if not 0 < len(ids) < self.max_len:
            return None
        self._keep(state, ids)
        return Reading(segment.request, state, ids)

    def _new_state(self, context: Context, ids: Int64Array, names: set[str]) -> DraftState | None:
        """A slot for a request, begun as an ended text began; ``None`` where there is none."""
        source, num_same = None, _WORTH_KEEPING - 1
        for ended in self._ended:
            num_alike = _num_alike(ended.ids, ids)
            if num_alike > num_same:
                source, num_same = ended, num_alike
        if source is not None:
            self._ended.remove(source)
            if not self._cache.num_free_slots:  # it goes on in its place
                return DraftState(source.slot, context, source.ids[:num_same].copy())
            self._ended.append(source)
        if not self._cache.num_free_slots:
            self._make_room(names)
        if not self._cache.num_free_slots:
            return None
        state = DraftState(self._cache.allocate(), context)
        if source is not None:
            self._cache.copy_rows(source.slot, state.slot, num_same)
            state.ids = source.ids[:num_same].copy()
        return state

    def _make_room(self, names: set[str]) -> None:
        """Forget what was used longest ago: an ended text, else a request, but none of some."""
        if not self._ended:
            idle = next((name for name in self._states if name not in names), None)
            if idle is None:
                return
            self._cache.free(self._states.pop(idle).slot)
            return
        self._cache.free(self._ended.pop(0).slot)

    def _keep(self, state: DraftState, ids: Int64Array) -> None:
        """Keep of a request's rows those that its text still holds."""
        num_same = _num_alike(state.ids, ids)
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


def _num_alike(one: Int64Array, other: Int64Array) -> int:
    """With how many tokens two texts begin alike."""
    both = min(len(one), len(other))
    differs = one[:both] != other[:both]
    return int(np.argmax(differs)) if differs.any() else both


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
