"""Verifying a step: what reaches each request's rule, and that kernels are ready beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling import pick, processors
from foredraft.types import DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from foredraft.verify import step, walk
from foredraft.verify.rejection import rejection
from foredraft.verify.traversal import traversal

VOCAB = 6
RULES = {"rejection": rejection, "traversal": traversal}


def plan_of(rules: list[str], seed: int) -> StepPlan:
    segments = []
    for index, rule in enumerate(rules):
        speculation = SpeculationParams("m", 3, rule)
        ids = np.array([1, 2, 3], dtype=np.int64)
        request = Request(
            str(index), ids, SamplingParams(1.0), speculation, seed, 9, frozenset[int]()
        )
        segments.append(Segment(request, ids, index, 2, 1, True))
    return StepPlan(tuple(segments))


def verdict_of(plan: StepPlan, num: int, is_with_replacement: list[bool] | None) -> Verdict:
    """Every segment drafts three siblings, drawn from one lopsided distribution."""
    drafts = DraftBatch(
        np.tile([4, 1, 0], num),
        np.zeros(3 * num, dtype=np.int64),
        np.arange(num + 1) * 3,
        torch.tensor([[0.3, 0.2, 0.05, 0.05, 0.3, 0.1]]),
        np.zeros(3 * num, dtype=np.int64),
        None if is_with_replacement is None else np.array(is_with_replacement),
    )
    logits = torch.log(torch.tensor([0.2, 0.25, 0.2, 0.1, 0.15, 0.1])).repeat(4 * num, 1)
    offsets = np.arange(num + 1) * 4
    return step.verify(plan, drafts, TargetOutput(logits, offsets, {}, offsets))


@pytest.mark.parametrize("rule", RULES)
def test_how_siblings_were_drawn_reaches_the_rule(rule: str) -> None:
    """Told that siblings were drawn independently, it gives another verdict."""
    num_changed = 0
    for seed in range(200):
        plan = plan_of([rule, "walk", rule], seed)
        told = verdict_of(plan, 3, [True, False, False])
        for segment, with_replacement in ((0, True), (2, False)):
            nodes, token = RULES[rule](
                np.array([4, 1, 0]),
                np.zeros(3, dtype=np.int64),
                processors.probs(
                    torch.log(torch.tensor([0.2, 0.25, 0.2, 0.1, 0.15, 0.1])).repeat(4, 1),
                    processors.RowParams.of([SamplingParams(1.0)], np.array([4])),
                ),
                torch.tensor([[0.3, 0.2, 0.05, 0.05, 0.3, 0.1]]),
                np.zeros(3, dtype=np.int64),
                step._coins(seed, 3, 4),
                with_replacement=with_replacement,
            )
            begin, end = told.token_offsets[segment : segment + 2]
            assert told.token_ids[begin:end].tolist() == [[4, 1, 0][n - 1] for n in nodes] + [token]
        without = verdict_of(plan, 3, None)
        num_changed += told.token_ids.tolist() != without.token_ids.tolist()
    assert num_changed > 5


def test_nothing_is_compiled_after_loading() -> None:
    """The signatures that a step of float32 logits needs are there before the first request."""
    step.load_kernels()
    kernels = [
        pick._argmax,
        pick._pick_rows,
        pick._argmax_parallel,
        pick._pick_rows_parallel,
        processors._row_cut,
        walk._walk,
    ]
    before = [len(kernel.signatures) for kernel in kernels]
    if torch.get_num_threads() > 1:
        assert all(before)
    else:
        assert all(before[:2]) and all(before[4:])
    plan = plan_of(["walk"] * 2, 1)
    verdict_of(plan, 2, None)
    assert [len(kernel.signatures) for kernel in kernels] == before
