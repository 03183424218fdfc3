"""Token trees as parent arrays: depth and who may attend to whom.

A tree of ``n`` nodes hangs below a root. Row 0 is the root, row ``k`` the k-th node (1-based), and
``parents[k - 1]`` is the row of its parent, always an earlier one. A chain is a tree with one child
a node: ``parents = [0, 1, 2, ...]``.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def is_chain(parents: Int64Array) -> bool:
    """Whether every node's parent is the row just before it."""
    return bool((parents == np.arange(len(parents))).all())


@numba.njit(cache=True)
def _depths(parents, out):  # type: ignore[no-untyped-def]
    out[0] = 0
    for node in range(parents.size):
        out[node + 1] = out[parents[node]] + 1


def depths(parents: Int64Array) -> Int64Array:
    """Return the depth of the root (0) and of every node, int64 [1 + num_nodes]."""
    out = np.empty(len(parents) + 1, dtype=np.int64)
    _depths(parents, out)
    return out


@numba.njit(cache=True)
def _ancestors(parents, out):  # type: ignore[no-untyped-def]
    out[0, 0] = True
    for node in range(parents.size):
        row = node + 1
        for column in range(row):
            out[row, column] = out[parents[node], column]
        out[row, row] = True


def ancestors(parents: Int64Array) -> NDArray[np.bool_]:
    """Return who sees whom, bool [1 + n, 1 + n]: a row sees itself and its ancestors."""
    size = len(parents) + 1
    out = np.zeros((size, size), dtype=np.bool_)
    _ancestors(parents, out)
    return out


def check(parents: Int64Array) -> None:
    """Raise ``ValueError`` unless every parent is an earlier row."""
    rows = np.arange(1, len(parents) + 1)
    if len(parents) and not ((parents >= 0) & (parents < rows)).all():
        node = int(np.nonzero((parents < 0) | (parents >= rows))[0][0])
        raise ValueError(
            f"node {node + 1} has parent row {int(parents[node])}; allowed are rows 0 to {node}: "
            "put a parent before its children"
        )
