"""How deep a drafter whose drafts take time should draft, beside others whose drafts are free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array

_LEAST_SURVIVAL = 0.01
"""Levels that are reached with less than this chance by every request are not looked at."""


def depths_that_pay(
    survival: Float64Array,
    free_tokens: Float64Array,
    free_rows: float,
    sure_tokens: float,
    seconds: Callable[[Float64Array], Float64Array],
    draft_seconds: Callable[[int], float],
    least_gain: float,
) -> tuple[Int64Array, float]:
    """Choose a depth, and the requests that draft to it, for the most expected tokens per second.

    A level is drafted for all requests at once, so one depth is chosen for those that draft at all.
    A request whose free draft brings as much anyway gains nothing by it: of both the better counts.

    Args:
        survival: float64 [num_requests, deepest], chance that the first tokens of the costly draft
            are all accepted; 0 beyond what a request may draft.
        free_tokens: float64 [num_requests], what free drafts bring.
        free_rows: Rows of the pass with free drafts alone.
        sure_tokens: Tokens of the step whatever is drafted.
        seconds: Of passes of so many rows.
        draft_seconds: Of drafting to a depth.
        least_gain: The costly draft must beat the free ones by this share, 0 or more.

    Returns:
        int64 [num_requests], nodes of each, and the price of one pass with free drafts alone.
    """
    num_requests, deepest = survival.shape
    free = sure_tokens + float(free_tokens.sum())
    plain_s = float(seconds(np.array([free_rows]))[0])
    best_rate = free / plain_s * (1 + least_gain)
    best = np.zeros(num_requests, dtype=np.int64)
    for depth in range(1, deepest + 1):
        if survival[:, depth - 1].max() < _LEAST_SURVIVAL:
            break
        gains = np.maximum(0.0, survival[:, :depth].sum(axis=1) - free_tokens)
        order = np.argsort(-gains, kind="stable")
        counts = np.arange(1, num_requests + 1)
        tokens = free + np.cumsum(gains[order])
        costs = seconds(free_rows + depth * counts.astype(np.float64)) + draft_seconds(depth)
        rates = tokens / costs
        number = int(np.argmax(rates))
        if rates[number] > best_rate:
            best_rate = rates[number]
            best = np.zeros(num_requests, dtype=np.int64)
            best[order[: number + 1]] = np.minimum(
                depth, (survival[order[: number + 1]] > 0).sum(axis=1)
            )
    return best, plain_s
