"""Which nodes a step keeps: the best of all choices that are closed under parents."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.control.allocate import allocate

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
