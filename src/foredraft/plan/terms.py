"""What a step costs at a batch size, from one of three places: given, computed, or measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foredraft.errors import PlanError
from foredraft.plan.acceptance import check_count
from foredraft.plan.cost import StepCost, check_cost, check_draft_cost, draft_time
from foredraft.plan.profile import Profile
from foredraft.plan.roofline import Roofline

_MOST_REQUESTS = 4096  # the largest batch that the roofline is asked about
_STEP = 1.06  # between the batches looked at, beyond the first few


class Terms(Protocol):
    """The terms of the arithmetic, in units of a plain decode step at the same batch size."""

    @property
    def source(self) -> str:
        """Where they are from, in words."""

    @property
    def draft_cost(self) -> str:
        """How draft time counts."""

    @property
    def uncertainty(self) -> float:
        """How far times may be off, as a share; 0 where they are taken as exact."""

    def t_draft(self, num_requests: int) -> float:
        """Draft time: of a draft, of a token or of a level."""

    def verify_cost(self, num_draft_tokens: float, num_requests: int) -> float:
        """A verify pass with so many draft tokens a request."""

    def alpha(self, num_speculative_tokens: int, num_requests: int) -> float:
        """Marginal cost of one more draft token, about this many."""

    def last_alpha(self, num_requests: int) -> float:
        """Marginal cost of one more draft token, however long the draft."""

    def default_batches(self) -> tuple[int, ...]:
        """Batch sizes worth showing."""

    def known_batches(self) -> tuple[int, ...]:
        """Batch sizes to look for the break-even in, rising; none where nothing is known."""


@dataclass(frozen=True, slots=True)
class GivenTerms:
    """Numbers alone: they hold for the one batch size they were measured at.

    Attributes:
        cost: The numbers.
    """

    cost: StepCost

    @property
    def source(self) -> str:
        """Say which numbers."""
        return f"numbers as given: alpha {self.cost.alpha:g}, t_draft {self.cost.t_draft:g}"

    @property
    def draft_cost(self) -> str:
        """As given."""
        return self.cost.draft_cost

    @property
    def uncertainty(self) -> float:
        """Taken as exact."""
        return 0.0

    def t_draft(self, num_requests: int) -> float:
        """As given."""
        return self.cost.t_draft

    def verify_cost(self, num_draft_tokens: float, num_requests: int) -> float:
        """``1 + alpha * N``."""
        return 1.0 + self.cost.alpha * num_draft_tokens

    def alpha(self, num_speculative_tokens: int, num_requests: int) -> float:
        """As given."""
        return self.cost.alpha

    def last_alpha(self, num_requests: int) -> float:
        """As given."""
        return self.cost.alpha

    def default_batches(self) -> tuple[int, ...]:
        """One."""
        return (1,)

    def known_batches(self) -> tuple[int, ...]:
        """None: alpha says nothing of another batch size."""
        return ()


@dataclass(frozen=True, slots=True)
class RooflineTerms:
    """Computed from a model and a machine.

    Attributes:
        roofline: Both of them.
        context: Tokens of each request in the cache.
        draft_steps: Draft time in plain decode steps, taken to be the same at every batch size.
        draft_cost: How it counts.
    """

    roofline: Roofline
    context: int
    draft_steps: float = 0.0
    draft_cost: str = "once"

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_count("context", self.context)
        check_cost("t_draft", self.draft_steps)
        check_draft_cost(self.draft_cost)

    @property
    def source(self) -> str:
        """Say which model and machine."""
        shape, hardware = self.roofline.shape, self.roofline.hardware
        return (
            f"roofline of {shape.describe()}, on {hardware.name} ({hardware.bandwidth_gb_s:g} GB/s,"
            f" {hardware.peak(shape) / 1e12:g} TFLOPS), context {self.context}"
        )

    @property
    def uncertainty(self) -> float:
        """Not known: a roofline is a bound, not a measurement."""
        return 0.0

    def t_draft(self, num_requests: int) -> float:
        """As given."""
        return self.draft_steps

    def verify_cost(self, num_draft_tokens: float, num_requests: int) -> float:
        """From the roofline."""
        return self.roofline.verify_cost(num_draft_tokens, num_requests, self.context)

    def alpha(self, num_speculative_tokens: int, num_requests: int) -> float:
        """Mean over the first so many draft tokens."""
        return self.roofline.alpha(max(1, num_speculative_tokens), num_requests, self.context)

    def last_alpha(self, num_requests: int) -> float:
        """Where operations alone count."""
        return self.roofline.last_alpha(num_requests, self.context)

    def default_batches(self) -> tuple[int, ...]:
        """Powers of two to 256."""
        return tuple(1 << power for power in range(9))

    def known_batches(self) -> tuple[int, ...]:
        """Every one at first, then some, to 4096 or what fits into memory if that is known."""
        most = self.roofline.most_requests(self.context)
        limit = _MOST_REQUESTS if most is None else max(1, min(most, _MOST_REQUESTS))
        found: list[int] = []
        batch = 1
        while batch <= limit:
            found.append(batch)
            batch = max(batch + 1, int(batch * _STEP))
        return (*found[:-1], limit)


@dataclass(frozen=True, slots=True)
class MeasuredTerms:
    """From a profile. Between measured batch sizes, on straight lines; beyond them, refused.

    Attributes:
        profile: What was measured.
        method: Whose draft time.
        context: Tokens of each request in the cache; the nearest measured one counts. ``None``
            takes the shortest.
        draft_steps: Draft time in plain decode steps, instead of the profile's.
        draft_steps_cost: How it counts.
    """

    profile: Profile
    method: str
    context: int | None = None
    draft_steps: float | None = None
    draft_steps_cost: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and that there is a draft time."""
        if self.context is not None:
            check_count("context", self.context)
        if self.draft_steps_cost is not None:
            check_draft_cost(self.draft_steps_cost)
        if self.draft_steps is not None:
            check_cost("t_draft", self.draft_steps)
            if self.draft_steps_cost is None:
                raise PlanError("t_draft is given without draft_cost; say how it counts.")
        else:
            self.profile.t_draft(self.method, self.profile.batches()[0])

    @property
    def source(self) -> str:
        """Say which model, machine and versions."""
        profile = self.profile
        machine = profile.machine
        where = machine.get("gpu") or machine.get("cpu") or profile.device
        threads = machine.get("num_threads")
        how = f", {threads} threads" if threads and not machine.get("gpu") else ""
        torch = profile.versions.get("torch")
        version = f", PyTorch {torch}" if torch else ""
        return f"measured: {profile.model} ({profile.dtype}) on {where}{how}{version}"

    @property
    def draft_cost(self) -> str:
        """As measured, unless it was given."""
        return self.draft_steps_cost or self.profile.drafts[self.method].cost

    @property
    def uncertainty(self) -> float:
        """How far repeats of the two passes of a ratio lay apart."""
        return 2 * self.profile.stability

    def t_draft(self, num_requests: int) -> float:
        """As measured, unless it was given."""
        if self.draft_steps is not None:
            return self.draft_steps
        return self._between(lambda batch: self.profile.t_draft(self.method, batch), num_requests)

    def verify_cost(self, num_draft_tokens: float, num_requests: int) -> float:
        """As measured."""
        return self._between(
            lambda batch: self.profile.verify_cost(num_draft_tokens, batch, self._context(batch)),
            num_requests,
        )

    def alpha(self, num_speculative_tokens: int, num_requests: int) -> float:
        """Fitted to what was measured; the same for every N."""
        return self._between(
            lambda batch: self.profile.alpha(batch, self._context(batch)), num_requests
        )

    def last_alpha(self, num_requests: int) -> float:
        """Fitted to what was measured."""
        return self.alpha(1, num_requests)

    def default_batches(self) -> tuple[int, ...]:
        """Those that were measured."""
        return tuple(self.profile.batches())

    def known_batches(self) -> tuple[int, ...]:
        """All up to the largest measured."""
        measured = self.profile.batches()
        return tuple(range(measured[0], measured[-1] + 1))

    def context_of(self, num_requests: int) -> int:
        """The measured context that stands for the one asked for, at a measured batch."""
        contexts = self.profile.contexts(num_requests)
        wanted = contexts[0] if self.context is None else self.context
        return min(contexts, key=lambda c: (abs(c - wanted), c))

    def _context(self, num_requests: int) -> int:
        return self.context_of(num_requests)

    def _between(self, value: Callable[[int], float], num_requests: int) -> float:
        measured = self.profile.batches()
        if num_requests in measured:
            return value(num_requests)
        if not measured[0] < num_requests < measured[-1]:
            raise PlanError(
                f"batch is {num_requests}, but the profile was measured from {measured[0]} to "
                f"{measured[-1]} requests; choose one in between, or plan with --model-config and "
                "the machine's figures."
            )
        high = next(batch for batch in measured if batch > num_requests)
        low = max(batch for batch in measured if batch < num_requests)
        share = (num_requests - low) / (high - low)
        return value(low) * (1 - share) + value(high) * share


def draft_costs(terms: Terms, num_requests: int, most: int, draft_share: float) -> list[float]:
    """Draft time of a step for every N from 0 to ``most``, in plain decode steps.

    A drafter that counts ``once`` is asked in every step; one that counts by token or level takes
    no time in a step without a draft.
    """
    t_draft = terms.t_draft(num_requests)
    often = 1.0 if terms.draft_cost == "once" else draft_share
    return [often * draft_time(t_draft, terms.draft_cost, n) for n in range(most + 1)]


def ceiling(terms: Terms, num_requests: int, most: int) -> float:
    """Return the speedup that no acceptance exceeds, with N up to ``most`` or without end.

    Infinite where a longer draft costs nothing more.
    """
    each = terms.last_alpha(num_requests)
    if terms.draft_cost != "once":
        each += terms.t_draft(num_requests)
    if each <= 0:
        return math.inf
    drafts = draft_costs(terms, num_requests, most, 1.0)
    reached = [
        (n + 1) / (drafts[n] + terms.verify_cost(n, num_requests)) for n in range(1, most + 1)
    ]
    return max(1.0, 1.0 / each, *reached)
