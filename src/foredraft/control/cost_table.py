"""What a step costs here: measured times, straight lines between them, corrected as steps go by.

Only ratios matter to a decision: what a pass with drafts costs beside one without. So the table
holds shapes, and what is learnt while running has two parts: one factor for the machine as a whole
(a slower hour changes nothing), and one for each kind of pass, which does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numba
import numpy as np

from foredraft.plan.profile import PaddingTime, PassTime
from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array

_MEMORY = 1 / 64
"""Weight of one step in a running mean; more while the mean is young."""

_FIRST = 4.0
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
        paddings: What unequal drafts were measured to cost; nothing by default.
    """

    def __init__(self, passes: Iterable[PassTime], paddings: Sequence[PaddingTime] = ()) -> None:
        """Sort the cells into one line of rows for each batch and context."""
        cells = {(c.num_requests, c.context, c.num_rows): c.seconds for c in passes}
        if not cells:
            raise ValueError("a cost table needs at least one measured pass")
        order = sorted(cells)
        lines = sorted({key[:2] for key in order})
        batches = sorted({batch for batch, _ in lines})
        batch_of_line = np.array([batch for batch, _ in lines])
        line_of_cell = np.array([lines.index(key[:2]) for key in order])
        self._table = (
            np.array(batches, dtype=np.float64),
            np.searchsorted(batch_of_line, [*batches, batches[-1] + 1]),
            np.array([context for _, context in lines], dtype=np.float64),
            np.searchsorted(line_of_cell, np.arange(len(lines) + 1)),
            np.array([rows for _, _, rows in order], dtype=np.float64),
            np.array([cells[key] for key in order], dtype=np.float64),
        )
        self._padding = _padding_line(paddings)
        self._learnt = (
            np.array([0.0, _FIRST]),
            np.zeros((_NUM_KINDS, _NUM_KINDS)),
            np.full((_NUM_KINDS, _NUM_KINDS), _FIRST),
            np.zeros(_NUM_KINDS, dtype=np.int64),
        )

    def seconds(self, num_requests: int, num_rows: Float64Array, context: float) -> Float64Array:
        """Expected seconds of passes over one batch, float64 like ``num_rows``.

        Args:
            num_requests: Requests in the pass.
            num_rows: float64 [k], rows of each pass, all requests together; at least as many as
                requests.
            context: Mean tokens of a request in the cache.
        """
        factor, corrections, _, _ = self._learnt
        out: Float64Array = _seconds(
            num_requests, num_rows, float(context), *self._table, factor, corrections
        )
        return out

    def padding_seconds(self, context: float) -> float:
        """Seconds that a row of padding costs in attention, over ``context`` tokens."""
        at_once, per_token = self._padding
        return (at_once + per_token * context) * float(np.exp(self._learnt[0][0]))

    def steps_since_plain(self, num_requests: int) -> int:
        """Steps observed with batches of this kind since one of them held no draft."""
        return int(self._learnt[3][_kind(num_requests)])

    def observe(
        self,
        num_requests: int,
        num_rows: int,
        context: float,
        seconds: float,
        num_padded: int = 0,
    ) -> None:
        """Learn from a step that held decode rows alone and took so many seconds.

        Args:
            num_requests: Requests of the step.
            num_rows: Its rows, all requests together.
            context: Mean tokens of a request in the cache.
            seconds: What it took.
            num_padded: Rows of padding in its attention.
        """
        seconds -= num_padded * self.padding_seconds(context)
        if seconds > 0:
            _observe(num_requests, num_rows, float(context), seconds, *self._table, *self._learnt)


def _padding_line(paddings: Sequence[PaddingTime]) -> tuple[float, float]:
    """Seconds of a row of padding: at no context, and more for each token of it."""
    by_context: dict[int, list[float]] = {}
    for cell in paddings:
        by_context.setdefault(cell.context, []).append(cell.row_seconds)
    if not by_context:
        return 0.0, 0.0
    points = [(context, float(np.median(by_context[context]))) for context in sorted(by_context)]
    (near, low), (far, high) = points[0], points[-1]
    slope = max(0.0, high - low) / (far - near) if far > near else 0.0
    return max(0.0, low - slope * near), slope


@numba.njit(cache=True)
def _kind(number: float) -> int:
    """Half octaves from 1: what is alike in size shares a correction."""
    return min(int(2 * np.log2(max(number, 1.0))), _NUM_KINDS - 1)


@numba.njit(cache=True)
def _place(per_request: float) -> float:
    """Where a pass lies among the kinds, by its rows a request; 0 is a pass without drafts."""
    if per_request <= 1.0:
        return 0.0
    return float(min(1.0 + 2 * np.log2(per_request), _NUM_KINDS - 2.0))


