"""The closed form: expected tokens, speedup, the best N, the marginal rule, the ceiling."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.errors import PlanError
from foredraft.plan.acceptance import (
    chain_expected_tokens,
    constant_survival,
    path_probabilities,
    survival_expected_tokens,
    tree_expected_tokens,
)
from foredraft.plan.cost import (
    StepCost,
    best_num_speculative_tokens,
    least_acceptance,
    one_more_pays,
    speedup,
    speedups,
)
from foredraft.plan.profile import DRAFT_COSTS

MOST = 40
acceptances = st.floats(0, 1)
lengths = st.integers(0, MOST)
step_costs = st.builds(StepCost, st.floats(0, 1.5), st.floats(0, 2), st.sampled_from(DRAFT_COSTS))
conditionals = st.lists(acceptances, max_size=MOST)


def _survival(rates: list[float]) -> list[float]:
    result, reached = [], 1.0
    for rate in rates:
        reached *= rate
        result.append(reached)
    return result


# ------------------------------------------------------------------------------- expected tokens


@settings(deadline=None)
@given(st.floats(0, 0.999), lengths)
def test_a_chain_is_the_closed_form(acceptance: float, n: int) -> None:
    closed = (1 - acceptance ** (n + 1)) / (1 - acceptance)
    assert chain_expected_tokens(acceptance, n) == pytest.approx(closed, rel=1e-9)


@settings(deadline=None)
@given(acceptances, acceptances, lengths)
def test_more_acceptance_and_more_drafts_never_emit_less(p: float, q: float, n: int) -> None:
    low, high = sorted((p, q))
    assert chain_expected_tokens(low, n) <= chain_expected_tokens(high, n) + 1e-12
    assert chain_expected_tokens(p, n) <= chain_expected_tokens(p, n + 1)
    assert 1 <= chain_expected_tokens(p, n) <= n + 1


@settings(deadline=None)
@given(lengths)
def test_limits_of_a_chain(n: int) -> None:
    assert chain_expected_tokens(0, n) == 1
    assert chain_expected_tokens(1, n) == n + 1
    assert chain_expected_tokens(0.75, 400) == pytest.approx(4)


@settings(deadline=None)
@given(acceptances, lengths)
def test_survival_of_a_constant_acceptance_is_the_chain(p: float, n: int) -> None:
    assert survival_expected_tokens(constant_survival(p, n)) == chain_expected_tokens(p, n)


@settings(deadline=None)
@given(conditionals)
def test_a_chain_is_a_tree(rates: list[float]) -> None:
    parents = list(range(len(rates)))
    assert path_probabilities(parents, rates) == pytest.approx(_survival(rates))
    assert tree_expected_tokens(parents, rates) == pytest.approx(
        survival_expected_tokens(_survival(rates))
    )


def test_a_tree_by_hand() -> None:
    # Two children of the root, one grandchild below the first.
    assert path_probabilities([0, 0, 1], [0.6, 0.3, 0.5]) == pytest.approx((0.6, 0.3, 0.3))
    assert tree_expected_tokens([0, 0, 1], [0.6, 0.3, 0.5]) == pytest.approx(2.2)


def test_siblings_share_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"children of row 0 are accepted with probability 1\.2"):
        tree_expected_tokens([0, 0], [0.6, 0.6])
    with pytest.raises(PlanError, match="node 2 has parent row 2"):
        tree_expected_tokens([0, 2], [0.6, 0.6])
    with pytest.raises(PlanError, match="2 nodes and acceptances 1"):
        tree_expected_tokens([0, 0], [0.6])


@pytest.mark.parametrize("value", [-0.1, 1.01, 80, math.nan, math.inf, "0.8", None, True])
def test_acceptance_is_a_probability(value: Any) -> None:
    with pytest.raises(PlanError, match=r"acceptance is .*allowed is a probability, from 0 to 1"):
        chain_expected_tokens(value, 4)


def test_a_percentage_is_noticed() -> None:
    with pytest.raises(PlanError, match=r"If 80 is a percentage, that is 0\.8"):
        chain_expected_tokens(80, 4)


@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
def test_lengths_are_counts(value: Any) -> None:
    with pytest.raises(PlanError, match="allowed is an integer of 0 or more"):
        chain_expected_tokens(0.5, value)


def test_survival_never_rises() -> None:
    with pytest.raises(PlanError, match=r"survival rises to 0\.6 at position 2"):
        survival_expected_tokens([0.5, 0.6])
    with pytest.raises(PlanError, match="given for 1 positions"):
        survival_expected_tokens([0.5], 2)


# ------------------------------------------------------------------------------------ the speedup


@settings(deadline=None)
@given(step_costs)
def test_no_draft_is_plain_decoding(cost: StepCost) -> None:
    assert speedup(1, 0, cost) == 1
    assert speedups([], cost) == [1]


def test_worked_by_hand() -> None:
    expected = chain_expected_tokens(0.8, 4)
    assert expected == pytest.approx(3.3616)
    assert speedup(expected, 4, StepCost(0.01, 0.05, "per_token")) == pytest.approx(3.3616 / 1.24)
    assert speedup(expected, 4, StepCost(0.01, 0.05, "once")) == pytest.approx(3.3616 / 1.09)
    # A tree of 4 nodes and 2 levels.
    cost = StepCost(0.01, 0.05, "per_level")
    assert speedup(2.2, 4, cost, num_levels=2) == pytest.approx(2.2 / 1.14)


@settings(deadline=None)
@given(acceptances, lengths, step_costs)
def test_best_n_is_the_best_of_all(acceptance: float, most: int, cost: StepCost) -> None:
    def brute(n: int) -> float:
        each = 0 if not n else cost.t_draft * (1 if cost.draft_cost == "once" else n)
        return sum(acceptance**k for k in range(n + 1)) / (each + 1 + cost.alpha * n)

    best = best_num_speculative_tokens(constant_survival(acceptance, most), cost)
    top = max(brute(n) for n in range(most + 1))
    assert brute(best) == pytest.approx(top, rel=1e-12)
    assert all(brute(n) <= brute(best) * (1 + 1e-12) for n in range(best))


@settings(deadline=None)
@given(conditionals, step_costs)
def test_the_marginal_rule_finds_the_best_draft(rates: list[float], cost: StepCost) -> None:
    """From the first draft token on, stopping at the first that does not pay is exact."""
    survival = _survival(rates)
    every = speedups(survival, cost)
    if len(every) == 1:
        return
    marginal = cost.alpha + (0 if cost.draft_cost == "once" else cost.t_draft)
    n = 1
    while n < len(survival):
        expected = survival_expected_tokens(survival, n)
        if not one_more_pays(survival[n], marginal, expected, cost.step(n)):
            break
        n += 1
    assert every[n] == pytest.approx(max(every[1:]), rel=1e-9)


@settings(deadline=None)
@given(acceptances, st.integers(1, 400), step_costs)
def test_the_ceiling_is_never_exceeded(acceptance: float, n: int, cost: StepCost) -> None:
    assert max(speedups(constant_survival(acceptance, n), cost)) <= cost.ceiling() * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(0.01, 0.9), st.floats(0, 0.5))
def test_the_ceiling_is_reached_in_the_limit(alpha: float, t_draft: float) -> None:
    n = 1_000_000
    once = StepCost(alpha, t_draft, "once")
    assert speedup(n + 1, n, once) == pytest.approx(once.ceiling(), rel=1e-3)
    each = StepCost(alpha, t_draft, "per_token")
    if alpha + t_draft < 1:
        assert each.ceiling() == pytest.approx(1 / (alpha + t_draft))
        assert speedup(n + 1, n, each) == pytest.approx(each.ceiling(), rel=1e-3)


def test_ceilings() -> None:
    assert StepCost(0.1).ceiling() == pytest.approx(10)
    assert StepCost(0.05, 0.5, "once").ceiling() == pytest.approx(20)
    assert StepCost(0.05, 0.05, "per_token").ceiling() == pytest.approx(10)
    assert StepCost(0.0).ceiling() == math.inf
    assert StepCost(0.0, 0.0, "per_token").ceiling() == math.inf
    assert StepCost(2.0).ceiling() == 1  # plain decoding


@settings(deadline=None)
@given(conditionals, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_cheaper_is_never_slower(
    rates: list[float], alpha: float, other: float, t_draft: float
) -> None:
    low, high = sorted((alpha, other))
    survival = _survival(rates)
    cheap, dear = (
        speedups(survival, StepCost(low, t_draft)),
        speedups(survival, StepCost(high, t_draft)),
    )
    assert all(a >= b for a, b in zip(cheap, dear, strict=True))


@settings(deadline=None)
@given(step_costs)
def test_least_acceptance_is_where_it_begins_to_pay(cost: StepCost) -> None:
    least = least_acceptance(cost, 16)
    if least is None:
        assert max(speedups(constant_survival(1.0, 16), cost)[1:]) <= 1
        return
    assert max(speedups(constant_survival(least, 16), cost)[1:]) >= 1 - 1e-9
    assert max(speedups(constant_survival(max(0.0, least - 1e-6), 16), cost)[1:]) <= 1 + 1e-9


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1", True])
@pytest.mark.parametrize("name", ["alpha", "t_draft"])
def test_costs_are_finite_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{name} is .*allowed is a number of 0 or more"):
        StepCost(**({"alpha": 0.1} | {name: value}))


def test_bad_shapes_of_a_step() -> None:
    with pytest.raises(PlanError, match="draft_cost is 'twice'; allowed is one of once, per_token"):
        StepCost(0.1, 0.1, "twice")
    with pytest.raises(PlanError, match="a tree of 2 nodes has at most 2 levels"):
        StepCost(0.1, 0.1, "per_level").step(2, num_levels=3)
    with pytest.raises(PlanError, match="emits from 1 to 5"):
        speedup(5.5, 4, StepCost(0.1))


# ------------------------------------------------------------------ the table of the source text


@pytest.mark.parametrize(
    ("acceptance", "alpha", "best"),
    [
        (0.8, 0.05, 8),
        (0.8, 0.10, 6),
        (0.8, 0.15, 5),  # the text says 6 to 8
        (0.9, 0.05, 14),  # the text says 10 to 12
        (0.9, 0.10, 10),
        (0.9, 0.15, 8),  # the text says 10 to 12
    ],
)
def test_the_table_of_the_source_text(acceptance: float, alpha: float, best: int) -> None:
    cost = StepCost(alpha, 0.05, "once")
    assert best_num_speculative_tokens(constant_survival(acceptance, 64), cost) == best
    assert cost.ceiling() == pytest.approx(1 / alpha)


@pytest.mark.parametrize("alpha", [0.061, 0.07, 0.08, 0.09, 0.10, 0.108])
def test_within_these_alphas_both_ranges_of_the_text_hold(alpha: float) -> None:
    cost = StepCost(alpha, 0.05, "once")
    assert 6 <= best_num_speculative_tokens(constant_survival(0.8, 64), cost) <= 8
    assert 10 <= best_num_speculative_tokens(constant_survival(0.9, 64), cost) <= 12
