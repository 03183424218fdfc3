"""The controller against a world that is known: set acceptance, a set cost table, no model.

The controller and the synthetic drafter are those of the engine; only the target is replaced, by
texts that are there already and a clock that follows a formula. So the best choice is known at
every step, and regret can be stated in expected tokens, without the luck of single draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.control.allocate import allocate
from foredraft.control.controller import MAX_AUTO_NODES, Controller, MethodTraits
from foredraft.control.cost_table import CostTable
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.synthetic import SyntheticConfig, SyntheticDrafter
from foredraft.engine.measure import bends, rows_to_measure
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.types import (
    DraftBatch,
    Int64Array,
    Request,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)

Cost = Callable[[int, float], float]
"""Seconds of a pass, from the number of requests and of rows."""

_ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17, 21, 25, 32, 64, 128)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_VOCAB = 50_000
_PROMPT_LEN = 8
_NO_LOGITS = torch.empty(0)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step: what was chosen, and what that was worth.

    Attributes:
        num_nodes: Draft nodes, all requests together.
        expected_tokens: Of the step, by the true acceptance.
        seconds: By the true cost, without noise.
        best_rate: Expected tokens per second of the best choice.
    """

    num_nodes: int
    expected_tokens: float
    seconds: float
    best_rate: float

    @property
    def share_of_best(self) -> float:
        """Expected tokens per second, as a share of the best choice's."""
        return self.expected_tokens / self.seconds / self.best_rate


def simulate(
    acceptance: Sequence[float],
    num_requests: int,
    cost: Cost,
    seed: int = 0,
    noise: float = 0.03,
) -> list[SimulatedStep]:
    """Let the controller decide ``len(acceptance)`` steps.

    Args:
        acceptance: The true acceptance in each step; the drafter's setting, unknown to the
            controller.
        num_requests: Requests of the batch.
        cost: The true cost of a pass. The controller's table is measured from it, with noise, at
            the row counts that a profile measures.
        seed: Of texts, coins and noise.
        noise: Standard deviation of measured times, as a share.
    """
    rng = np.random.default_rng(seed)
    controller = Controller(lambda method: MethodTraits(sees_noise=True))
    controller.cost_table = CostTable(_measured(cost, noise, rng))
    context = DrafterContext(_VOCAB, 1 << 20)
    drafters = {
        chance: SyntheticDrafter(SyntheticConfig(chance), context) for chance in set(acceptance)
    }
    texts = [_Text(i, rng, len(acceptance) * (MAX_AUTO_NODES + 1)) for i in range(num_requests)]
    for drafter in drafters.values():
        for text in texts:
            drafter.remember(text.request, text.token_ids)
    steps = []
    for chance in acceptance:
        plan = StepPlan(tuple(text.segment() for text in texts))
        budgets = controller.budget(plan)
        drafts = controller.trim(plan, drafters[chance].propose(plan, budgets))
        depths = np.concatenate([np.arange(1, n + 1) for n in drafts.num_nodes])
        steps.append(
            SimulatedStep(
                len(depths),
                num_requests + float((chance**depths).sum()),
                cost(num_requests, float(num_requests + len(depths))),
                best_rate(chance, num_requests, cost),
            )
        )
        verdict = _walk(texts, drafts)
        seconds = steps[-1].seconds * float(np.exp(noise * rng.normal()))
        num_rows = np.concatenate([[0], np.cumsum(1 + drafts.num_nodes)])
        target = TargetOutput(_NO_LOGITS, num_rows, {}, num_rows)
        controller.observe(plan, drafts, target, verdict, seconds, {"synthetic": 1e-9})
    return steps


def _measured(cost: Cost, noise: float, rng: np.random.Generator) -> list[PassTime]:
    """What a profile would find: the same rows, and medians with noise."""

    def measure(batch: int, rows: Sequence[int]) -> dict[int, float]:
        errors = np.exp(noise / 2 * rng.normal(size=len(rows)))
        return {n: cost(batch, float(n)) * float(e) for n, e in zip(rows, errors, strict=True)}

    cells = []
    for batch in _BATCHES:
        times = measure(batch, rows_to_measure(batch, _ROWS))
        times |= measure(batch, bends(times))
        cells += [PassTime(batch, number, 0, value, noise) for number, value in times.items()]
    return cells


def cost_table_of(cost: Cost, num_requests: int) -> CostTable:
    """A table that holds the very cost, for batches up to a size."""
    most = MAX_AUTO_NODES + 1
    return CostTable(
        PassTime(batch, rows, 0, cost(batch, float(rows)), 0.0)
        for batch in range(1, num_requests + 1)
        for rows in range(batch, batch * most + 1)
    )


def best_rate(acceptance: float, num_requests: int, cost: Cost) -> float:
    """Expected tokens per second of the best allocation, for chains of one acceptance.

    Of as many tokens a request as may be drafted at all, whatever the controller would give.
    """
    survival = np.repeat(acceptance ** np.arange(1.0, MAX_AUTO_NODES + 1), num_requests)
    seconds = [cost(num_requests, float(num_requests + n)) for n in range(len(survival) + 1)]
    best = allocate(survival, np.array(seconds), num_requests, 0.0)
    return best.expected_tokens / best.seconds


class _Text:
    """One request with a text that is there already."""

    def __init__(self, index: int, rng: np.random.Generator, length: int) -> None:
        self.token_ids = rng.integers(0, _VOCAB, _PROMPT_LEN + length).astype(np.int64)
        self.length = _PROMPT_LEN
        self.request = Request(
            str(index),
            self.token_ids[:_PROMPT_LEN],
            SamplingParams(),
            SpeculationParams("synthetic"),
            index,
            length,
            frozenset(),
        )

    def segment(self) -> Segment:
        return Segment(
            self.request, self.token_ids[: self.length], 0, self.length - 1, 1, is_decode=True
        )


def _walk(texts: list[_Text], drafts: DraftBatch) -> Verdict:
    """Accept of each chain what agrees with its text, and let the texts go on."""
    paths: list[Int64Array] = []
    tokens: list[Int64Array] = []
    for index, text in enumerate(texts):
        drafted = drafts.token_ids[drafts.offsets[index] : drafts.offsets[index + 1]]
        coming = text.token_ids[text.length : text.length + len(drafted) + 1]
        is_right = drafted == coming[: len(drafted)]
        num_accepted = len(drafted) if is_right.all() else int(np.argmin(is_right))
        paths.append(np.arange(1, num_accepted + 1))
        tokens.append(coming[: num_accepted + 1])
        text.length += num_accepted + 1
    return Verdict(
        np.concatenate(paths),
        np.concatenate([[0], np.cumsum([len(p) for p in paths])]),
        np.concatenate(tokens),
        np.concatenate([[0], np.cumsum([len(t) for t in tokens])]),
        np.ones(len(texts), dtype=np.bool_),
    )
