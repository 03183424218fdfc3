"""Lookahead: the window, the pool, and what a step does to both."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.control.controller import Controller, MethodTraits
from foredraft.control.cost_table import CostTable
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.lookahead import LookaheadConfig, LookaheadDrafter
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import warnings_logged

VOCAB = 97


def follows(token: int) -> int:
    """A target that looks at one token only: what comes after it."""
    return (5 * token + 11) % VOCAB


def drafter(**options: int) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadConfig(**options), DrafterContext(VOCAB, 4096))


def plan_of(text: list[int], name: str = "r", num: int | str = 64) -> StepPlan:
    ids = np.array(text, dtype=np.int64)
    ids.flags.writeable = False
    speculation = SpeculationParams("lookahead", num)
    request = Request(name, ids[:2], SamplingParams(), speculation, 0, 999, frozenset())
    return StepPlan((Segment(request, ids, 0, len(ids) - 1, 1, is_decode=True),))


def step(one: LookaheadDrafter, text: list[int], budget: int) -> tuple[DraftBatch, list[int]]:
    """Draft, verify against ``follows``, show the verdict; the draft and what was emitted."""
    plan = plan_of(text)
    drafts = one.propose(plan, Budgets(np.array([budget])))
    tokens = [text[-1], *drafts.token_ids.tolist()]
    picks = np.array([follows(token) for token in tokens], dtype=np.int64)
    path, row, emitted = [], 0, []
    while True:
        emitted.append(int(picks[row]))
        found = np.nonzero((drafts.parents == row) & (drafts.token_ids == picks[row]))[0]
        if not len(found):
            break
        row = int(found[0]) + 1
        path.append(row)
    ends = np.array([0, len(tokens)])
    verdict = Verdict(
        np.array(path, dtype=np.int64),
        np.array([0, len(path)]),
        np.array(emitted),
        np.array([0, len(emitted)]),
        np.ones(1, dtype=np.bool_),
        picks,
    )
    one.observe(plan, drafts, TargetOutput(None, ends, {}, ends), verdict)  # type: ignore[arg-type]
    return drafts, emitted


def levels(drafts: DraftBatch) -> list[int]:
    """Depth of each node, from 1."""
    depths = [0]
    for parent in drafts.parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def test_the_window_is_a_chain_with_branches() -> None:
    """W columns, N - 1 levels: column c of level l lies c + l + 1 below the root."""
    one = drafter(window=4, ngram_len=3, num_guesses=2)
    drafts = one.propose(plan_of([3, 90]), Budgets(np.array([12])))
    window = one._states["r"].window
    assert window.shape == (2, 4) and (window >= 0).all()
    expected = {tuple(window[0, : c + 1]) for c in range(4)} | {
        (*window[0, : c + 1], window[1, c]) for c in range(4)
    }
    found, paths = set(), [()]
    for token, parent in zip(drafts.token_ids, drafts.parents, strict=True):
        paths.append((*paths[parent], token))
        found.add(paths[-1])
    assert expected <= found and max(levels(drafts)) <= 5


def test_it_learns_n_grams_and_drafts_from_them() -> None:
    """After a few steps most tokens come from drafts; all of them are the target's own."""
    one = drafter()
    text = [3, 90]
    lengths = []
    for _ in range(60):
        drafts, emitted = step(one, text, 30)
        assert len(drafts.token_ids) <= 30
        for token in emitted:
            assert token == follows(text[-1])
            text.append(token)
        lengths.append(len(emitted))
    assert np.mean(lengths[-30:]) > 1.5
    # What the pool holds under a token is what the target says after some guess of it.
    pool = one._states["r"].pool
    for slot in np.nonzero(pool.keys >= 0)[0]:
        for gram in pool.grams[slot, : min(pool.turns[slot], 5)]:
            assert gram[-1] == follows(int(gram[-2]))


def test_the_window_moves_with_the_text() -> None:
    """A step that emits one token lets every level become the one above; others shift columns."""
    one = drafter(window=4, ngram_len=3, num_guesses=1)
    text = [3, 90]
    one.propose(plan_of(text), Budgets(np.array([30])))
    window = one._states["r"].window
    window[:] = 50 + np.arange(8).reshape(2, 4)  # nothing that the target would say
    drafts, emitted = step(one, text, 30)
    assert len(emitted) == 1 and len(drafts.token_ids) >= 8
    np.testing.assert_array_equal(window[0], [54, 55, 56, 57])
    np.testing.assert_array_equal(window[1], [follows(t) for t in (54, 55, 56, 57)])


