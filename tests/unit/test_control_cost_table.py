"""What a step costs: as measured between measured cells, and learnt where that is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.control.allocate import allocate
from foredraft.control.cost_table import CostTable
from foredraft.plan.profile import PaddingTime, PassTime

ROWS = (1, 2, 3, 5, 9, 17, 32)
BATCHES = (1, 4, 16)
CONTEXTS = (0, 512)


def truth(num_requests: int, rows: float, context: float) -> float:
    """Seconds, linear in everything but the batch."""
    return 0.01 + 0.0004 * rows + 1e-7 * num_requests * context


def table(shape=truth, batches=BATCHES, contexts=CONTEXTS, rows=ROWS) -> CostTable:
    return CostTable(
        PassTime(b, b * r, c, shape(b, b * r, c), 0.0)
        for b in batches
        for r in rows
        for c in contexts
    )


def at(the_table: CostTable, num_requests: int, rows: float, context: float = 0.0) -> float:
    return float(the_table.seconds(num_requests, np.array([float(rows)]), context)[0])


def test_measured_cells_are_exact_whatever_their_shape() -> None:
    rng = np.random.default_rng(0)
    cells = [
        PassTime(b, b * r, c, float(rng.uniform(0.01, 0.1)), 0.0)
        for b in (1, 3, 8)
        for r in ROWS
        for c in (0, 100, 1000)
    ]
    the_table = CostTable(cells)
    for cell in cells:
        assert at(the_table, cell.num_requests, cell.num_rows, cell.context) == pytest.approx(
            cell.seconds
        )


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(1, 32), st.floats(0, 512))
def test_between_cells_lines_are_straight(batch: int, per_request: float, context: float) -> None:
    """Where time is linear in rows and context, and the batch was measured, nothing is lost."""
    the_table = table()
    if batch in BATCHES:
        expected = truth(batch, batch * per_request, context)
        assert at(the_table, batch, batch * per_request, context) == pytest.approx(expected)
    else:
        low, high = max(b for b in BATCHES if b < batch), min(b for b in BATCHES if b > batch)
        ends = [truth(b, b * per_request, context) for b in (low, high)]
        assert min(ends) <= at(the_table, batch, batch * per_request, context) <= max(ends)


def test_beyond_the_cells_it_goes_on_sanely() -> None:
    the_table = table()
    assert at(the_table, 1, 64) == pytest.approx(truth(1, 64, 0))  # the last slope
    assert at(the_table, 1, 1, 5000) == at(the_table, 1, 1, 512)  # the last context
    assert at(the_table, 32, 32) == pytest.approx(2 * at(the_table, 16, 16))  # twice the batch
    rows = np.arange(1.0, 500.0)
    seconds = the_table.seconds(1, rows, 0.0)
    assert (np.diff(seconds) >= 0).all() and np.isfinite(seconds).all()
    # A last pair that fell by chance does not make a large pass free.
    falling = CostTable([PassTime(1, 1, 0, 1.0, 0.0), PassTime(1, 2, 0, 0.9, 0.0)])
    assert at(falling, 1, 1000) == pytest.approx(0.9)
    alone = CostTable([PassTime(1, 1, 0, 1.0, 0.0)])
    assert at(alone, 1, 32) == pytest.approx(1.0) and at(alone, 4, 4) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="at least one"):
        CostTable([])


def test_it_learns_a_kind_of_pass_that_is_dearer_than_measured() -> None:
    """Passes of 8 rows take half as long again; the others are as measured."""
    the_table = table()
    before = at(the_table, 1, 8) / at(the_table, 1, 1)
    for _ in range(400):
        the_table.observe(1, 8, 0, 1.5 * truth(1, 8, 0))
        the_table.observe(1, 1, 0, truth(1, 1, 0))
    assert at(the_table, 1, 8) == pytest.approx(1.5 * truth(1, 8, 0), rel=0.02)
    assert at(the_table, 1, 1) == pytest.approx(truth(1, 1, 0), rel=0.02)
    assert at(the_table, 1, 8) / at(the_table, 1, 1) == pytest.approx(1.5 * before, rel=0.03)


def test_one_hiccup_moves_nothing() -> None:
    the_table = table()
    for _ in range(30):  # while it is young it learns fast, hiccups too
        the_table.observe(1, 8, 0, truth(1, 8, 0))
    the_table.observe(1, 8, 0, 1000 * truth(1, 8, 0))
    assert at(the_table, 1, 8) == pytest.approx(truth(1, 8, 0), rel=0.05)
    after = at(the_table, 1, 8)
    the_table.observe(1, 8, 0, 0.0)  # a clock that stood still says nothing
    assert at(the_table, 1, 8) == after


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_a_machine_that_is_slower_as_a_whole_decides_the_same(factor: float) -> None:
    """What counts is the cost of a pass with drafts as a share of one without."""
    survival = np.cumprod(np.full(24, 0.8))

    def choice(the_table: CostTable) -> int:
        seconds = the_table.seconds(1, 1 + np.arange(25.0), 0.0)
        return int(allocate(survival, seconds, 1.0, 0.0).is_kept.sum())

    the_table = table()
    chosen = choice(the_table)
    rng = np.random.default_rng(1)
    for _ in range(2000):
        rows = int(rng.integers(1, 33))
        the_table.observe(1, rows, 0, factor * truth(1, rows, 0))
    assert abs(choice(the_table) - chosen) <= 1
    assert at(the_table, 1, 8) == pytest.approx(factor * truth(1, 8, 0), rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=50))
def test_whatever_it_sees_it_stays_a_time(observed: list[float]) -> None:
    the_table = table()
    for seconds in observed:
        the_table.observe(4, 12, 100, seconds)
    assert 0 < at(the_table, 4, 12, 100) < math.inf


def test_what_a_row_of_padding_costs_grows_with_the_context() -> None:
    """Measured 1 ms at 128 tokens and 3 ms at 1024; a line between, and one batch counts as all."""
    passes = [
        PassTime(b, b * r, c, 0.05 + b * r * 1e-3, 0.0)
        for b in (1, 4)
        for r in (1, 2, 3, 5, 9)
        for c in (128, 1024)
    ]
    paddings = [PaddingTime(4, 128, 1e-3), PaddingTime(4, 1024, 3e-3), PaddingTime(16, 1024, 3e-3)]
    the_table = CostTable(passes, paddings)
    assert the_table.padding_seconds(576) == pytest.approx(2e-3)
    assert CostTable(passes).padding_seconds(576) == 0
    assert CostTable(passes, paddings[:1]).padding_seconds(4000) == pytest.approx(1e-3)
    noisy = CostTable(passes, [PaddingTime(4, 128, 3e-3), PaddingTime(4, 1024, 1e-3)])
    assert noisy.padding_seconds(4000) == pytest.approx(3e-3)
    # A step's padding is not charged to its kind of pass.
    before = at(the_table, 4, 12, 576.0)
    for _ in range(50):
        the_table.observe(4, 12, 576, before + 8 * 2e-3, num_padded=8)
    assert at(the_table, 4, 12, 576.0) == pytest.approx(before, rel=1e-3)


def test_a_plain_pass_is_a_kind_of_its_own() -> None:
    """The first draft node makes the time jump; what is learnt on one side stays there."""
    the_table = table()
    plain, one = at(the_table, 8, 8), at(the_table, 8, 9)
    for _ in range(200):
        the_table.observe(8, 9, 0, 1.3 * one)
        the_table.observe(8, 8, 0, plain)
    assert at(the_table, 8, 8) == pytest.approx(plain, rel=0.02)
    assert at(the_table, 8, 9) == pytest.approx(1.3 * one, rel=0.02)
    assert the_table.steps_since_plain(8) == 0
    the_table.observe(8, 9, 0, one)
    assert the_table.steps_since_plain(8) == 1 and the_table.steps_since_plain(64) == 0