@numba.njit(cache=True)
def _between(measured: Float64Array, first: int, end: int, value: float) -> tuple[int, float]:
    """The measured neighbour at or below a value, and how far it lies from there to the next."""
    if value <= measured[first]:
        return first, 0.0
    for index in range(first, end - 1):
        if value <= measured[index + 1]:
            return index, (value - measured[index]) / (measured[index + 1] - measured[index])
    return end - 1, 0.0


@numba.njit(cache=True)
def _seconds(
    num_requests: int,
    num_rows: Float64Array,
    context: float,
    batches: Float64Array,
    first_line: Int64Array,
    contexts: Float64Array,
    first_cell: Int64Array,
    rows: Float64Array,
    seconds: Float64Array,
    factor: Float64Array,
    corrections: Float64Array,
) -> Float64Array:
    """Between the measured batches and contexts, and corrected by what was learnt."""
    out = np.zeros(num_rows.size)
    low, share = _between(batches, 0, batches.size, num_requests)
    # Beyond the largest measured batch, a pass grows as its rows do.
    scale = max(1.0, num_requests / batches[-1])
    for offset in range(2 if share > 0 else 1):
        batch = low + offset
        weight = scale * (share if offset else 1 - share)
        begin, end = first_line[batch], first_line[batch + 1]
        known, part = _between(contexts, begin, end, context)
        stretch = batches[batch] / num_requests
        for line in range(known, known + (2 if part > 0 else 1)):
            times = weight * (part if line > known else 1 - part)
            _add_line(
                rows, seconds, first_cell[line], first_cell[line + 1], stretch, num_rows, times, out
            )
    learnt = corrections[_kind(num_requests)]
    for index in range(out.size):
        place = _place(num_rows[index] / num_requests)
        kind = int(place)
        between = place - kind
        out[index] *= np.exp(factor[0] + (1 - between) * learnt[kind] + between * learnt[kind + 1])
    return out


@numba.njit(cache=True)
def _add_line(
    rows: Float64Array,
    seconds: Float64Array,
    begin: int,
    end: int,
    stretch: float,
    num_rows: Float64Array,
    weight: float,
    out: Float64Array,
) -> None:
    """Add straight lines between the points; the last slope goes on, and never falls."""
    last = end - 1
    slope = 0.0
    if last > begin:
        slope = max(0.0, (seconds[last] - seconds[last - 1]) / (rows[last] - rows[last - 1]))
    upper = begin
    for index in range(num_rows.size):
        place = num_rows[index] * stretch
        if place <= rows[begin]:
            out[index] += weight * seconds[begin]
        elif place >= rows[last]:
            out[index] += weight * (seconds[last] + (place - rows[last]) * slope)
        else:
            if rows[upper] < place:
                while rows[upper] < place:
                    upper += 1
            else:
                while rows[upper - 1] >= place:
                    upper -= 1
            share = (place - rows[upper - 1]) / (rows[upper] - rows[upper - 1])
            out[index] += weight * (
                seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1])
            )


@numba.njit(cache=True)
def _observe(
    num_requests: int,
    num_rows: int,
    context: float,
    seconds: float,
    batches: Float64Array,
    first_line: Int64Array,
    contexts: Float64Array,
    first_cell: Int64Array,
    rows: Float64Array,
    times: Float64Array,
    factor: Float64Array,
    corrections: Float64Array,
    counts: Float64Array,
    since_plain: Int64Array,
) -> None:
    """Correct the factor and the kinds of pass next to this one; count steps without a plain one.

    ``factor`` holds the factor's logarithm and the number of steps it has seen.
    """
    expected = _seconds(
        num_requests,
        np.array([float(num_rows)]),
        context,
        batches,
        first_line,
        contexts,
        first_cell,
        rows,
        times,
        factor,
        corrections,
    )[0]
    if expected <= 0:
        return
    surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, np.log(seconds / expected)))
    # Shared equally: what recurs in every kind of pass ends in the factor, the rest here.
    factor[0] += surprise * max(_MEMORY, 1 / factor[1]) / 2
    factor[1] += 1
    place = _place(num_rows / num_requests)
    batch, low = _kind(num_requests), int(place)
    since_plain[batch] = 0 if place == 0 else since_plain[batch] + 1
    for offset in range(2):
        kind = low + offset
        weight = place - low if offset else 1 - (place - low)
        gain = weight * max(_MEMORY, 1 / counts[batch, kind])
        new = corrections[batch, kind] + surprise * gain
        corrections[batch, kind] = max(-_MOST_CORRECTION, min(_MOST_CORRECTION, new))
        counts[batch, kind] += weight
