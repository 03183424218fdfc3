"""Speedup, the best number of draft tokens, the marginal rule and the ceiling.

All costs are in units of one plain decode step:

    speedup = E / (draft time + 1 + alpha * N)

with ``E`` the expected tokens of a step. Plain decoding emits 1 token at a cost of 1, so N = 0 is a
speedup of exactly 1: leaving speculation off is always among the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.errors import PlanError
from foredraft.plan.acceptance import check_count, check_survival
from foredraft.plan.profile import DRAFT_COSTS

METHOD_DRAFT_COSTS: dict[str, str] = {
    "ngram": "once",
    "suffix": "once",
    "auto": "once",
    "lookahead": "once",
    "prediction": "once",
    "recycling": "once",
    "synthetic": "once",
    "medusa": "once",
    "draft-model": "per_token",
    "eagle": "per_token",
    "eagle3": "per_token",
    "mtp": "per_token",
}
"""How each method's draft time counts when it drafts a chain."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, in plain decode steps, where one more draft token always costs the same.

    Attributes:
        alpha: Marginal cost of verifying one more draft token.
        t_draft: Draft time: of a draft, of a token or of a level.
        draft_cost: Which of these: ``once``, ``per_token`` or ``per_level``.
    """

    alpha: float
    t_draft: float = 0.0
    draft_cost: str = "once"

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_cost("alpha", self.alpha)
        check_cost("t_draft", self.t_draft)
        check_draft_cost(self.draft_cost)

    def draft(self, num_speculative_tokens: int, num_levels: int | None = None) -> float:
        """Draft time of a step.

        Args:
            num_speculative_tokens: Draft tokens, N; none costs nothing.
            num_levels: Levels of the tree; ``None`` is a chain, of N levels.
        """
        return draft_time(self.t_draft, self.draft_cost, num_speculative_tokens, num_levels)

    def step(self, num_speculative_tokens: int, num_levels: int | None = None) -> float:
        """Cost of a step: draft time + 1 + alpha * N."""
        return (
            self.draft(num_speculative_tokens, num_levels)
            + 1.0
            + self.alpha * num_speculative_tokens
        )

    def ceiling(self) -> float:
        """Return the speedup that no acceptance and no N exceed.

        As acceptance goes to 1 and N grows, the speedup goes to ``1 / alpha``, or to
        ``1 / (alpha + t_draft)`` where a token's drafting costs time; infinite where both are 0. It
        is at least 1: plain decoding is always there.
        """
        each = self.alpha + (0.0 if self.draft_cost == "once" else self.t_draft)
        return max(1.0, 1.0 / each) if each else math.inf


def draft_time(
    t_draft: float, draft_cost: str, num_speculative_tokens: int, num_levels: int | None = None
) -> float:
    """Draft time of a step in the unit of ``t_draft``; see :meth:`StepCost.draft`."""
    check_count("num_speculative_tokens", num_speculative_tokens)
    if num_levels is None:
        num_levels = num_speculative_tokens
    elif not 0 <= check_count("num_levels", num_levels) <= num_speculative_tokens:
        raise PlanError(
            f"num_levels is {num_levels}, but a tree of {num_speculative_tokens} nodes has at most "
            f"{num_speculative_tokens} levels; give fewer."
        )
    if not num_speculative_tokens:
        return 0.0
    times = {"once": 1, "per_token": num_speculative_tokens, "per_level": num_levels}
    return t_draft * times[draft_cost]


def speedup(
    expected_tokens: float,
    num_speculative_tokens: int,
    cost: StepCost,
    num_levels: int | None = None,
) -> float:
    """Tokens per second over plain decoding's.

    Args:
        expected_tokens: Tokens that a step emits on average, from 1 to N + 1.
        num_speculative_tokens: Draft tokens, N.
        cost: What a step costs.
        num_levels: Levels of the tree; ``None`` is a chain.
    """
    check_count("num_speculative_tokens", num_speculative_tokens)
    if not 1.0 <= expected_tokens <= num_speculative_tokens + 1 + 1e-9:
        raise PlanError(
            f"expected_tokens is {expected_tokens!r}; a step with {num_speculative_tokens} draft "
            f"tokens emits from 1 to {num_speculative_tokens + 1}. Give a number of these."
        )
    return expected_tokens / cost.step(num_speculative_tokens, num_levels)


def speedups(survival: Sequence[float], cost: StepCost) -> list[float]:
    """Speedup of a chain for every N from 0 to the length of ``survival``."""
    check_survival(survival)
    result = []
    expected = 1.0
    for n in range(len(survival) + 1):
        if n:
            expected += survival[n - 1]
        result.append(expected / cost.step(n))
    return result


def best_num_speculative_tokens(survival: Sequence[float], cost: StepCost) -> int:
    """Return the N, 0 included, with the greatest speedup; the smallest of several.

    Exact: it looks at all of them, from 0 to the length of ``survival``.
    """
    every = speedups(survival, cost)
    return every.index(max(every))


def one_more_pays(
    survival_of_next: float, marginal_cost: float, expected_tokens: float, step_cost: float
) -> bool:
    """The marginal rule: whether one more draft token raises the speedup.

    It does if it emits more per time than the step does without it:
    ``a_(N+1) / marginal cost > E(N) / cost(N)``. As survival never rises and the marginal cost
    stays the same, the first failure is final: beyond it, no longer draft is better.

    Args:
        survival_of_next: ``a_(N+1)``.
        marginal_cost: ``alpha``, and a token's draft time where drafting costs per token.
        expected_tokens: ``E(N)``.
        step_cost: ``cost(N)``.
    """
    check_cost("marginal_cost", marginal_cost)
    return survival_of_next * step_cost > marginal_cost * expected_tokens


def least_acceptance(cost: StepCost, num_speculative_tokens: int) -> float | None:
    """Return the constant acceptance at which some N up to this one begins to pay.

    ``None`` where even an acceptance of 1 does not.
    """
    check_count("num_speculative_tokens", num_speculative_tokens, 1)

    def best(acceptance: float) -> float:
        expected, power, most = 1.0, 1.0, 0.0
        for n in range(1, num_speculative_tokens + 1):
            power *= acceptance
            expected += power
            most = max(most, expected / cost.step(n))
        return most

    if best(1.0) <= 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if best(middle) > 1.0 else (middle, high)
    return high


def check_cost(name: str, value: float) -> float:
    """Return ``value`` if it is a finite number of at least 0, else raise ``PlanError``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise PlanError(
            f"{name} is {value!r}; allowed is a number of 0 or more, in units of one plain decode "
            "step. Give another."
        )
    return float(value)


def check_draft_cost(value: str) -> str:
    """Return ``value`` if it says how draft time counts, else raise ``PlanError``."""
    if value not in DRAFT_COSTS:
        raise PlanError(
            f"draft_cost is {value!r}; allowed is one of {', '.join(DRAFT_COSTS)}. Choose one."
        )
    return value
