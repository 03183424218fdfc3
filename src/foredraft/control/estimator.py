"""How likely a draft token is accepted once its parent is: learnt from what became of drafts.

For each method there is a table of acceptance by kind of node (its depth, or where the drafter says
how sure it is, that), over the drafts of all requests: the workload's prior. Each request has an
offset to it on the logit scale, which starts at 0 and is learnt by a discounted, one-dimensional
Newton step a node (the extended Kalman filter of a logistic regression with one intercept). So a
young request behaves like the others, and an old one like itself. A cumulative sum of the evidence
for a change (Page, 1954) lets a request be steady for long and yet turn within a few nodes.

Survival is the product of acceptances along a path. An acceptance is learnt only where the parent
was accepted, so there is nothing to correct for drafts that were rejected before, or were short
(a product-limit estimate: Kaplan and Meier, 1958). Where a draft was fixed before the noise, a node
deeper than that, and every node with less variance, is known from the target's own probabilities:
the chance that the target draws the very token that was drafted.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array

NUM_DEPTHS = 64
"""Depths told apart; deeper nodes count as this deep."""

NUM_LEVELS = 16
"""Levels of a drafter's confidence told apart."""

_NUM_BINS = NUM_DEPTHS + 2 * NUM_LEVELS

_PRIOR_ACCEPTANCE = 0.7
"""Of a node at any depth, before anything was seen: hopeful, so that it is tried."""

_PRIOR_TRIALS = 8.0
_BIN_MEMORY = 512.0
"""Trials after which a table entry has forgotten most of what was before."""

_OFFSET_PRECISION = 8.0
"""A request is taken to be like the workload: within some 0.4 on the logit scale, until it shows
otherwise."""

_KEEP = 0.99
"""What is left of an offset's precision after one more trial: some 100 trials count."""

_SHIFT = 2.0
"""A change worth noticing, on the logit scale."""

_ALARM = 6.0
"""Evidence (a logarithm of odds) for such a change, in either direction, at which what was believed
of a request is given up."""

_PRECISION_AFTER_ALARM = 1.0
_KEPT_AFTER_ALARM = 0.8
"""What is left of the workload's table after one request's alarm: if all raise it, little is."""

_PULL = 0.01
"""Of an offset, drawn back to the workload with each trial, before division by the precision: a
request that has nothing accepted comes to some 0.04, whatever the workload."""

_OUTRIGHT = 0.3
"""Of an outcome, what the workload learns whatever the request's offset makes of it: in the long
run it must come to what its requests are like."""

_IDLE_PULL = 0.002
"""Of an offset, drawn back with each step without a draft: what was believed grows old, but slower
than probes come, or age alone would bring back drafts that were refuted."""

_MOST_OFFSET = 6.0
_LEAST, _MOST = 0.002, 0.998


def bins_of(depths: Int64Array, ranks: Int64Array, confidence: Float64Array | None) -> Int64Array:
    """The kind of each node, int64 [num_nodes].

    Args:
        depths: int64 [num_nodes], from 1.
        ranks: int64 [num_nodes], place among siblings, from 0.
        confidence: float [num_nodes] in [0, 1), what the drafter says; ``None``, or NaN for a
            node, where it does not.
    """
    by_depth = np.minimum(depths, NUM_DEPTHS) - 1
    if confidence is None:
        return by_depth
    doubt = np.maximum(1.0 - np.nan_to_num(confidence), 1e-9)
    levels = np.clip(np.floor(-2 * np.log2(doubt)), 0, NUM_LEVELS - 1).astype(np.int64)
    sure = NUM_DEPTHS + NUM_LEVELS * (ranks > 0) + levels
    return np.where(np.isnan(confidence), by_depth, sure)


