"""Expected tokens of a step, and what recorded steps say of acceptance.

``a_k`` is the survival of position ``k``: the probability that the first ``k`` draft tokens are all
accepted. A step emits the accepted tokens and one more, the target's own, so a chain of ``N`` draft
tokens is expected to emit ``1 + a_1 + ... + a_N``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foredraft.errors import PlanError

if TYPE_CHECKING:
    from foredraft.plan.trace import RequestTrace

CONFIDENCE = 0.90
"""Of the intervals: nine in ten of them hold what they are about."""

_MIN_REQUESTS = 8  # fewer are too few to resample; then their steps are
_MAX_DRAWS = 2_000_000
_SUM_TOLERANCE = 1e-9


def check_probability(name: str, value: float) -> float:
    """Return ``value`` if it is a probability, else raise ``PlanError``."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise PlanError(
            f"{name} is {value!r}; allowed is a probability, from 0 to 1. "
            f"{_hint_of_percent(value)}Give another."
        )
    return float(value)


def check_count(name: str, value: int, least: int = 0) -> int:
    """Return ``value`` if it is an integer of at least ``least``, else raise ``PlanError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} is {value!r}; allowed is an integer of {least} or more.")
    return value


def constant_survival(acceptance: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Survival of every position where each token is accepted with the same probability.

    Args:
        acceptance: Probability that a draft token is accepted, given that those before it were.
        num_speculative_tokens: How many positions.
    """
    check_probability("acceptance", acceptance)
    check_count("num_speculative_tokens", num_speculative_tokens)
    return tuple(acceptance**k for k in range(1, num_speculative_tokens + 1))


