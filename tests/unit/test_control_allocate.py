"""Which nodes a step keeps: the best of all choices that are closed under parents."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.control.allocate import Padding, allocate

ACCEPTANCE = st.floats(0.01, 0.99)


@st.composite
def forests(draw: st.DrawFn, most: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Parents (index, -1 for a root) and survival of the nodes of some trees."""
    count = draw(st.integers(0, most))
    parents, survival = [], []
    for node in range(count):
        parent = draw(st.integers(-1, node - 1))
        parents.append(parent)
        survival.append(draw(ACCEPTANCE) * (1.0 if parent < 0 else survival[parent]))
    return np.array(parents, dtype=np.int64), np.array(survival, dtype=np.float64)


@settings(deadline=None)
@given(
    forests(),
    st.lists(st.floats(0.5, 3.0), min_size=10, max_size=10),
    st.floats(1.0, 4.0),
)
def test_no_choice_that_keeps_parents_is_better(
    forest: tuple[np.ndarray, np.ndarray], costs: list[float], sure_tokens: float
) -> None:
    """Against all subsets; the cost need not rise, nor evenly."""
    parents, survival = forest
    seconds = np.array(costs[: len(survival) + 1])
    chosen = allocate(survival, seconds, sure_tokens, 0.0)
    best = 0.0
    for subset in itertools.product([False, True], repeat=len(survival)):
        kept = np.array(subset, dtype=bool)
        if any(kept[node] and p >= 0 and not kept[p] for node, p in enumerate(parents)):
            continue
        best = max(best, (sure_tokens + survival[kept].sum()) / seconds[kept.sum()])
    assert np.isclose(chosen.expected_tokens / chosen.seconds, best)
    for node in np.nonzero(chosen.is_kept)[0]:
        assert parents[node] < 0 or chosen.is_kept[parents[node]]
    assert chosen.seconds == seconds[chosen.is_kept.sum()]
    assert chosen.plain_seconds == seconds[0]
    assert np.isclose(chosen.expected_tokens, sure_tokens + survival[chosen.is_kept].sum())


@settings(deadline=None)
@given(
    st.lists(ACCEPTANCE, min_size=1, max_size=40),
    st.floats(0.001, 0.5),
    st.floats(0.0, 0.2),
)
def test_a_small_gain_is_not_enough(chain: list[float], slope: float, least_gain: float) -> None:
    survival = np.cumprod(chain)
    seconds = 1 + slope * np.arange(len(chain) + 1.0)
    chosen = allocate(survival, seconds, 1.0, least_gain)
    rates = np.concatenate([[1.0], 1 + np.cumsum(survival)]) / seconds
    best = int(np.argmax(rates))
    if rates[best] > (1 + least_gain) * (1 + 1e-9):
        assert np.isclose(chosen.expected_tokens / chosen.seconds, rates[best])
    elif rates[best] < (1 + least_gain) * (1 - 1e-9):
        assert not chosen.is_kept.any() and chosen.seconds == chosen.plain_seconds == 1.0


def test_equal_chances_keep_the_first() -> None:
    """Chances so small that they are all zero still leave no child without its parent."""
    survival = np.cumprod(np.full(200, 0.002))
    seconds = np.concatenate([np.full(150, 1.0), np.full(51, 2.0)])
    chosen = allocate(survival, seconds, 1.0, 0.0)
    count = int(chosen.is_kept.sum())
    assert chosen.is_kept[:count].all() and not chosen.is_kept[count:].any()


def test_a_cheap_spot_behind_a_dear_one_is_found() -> None:
    """Tensor cores work in tiles: 3 nodes may cost what 7 do."""
    survival = np.cumprod(np.full(12, 0.9))
    seconds = np.array([1.0] + [2.0] * 7 + [4.0] * 5)
    assert allocate(survival, seconds, 1.0, 0.0).is_kept.sum() == 7


def test_nothing_on_offer() -> None:
    chosen = allocate(np.empty(0), np.array([0.5]), 3.0, 0.01)
    assert len(chosen.is_kept) == 0
    assert (chosen.expected_tokens, chosen.seconds, chosen.plain_seconds) == (3.0, 0.5, 0.5)


@settings(deadline=None)
@given(
    forests(8),
    st.lists(st.floats(0.0, 0.3), min_size=9, max_size=9),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.floats(0.001, 0.5),
    st.integers(0, 3),
)
def test_unequal_drafts_are_weighed_with_their_padding(
    forest: tuple[np.ndarray, np.ndarray],
    rises: list[float],
    roots: list[int],
    row_seconds: float,
    most_before: int,
) -> None:
    """Against the best of all choices of the likeliest nodes under a bound on each request."""
    parents, survival = forest
    owners = np.zeros(len(survival), dtype=np.int64)
    for node, parent in enumerate(parents):
        owners[node] = roots[node] if parent < 0 else owners[parent]
    seconds = 1 + np.cumsum(rises)[: len(survival) + 1]
    padding = Padding(owners, 3, row_seconds, most_before, most_before)
    chosen = allocate(survival, seconds, 3.0, 0.0, padding)

    def cost(kept: np.ndarray) -> float:
        most = max(most_before, np.bincount(owners[kept], minlength=3).max())
        return seconds[kept.sum()] + row_seconds * (3 * most - most_before - kept.sum())

    order = np.argsort(-survival, kind="stable")
    best = 0.0
    for cap in range(len(survival) + 1):
        kept = np.zeros(len(survival), dtype=bool)
        best = max(best, 3 / cost(kept))
        for node in order:
            if kept[owners == owners[node]].sum() < cap:
                kept[node] = True
                best = max(best, (3 + survival[kept].sum()) / cost(kept))
    assert np.isclose(chosen.expected_tokens / chosen.seconds, best)
    assert np.isclose(chosen.seconds, cost(chosen.is_kept))
    assert np.isclose(chosen.plain_seconds, cost(np.zeros(len(survival), dtype=bool)))
    for node in np.nonzero(chosen.is_kept)[0]:
        assert parents[node] < 0 or chosen.is_kept[parents[node]]