@numba.njit(cache=True)
def read_nodes(
    parents: Int64Array,
    offsets: Int64Array,
    confidence: Float64Array,
    is_walk: NDArray[np.bool_],
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Segment, index of the parent, and kind of every node of a batch, in one go.

    Args:
        parents: int64 [num_nodes], rows within the segment's tree; 0 is the root.
        offsets: int64 [num_segments + 1].
        confidence: float64 [num_nodes], NaN where a drafter cannot say; empty where none can.
        is_walk: bool [num_segments]; kinds of other segments go by depth alone, as their forecasts
            do.

    Returns:
        int64 [num_nodes] each; a parent of -1 is the root. Kinds are those of :func:`bins_of`.
    """
    owners = np.empty(parents.size, dtype=np.int64)
    above = np.empty(parents.size, dtype=np.int64)
    bins = np.empty(parents.size, dtype=np.int64)
    depths = np.empty(parents.size, dtype=np.int64)
    has_child = np.zeros(parents.size + offsets.size, dtype=np.bool_)
    for segment in range(offsets.size - 1):
        first = offsets[segment]
        for node in range(first, offsets[segment + 1]):
            row = parents[node]
            owners[node] = segment
            above[node] = first + row - 1 if row > 0 else -1
            depths[node] = depths[above[node]] + 1 if row > 0 else 1
            place = first + row + segment
            is_sibling = has_child[place]
            has_child[place] = True
            if confidence.size and is_walk[segment] and not np.isnan(confidence[node]):
                doubt = max(1.0 - confidence[node], 1e-9)
                level = min(max(int(np.floor(-2 * np.log2(doubt))), 0), NUM_LEVELS - 1)
                bins[node] = NUM_DEPTHS + (NUM_LEVELS if is_sibling else 0) + level
            else:
                bins[node] = min(depths[node], NUM_DEPTHS) - 1
    return owners, above, bins


class AcceptanceTable:
    """Acceptance of one method's draft nodes, over all requests and for each.

    Attributes:
        num_trials: Discounted number of outcomes seen.
        num_hits: Of these, accepted ones.
    """

    def __init__(self) -> None:
        """Start from the prior."""
        levels = 1 - 0.5 ** ((np.arange(NUM_LEVELS) + 0.5) / 2)  # the middle of each level
        self._prior = np.concatenate(
            [np.full(NUM_DEPTHS, _PRIOR_ACCEPTANCE), levels**2, levels**2 / 4]
        )
        self._hits = np.zeros(_NUM_BINS)
        self._trials = np.zeros(_NUM_BINS)
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._offsets: NDArray[np.float64] = np.empty((0, 4))
        self.num_trials: float = 0.0
        self.num_hits: float = 0.0

    def offset(self, request_id: str) -> NDArray[np.float64]:
        """What is believed of a request, a view of float64 [4], to be read or written.

        Its offset to the workload, the precision of that, and the evidence that it has become
        worse, and better, than believed.
        """
        row: NDArray[np.float64] = self._offsets[self.row(request_id)]
        return row

    def row(self, request_id: str) -> int:
        """Where what is believed of a request is kept; made for a request that is new."""
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                size = len(self._offsets)
                self._offsets = np.concatenate([self._offsets, np.empty((max(16, size), 4))])
                self._free = list(range(len(self._offsets) - 1, size - 1, -1))
            row = self._rows[request_id] = self._free.pop()
            self._offsets[row] = (0.0, _OFFSET_PRECISION, 0.0, 0.0)
        return row

    def acceptance(self, bins: Int64Array, request_id: str) -> Float64Array:
        """Estimated acceptance of nodes of one request, float64 like ``bins``."""
        return self.acceptance_of(bins, np.full(len(bins), self.row(request_id)))

    def acceptance_of(self, bins: Int64Array, rows: Int64Array) -> Float64Array:
        """Estimated acceptance of nodes of many requests, by each node's :meth:`row`."""
        out: Float64Array = _acceptance(
            bins, rows, self._hits, self._trials, self._prior, self._offsets
        )
        return out

    def observe(
        self, request_id: str, bins: Int64Array, values: Float64Array, weights: Float64Array
    ) -> None:
        """Learn outcomes of one request's nodes; see :meth:`observe_of`."""
        self.observe_of(np.full(len(bins), self.row(request_id)), bins, values, weights)

    def observe_of(
        self, rows: Int64Array, bins: Int64Array, values: Float64Array, weights: Float64Array
    ) -> None:
        """Learn outcomes.

        Args:
            rows: int64 [n], each node's request, by its :meth:`row`.
            bins: int64 [n].
            values: float64 [n] in [0, 1]: accepted or not, or the chance of it.
            weights: float64 [n] in [0, 1]: the chance that the node's parent was accepted.
        """
        _observe(rows, bins, values, weights, self._hits, self._trials, self._prior, self._offsets)
        keep = (1 - 1 / _BIN_MEMORY) ** len(bins)
        self.num_trials = self.num_trials * keep + float(weights.sum())
        self.num_hits = self.num_hits * keep + float(values @ weights)

    def age(self, request_id: str) -> None:
        """Let a step without a draft make what is believed of a request less sure."""
        self.offset(request_id)[0] *= 1 - _IDLE_PULL

    def forget(self, request_id: str) -> None:
        """Drop a request's offset."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)


@numba.njit(cache=True)
def survival_of(parents: Int64Array, acceptance: Float64Array) -> Float64Array:
    """Chance that each node is accepted: the product along its path, float64 [n].

    Args:
        parents: int64 [n], index of each node's parent, which comes before it; -1 for the root.
        acceptance: float64 [n], chance of each once its parent is accepted.
    """
    out = np.empty(parents.size, dtype=np.float64)
    for node in range(parents.size):
        parent = parents[node]
        before = 1.0 if parent < 0 else out[parent]
        out[node] = before * acceptance[node]
    return out


@numba.njit(cache=True)
def _acceptance(
    bins: Int64Array,
    rows: Int64Array,
    hits: Float64Array,
    trials: Float64Array,
    prior: Float64Array,
    offsets: Float64Array,
) -> Float64Array:
    out = _shares(bins, hits, trials, prior)
    for index in range(bins.size):
        odds = out[index] / (1 - out[index]) * np.exp(offsets[rows[index], 0])
        out[index] = min(max(odds / (1 + odds), _LEAST), _MOST)
    return out


@numba.njit(cache=True)
def _shares(
    bins: Int64Array, hits: Float64Array, trials: Float64Array, prior: Float64Array
) -> Float64Array:
    """The workload's acceptance by kind: few trials lean on all depths together, or a guess."""
    all_hits = hits[:NUM_DEPTHS].sum() + _PRIOR_ACCEPTANCE * _PRIOR_TRIALS
    all_trials = trials[:NUM_DEPTHS].sum() + _PRIOR_TRIALS
    out = np.empty(bins.size, dtype=np.float64)
    for index in range(bins.size):
        kind = bins[index]
        lean = all_hits / all_trials if kind < NUM_DEPTHS else prior[kind]
        share = (hits[kind] + lean * _PRIOR_TRIALS) / (trials[kind] + _PRIOR_TRIALS)
        out[index] = min(max(share, _LEAST), _MOST)
    return out


@numba.njit(cache=True)
def _observe(
    rows: Int64Array,
    bins: Int64Array,
    values: Float64Array,
    weights: Float64Array,
    hits: Float64Array,
    trials: Float64Array,
    prior: Float64Array,
    offsets: Float64Array,
) -> None:
    shares = _shares(bins, hits, trials, prior)
    for index in range(bins.size):
        kind, weight = bins[index], weights[index]
        if weight <= 0.0:
            continue
        offset = offsets[rows[index]]
        share = shares[index]
        odds = share / (1 - share) * np.exp(offset[0])
        expected = min(max(odds / (1 + odds), _LEAST), _MOST)
        value = values[index]
        for direction in range(2):
            shifted = odds * np.exp(_SHIFT if direction else -_SHIFT)
            other = min(max(shifted / (1 + shifted), _LEAST), _MOST)
            evidence = value * np.log(other / expected) + (1 - value) * np.log(
                (1 - other) / (1 - expected)
            )
            offset[2 + direction] = max(0.0, offset[2 + direction] + weight * evidence)
            if offset[2 + direction] > _ALARM:
                offset[1] = _PRECISION_AFTER_ALARM
                offset[2], offset[3] = 0.0, 0.0
                hits *= _KEPT_AFTER_ALARM
                trials *= _KEPT_AFTER_ALARM
        # Towards the usual precision slowly, and towards more with every trial.
        keep = _KEEP**weight
        offset[1] = _OFFSET_PRECISION + keep * (offset[1] - _OFFSET_PRECISION)
        offset[1] += weight * expected * (1 - expected)
        offset[0] += weight * (value - expected - _PULL * offset[0]) / offset[1]
        offset[0] = min(max(offset[0], -_MOST_OFFSET), _MOST_OFFSET)
        forget = 1 - weight / _BIN_MEMORY
        # Mostly what the offset does not explain, or both would learn the same thing twice: then
        # requests whose offsets went down are taken for worse and worse as the workload follows.
        unexplained = min(max(share + value - expected, 0.0), 1.0)
        typical = _OUTRIGHT * value + (1 - _OUTRIGHT) * unexplained
        hits[kind] = hits[kind] * forget + weight * typical
        trials[kind] = trials[kind] * forget + weight