def chain_expected_tokens(acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens that a step emits on average: ``(1 - p^(N+1)) / (1 - p)``, and ``N + 1`` at p = 1.

    Leviathan et al. 2022 (arXiv 2211.17192), equation 1.

    Args:
        acceptance: Constant acceptance, p.
        num_speculative_tokens: Length of the chain, N.
    """
    # The sum, not the quotient: it loses nothing near p = 1.
    return 1.0 + math.fsum(constant_survival(acceptance, num_speculative_tokens))


def survival_expected_tokens(
    survival: Sequence[float], num_speculative_tokens: int | None = None
) -> float:
    """Tokens that a step emits on average: ``1 + a_1 + ... + a_N``.

    Args:
        survival: ``a_1, a_2, ...``, never rising.
        num_speculative_tokens: Length of the chain; ``None`` takes all of ``survival``.
    """
    check_survival(survival)
    if num_speculative_tokens is None:
        num_speculative_tokens = len(survival)
    if check_count("num_speculative_tokens", num_speculative_tokens) > len(survival):
        raise PlanError(
            f"num_speculative_tokens is {num_speculative_tokens}, but survival is given for "
            f"{len(survival)} positions; give as many."
        )
    return 1.0 + math.fsum(survival[:num_speculative_tokens])


def path_probabilities(parents: Sequence[int], acceptances: Sequence[float]) -> tuple[float, ...]:
    """Probability of each node of a tree that the walk reaches it.

    Args:
        parents: The row of each node's parent; row 0 is the root, row k the k-th node. A chain is
            ``0, 1, 2, ...``.
        acceptances: Probability of each node that it is the accepted child, given that its parent
            was reached. Those of siblings add up to 1 at most.
    """
    if len(parents) != len(acceptances):
        raise PlanError(
            f"parents has {len(parents)} nodes and acceptances {len(acceptances)}; give one "
            "acceptance a node."
        )
    reached = [1.0]
    taken: dict[int, float] = {}
    for row, (parent, acceptance) in enumerate(zip(parents, acceptances, strict=True), start=1):
        if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < row:
            raise PlanError(
                f"node {row} has parent row {parent!r}; allowed are rows 0 to {row - 1}: a parent "
                "comes before its children."
            )
        check_probability(f"acceptance of node {row}", acceptance)
        taken[parent] = taken.get(parent, 0.0) + acceptance
        if taken[parent] > 1.0 + _SUM_TOLERANCE:
            raise PlanError(
                f"the children of row {parent} are accepted with probability {taken[parent]:g} in "
                "all; at most one of them is, so give at most 1."
            )
        reached.append(reached[parent] * acceptance)
    return tuple(reached[1:])


def tree_expected_tokens(parents: Sequence[int], acceptances: Sequence[float]) -> float:
    """Tokens that a step with a draft tree emits on average: 1 + the sum of path probabilities.

    Args:
        parents: As for :func:`path_probabilities`.
        acceptances: As for :func:`path_probabilities`.
    """
    return 1.0 + math.fsum(path_probabilities(parents, acceptances))


def check_survival(survival: Sequence[float]) -> None:
    """Raise ``PlanError`` unless these are probabilities that never rise."""
    before = 1.0
    for position, value in enumerate(survival, start=1):
        check_probability(f"survival of position {position}", value)
        if value > before + _SUM_TOLERANCE:
            raise PlanError(
                f"survival rises to {value!r} at position {position}; the first {position} tokens "
                "are all accepted no more often than those before the last. Give the probability "
                "that all tokens up to a position are accepted."
            )
        before = value


@dataclass(frozen=True, slots=True)
class Survival:
    """What is believed of a drafter's acceptance.

    Attributes:
        draft_share: Share of steps in which the drafter had anything to propose: an n-gram drafter
            may find no match. The rest of the steps emit one token.
        conditional: Acceptance at each position, given that those before it were accepted, in steps
            with a draft.
        beyond: The same for every later position.
    """

    draft_share: float
    conditional: tuple[float, ...]
    beyond: float

    def by_position(self, num_speculative_tokens: int) -> tuple[float, ...]:
        """Return ``a_1 .. a_N`` over all steps, those without a draft included."""
        result: list[float] = []
        reached = self.draft_share
        for position in range(num_speculative_tokens):
            known = position < len(self.conditional)
            reached *= self.conditional[position] if known else self.beyond
            result.append(reached)
        return tuple(result)


@dataclass(frozen=True, slots=True)
class SurvivalEstimate:
    """What recorded steps say.

    Attributes:
        survival: The estimate.
        num_steps: Steps it is made from.
        num_trials: Of these, how many tested position 1, 2, ...: a step that drafted at least so
            many tokens and had all the earlier ones accepted.
        acceptance: Accepted over tested: the estimate of a constant acceptance; ``None`` where
            nothing was drafted.
        is_chosen: Whether the number of draft tokens was decided at every step, by how good they
            would be.
        models: The targets that they were recorded with, as far as the trace says.
        replicates: The estimate from data drawn again with replacement; what differs between them
            is what is not known.
    """

    survival: Survival
    num_steps: int
    num_trials: tuple[int, ...]
    acceptance: float | None
    replicates: tuple[Survival, ...]
    is_chosen: bool = False
    models: tuple[str, ...] = ()

    def interval(self, position: int) -> tuple[float, float]:
        """Bounds of the survival of a position, from 1, at ``CONFIDENCE``."""
        check_count("position", position, 1)
        return quantiles([r.by_position(position)[-1] for r in self.replicates])

    def acceptance_interval(self) -> tuple[float, float] | None:
        """Bounds of the constant acceptance; ``None`` where nothing was drafted."""
        if self.acceptance is None:
            return None
        return quantiles([r.beyond for r in self.replicates])


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper bound that hold ``CONFIDENCE`` of the values between them."""
    ordered = sorted(values)
    tail = (1 - CONFIDENCE) / 2
    return _quantile(ordered, tail), _quantile(ordered, 1 - tail)


def estimate_survival(
    requests: Sequence[RequestTrace], num_replicates: int = 400, seed: int = 0
) -> SurvivalEstimate:
    """Estimate survival by position from recorded steps, with what is needed for an interval.

    A step says nothing of the positions it did not draft, nor of those after its first rejection.
    So the acceptance of position ``k`` is taken from the steps that tested it alone, and survival
    is the product of these rates (Kaplan and Meier 1958). Positions that no step tested get the
    overall rate: acceptance over tests, all positions together.

    Args:
        requests: Recorded requests.
        num_replicates: How often to draw again. Requests are drawn, as steps of one request are
            alike; where there are fewer than eight requests, steps are, which makes the interval
            too narrow rather than too wide.
        seed: Of the draws.

    Raises:
        PlanError: No step is recorded.
    """
    check_count("num_replicates", num_replicates, 1)
    units = [unit for request in requests if (unit := _counts(request.steps)).num_steps]
    num_steps = sum(unit.num_steps for unit in units)
    if not num_steps:
        raise PlanError(
            "the trace holds no step in which a draft was allowed; generate more than one token a "
            "request, with drafting on."
        )
    total = _Counts()
    for unit in units:
        total.add(unit)
    if len(units) < _MIN_REQUESTS:
        every = [_counts([step]) for request in requests for step in request.steps]
        units = [unit for unit in every if unit.num_steps]
    num_replicates = max(50, min(num_replicates, _MAX_DRAWS // len(units)))
    generator = random.Random(seed)
    replicates = []
    kinds: dict[_Key, int] = {}
    for unit in units:
        kinds[unit.key()] = kinds.get(unit.key(), 0) + 1
    keys = list(kinds)
    weights = list(kinds.values())
    for _ in range(num_replicates):
        drawn = _Counts()
        again: dict[_Key, int] = {}
        for key in generator.choices(keys, weights, k=len(units)):
            again[key] = again.get(key, 0) + 1
        for key, times in again.items():
            drawn.add(_Counts(key[0], key[1], list(key[2]), list(key[3])), times)
        replicates.append(drawn.survival())
    return SurvivalEstimate(
        models=tuple(sorted({request.model for request in requests if request.model})),
        is_chosen=any(request.is_auto for request in requests),
        survival=total.survival(),
        num_steps=num_steps,
        num_trials=tuple(total.trials),
        acceptance=total.rate(),
        replicates=tuple(replicates),
    )


def acceptance_counts(requests: Sequence[RequestTrace]) -> Mapping[str, int]:
    """Plain sums over a trace: requests, steps, drafts, draft and accepted tokens."""
    steps = [step for request in requests for step in request.steps]
    return {
        "num_requests": len(requests),
        "num_steps": len(steps),
        "num_drafts": sum(step[0] > 0 for step in steps),
        "num_draft_tokens": sum(step[0] for step in steps),
        "num_accepted_tokens": sum(step[1] for step in steps),
    }


_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Counts:
    """Counts that add up over steps and requests."""

    num_steps: int = 0
    num_drafts: int = 0
    trials: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def key(self) -> _Key:
        return self.num_steps, self.num_drafts, tuple(self.trials), tuple(self.accepted)

    def add(self, other: _Counts, times: int = 1) -> None:
        self.num_steps += times * other.num_steps
        self.num_drafts += times * other.num_drafts
        missing = len(other.trials) - len(self.trials)
        if missing > 0:
            self.trials += [0] * missing
            self.accepted += [0] * missing
        for position, count in enumerate(other.trials):
            self.trials[position] += times * count
            self.accepted[position] += times * other.accepted[position]

    def rate(self) -> float | None:
        tested = sum(self.trials)
        return sum(self.accepted) / tested if tested else None

    def survival(self) -> Survival:
        rates = []
        for trials, accepted in zip(self.trials, self.accepted, strict=True):
            if not trials:
                break
            rates.append(accepted / trials)
        return Survival(self.num_drafts / self.num_steps, tuple(rates), self.rate() or 0.0)


def _counts(steps: Sequence[Sequence[int]]) -> _Counts:
    """Trials and successes by position.

    A draft that was cut says nothing of what lies behind its end. One that was not had no more to
    give there, which is as good as a rejection. A step in which no draft was allowed says nothing.
    """
    counts = _Counts()
    for drafted, accepted, *cut in steps:
        is_cut = cut[0] if cut else drafted > 0
        if drafted == 0 and is_cut:
            continue
        counts.num_steps += 1
        counts.num_drafts += drafted > 0
        ends = drafted > 0 and not is_cut and accepted == drafted
        tested = min(drafted, accepted + 1) + ends
        missing = tested - len(counts.trials)
        if missing > 0:
            counts.trials += [0] * missing
            counts.accepted += [0] * missing
        for position in range(tested):
            counts.trials[position] += 1
            counts.accepted[position] += position < accepted
    return counts


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _hint_of_percent(value: object) -> str:
    if isinstance(value, int | float) and 1 < value <= 100:
        return f"(If {value:g} is a percentage, that is {value / 100:g}.) "
    return ""
