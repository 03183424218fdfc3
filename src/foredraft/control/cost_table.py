"""What a step costs here: measured times, straight lines between them, corrected as steps go by.

Only ratios matter to a decision: what a pass with drafts costs beside one without. So the table
holds shapes, and what is learnt while running has two parts: one factor for the machine as a whole
(a slower hour changes nothing), and one for each kind of pass, which does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numba
import numpy as np

from foredraft.plan.profile import PassTime
from foredraft.sampling.processors import Float64Array

_MEMORY = 1 / 64
"""Weight of one step in a running mean; more while the mean is young."""

_FIRST = 8.0
"""A mean starts as if so many steps had agreed with the table."""

_MOST_SURPRISE = 0.25
"""A step's logarithmic error counts at most this much: one hiccup must not move the table."""

_MOST_CORRECTION = 0.7
"""A kind of pass is corrected by at most this factor's exponential, either way."""


_NUM_KINDS = 32
"""Kinds of batch, and kinds of pass, told apart; what is larger counts as the last. Batches go by
half octaves. A pass without drafts is a kind of its own: with the first draft node the time jumps.
The others go by half octaves of rows a request."""


class CostTable:
    """Seconds of a step but its drafting, by requests, rows and context.

    Args:
        passes: What was measured; at least one pass.
    """

    def __init__(self, passes: Iterable[PassTime]) -> None:
        """Sort the cells into one line of rows for each batch and context."""
        lines: dict[tuple[int, int], dict[int, float]] = {}
        for cell in passes:
            lines.setdefault((cell.num_requests, cell.context), {})[cell.num_rows] = cell.seconds
        if not lines:
            raise ValueError("a cost table needs at least one measured pass")
        self._lines: dict[tuple[int, int], tuple[Float64Array, Float64Array]] = {}
        for key, line in lines.items():
            rows = sorted(line)
            self._lines[key] = (
                np.array(rows, dtype=np.float64),
                np.array([line[number] for number in rows]),
            )
        self._batches = sorted({num_requests for num_requests, _ in lines})
        self._contexts = {
            batch: sorted(context for other, context in lines if other == batch)
            for batch in self._batches
        }
        self._factor = 0.0
        self._num_observed = _FIRST
        self._corrections = np.zeros((_NUM_KINDS, _NUM_KINDS))
        self._counts = np.full((_NUM_KINDS, _NUM_KINDS), _FIRST)
        self._since_plain = np.zeros(_NUM_KINDS, dtype=np.int64)

    def seconds(self, num_requests: int, num_rows: Float64Array, context: float) -> Float64Array:
        """Expected seconds of passes over one batch, float64 like ``num_rows``.

        Args:
            num_requests: Requests in the pass.
            num_rows: float64 [k], rows of each pass, all requests together; at least as many as
                requests.
            context: Mean tokens of a request in the cache.
        """
        per_request = num_rows / num_requests
        out = np.zeros(len(num_rows))
        low, high, share = _between(self._batches, num_requests)
        # Beyond the largest measured batch, a pass grows as its rows do.
        scale = max(1.0, num_requests / self._batches[-1])
        for batch, weight in ((low, scale * (1 - share)), (high, scale * share)):
            if weight:
                self._add(batch, per_request, context, weight, out)
        _correct(out, per_request, self._corrections[_kind(num_requests)], self._factor)
        return out

    def steps_since_plain(self, num_requests: int) -> int:
        """Steps observed with batches of this kind since one of them held no draft."""
        return int(self._since_plain[_kind(num_requests)])

    def observe(self, num_requests: int, num_rows: int, context: float, seconds: float) -> None:
        """Learn from a step that held decode rows alone and took so many seconds."""
        expected = float(self.seconds(num_requests, np.array([float(num_rows)]), context)[0])
        if seconds <= 0 or expected <= 0:
            return
        surprise = math.log(seconds / expected)
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        # Shared equally: what recurs in every kind of pass ends in the factor, the rest here.
        self._factor += surprise * max(_MEMORY, 1 / self._num_observed) / 2
        self._num_observed += 1
        place = _place(num_rows / num_requests)
        batch, low = _kind(num_requests), int(place)
        self._since_plain[batch] = 0 if place == 0 else self._since_plain[batch] + 1
        for kind, weight in ((low, 1 - (place - low)), (low + 1, place - low)):
            gain = weight * max(_MEMORY, 1 / self._counts[batch, kind])
            new = self._corrections[batch, kind] + surprise * gain
            self._corrections[batch, kind] = max(-_MOST_CORRECTION, min(_MOST_CORRECTION, new))
            self._counts[batch, kind] += weight

    def _add(
        self,
        batch: int,
        per_request: Float64Array,
        context: float,
        weight: float,
        out: Float64Array,
    ) -> None:
        """Add the weighted seconds of a measured batch, between its measured contexts."""
        low, high, share = _between(self._contexts[batch], context)
        for known, part in ((low, weight * (1 - share)), (high, weight * share)):
            if part:
                _add_line(*self._lines[batch, known], per_request * batch, part, out)


def _kind(number: float) -> int:
    """Half octaves from 1: what is alike in size shares a correction."""
    return min(int(2 * math.log2(max(number, 1.0))), _NUM_KINDS - 1)


@numba.njit(cache=True)
def _place(per_request: float) -> float:
    """Where a pass lies among the kinds, by its rows a request; 0 is a pass without drafts."""
    if per_request <= 1.0:
        return 0.0
    return min(1.0 + 2 * np.log2(per_request), _NUM_KINDS - 2.0)


def _between(measured: list[int], value: float) -> tuple[int, int, float]:
    """The measured neighbours of a value, and how far it lies from the first to the second."""
    if value <= measured[0]:
        return measured[0], measured[0], 0.0
    for low, high in itertools.pairwise(measured):
        if value <= high:
            return low, high, (value - low) / (high - low)
    return measured[-1], measured[-1], 0.0


@numba.njit(cache=True)
def _add_line(
    rows: Float64Array, seconds: Float64Array, at: Float64Array, weight: float, out: Float64Array
) -> None:
    """Add straight lines between the points; the last slope goes on, and never falls."""
    last = rows.size - 1
    slope = 0.0
    if last > 0:
        slope = max(0.0, (seconds[last] - seconds[last - 1]) / (rows[last] - rows[last - 1]))
    for index in range(at.size):
        place = at[index]
        if place <= rows[0]:
            out[index] += weight * seconds[0]
        elif place >= rows[last]:
            out[index] += weight * (seconds[last] + (place - rows[last]) * slope)
        else:
            upper = np.searchsorted(rows, place)
            share = (place - rows[upper - 1]) / (rows[upper] - rows[upper - 1])
            out[index] += weight * (
                seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1])
            )


@numba.njit(cache=True)
def _correct(
    out: Float64Array, per_request: Float64Array, corrections: Float64Array, factor: float
) -> None:
    """Apply what was learnt, between the two nearest kinds of pass."""
    for index in range(out.size):
        place = _place(per_request[index])
        kind = int(place)
        share = place - kind
        learnt = (1 - share) * corrections[kind] + share * corrections[kind + 1]
        out[index] *= np.exp(factor + learnt)
