"""The synthetic drafter: what is accepted follows the setting, and nothing else does."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from foredraft.config import make_config
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.synthetic import SyntheticConfig, SyntheticDrafter
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import warnings_logged

VOCAB = 1000
PROMPT = np.arange(5, dtype=np.int64)
TEXT = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.int64)
TEXT[: len(PROMPT)] = PROMPT


def make(**options: Any) -> SyntheticDrafter:
    config = make_config(SyntheticConfig, options, "method 'synthetic'")
    return SyntheticDrafter(config, DrafterContext(VOCAB, 1 << 16))


def knowing(**options: Any) -> SyntheticDrafter:
    drafter = make(**options)
    drafter.remember(segment(10).request, TEXT)
    return drafter


def segment(
    length: int, seed: int = 7, prompt: np.ndarray = PROMPT, temperature: float = 1.0
) -> Segment:
    sampling = SamplingParams(temperature)
    request = Request(
        "r", prompt, sampling, SpeculationParams("synthetic"), seed, 5000, frozenset()
    )
    ids = np.concatenate([prompt, TEXT[len(prompt) : length]])
    return Segment(request, ids, 0, len(ids) - 1, 1, True)


def chain(drafter: SyntheticDrafter, length: int, limit: int, seed: int = 7) -> np.ndarray:
    plan = StepPlan((segment(length, seed),))
    batch = drafter.propose(plan, Budgets(np.array([limit])))
    assert batch.offsets.tolist() == [0, len(batch.token_ids)]
    assert batch.parents.tolist() == list(range(len(batch.token_ids)))
    assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB)).all()
    return batch.token_ids


def shares_right(drafter: SyntheticDrafter, width: int, places: range) -> np.ndarray:
    """Share of right tokens by position, each draft from another place of the text."""
    right = [chain(drafter, at, width) == TEXT[at : at + width] for at in places]
    return np.mean(right, axis=0)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_each_token_is_right_with_the_set_chance(acceptance: float) -> None:
    """3000 places: five standard deviations are 0.046, so one false alarm in a million."""
    found = shares_right(knowing(acceptance=acceptance), 4, range(5, 3005))
    np.testing.assert_allclose(found, acceptance, atol=0.046)


def test_tokens_of_a_draft_fail_independently() -> None:
    drafter = knowing(acceptance=0.5)
    right = np.array([chain(drafter, at, 2) == TEXT[at : at + 2] for at in range(5, 3005)])
    assert np.mean(right[:, 0] & right[:, 1]) == pytest.approx(0.25, abs=0.04)


def test_a_chance_for_each_position() -> None:
    found = shares_right(knowing(acceptance=[0.9, 0.5, 0.1]), 5, range(5, 3005))
    np.testing.assert_allclose(found, [0.9, 0.5, 0.1, 0.1, 0.1], atol=0.046)


def test_changes_begin_where_they_are_told() -> None:
    drafter = knowing(acceptance=1.0, changes=[[100, 0.0], [200, [1.0, 0.0]]])
    for outputs, *expected in ((0, 1, 1), (99, 1, 1), (100, 0, 0), (199, 0, 0), (200, 1, 0)):
        at = len(PROMPT) + outputs
        assert (chain(drafter, at, 2) == TEXT[at : at + 2]).tolist() == expected


def test_the_same_place_is_drafted_the_same_way() -> None:
    """Coins belong to a seed and a place, so that two runs can be compared."""
    one, other = knowing(acceptance=0.5), knowing(acceptance=0.5)
    for at in range(5, 100):
        np.testing.assert_array_equal(chain(one, at, 8), chain(other, at, 8))


def test_what_is_not_known_is_not_drafted() -> None:
    drafter = knowing()
    assert len(chain(drafter, 50, 6)) == 6
    assert len(chain(drafter, 50, 6, seed=8)) == 0  # another seed, another text
    assert len(chain(make(), 50, 6)) == 0
    assert len(chain(drafter, 50, 0)) == 0
    assert len(chain(drafter, len(TEXT) - 2, 6)) == 2  # the text ends
    assert len(chain(drafter, len(TEXT), 6)) == 0
    other = StepPlan((segment(5, prompt=PROMPT + 1),))
    assert len(drafter.propose(other, Budgets(np.array([4]))).token_ids) == 0
    astray = segment(50)
    astray.token_ids[20] += 1  # went another way than last time
    assert len(drafter.propose(StepPlan((astray,)), Budgets(np.array([4]))).token_ids) == 0


def test_batches_are_ragged() -> None:
    drafter = knowing(acceptance=1.0)
    plan = StepPlan((segment(10), segment(20, seed=9), segment(30), segment(40)))
    batch = drafter.propose(plan, Budgets(np.array([2, 5, 0, 3])))
    assert batch.offsets.tolist() == [0, 2, 2, 2, 5]
    assert batch.parents.tolist() == [0, 1, 0, 1, 2]
    assert batch.token_ids.tolist() == [*TEXT[10:12], *TEXT[40:43]]
    assert len(drafter.propose(StepPlan(()), Budgets(np.empty(0, dtype=np.int64))).token_ids) == 0


def observe(drafter: SyntheticDrafter, length: int, emitted: list[int]) -> None:
    none = np.zeros(2, dtype=np.int64)
    tokens = np.array(emitted, dtype=np.int64)
    verdict = Verdict(
        none[:0], none, tokens, np.array([0, len(tokens)]), np.ones(1, dtype=np.bool_)
    )
    plan = StepPlan((segment(length),))
    output = TargetOutput(None, none, {}, none)  # type: ignore[arg-type]
    drafter.observe(plan, DraftBatch.empty(1), output, verdict)


def test_the_first_run_makes_a_text_known() -> None:
    drafter = make(acceptance=1.0)
    for at in range(5, 60):
        assert len(chain(drafter, at, 4)) == 0
        observe(drafter, at, [int(TEXT[at])])
    assert chain(drafter, 10, 50).tolist() == TEXT[10:60].tolist()
    observe(drafter, 20, TEXT[20:25].tolist())  # the second run tells nothing new
    assert chain(drafter, 25, 100).tolist() == TEXT[25:60].tolist()
    observe(drafter, 20, [])  # a prompt chunk
    assert chain(drafter, 25, 100).tolist() == TEXT[25:60].tolist()
    observe(drafter, 30, [int(TEXT[30]) + 1])  # another way: the new one counts
    assert len(chain(drafter, 40, 4)) == 0


def test_old_texts_make_room() -> None:
    drafter = make()
    for seed in range(1000):
        drafter.remember(segment(10, seed).request, TEXT[:20])
    assert len(drafter._texts) < 1000
    assert len(chain(drafter, 10, 4, seed=999)) == 4 and len(chain(drafter, 10, 4, seed=0)) == 0


def test_at_temperature_0_the_seed_is_none_of_a_text() -> None:
    """A request without a seed gets another one each time, and the same text."""
    drafter = make(acceptance=1.0)
    drafter.remember(segment(10, 3, temperature=0.0).request, TEXT)
    plan = StepPlan((segment(10, 4, temperature=0.0), segment(10, 3)))
    assert drafter.propose(plan, Budgets(np.array([5, 5]))).num_nodes.tolist() == [5, 0]


def test_a_text_that_parts_from_the_known_one_is_said_so() -> None:
    drafter = knowing()
    parted = segment(12)
    ids = parted.token_ids.copy()
    ids[-1] += 1
    plan = StepPlan((dataclasses.replace(parted, token_ids=ids),))
    with warnings_logged() as said:
        for _ in range(2):
            assert drafter.propose(plan, Budgets(np.array([5]))).num_nodes.tolist() == [0]
    assert len(said) == 1 and "check with float32" in said[0]


@pytest.mark.parametrize(("cost", "units"), [("once", 1), ("per_token", 6), ("per_level", 6)])
def test_it_takes_the_time_it_is_told(cost: str, units: int) -> None:
    drafter = knowing(acceptance=1.0, seconds=0.01, cost=cost)
    assert drafter.needs.cost == cost
    started = time.perf_counter()
    chain(drafter, 50, 6)
    assert 0.01 * units <= time.perf_counter() - started < 0.01 * units + 0.2
    started = time.perf_counter()
    chain(drafter, 50, 0)
    assert time.perf_counter() - started < 0.01


def test_it_serves_the_default_rule_alone_and_sees_the_noise() -> None:
    needs = make().needs
    assert needs.rules == ("walk",) and needs.sees_noise and not needs.draft_probs


BAD: list[tuple[dict[str, Any], str]] = [
    ({"acceptance": 1.1}, "acceptance is 1.1"),
    ({"acceptance": -0.1}, "acceptance is -0.1"),
    ({"acceptance": float("nan")}, "acceptance is nan"),
    ({"acceptance": "high"}, "acceptance is 'high'"),
    ({"acceptance": True}, "acceptance is True"),
    ({"acceptance": []}, r"acceptance is \[\]"),
    ({"acceptance": [0.5, 2]}, r"acceptance is \[0.5, 2\]"),
    ({"changes": [[5, 0.5], [5, 0.1]]}, "changes begin at"),
    ({"changes": [[9, 0.5], [5, 0.1]]}, "changes begin at"),
    ({"changes": [[0, 0.5]]}, "changes begin at"),
    ({"changes": [[True, 0.5]]}, "changes begin at"),
    ({"changes": [["x", 0.5]]}, "changes begin at"),
    ({"changes": [[5, 1.5]]}, "acceptance is 1.5"),
    ({"changes": 5}, "changes is 5"),
    ({"changes": [5]}, r"changes is \[5\]"),
    ({"changes": [[5]]}, r"changes is \[\[5\]\]"),
    ({"seconds": -1}, "seconds is -1"),
    ({"seconds": float("inf")}, "seconds is inf"),
    ({"seconds": float("nan")}, "seconds is nan"),
    ({"seconds": "slow"}, "seconds is 'slow'"),
    ({"seconds": True}, "seconds is True"),
    ({"cost": "twice"}, "cost is 'twice'"),
    ({"accept": 0.5}, "has no option 'accept'"),
]


@pytest.mark.parametrize(("options", "expected"), BAD)
def test_bad_options_are_refused_in_words(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make(**options)
