"""How many draft nodes a step should hold: as many as raise expected tokens per second.

Each next node goes to the request where it adds most, which is the one with the greatest survival
over all requests. Expected tokens are the requests plus the survival of what is kept; the cost of
the step is a table that need not be even or rising evenly, so every number is compared, not only
the next one; and where attention pads every request to the longest draft, so is every bound on the
length of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array

_EVERY_CAP, _CAP_STRIDE = 32, 8
"""Bounds on the length of a draft up to which every one is weighed, and then every so many-th."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is kept of the nodes on offer.

    Attributes:
        is_kept: bool [num_nodes].
        expected_tokens: Of the step, all requests together.
        seconds: Of the step, by the table.
        plain_seconds: Of the same step without any node.
    """

    is_kept: NDArray[np.bool_]
    expected_tokens: float
    seconds: float
    plain_seconds: float


@dataclass(frozen=True, slots=True)
class Padding:
    """What it costs that requests draft unequally: attention pads them to the longest draft.

    Attributes:
        owners: int64 [num_nodes], each node's request.
        num_requests: Requests of the step.
        row_seconds: Of one row of padding.
        most_before: Most nodes of a request among those that are drafted already.
        num_before: Nodes that are drafted already.
    """

    owners: Int64Array
    num_requests: int
    row_seconds: float
    most_before: int = 0
    num_before: int = 0


def allocate(
    survival: Float64Array,
    seconds: Float64Array,
    sure_tokens: float,
    least_gain: float,
    padding: Padding | None = None,
) -> Allocation:
    """Keep the likeliest nodes, as many as make the step worth most per second.

    Args:
        survival: float64 [num_nodes], chance that each node is accepted; strictly less than that of
            its parent, so that what is kept is closed under parents.
        seconds: float64 [num_nodes + 1], cost of the step with so many nodes.
        sure_tokens: Expected tokens of the step whatever is kept: one a request, and what is
            drafted already.
        least_gain: Drafting must beat plain decoding by this share to be chosen, 0 or more.
        padding: What unequal drafts cost beyond ``seconds``; bounds on the nodes of a request are
            then weighed too, every one up to 32 and every eighth beyond. ``None`` where they cost
            nothing.
    """
    if padding is None:
        padding = Padding(np.zeros(len(survival), dtype=np.int64), 1, 0.0)
    is_kept, tokens, cost, plain = _allocate(
        survival,
        seconds,
        float(sure_tokens),
        1 + least_gain,
        padding.owners,
        padding.num_requests,
        float(padding.row_seconds),
        padding.most_before,
        padding.num_before,
    )
    return Allocation(is_kept, tokens, cost, plain)


@numba.njit(cache=True)
def _allocate(
    survival: Float64Array,
    seconds: Float64Array,
    sure_tokens: float,
    least_ratio: float,
    owners: Int64Array,
    num_requests: int,
    row_seconds: float,
    most_before: int,
    num_before: int,
) -> tuple[NDArray[np.bool_], float, float, float]:
    """What is kept, expected tokens and cost with it, and cost without any."""
    order = np.argsort(-survival, kind="mergesort")
    ranks = np.zeros(survival.size, dtype=np.int64)
    counts = np.zeros(max(num_requests, 1), dtype=np.int64)
    for node in order:
        counts[owners[node]] += 1
        ranks[node] = counts[owners[node]]
    longest = counts.max()
    plain = seconds[0] + row_seconds * (num_requests * most_before - num_before)
    best, best_cap = 0, 0
    best_tokens, best_cost = sure_tokens, plain
    best_rate = sure_tokens / plain * least_ratio
    for cap in range(1 if row_seconds > 0 else longest, longest + 1):
        if cap > _EVERY_CAP and cap % _CAP_STRIDE and cap < longest:
            continue
        tokens, number, most = sure_tokens, 0, most_before
        for node in order:
            if ranks[node] > cap:
                continue
            number += 1
            most = max(most, ranks[node])
            tokens += survival[node]
            num_padded = num_requests * most - num_before - number
            cost = seconds[number] + row_seconds * num_padded
            if tokens / cost > best_rate:
                best, best_cap, best_tokens, best_cost = number, cap, tokens, cost
                best_rate = tokens / cost
    is_kept = np.zeros(survival.size, dtype=np.bool_)
    for node in order:
        if best == 0:
            break
        if ranks[node] <= best_cap:
            is_kept[node] = True
            best -= 1
    return is_kept, best_tokens, best_cost, plain
