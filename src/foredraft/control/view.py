"""A step as the controller sees it: who speculates, what is kept of them, which nodes are whose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.control.estimator import AcceptanceTable, read_nodes
from foredraft.sampling.processors import Float64Array
from foredraft.types import DraftBatch, Int64Array, StepPlan

FIRST_PROBE = 8
"""Steps without a draft before one token is tried again."""

_FIRST_GAIN, _FIRST_WEIGHT, _GAIN_MEMORY = 0.5, 4.0, 16.0
"""What a whole draft is taken to bring at first, as if so many drafts had said so, and the drafts
that it is learnt over."""

_LATENCY_WEIGHT = 8.0
"""What a token counts for of a request that would be served first, beside one of the others."""

NO_CONFIDENCE = np.empty(0)


@dataclass(frozen=True, slots=True)
class MethodTraits:
    """What the controller must know of a drafter.

    Attributes:
        cost: What its time is counted by: ``once``, ``per_token`` or ``per_level``.
        sees_noise: Whether its drafts depend on the target's noise, so that the target's
            probability of a token is not the chance that it is picked.
        is_whole: Whether a draft must be verified whole or not at all.
        members: Of several that draft together, those whose drafts take time, and how it counts.
    """

    cost: str = "once"
    sees_noise: bool = False
    is_whole: bool = False
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class RequestNote:
    """What is kept of a request: when it last drafted, how long it has been watched, its gain.

    The gain is the accepted tokens of a draft that is verified whole; below 0 it is not known. The
    free gain is that of drafts which cost no time, where others of a method do; and these others
    have notes of their own.
    """

    num_verify_steps: int = 0
    num_idle: int = 0
    probe_after: int = FIRST_PROBE
    is_probe: bool = False
    is_cheap: bool = False
    is_nearly_free: bool = False
    gain: float = -1.0
    num_gains: int = 0
    free_gain: float = 0.0
    free_nodes: float = 0.0
    members: dict[str, RequestNote] = field(default_factory=dict)

    def learn_free(self, num_accepted: float, num_nodes: float) -> None:
        """Learn what a step brought and held in which none of the costly members drafted."""
        self.free_gain += (num_accepted - self.free_gain) / _GAIN_MEMORY
        self.free_nodes += (num_nodes - self.free_nodes) / _GAIN_MEMORY

    def begin_gain(self, method: MethodNote) -> None:
        """Take a young request to be like the method's others."""
        if self.gain < 0:
            self.gain = method.gain

    def learn_gain(self, num_accepted: float, method: MethodNote) -> None:
        """Learn what a whole draft brought."""
        self.begin_gain(method)
        for note in (self, method):
            note.num_gains += 1
            rate = max(1 / _GAIN_MEMORY, 1 / (_FIRST_WEIGHT + note.num_gains))
            note.gain += (num_accepted - note.gain) * rate


