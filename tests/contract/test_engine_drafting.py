"""Several methods in one step: each sees its own requests; drafts are joined as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from foredraft.drafters.base import Drafter, Needs
from foredraft.engine.drafting import Drafting
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import ScriptDrafter, engine, run, table_target, table_text

VOCAB = 12
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))


class Recording(Drafter):
    """Gives what it is told to, and remembers what it was asked."""

    Config = dict
    needs = Needs(draft_probs=True)

    def __init__(self, trees: dict[str, tuple[list, list, list]], num_dists: int, mark: float):
        self._trees = trees
        self._probs = torch.full((num_dists, VOCAB), mark) if num_dists else None
        self.budgets: list[list[int]] = []
        self.observed: list[int] = []

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        self.budgets.append(budgets.max_nodes.tolist())
        tokens, parents, dists, offsets = [], [], [], [0]
        for segment, budget in zip(plan.segments, budgets.max_nodes.tolist(), strict=True):
            if budget:
                more = self._trees[segment.request.request_id]
                tokens, parents, dists = tokens + more[0], parents + more[1], dists + more[2]
            offsets.append(len(tokens))
        dist_ids = None if self._probs is None else np.array(dists, dtype=np.int64)
        return DraftBatch(
            np.array(tokens, dtype=np.int64),
            np.array(parents, dtype=np.int64),
            np.array(offsets, dtype=np.int64),
            self._probs,
            dist_ids,
        )

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        self.observed.append(len(plan.segments))


def segment_of(name: str, method: str, verification: str = "walk") -> Segment:
    ids = np.array([1, 2, 3])
    speculation = SpeculationParams(method, 8, verification)
    request = Request(name, ids, SamplingParams(), speculation, 0, 50, frozenset())
    return Segment(request, ids, 0, 2, 1, True)


def test_drafts_of_several_methods_are_joined() -> None:
    """Tokens, parents and laws of every node stay with its own segment."""
    drafters = {
        "one": Recording({"a": ([4, 5], [0, 1], [1, -1]), "d": ([6], [0], [0])}, 2, 0.25),
        "two": Recording({"b": ([7, 8, 9], [0, 0, 2], [0, 2, 1])}, 3, 0.5),
        "chosen": Recording({"e": ([3], [0], [])}, 0, 0.0),
    }
    drafters["chosen"].needs = Needs()
    drafting = Drafting({}, table_target(TABLE), drafters)
    plan = StepPlan(
        tuple(
            segment_of(name, method, "traversal")
            for name, method in (
                ("a", "one"),
                ("b", "two"),
                ("c", "none"),
                ("d", "one"),
                ("e", "chosen"),
            )
        )
    )
    batch = drafting.propose(plan, Budgets(np.array([2, 3, 0, 1, 1])))
    assert batch.offsets.tolist() == [0, 2, 5, 5, 6, 7]
    assert batch.token_ids.tolist() == [4, 5, 7, 8, 9, 6, 3]
    assert batch.parents.tolist() == [0, 1, 0, 0, 2, 0, 0]
    assert batch.draft_probs is not None and batch.dist_ids is not None
    assert len(batch.draft_probs) == 5
    marks = [
        None if dist < 0 else float(batch.draft_probs[dist, 0]) for dist in batch.dist_ids.tolist()
    ]
    assert marks == [0.25, None, 0.5, 0.5, 0.5, 0.25, None]
    # Within a table the row is the one that was named.
    rows = {"one": [batch.dist_ids[0], batch.dist_ids[5]], "two": batch.dist_ids[2:5].tolist()}
    assert rows["one"][0] - rows["one"][1] == 1
    assert [row - min(rows["two"]) for row in rows["two"]] == [0, 2, 1]
    # Nobody was shown another's budget.
    assert drafters["one"].budgets == [[2, 0, 0, 1, 0]]
    assert drafters["two"].budgets == [[0, 3, 0, 0, 0]]
    assert drafters["chosen"].budgets == [[0, 0, 0, 0, 1]]


def test_only_methods_with_a_budget_are_asked() -> None:
    drafters = {"one": Recording({"a": ([4], [0], [0])}, 1, 0.5), "two": Recording({}, 1, 0.5)}
    drafting = Drafting({}, table_target(TABLE), drafters)
    plan = StepPlan((segment_of("a", "one"), segment_of("b", "two")))
    none = drafting.propose(plan, Budgets(np.array([0, 0])))
    assert none.offsets.tolist() == [0, 0, 0] and none.draft_probs is None
    assert drafters["one"].budgets == drafters["two"].budgets == []
    batch = drafting.propose(plan, Budgets(np.array([1, 0])))
    assert batch.token_ids.tolist() == [4]
    assert drafters["two"].budgets == []


def test_everyone_observes_every_step() -> None:
    """Also prompt chunks, and steps in which a drafter had no request of its own."""
    drafters = {
        "one": Recording({}, 0, 0.0),
        "script": ScriptDrafter("wrong", [], vocab_size=VOCAB),
    }
    the_engine = engine(table_target(TABLE), drafters, max_num_batched_tokens=2)
    sampling = SamplingParams(max_tokens=4)
    run(the_engine, [[1, 2, 3, 4, 5]], sampling, SpeculationParams("script", 2))
    # Chunks of 2, 2 and 1, then 3 tokens one a step.
    assert drafters["one"].observed == [1] * 6  # type: ignore[attr-defined]


def test_methods_of_a_request_do_not_reach_its_text() -> None:
    """One request a method, all in one batch; texts are those of a loop without drafts."""
    samplings = [SamplingParams(1.0, seed=seed, max_tokens=20) for seed in range(4)]
    texts = [table_text(TABLE, [3, 1], sampling, 20) for sampling in samplings]
    whole = [[3, 1, *text] for text in texts]
    drafters = {
        "right": ScriptDrafter("right", whole, 3, vocab_size=VOCAB),
        "half": ScriptDrafter("half", whole, vocab_size=VOCAB, ragged=True),
    }
    the_engine = engine(table_target(TABLE), drafters)
    methods = ["right", "ngram", "half", "none"]
    for order in range(4):
        turned = methods[order:] + methods[:order]
        outputs = run(
            the_engine, [[3, 1]] * 4, samplings, [SpeculationParams(m, 5) for m in turned]
        )
        assert outputs == texts


def test_hidden_states_reach_those_who_need_them() -> None:
    """The layers of all drafters together; asked for as soon as one of them is known."""
    plain, needy = Recording({}, 0, 0.0), Recording({}, 0, 0.0)
    needy.needs = Needs(hidden_layers=(3, 1))
    other = dataclasses.replace(needy.needs, hidden_layers=(0, 3))
    third = Recording({}, 0, 0.0)
    third.needs = other
    target = table_target(TABLE)
    assert Drafting({}, target, {"plain": plain}).hidden_layers == ()
    every = Drafting({}, target, {"plain": plain, "needy": needy, "third": third})
    assert every.hidden_layers == (0, 1, 3)
    the_engine = engine(target, {"needy": needy})
    the_engine.add([1], SamplingParams(), SpeculationParams("needy"))
    assert the_engine.runner.hidden_layers == (1, 3)
