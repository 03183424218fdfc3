"""Acceptance learnt from outcomes: kinds of node, the workload, each request's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.control.estimator import (
    NUM_DEPTHS,
    NUM_LEVELS,
    AcceptanceTable,
    bins_of,
    read_nodes,
    survival_of,
)
from foredraft.tree.tree import depths as tree_depths
from foredraft.types import Int64Array

FIRST = np.array([0])
"""The kind of a node right after the root, of a drafter that cannot say how sure it is."""


def see(table: AcceptanceTable, request_id: str, values: list[float], kinds: Int64Array) -> None:
    """Let outcomes come one at a time, as steps bring them."""
    for value in values:
        table.observe(request_id, kinds, np.array([float(value)]), np.ones(1))


def coins(chance: float, count: int, seed: int = 0) -> list[float]:
    return (np.random.default_rng(seed).random(count) < chance).astype(float).tolist()


def estimate(table: AcceptanceTable, request_id: str, kinds: Int64Array = FIRST) -> float:
    return float(table.acceptance(kinds, request_id)[0])


@settings(deadline=None)
@given(st.data())
def test_survival_is_the_product_along_the_path(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 30))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    acceptance = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    found = survival_of(np.array(parents, dtype=np.int64), np.array(acceptance, dtype=np.float64))
    for node in range(count):
        expected, above = 1.0, node
        while above >= 0:
            expected *= acceptance[above]
            above = parents[above]
        assert found[node] == pytest.approx(expected)


def test_kinds_go_by_depth_where_a_drafter_cannot_say() -> None:
    depths = np.array([1, 2, NUM_DEPTHS, NUM_DEPTHS + 5, 1])
    ranks = np.array([0, 0, 0, 0, 3])
    expected = [0, 1, NUM_DEPTHS - 1, NUM_DEPTHS - 1, 0]
    assert bins_of(depths, ranks, None).tolist() == expected
    assert bins_of(depths, ranks, np.full(5, np.nan)).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(0, 1, exclude_max=True), st.just(float("nan"))), max_size=20))
def test_kinds_go_by_confidence_where_there_is_one(confidence: list[float]) -> None:
    count = len(confidence)
    depths, ranks = np.arange(1, count + 1), np.arange(count) % 2
    kinds = bins_of(depths, ranks, np.array(confidence, dtype=np.float64))
    for node, sure in enumerate(confidence):
        if np.isnan(sure):
            assert kinds[node] == node
        else:
            first = NUM_DEPTHS + NUM_LEVELS * (node % 2)
            assert first <= kinds[node] < first + NUM_LEVELS


@settings(deadline=None)
@given(st.data())
def test_a_batch_is_read_as_its_plain_twin_says(data: st.DataObject) -> None:
    """Several trees at once, some under a classical rule, with and without confidence."""
    sizes = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))
    trees = [[data.draw(st.integers(0, node)) for node in range(size)] for size in sizes]
    count = sum(sizes)
    sure = data.draw(
        st.lists(
            st.one_of(st.floats(0, 1, exclude_max=True), st.just(float("nan"))),
            min_size=count,
            max_size=count,
        )
    )
    confidence = np.array(sure, dtype=np.float64)
    if data.draw(st.booleans()):
        confidence = np.empty(0)
    is_walk = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parents = np.array([row for one in trees for row in one], dtype=np.int64)
    owners, above, kinds = read_nodes(parents, offsets, confidence, is_walk)
    for segment, one in enumerate(trees):
        first, end = offsets[segment], offsets[segment + 1]
        assert owners[first:end].tolist() == [segment] * len(one)
        assert above[first:end].tolist() == [first + row - 1 if row else -1 for row in one]
        depths = tree_depths(np.array(one, dtype=np.int64))[1:]
        ranks = np.array([min(one[:node].count(row), 1) for node, row in enumerate(one)])
        own = confidence[first:end] if len(confidence) and is_walk[segment] else None
        expected = bins_of(depths, ranks.astype(np.int64), own)
        assert kinds[first:end].tolist() == expected.tolist()


def test_the_surer_the_higher_the_kind() -> None:
    confidence = np.concatenate([np.linspace(0, 0.999, 500), 1 - 0.5 ** np.arange(10, 50)])
    ones = np.ones(len(confidence), dtype=np.int64)
    kinds = bins_of(ones, 0 * ones, np.minimum(confidence, np.nextafter(1, 0)))
    assert (np.diff(kinds) >= 0).all()
    assert kinds[0] == NUM_DEPTHS and kinds[-1] == NUM_DEPTHS + NUM_LEVELS - 1
    table = AcceptanceTable()
    priors = table.acceptance(np.arange(NUM_DEPTHS, NUM_DEPTHS + NUM_LEVELS), "a")
    assert (np.diff(priors) > 0).all()  # until outcomes say otherwise


@pytest.mark.parametrize("chance", [0.02, 0.2, 0.5, 0.8, 0.95])
def test_it_converges_to_the_true_acceptance(chance: float) -> None:
    """Mean of 20 tables after 300 outcomes; a binomial of some 100 trials is off by 0.05."""
    found = []
    for seed in range(20):
        table = AcceptanceTable()
        see(table, "a", coins(chance, 300, seed), FIRST)
        found.append(estimate(table, "a"))
        assert found[-1] == pytest.approx(chance, abs=0.2)
    assert np.mean(found) == pytest.approx(chance, abs=0.05)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9), (0.95, 0.4)])
def test_it_follows_a_change_within_a_few_dozen_outcomes(before: float, after: float) -> None:
    found = []
    for seed in range(10):
        table = AcceptanceTable()
        see(table, "a", coins(before, 300, seed), FIRST)
        see(table, "a", coins(after, 40, seed + 100), FIRST)
        found.append(estimate(table, "a"))
    assert np.mean(found) == pytest.approx(after, abs=0.15)


def test_steady_luck_is_no_change() -> None:
    """A request of one acceptance keeps it for a thousand outcomes."""
    table = AcceptanceTable()
    found = []
    for value in coins(0.8, 1000, 3):
        see(table, "a", [value], FIRST)
        found.append(estimate(table, "a"))
    assert min(found[100:]) > 0.5 and np.mean(found[100:]) == pytest.approx(0.8, abs=0.04)


def test_a_new_request_starts_from_the_workload() -> None:
    table = AcceptanceTable()
    assert estimate(table, "first") == pytest.approx(0.7, abs=0.01)  # hopeful
    for index in range(10):
        see(table, f"request {index}", coins(0.2, 60, index), FIRST)
    assert estimate(table, "new") == pytest.approx(0.2, abs=0.08)
    # Depths that nobody has reached lean on those that were.
    assert estimate(table, "new", np.array([5])) < 0.4
    # What a request shows of itself is its own: it moves others far less.
    see(table, "other", [1.0] * 30, FIRST)
    assert estimate(table, "other") > 0.75
    assert estimate(table, "new") < 0.45


def test_forget_drops_the_request_and_not_the_workload() -> None:
    table = AcceptanceTable()
    see(table, "steady", coins(0.5, 200), FIRST)
    see(table, "bad", [0.0] * 30, FIRST)
    new = estimate(table, "new")
    assert estimate(table, "bad") < new - 0.2
    table.forget("bad")
    assert estimate(table, "bad") == pytest.approx(new)
    table.forget("never seen")
    for index in range(100):  # rows are given to others, and come clean
        see(table, f"x{index}", [0.0] * 3, FIRST)
        table.forget(f"x{index}")
    assert estimate(table, "another") == pytest.approx(estimate(table, "yet another"))


def test_without_drafts_what_is_believed_grows_old() -> None:
    table = AcceptanceTable()
    see(table, "steady", coins(0.8, 400), FIRST)
    see(table, "bad", [0.0] * 12, FIRST)
    low, workload = estimate(table, "bad"), estimate(table, "new")
    for _ in range(4000):
        table.age("bad")
    assert low < 0.4 < estimate(table, "bad") == pytest.approx(workload, abs=0.01)


def test_what_becomes_of_all_is_not_learnt_twice() -> None:
    """All requests turn from 0.9 to 0.3 at once; then they are not taken for much less than 0.3."""
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        table = AcceptanceTable()
        names = [f"r{i}" for i in range(8)]
        for acceptance, steps in ((0.9, 60), (0.3, 40)):
            for _ in range(steps):
                for name in names:
                    see(table, name, [float(rng.random() < acceptance)], FIRST)
        found += [estimate(table, name) for name in names]
    assert 0.25 < np.mean(found) < 0.33


def test_nodes_that_were_never_reached_say_nothing() -> None:
    table = AcceptanceTable()
    kinds = np.arange(4)
    before = table.acceptance(kinds, "a")
    table.observe("a", kinds, np.zeros(4), np.zeros(4))
    np.testing.assert_array_equal(before, table.acceptance(kinds, "a"))
    assert table.num_trials == table.num_hits == 0
    table.observe("a", kinds, np.array([1.0, 0.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0, 0.0]))
    assert table.num_trials == pytest.approx(2.0) and table.num_hits == pytest.approx(1.0)


def test_chances_teach_what_coins_teach() -> None:
    """Where the target's own probabilities are known, they stand for outcomes."""
    table = AcceptanceTable()
    see(table, "a", [0.35] * 300, FIRST)
    assert estimate(table, "a") == pytest.approx(0.35, abs=0.03)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, NUM_DEPTHS + 2 * NUM_LEVELS - 1), st.floats(0, 1), st.floats(0, 1)
        ),
        max_size=80,
    )
)
def test_it_stays_a_chance_whatever_comes(outcomes: list[tuple[int, float, float]]) -> None:
    table = AcceptanceTable()
    for kind, value, weight in outcomes:
        table.observe("a", np.array([kind]), np.array([value]), np.array([weight]))
    every = table.acceptance(np.arange(NUM_DEPTHS + 2 * NUM_LEVELS), "a")
    assert ((every > 0) & (every < 1)).all()
