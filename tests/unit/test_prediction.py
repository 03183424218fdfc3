"""Predicted output: where the draft goes on after the output left the prediction."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.prediction import PredictionConfig, PredictionDrafter
from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan

PROMPT = [900, 901]


def drafter(**options: int) -> PredictionDrafter:
    return PredictionDrafter(PredictionConfig(**options), DrafterContext(1000, 4096))


def propose(
    one: PredictionDrafter,
    output: list[int],
    prediction: list[int] | None,
    budget: int = 8,
    rule: str = "walk",
    name: str = "r",
) -> DraftBatch:
    ids = np.array(PROMPT + output, dtype=np.int64)
    ids.flags.writeable = False
    wanted = None if prediction is None else tuple(prediction)
    speculation = SpeculationParams("prediction", 8, rule, prediction=wanted)
    request = Request(name, ids[:2], SamplingParams(), speculation, 0, 512, frozenset())
    plan = StepPlan((Segment(request, ids, 0, len(ids) - 1, 1, is_decode=True),))
    return one.propose(plan, Budgets(np.array([budget])))


def paths(batch: DraftBatch) -> list[list[int]]:
    """The tree's leaves, each as the tokens on the way to it."""
    leaves = set(range(1, len(batch.parents) + 1)) - set(batch.parents.tolist())
    found = []
    for leaf in sorted(leaves):
        path = []
        while leaf > 0:
            path.insert(0, int(batch.token_ids[leaf - 1]))
            leaf = int(batch.parents[leaf - 1])
        found.append(path)
    return found


TEXT = list(range(10, 60))


def test_it_begins_with_the_prediction() -> None:
    assert paths(propose(drafter(), [], TEXT)) == [TEXT[:8]]


def test_it_goes_on_while_the_output_follows() -> None:
    one = drafter()
    propose(one, [], TEXT)
    assert paths(propose(one, TEXT[:5], TEXT)) == [TEXT[5:13]]
    assert paths(propose(one, TEXT[:14], TEXT)) == [TEXT[14:22]]
    assert paths(propose(one, TEXT[:48], TEXT)) == [TEXT[48:]]
    assert paths(propose(one, TEXT, TEXT)) == []


@pytest.mark.parametrize("kind", ["replaced", "put in", "left out"])
def test_after_a_divergence_the_right_place_is_among_the_drafts(kind: str) -> None:
    one = drafter()
    propose(one, TEXT[:10], TEXT)
    if kind == "left out":  # the token that came is the next but one
        output, rest = [*TEXT[:10], TEXT[11]], TEXT[12:]
    else:
        output = [*TEXT[:10], 777]
        rest = TEXT[11:] if kind == "replaced" else TEXT[10:]
    assert any(path == rest[: len(path)] for path in paths(propose(one, output, TEXT)))


def test_who_asks_twice_gets_the_same() -> None:
    one = drafter()
    propose(one, TEXT[:10], TEXT)
    for output in ([*TEXT[:10], 777], [*TEXT[:10], 777, 20], [*TEXT[:10], 777, *TEXT[11:16]]):
        first, again = (propose(one, output, TEXT) for _ in range(2))
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.parents.tolist() == again.parents.tolist()


def test_two_tokens_later_one_place_is_left() -> None:
    """After one token that agrees there is little doubt, after four none."""
    one = drafter()
    propose(one, TEXT[:10], TEXT)
    propose(one, [*TEXT[:10], 777], TEXT)
    output = [*TEXT[:10], 777, *TEXT[11:16]]
    assert paths(propose(one, output, TEXT)) == [TEXT[16:24]]


def test_a_passage_that_was_left_out_or_repeated() -> None:
    one = drafter()
    propose(one, TEXT[:10], TEXT)
    assert TEXT[31:35] == paths(propose(one, TEXT[:10] + TEXT[25:31], TEXT))[0][:4]
    assert TEXT[6:10] == paths(propose(one, TEXT[:10] + TEXT[25:31] + TEXT[:6], TEXT))[0][:4]


def test_of_equal_places_the_nearest_is_taken() -> None:
    text = [1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4, 70]
    one = drafter()
    propose(one, text[:5], text)
    output = [*text[:5], 9, 1, 2, 3, 4]  # something was put in after 50
    assert paths(propose(one, output, text))[0][0] == 60


def test_requests_do_not_know_of_each_other() -> None:
    one = drafter()
    propose(one, TEXT[:10], TEXT, name="a")
    assert paths(propose(one, [], TEXT[5:], name="b")) == [TEXT[5:13]]
    one.forget("a")
    assert paths(propose(one, TEXT[:3], TEXT, name="a"))[0][:2] == TEXT[3:5]


def test_chains_where_a_rule_asks_for_them() -> None:
    one = drafter()
    batch = propose(one, [*TEXT[:10], 777], TEXT, rule="block")
    assert batch.parents.tolist() == list(range(len(batch.parents)))


def test_nothing_without_a_prediction() -> None:
    assert not len(propose(drafter(), [1, 2], None).token_ids)
    assert not len(propose(drafter(), [1, 2], []).token_ids)
    assert not len(propose(drafter(), [1, 2], TEXT, budget=0).token_ids)


def test_ids_that_the_model_does_not_have_end_the_draft() -> None:
    assert paths(propose(drafter(), [], [5, 6, 1000, 7])) == [[5, 6]]


def test_what_a_request_may_bring() -> None:
    assert SpeculationParams("prediction", prediction=np.array([1, 2])).prediction == (1, 2)
    for wrong in (7, b"text", [1, -2], [1.5], ["a"]):
        with pytest.raises(InvalidRequestError, match="prediction"):
            SpeculationParams("prediction", prediction=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_branches"):
        PredictionConfig(5)


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_an_edited_text_takes_few_steps(share: float) -> None:
    """A text of which a share of the words was kept: steps of a walk along it."""
    rng = np.random.default_rng(5)
    text = rng.integers(0, 400, 400).tolist()
    output: list[int] = []
    for token in text:
        if rng.random() < share:
            output.append(token)
            continue
        kind = rng.integers(3)
        if kind == 0:
            output.append(int(rng.integers(400, 800)))
        elif kind == 1:
            output += [int(rng.integers(400, 800)), token]
    one, length, steps = drafter(), 0, 0
    while length < len(output):
        batch = propose(one, output[:length], text, budget=16)
        row = 0
        while length < len(output):
            children = np.nonzero((batch.parents == row) & (batch.token_ids == output[length]))[0]
            length += 1
            if not len(children):
                break
            row = int(children[0]) + 1
        steps += 1
    assert len(output) / steps > {0.9: 5.5, 0.5: 1.6}[share]
