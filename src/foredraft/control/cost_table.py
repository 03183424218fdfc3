"""What a step costs here: measured times, straight lines between them, corrected as steps go by.

Only ratios matter to a decision: what a pass with drafts costs beside one without. So the table
holds shapes, and what is learnt while running has two parts: one factor for the machine as a whole
(a slower hour changes nothing), and one for each kind of pass, which does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from foredraft.plan.profile import PassTime
from foredraft.sampling.processors import Float64Array

_MEMORY = 1 / 64
"""Weight of one step in the running means."""

_MOST_SURPRISE = 0.25
"""A step's logarithmic error counts at most this much: one hiccup must not move the table."""

_MOST_CORRECTION = 0.7
"""A kind of pass is corrected by at most this factor's exponential, either way."""


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
        self._corrections: dict[tuple[int, int], float] = {}

    def seconds(self, num_requests: int, num_rows: Float64Array, context: float) -> Float64Array:
        """Expected seconds of passes over one batch, float64 like ``num_rows``.

        Args:
            num_requests: Requests in the pass.
            num_rows: float64 [k], rows of each pass, all requests together; at least as many as
                requests.
            context: Mean tokens of a request in the cache.
        """
        per_request = num_rows / num_requests
        low, high, share = _between(self._batches, num_requests)
        seconds = self._at(low, per_request, context)
        if high != low:
            seconds = seconds + share * (self._at(high, per_request, context) - seconds)
        elif num_requests > high:
            seconds = seconds * (num_requests / high)
        batch_kind = _kind(num_requests)
        corrections = [
            self._corrections.get((batch_kind, kind), 0.0)
            for kind in range(_kind(float(per_request.max())) + 1)
        ]
        kinds = np.floor(2 * np.log2(np.maximum(per_request, 1.0))).astype(np.int64)
        out: Float64Array = seconds * np.exp(self._factor + np.array(corrections)[kinds])
        return out

    def observe(self, num_requests: int, num_rows: int, context: float, seconds: float) -> None:
        """Learn from a step that held decode rows alone and took so many seconds."""
        expected = float(self.seconds(num_requests, np.array([float(num_rows)]), context)[0])
        if seconds <= 0 or expected <= 0:
            return
        surprise = math.log(seconds / expected)
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        key = (_kind(num_requests), _kind(num_rows / num_requests))
        # Shared equally: what recurs in every kind of pass ends in the factor, the rest here.
        self._factor += surprise * _MEMORY
        old = self._corrections.get(key, 0.0)
        new = old + surprise * _MEMORY
        self._corrections[key] = max(-_MOST_CORRECTION, min(_MOST_CORRECTION, new))

    def _at(self, batch: int, per_request: Float64Array, context: float) -> Float64Array:
        """Seconds for a measured batch, between its measured contexts."""
        low, high, share = _between(self._contexts[batch], context)
        seconds = _on_line(*self._lines[batch, low], per_request * batch)
        if high != low:
            upper = _on_line(*self._lines[batch, high], per_request * batch)
            seconds = seconds + share * (upper - seconds)
        return seconds


def _kind(number: float) -> int:
    """Half octaves from 1: what is alike in size shares a correction."""
    return int(2 * math.log2(max(number, 1.0)))


def _between(measured: list[int], value: float) -> tuple[int, int, float]:
    """The measured neighbours of a value, and how far it lies from the first to the second."""
    if value <= measured[0]:
        return measured[0], measured[0], 0.0
    for low, high in itertools.pairwise(measured):
        if value <= high:
            return low, high, (value - low) / (high - low)
    return measured[-1], measured[-1], 0.0


def _on_line(rows: Float64Array, seconds: Float64Array, at: Float64Array) -> Float64Array:
    """Straight lines between the points; the last slope goes on, and never falls."""
    values = np.interp(at, rows, seconds)
    if len(rows) > 1:
        slope = max(0.0, float((seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])))
        values = values + np.maximum(at - rows[-1], 0.0) * slope
    out: Float64Array = values
    return out
