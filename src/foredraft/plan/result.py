"""What a plan says: every choice of N at every batch size, the best of them, and a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from foredraft.plan.acceptance import CONFIDENCE, Survival

ENOUGH = 0.98
"""Share of the best speedup that a smaller N must reach to be worth naming."""


@dataclass(frozen=True, slots=True)
class PlanCell:
    """One choice of N at one batch size.

    Attributes:
        num_speculative_tokens: N.
        expected_tokens: Tokens that a step emits.
        step_cost: What it costs, in plain decode steps.
        speedup: Their quotient.
        low: Lower bound of the speedup; ``None`` where nothing says how sure the numbers are.
        high: Upper bound.
    """

    num_speculative_tokens: int
    expected_tokens: float
    step_cost: float
    speedup: float
    low: float | None
    high: float | None

    @property
    def spans_one(self) -> bool:
        """Whether the interval does not say if this is faster or slower than plain decoding."""
        return self.low is not None and self.high is not None and self.low < 1.0 < self.high


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Every choice of N at one batch size.

    Attributes:
        num_requests: Batch size.
        alpha: Marginal cost of one more draft token, about the best N.
        t_draft: Draft time.
        ceiling: Speedup that no acceptance exceeds.
        cells: One for every N, from 0.
    """

    num_requests: int
    alpha: float
    t_draft: float
    ceiling: float
    cells: tuple[PlanCell, ...]

    @property
    def best(self) -> PlanCell:
        """The cell with the greatest speedup, with the smallest N of several."""
        return max(self.cells, key=lambda cell: (cell.speedup, -cell.num_speculative_tokens))

    @property
    def enough(self) -> PlanCell:
        """The cell with the smallest N that is within 2 % of the best."""
        least = ENOUGH * self.best.speedup
        return next(cell for cell in self.cells if cell.speedup >= least)

    @property
    def best_draft(self) -> PlanCell:
        """The same among those with a draft."""
        return max(self.cells[1:], key=lambda cell: (cell.speedup, -cell.num_speculative_tokens))


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        method: How drafts are made.
        draft_cost: How their time counts.
        source: Where the costs are from.
        acceptance: Overall acceptance of a draft token.
        survival: What the expectation is made of.
        batches: By batch size; the first is the one the verdict begins with.
        break_even_batch: Smallest batch size at which no draft pays; ``None`` if there is none
            among those that are known.
        most_known_batch: Largest of these; ``None`` where nothing is known of other batch sizes.
        verdict: The answer in plain words.
        notes: What to bear in mind.
    """

    method: str
    draft_cost: str
    source: str
    acceptance: float
    survival: Survival
    batches: tuple[BatchPlan, ...]
    break_even_batch: int | None
    most_known_batch: int | None
    verdict: str
    notes: tuple[str, ...]

    @property
    def first(self) -> BatchPlan:
        """The batch size asked for first."""
        return self.batches[0]

    def tiers(self) -> list[tuple[int, int, int]]:
        """Batch sizes from, to, and the best N there, without gaps from 1; 0 from break-even on.

        Sizes between two that were asked for get the N of the larger one.
        """
        result: list[tuple[int, int, int]] = []
        start = 1
        for batch in sorted(self.batches, key=lambda b: b.num_requests):
            end, best = batch.num_requests, batch.best.num_speculative_tokens
            edge = self.break_even_batch
            if edge is not None and start < edge <= end and result:
                if edge > start:
                    _append_tier(result, start, edge - 1, result[-1][2])
                start = edge
            _append_tier(result, start, end, best)
            start = end + 1
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints; an infinite ceiling is ``None``."""
        best = self.first.best
        return {
            "best_num_speculative_tokens": best.num_speculative_tokens,
            "expected_tokens": best.expected_tokens,
            "speedup": best.speedup,
            "speedup_interval": _interval(best),
            "ceiling": _finite(self.first.ceiling),
            "break_even_batch": self.break_even_batch,
            "verdict": self.verdict,
            "method": self.method,
            "draft_cost": self.draft_cost,
            "source": self.source,
            "acceptance": self.acceptance,
            "draft_share": self.survival.draft_share,
            "confidence": CONFIDENCE,
            "most_known_batch": self.most_known_batch,
            "notes": list(self.notes),
            "table": [
                {
                    "batch": batch.num_requests,
                    "alpha": batch.alpha,
                    "t_draft": batch.t_draft,
                    "ceiling": _finite(batch.ceiling),
                    "best_num_speculative_tokens": batch.best.num_speculative_tokens,
                    "speedup": batch.best.speedup,
                    "speedup_interval": _interval(batch.best),
                    "by_num_speculative_tokens": [
                        {
                            "num_speculative_tokens": cell.num_speculative_tokens,
                            "expected_tokens": cell.expected_tokens,
                            "step_cost": cell.step_cost,
                            "speedup": cell.speedup,
                            "speedup_interval": _interval(cell),
                        }
                        for cell in batch.cells
                    ],
                }
                for batch in self.batches
            ],
        }


def _append_tier(tiers: list[tuple[int, int, int]], start: int, end: int, best: int) -> None:
    if tiers and tiers[-1][2] == best:
        tiers[-1] = (tiers[-1][0], end, best)
    else:
        tiers.append((start, end, best))


def _interval(cell: PlanCell) -> list[float] | None:
    return None if cell.low is None or cell.high is None else [cell.low, cell.high]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
