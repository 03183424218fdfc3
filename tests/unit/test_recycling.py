"""Token recycling: what is kept of a verify pass, and the tree that is drawn from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.recycling import RecyclingConfig, RecyclingDrafter
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import (
    Budgets,
    DraftBatch,
    Request,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)

VOCAB = 40


def drafter(**options: int) -> RecyclingDrafter:
    return RecyclingDrafter(RecyclingConfig(**options), DrafterContext(VOCAB, 4096))


def plan_of(*texts: list[int]) -> StepPlan:
    segments = []
    for index, text in enumerate(texts):
        ids = np.array(text, dtype=np.int64)
        speculation = SpeculationParams("recycling", 8)
        request = Request(f"r{index}", ids[:1], SamplingParams(), speculation, 0, 512, frozenset())
        segments.append(Segment(request, ids, index, len(ids) - 1, 1, is_decode=True))
    return StepPlan(tuple(segments))


def chain(*drafts: list[int]) -> DraftBatch:
    return DraftBatch(
        np.array([token for draft in drafts for token in draft], dtype=np.int64),
        np.concatenate([np.arange(len(d)) for d in drafts]).astype(np.int64),
        np.concatenate([[0], np.cumsum([len(d) for d in drafts])]).astype(np.int64),
    )


def show(
    one: RecyclingDrafter, texts: list[list[int]], drafts: DraftBatch, kept: list[int], best: dict
) -> None:
    """A step in which the target ranked ``best[token]`` highest at every row of a token."""
    rows = []
    for index, text in enumerate(texts):
        nodes = drafts.token_ids[drafts.offsets[index] : drafts.offsets[index + 1]].tolist()
        rows += [text[-1], *nodes]
    logits = torch.full((len(rows), VOCAB), -5.0)
    for row, token in enumerate(rows):
        for rank, successor in enumerate(best.get(token, [])):
            logits[row, successor] = 10.0 - rank
    ends = np.concatenate([[0], np.cumsum(1 + drafts.num_nodes)]).astype(np.int64)
    paths = [np.arange(1, n + 1) for n in kept]
    verdict = Verdict(
        np.concatenate(paths).astype(np.int64),
        np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        np.zeros(0, dtype=np.int64),
        np.zeros(len(texts) + 1, dtype=np.int64),
        np.ones(len(texts), dtype=np.bool_),
    )
    one.observe(plan_of(*texts), drafts, TargetOutput(logits, ends, {}, ends), verdict)


def propose(one: RecyclingDrafter, text: list[int], budget: int) -> DraftBatch:
    return one.propose(plan_of(text), Budgets(np.array([budget])))


def test_it_drafts_what_the_target_ranked_highest() -> None:
    one = drafter(num_successors=2)
    assert not len(propose(one, [1], 8).token_ids)
    show(one, [[1]], chain([2, 3]), [2], {1: [2, 7], 2: [3, 8], 3: [1, 9]})
    batch = propose(one, [5, 1], 4)
    found = list(zip(batch.token_ids.tolist(), batch.parents.tolist(), strict=True))
    assert found[0] == (2, 0) and (7, 0) in found and (3, 1) in found
    assert batch.confidence is not None and (np.diff(batch.confidence[[0, 1]]) <= 0).all()


def test_of_two_rows_of_one_token_the_accepted_one_stays() -> None:
    one = drafter(num_successors=1)
    drafts = DraftBatch(
        np.array([2, 3, 2], dtype=np.int64),
        np.array([0, 1, 0], dtype=np.int64)[[0, 1, 2]],
        np.array([0, 3], dtype=np.int64),
    )
    logits = torch.full((4, VOCAB), -5.0)
    for row, best in enumerate((2, 3, 4, 30)):  # the second row of 2 was not accepted
        logits[row, best] = 1.0
    ends = np.array([0, 4])
    verdict = Verdict(
        np.array([1, 2]),
        np.array([0, 2]),
        np.zeros(0, dtype=np.int64),
        np.zeros(2, dtype=np.int64),
        np.ones(1, dtype=np.bool_),
    )
    one.observe(plan_of([1]), drafts, TargetOutput(logits, ends, {}, ends), verdict)
    assert propose(one, [2], 1).token_ids.tolist() == [3]


def test_the_best_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(0)
    one = drafter(num_successors=8)
    logits = torch.from_numpy(rng.normal(size=(VOCAB, VOCAB)).astype(np.float32))
    texts = [[token] for token in range(VOCAB)]
    ends = np.arange(VOCAB + 1)
    none = np.zeros(0, dtype=np.int64)
    verdict = Verdict(
        none, np.zeros(VOCAB + 1, dtype=np.int64), none, ends, np.ones(VOCAB, dtype=np.bool_)
    )
    one.observe(
        plan_of(*texts), DraftBatch.empty(VOCAB), TargetOutput(logits, ends, {}, ends), verdict
    )
    expected = np.argsort(-logits.numpy(), axis=1)[:, :8]
    np.testing.assert_array_equal(one._successors, expected)


def test_places_that_are_right_get_more_of_the_budget() -> None:
    one = drafter(num_successors=4)
    best = {t: [(t + k) % VOCAB for k in (1, 2, 3, 4)] for t in range(VOCAB)}
    for _ in range(60):  # the third-ranked successor is always the right one
        token = 7
        show(one, [[token]], chain([10]), [1], best)
        for t in range(VOCAB):
            one._successors[t] = best[t]
    batch = propose(one, [7], 3)
    assert 10 in batch.token_ids.tolist()
    first = batch.token_ids.tolist().index(10)
    assert batch.confidence is not None and batch.confidence[first] > 0.9


def test_many_requests_and_ids_outside_the_vocabulary() -> None:
    one = drafter()
    show(one, [[1], [VOCAB + 3], [2]], chain([2], [], [VOCAB - 1]), [1, 0, 0], {1: [2], 2: [3]})
    plan = plan_of([1], [VOCAB + 3], [2])
    batch = one.propose(plan, Budgets(np.array([4, 4, 0])))
    assert batch.num_nodes[0] == 4 and batch.num_nodes[1:].tolist() == [0, 0]


@pytest.mark.parametrize("options", [{"num_successors": 0}, {"max_depth": 200}, {"max_depth": 1.5}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        RecyclingConfig(**options)
