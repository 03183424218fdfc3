"""The controller in a known world: how far from the best choice, how soon after a change.

Regret is in expected tokens per second, without the luck of draws; seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.bench.simulate import Cost, best_rate, simulate


def linear(alpha: float) -> Cost:
    """Seconds of a pass: one, and ``alpha`` more for every row beyond the first."""
    return lambda num_requests, rows: 1.0 + alpha * (rows - 1)


def shares(acceptance: list[float], num_requests: int, alpha: float, seed: int) -> np.ndarray:
    """Of the best choice's tokens per second, by step."""
    steps = simulate(acceptance, num_requests, linear(alpha), seed)
    return np.array([step.share_of_best for step in steps])


def test_the_best_choice_is_the_formula() -> None:
    """Of one chain: the best of ``(1 + a + ... + a^n) / (1 + alpha n)``."""
    for acceptance in (0.0, 0.3, 0.9):
        for alpha in (0.01, 0.1, 0.5):
            rates = [
                sum(acceptance**depth for depth in range(n + 1)) / (1 + alpha * n)
                for n in range(32)
            ]
            assert best_rate(acceptance, 1, linear(alpha)) == pytest.approx(max(rates))


def test_no_step_is_better_than_the_best() -> None:
    for num_requests in (1, 5):
        found = shares([0.9] * 40 + [0.2] * 40, num_requests, 0.05, 1)
        assert found.max() <= 1 + 1e-9 and found.min() > 0


@pytest.mark.parametrize(
    ("num_requests", "alpha", "acceptance"),
    [
        (1, 0.02, 0.0),
        (1, 0.02, 0.8),
        (1, 0.1, 0.5),
        (1, 0.1, 0.95),
        (8, 0.02, 0.5),
        (8, 0.1, 0.0),
        (8, 0.1, 0.8),
        (32, 0.02, 0.95),
    ],
)
def test_regret_is_small(num_requests: int, alpha: float, acceptance: float) -> None:
    """Over 300 steps from knowing nothing; seen: 0.2 to 1.6 %."""
    found = [shares([acceptance] * 300, num_requests, alpha, seed).mean() for seed in range(3)]
    assert np.mean(found) > 0.97


@pytest.mark.parametrize(
    ("num_requests", "alpha", "before", "after"),
    [
        (1, 0.02, 0.9, 0.1),
        (1, 0.02, 0.95, 0.5),
        (1, 0.02, 0.5, 0.95),
        (1, 0.1, 0.5, 0.95),
        (8, 0.02, 0.5, 0.95),
        (8, 0.02, 0.9, 0.0),
        (8, 0.1, 0.9, 0.1),
    ],
)
def test_a_change_is_made_up_for_within_32_steps(
    num_requests: int, alpha: float, before: float, after: float
) -> None:
    """Eight steps in a row above 95 % of the best begin by then; seen: 3 to 14 steps."""
    for seed in range(3):
        found = shares([before] * 200 + [after] * 60, num_requests, alpha, seed)[200:]
        runs = np.convolve(found, np.full(8, 1 / 8), "valid")
        assert (runs[:32] > 0.95).any(), seed


@pytest.mark.parametrize("num_requests", [1, 8])
def test_what_turned_hopeless_stops_costing(num_requests: int) -> None:
    """Seen: 2.5 % and less, the probes included."""
    found = [
        shares([0.9] * 200 + [0.0] * 200, num_requests, 0.1, seed)[300:].mean() for seed in range(3)
    ]
    assert np.mean(found) > 0.96
