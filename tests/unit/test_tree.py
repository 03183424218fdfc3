"""Token trees: depth, ancestry and what counts as one, against loops that follow parents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.tree import tree


@st.composite
def some_parents(draw) -> np.ndarray:
    num_nodes = draw(st.integers(0, 20))
    return np.array([draw(st.integers(0, node)) for node in range(num_nodes)], dtype=np.int64)


def line_of(parents: np.ndarray, row: int) -> list[int]:
    """A row and its ancestors, up to the root."""
    line = [row]
    while line[-1]:
        line.append(int(parents[line[-1] - 1]))
    return line


@settings(deadline=None, max_examples=200, derandomize=True)
@given(some_parents())
def test_depths_and_ancestors_follow_the_parents(parents: np.ndarray) -> None:
    tree.check(parents)
    depths, seen = tree.depths(parents), tree.ancestors(parents)
    assert depths.dtype == np.int64 and seen.dtype == np.bool_
    assert depths.shape == (len(parents) + 1,) and seen.shape == (len(parents) + 1,) * 2
    for row in range(len(parents) + 1):
        line = line_of(parents, row)
        assert depths[row] == len(line) - 1
        assert np.nonzero(seen[row])[0].tolist() == sorted(line)


def test_the_smallest() -> None:
    none = np.empty(0, dtype=np.int64)
    assert tree.depths(none).tolist() == [0]
    assert tree.ancestors(none).tolist() == [[True]]
    assert tree.is_chain(none)
    tree.check(none)


def test_chains() -> None:
    for num_nodes in range(6):
        chain = np.arange(num_nodes)
        assert chain.dtype == np.int64 and chain.tolist() == list(range(num_nodes))
        assert tree.is_chain(chain)
        assert tree.depths(chain).tolist() == list(range(num_nodes + 1))
        assert (tree.ancestors(chain) == np.tri(num_nodes + 1, dtype=bool)).all()
    for branched in ([0, 0], [0, 1, 1], [0, 1, 0], [0, 1, 2, 2]):
        assert not tree.is_chain(np.array(branched))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(some_parents(), st.data())
def test_a_parent_that_comes_later_is_refused(parents: np.ndarray, data: st.DataObject) -> None:
    if not len(parents):
        return
    node = data.draw(st.integers(0, len(parents) - 1))
    bad = parents.copy()
    bad[node] = data.draw(st.sampled_from([-1, -5, node + 1, node + 2, 99]))
    with pytest.raises(ValueError, match=f"node {node + 1} has parent row {bad[node]}"):
        tree.check(bad)