class MethodNote:
    """What is kept of a method.

    Attributes:
        acceptance: Of its nodes.
        by_depth: The same by depth alone, for forecasts of drafts that take time.
        unit_seconds: Of what its cost is counted by; ``None`` before it drafted.
        num_costs: Drafts that this was learnt from.
        is_free: Whether its drafts cost next to nothing; ``None`` before it drafted.
        num_steps: Steps with a request of this method.
        off_until: The step until which it is off, for being dead; 0 where it is on.
        is_retrying: Whether it is being tried again.
        gain: Accepted tokens of a draft that is verified whole.
        whole_size: Nodes of the largest such draft that was seen; 0 before the first.
        num_gains: Drafts that this was learnt from.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.acceptance = AcceptanceTable()
        self.by_depth = AcceptanceTable()
        self.unit_seconds: float | None = None
        self.num_costs = 0
        self.is_free: bool | None = None
        self.num_steps = 0
        self.off_until = 0
        self.is_retrying = False
        self.gain = _FIRST_GAIN
        self.whole_size = 0
        self.num_gains = 0


class View:
    """What a plan says about speculation, read once a step.

    Attributes:
        plan: The plan.
        methods: Method of each segment.
        notes: What is kept of each segment's request.
        names: The methods that there are.
        which: Each segment's method, by its place in ``names``, int64 [num_segments].
        rows: Each segment's row in its method's table, int64 [num_segments].
        is_walk: Whether it verifies by the default rule, bool [num_segments].
        may_trim: Whether its draft may be trimmed, bool [num_segments].
        weights: What a token of each counts for, float64 [num_segments]; 1 where all are alike.
        num_rows: Rows of committed tokens in the pass.
        num_picks: Segments that emit a token whatever is drafted.
        sure_worth: What these tokens count for.
        context: Mean tokens of a segment in the cache.
        is_decoding: Whether all segments decode.
        asked: What was drafted, before trimming: that is what drafting took its time for.
        keep: bool, which of its nodes were kept, and
        acceptance: what was expected of each, float64; ``None`` before it is trimmed.
        read: A batch of drafts and what was read from it.
    """

    def __init__(
        self,
        plan: StepPlan,
        requests: dict[str, RequestNote],
        find_method: Callable[[str], MethodNote],
    ) -> None:
        """Read a plan; what is kept of requests that are new is made."""
        self.plan = plan
        self.methods = []
        self.notes = []
        self.names: list[str] = []
        size = len(plan.segments)
        self.which = np.zeros(size, dtype=np.int64)
        self.rows = np.zeros(size, dtype=np.int64)
        self.is_walk = np.zeros(size, dtype=np.bool_)
        self.may_trim = np.zeros(size, dtype=np.bool_)
        self.weights = np.ones(size)
        self.num_rows = self.num_picks = 0
        self.is_decoding = True
        num_cached = 0
        for index, segment in enumerate(plan.segments):
            request_id, speculation = segment.request.request_id, segment.request.speculation
            note = requests.get(request_id)
            if note is None:
                note = requests[request_id] = RequestNote()
            note.is_probe = False
            self.notes.append(note)
            method = speculation.method
            self.methods.append(method)
            if method not in self.names:
                self.names.append(method)
            self.which[index] = self.names.index(method)
            self.rows[index] = find_method(method).acceptance.row(request_id)
            self.is_walk[index] = speculation.verification == "walk"
            self.may_trim[index] = self.is_walk[index] and speculation.is_auto
            if speculation.preference == "latency":
                self.weights[index] = _LATENCY_WEIGHT
            self.num_rows += segment.num_rows
            self.num_picks += segment.wants_pick
            self.is_decoding &= segment.is_decode
            num_cached += segment.start
        if (self.weights == self.weights[0]).all():
            self.weights[:] = 1.0
        picks = [segment.wants_pick for segment in plan.segments]
        self.sure_worth = float(self.weights[picks].sum())
        self.context = num_cached / size
        self.asked: DraftBatch | None = None
        self.keep: NDArray[np.bool_] | None = None
        self.acceptance: Float64Array | None = None
        self.read: tuple[DraftBatch, Int64Array, Int64Array, Int64Array] | None = None


def read(view: View, drafts: DraftBatch) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Segment, parent's index and kind of every node, int64 [num_nodes] each."""
    if view.read is None or view.read[0] is not drafts:
        confidence = NO_CONFIDENCE if drafts.confidence is None else drafts.confidence
        found = read_nodes(drafts.parents, drafts.offsets, confidence, view.is_walk)
        view.read = (drafts, *found)
    return view.read[1:]


def kept(drafts: DraftBatch, keep: NDArray[np.bool_]) -> DraftBatch:
    """The batch without the nodes that are not kept; what is kept is closed under parents."""
    parents, offsets = renumber(drafts.parents, drafts.offsets, keep)
    return DraftBatch(
        drafts.token_ids[keep],
        parents,
        offsets,
        drafts.draft_probs,
        None if drafts.dist_ids is None else drafts.dist_ids[keep],
        drafts.is_with_replacement,
        None if drafts.confidence is None else drafts.confidence[keep],
        None if drafts.votes is None else np.ascontiguousarray(drafts.votes[:, keep]),
        drafts.voters,
    )


@numba.njit(cache=True)
def renumber(
    parents: Int64Array, offsets: Int64Array, keep: NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array]:
    """Parents' rows and offsets of the nodes that are kept."""
    kept = np.empty(parents.size, dtype=np.int64)
    kept_offsets = np.zeros(offsets.size, dtype=np.int64)
    rows = np.zeros(parents.size + 1, dtype=np.int64)
    total = 0
    for segment in range(offsets.size - 1):
        first = offsets[segment]
        count = 0
        for node in range(first, offsets[segment + 1]):
            if not keep[node]:
                continue
            count += 1
            rows[node] = count
            parent = parents[node]
            kept[total] = rows[first + parent - 1] if parent > 0 else 0
            total += 1
        kept_offsets[segment + 1] = total
    return kept[:total], kept_offsets


@numba.njit(cache=True)
def outcomes(
    offsets: Int64Array, above: Int64Array, path: Int64Array, path_offsets: Int64Array
) -> tuple[Float64Array, Float64Array]:
    """Whether each node was accepted, and whether its parent was, float64 [num_nodes] each."""
    values = np.zeros(above.size)
    weights = np.ones(above.size)
    for segment in range(offsets.size - 1):
        for place in range(path_offsets[segment], path_offsets[segment + 1]):
            values[offsets[segment] + path[place] - 1] = 1.0
    for node in range(above.size):
        if above[node] >= 0:
            weights[node] = values[above[node]]
    return values, weights
