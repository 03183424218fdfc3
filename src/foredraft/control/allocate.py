"""How many draft nodes a step should hold: as many as raise expected tokens per second.

Each next node goes to the request where it adds most, which is the one with the greatest survival
over all requests. Expected tokens are the requests plus the survival of what is kept; the cost of
the step is a table that need not be even or rising evenly, so every number is compared, not only
the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.sampling.processors import Float64Array


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


def allocate(
    survival: Float64Array, seconds: Float64Array, sure_tokens: float, least_gain: float
) -> Allocation:
    """Keep the likeliest nodes, as many as make the step worth most per second.

    Args:
        survival: float64 [num_nodes], chance that each node is accepted; strictly less than that of
            its parent, so that what is kept is closed under parents.
        seconds: float64 [num_nodes + 1], cost of the step with so many nodes.
        sure_tokens: Expected tokens of the step whatever is kept: one a request, and what is
            drafted already.
        least_gain: Drafting must beat plain decoding by this share to be chosen, 0 or more.
    """
    is_kept, best, tokens = _allocate(survival, seconds, float(sure_tokens), 1 + least_gain)
    return Allocation(is_kept, tokens, float(seconds[best]), float(seconds[0]))


@numba.njit(cache=True)
def _allocate(
    survival: Float64Array, seconds: Float64Array, sure_tokens: float, least_ratio: float
) -> tuple[NDArray[np.bool_], int, float]:
    """What is kept, how many nodes that are, likeliest first, and the expected tokens with it."""
    order = np.argsort(-survival, kind="mergesort")
    best, best_tokens = 0, sure_tokens
    best_rate = sure_tokens / seconds[0] * least_ratio
    tokens = sure_tokens
    for number in range(survival.size):
        tokens += survival[order[number]]
        rate = tokens / seconds[number + 1]
        if rate > best_rate:
            best, best_tokens, best_rate = number + 1, tokens, rate
    is_kept = np.zeros(survival.size, dtype=np.bool_)
    is_kept[order[:best]] = True
    return is_kept, best, best_tokens