def test_without_room_for_the_window_only_n_grams_are_drafted() -> None:
    one = drafter(window=5, ngram_len=4, num_guesses=5)
    text = [7, 8, 9, 10, 7, 8, 9, 11, 7]
    drafts = one.propose(plan_of(text), Budgets(np.array([6])))
    assert drafts.token_ids.tolist() == [8, 9, 11, 10] and drafts.parents.tolist() == [0, 1, 2, 2]
    assert not len(one.propose(plan_of([1, 2], "new"), Budgets(np.array([6]))).token_ids)


@pytest.mark.parametrize(("budget", "num", "is_said"), [(6, 64, True), (15, 64, False)])
def test_a_window_that_does_not_fit_is_said_once(budget: int, num: int, is_said: bool) -> None:
    one = drafter(window=5, ngram_len=4)
    with warnings_logged() as said:
        for _ in range(2):
            one.propose(plan_of([1, 2, 3], num=num), Budgets(np.array([budget])))
    assert len(said) == int(is_said)
    if is_said:
        assert "window of 15 nodes does not fit into the 6" in said[0]


def test_a_pool_keeps_the_newest_of_a_token() -> None:
    one = drafter(window=1, ngram_len=2, num_guesses=2)
    text = [1, 5, 1, 6, 1, 7, 1, 5, 1]
    drafts = one.propose(plan_of(text), Budgets(np.array([2])))
    assert drafts.token_ids.tolist()[0] == 5 and 6 not in drafts.token_ids[:2].tolist()


def test_a_long_text_does_not_fill_the_pool() -> None:
    one = LookaheadDrafter(LookaheadConfig(), DrafterContext(1 << 20, 1 << 20))
    text = list(range(100_000))
    one.propose(plan_of(text), Budgets(np.array([30])))
    for end in range(100_000, 130_000, 3000):
        one.propose(plan_of([*text, *range(100_000, end)]), Budgets(np.array([30])))
    pool = one._states["r"].pool
    assert (pool.keys >= 0).sum() == pool.num_keys <= len(pool.keys) // 2
    one.forget("r")
    assert one.num_state_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"ngram_len": 1},
        {"ngram_len": 9},
        {"num_guesses": 0},
        {"window": 2.5},
        {"window": 32, "ngram_len": 8},
    ],
)
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        LookaheadConfig(**options)


# --------------------------------------------------------------------------------- whole or not


def whole(gain: float, steps: int, seed: int = 0, max_auto_nodes: int = 31) -> list[int]:
    """Nodes of two requests' drafts, of 31 each at most, where a whole one brings so much."""
    controller = Controller(lambda method: MethodTraits(is_whole=True), max_auto_nodes)
    controller.cost_table = CostTable(
        PassTime(b, b * r, 0, 1 + 0.02 * b * (r - 1), 0.0) for b in (1, 2) for r in range(1, 33)
    )
    rng = np.random.default_rng(seed)
    given = []
    for _ in range(steps):
        plan = StepPlan(
            plan_of([1, 2], "a", "auto").segments + plan_of([1, 2], "b", "auto").segments
        )
        sizes = np.minimum(controller.budget(plan).max_nodes, 31)
        drafts = DraftBatch(
            np.concatenate([np.arange(n) for n in sizes]).astype(np.int64) % VOCAB,
            np.concatenate([np.arange(n) for n in sizes]).astype(np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )
        assert controller.trim(plan, drafts) is drafts, "nothing is trimmed"
        accepted = [min(int(n), int(rng.poisson(gain))) for n in sizes]
        ends = np.concatenate([[0], np.cumsum(1 + sizes)])
        verdict = Verdict(
            np.concatenate([np.arange(1, n + 1) for n in accepted]).astype(np.int64),
            np.concatenate([[0], np.cumsum(accepted)]).astype(np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(3, dtype=np.int64),
            np.ones(2, dtype=np.bool_),
        )
        seconds = 1 + 0.02 * float(sizes.sum())
        target = TargetOutput(None, ends, {}, ends)  # type: ignore[arg-type]
        controller.observe(plan, drafts, target, verdict, seconds, {"lookahead": 1e-9})
        given.append(int(sizes.sum()))
    return given


def test_a_whole_draft_that_pays_is_always_asked_for() -> None:
    assert np.mean(np.array(whole(3.0, 900)[500:]) == 62) > 0.95
    # By what it holds, and not by what it might: a budget of 127 rows would never pay.
    assert np.mean(np.array(whole(3.0, 2000, max_auto_nodes=127)[1500:]) == 62) > 0.95


def test_a_whole_draft_that_does_not_pay_is_off_but_for_probes() -> None:
    given = np.array(whole(0.3, 600)[60:])
    assert set(given) <= {0, 31, 62} and (given > 0).mean() < 0.03
