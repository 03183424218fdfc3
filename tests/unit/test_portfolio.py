"""The portfolio: drafts joined into one tree, and the votes that go along with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foredraft.config import make_config
from foredraft.control.controller import Controller, MethodTraits
from foredraft.control.cost_table import CostTable
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.drafters.portfolio import PortfolioConfig, PortfolioDrafter, _join
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.types import Budgets, DraftBatch, Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import engine, family_target, run, run_to_end, warnings_logged


def batch(*trees: tuple[list[int], list[int], list[float]]) -> DraftBatch:
    """Tokens, parents and confidence of each segment's tree."""
    return DraftBatch(
        np.array([t for tokens, _, _ in trees for t in tokens], dtype=np.int64),
        np.array([p for _, parents, _ in trees for p in parents], dtype=np.int64),
        np.concatenate([[0], np.cumsum([len(t) for t, _, _ in trees])]).astype(np.int64),
        confidence=np.array([c for _, _, sure in trees for c in sure], dtype=np.float64),
    )


def test_what_both_propose_is_one_node() -> None:
    one = batch(([5, 6, 7], [0, 1, 2], [0.9, 0.8, 0.7]), ([1], [0], [0.5]))
    other = batch(([5, 8, 6], [0, 0, 1], [0.4, 0.3, np.nan]), ([], [], []))
    joined = _join([one, other], ["a", "b"], np.array([8, 8]))
    assert joined.token_ids.tolist() == [5, 6, 7, 8, 1]
    assert joined.parents.tolist() == [0, 1, 2, 0, 0] and joined.offsets.tolist() == [0, 4, 5]
    assert joined.voters == ("a", "b") and joined.votes is not None
    np.testing.assert_array_equal(joined.votes[0], [0.9, 0.8, 0.7, -1, 0.5])
    np.testing.assert_array_equal(joined.votes[1], [0.4, np.nan, -1, 0.3, -1])


def test_the_likeliest_nodes_fill_the_budget() -> None:
    one = batch(([5, 6, 7], [0, 1, 2], [0.9, 0.2, 0.9]))
    other = batch(([8, 9], [0, 1], [0.6, 0.9]))
    joined = _join([one, other], ["a", "b"], np.array([3]))
    assert joined.token_ids.tolist() == [5, 8, 9] and joined.parents.tolist() == [0, 0, 2]
    assert joined.votes is not None
    assert joined.votes.tolist() == [[0.9, -1, -1], [-1, 0.6, 0.9]]


def test_joined_trees_are_trees() -> None:
    rng = np.random.default_rng(0)

    def random_tree(most: int) -> tuple[list[int], list[int], list[float]]:
        tokens, parents = [], []
        for node in range(int(rng.integers(0, most))):
            parent = int(rng.integers(0, node + 1))
            free = set(range(6)) - {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            tokens.append(int(rng.choice(sorted(free)))) if free else tokens.append(100 + node)
            parents.append(parent)
        return tokens, parents, rng.uniform(0, 1, len(tokens)).tolist()

    for _ in range(200):
        batches = [batch(*(random_tree(9) for _ in range(3))) for _ in range(3)]
        limits = rng.integers(0, 14, 3)
        joined = _join(batches, ["a", "b", "c"], limits)
        assert (joined.num_nodes <= limits).all() and joined.votes is not None
        assert (joined.votes != -1).any(axis=0).all()
        paths = [paths_of(one) for one in batches]
        for segment, found in enumerate(paths_of(joined)):
            every = set().union(*(one[segment] for one in paths))
            assert found <= every
            if len(every) <= limits[segment]:
                assert found == every


def paths_of(one: DraftBatch) -> list[set[tuple[int, ...]]]:
    """The nodes of each segment, each as the tokens on the way to it."""
    out = []
    for begin, end in zip(one.offsets[:-1], one.offsets[1:], strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(one.token_ids[begin:end], one.parents[begin:end], strict=True):
            paths.append((*paths[parent], int(token)))
        assert len(set(paths)) == len(paths), "siblings differ"
        out.append(set(paths[1:]))
    return out


# -------------------------------------------------------------------------- what a vote is worth


def test_a_members_word_is_worth_what_came_of_it() -> None:
    """One member is always right and the other never: in the end only the first is listened to."""
    controller = Controller(lambda method: MethodTraits(sees_noise=True))
    controller.cost_table = CostTable(
        PassTime(1, rows, 0, 1 + 0.05 * (rows - 1), 0.0) for rows in range(1, 33)
    )
    ids = np.array([1, 2, 3], dtype=np.int64)
    request = Request(
        "r", ids[:1], SamplingParams(), SpeculationParams("auto"), 0, 4000, frozenset()
    )
    plan_of = lambda: StepPlan((Segment(request, ids, 0, 2, 1, is_decode=True),))  # noqa: E731
    kept = []
    for _ in range(120):
        plan = plan_of()
        controller.budget(plan)
        right = batch(([5, 6], [0, 1], [0.5, 0.5]))
        wrong = batch(([8, 9], [0, 1], [0.9, 0.9]))
        drafts = controller.trim(plan, _join([right, wrong], ["right", "wrong"], np.array([8])))
        kept.append(drafts.token_ids.tolist())
        path = [i + 1 for i, token in enumerate(drafts.token_ids.tolist()) if token in (5, 6)]
        ends = np.array([0, 1 + len(drafts.token_ids)])
        verdict = Verdict(
            np.array(path, dtype=np.int64),
            np.array([0, len(path)]),
            np.zeros(0, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
            np.ones(1, dtype=np.bool_),
        )
        target = TargetOutput(None, ends, {}, ends)  # type: ignore[arg-type]
        seconds = 1 + 0.05 * len(drafts.token_ids)
        controller.observe(plan, drafts, target, verdict, seconds, {"auto": 1e-9})
    assert 5 in kept[0]
    assert all({5, 6} <= set(tokens) for tokens in kept[-20:])
    assert sum(8 in tokens for tokens in kept[-20:]) <= 2


# ------------------------------------------------------------------------------ members that fail


@dataclasses.dataclass(frozen=True)
class FailingConfig:
    where: str = "propose"


class FailingDrafter(Drafter):
    """Raises where it is told to."""

    Config = FailingConfig

    def __init__(self, config: FailingConfig, context: DrafterContext) -> None:
        self._where = config.where

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise ValueError(f"no {where}")

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        self._fail("propose")
        return DraftBatch.empty(len(plan.segments))

    def observe(self, plan, drafts, target, verdict) -> None:  # type: ignore[no-untyped-def]
        self._fail("observe")

    def finish(self, request: Request, token_ids: np.ndarray) -> None:
        self._fail("finish")

    def forget(self, request_id: str) -> None:
        self._fail("forget")

    def close(self) -> None:
        self._fail("close")


FAILING = f"{__name__}:FailingDrafter"


@pytest.mark.parametrize("where", ["propose", "observe", "finish", "forget", "close"])
@pytest.mark.parametrize("in_portfolio", [True, False])
def test_a_drafter_that_raises_hurts_nobody_else(where: str, in_portfolio: bool) -> None:
    the_target = family_target("llama")
    prompt, sampling = [5, 6, 7] * 9, SamplingParams(max_tokens=30, ignore_eos=True)
    plain = run(engine(the_target), [prompt], sampling, SpeculationParams("none"))
    options: dict[str, dict[str, object]] = {FAILING: {"where": where}}
    method = FAILING
    if in_portfolio:
        method = "auto"
        options = {
            "auto": {
                "members": (FAILING, "ngram", "suffix"),
                "options": {FAILING: options[FAILING]},
            }
        }
    the_engine = engine(the_target, drafter_options=options)
    methods = [SpeculationParams(method, 8), SpeculationParams("ngram", 8)]
    with warnings_logged() as said:
        ended = run_to_end(the_engine, [prompt, prompt], sampling, methods)
        if where == "close":
            with pytest.raises(ValueError, match="no close"):
                the_engine.close()
    assert [one.ids for one in ended] == plain * 2
    assert ended[1].stats.num_accepted_tokens > 0
    assert len(said) == (where != "close")
    if in_portfolio:
        assert ended[0].stats.num_accepted_tokens > 0
        suffix = the_engine.drafting._drafters["auto"].members["suffix"]  # type: ignore[attr-defined]
        assert suffix.shared.num_tokens > 0 and not suffix._texts


def test_a_member_that_fails_ends_no_request_that_it_does_not_serve() -> None:
    """Under a classical rule one member drafts; another's fault is not the request's."""
    the_target = family_target("llama")
    prompt, sampling = [5, 6, 7] * 9, SamplingParams(max_tokens=20, ignore_eos=True)
    plain = run(engine(the_target), [prompt], sampling, SpeculationParams("none"))
    members = {"members": ("ngram", FAILING), "options": {FAILING: {"where": "propose"}}}
    the_engine = engine(the_target, drafter_options={"auto": members})
    ways = [SpeculationParams("auto", 6), SpeculationParams("auto", 6, "rejection")]
    with warnings_logged():
        ended = run_to_end(the_engine, [prompt, prompt], sampling, ways)
    assert [one.finish_reason for one in ended] == ["length", "length"]
    assert [one.ids for one in ended] == plain * 2


def test_a_comparison_begins_anew_without_loading_a_model_again() -> None:
    config = PortfolioConfig(("suffix", "prediction", "ngram"))
    drafter = PortfolioDrafter(config, DrafterContext(100, 512))
    before = dict(drafter.members)
    assert drafter.renew()
    for method, member in drafter.members.items():
        assert (member is before[method]) == (not member.needs.learns)


# -------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def target():
    return family_target("llama")


_RNG = np.random.default_rng(4)
PROMPTS = [np.resize(_RNG.integers(3, 99, p), n).tolist() for p, n in ((3, 30), (40, 40), (1, 5))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mixed_with_other_methods_in_a_batch(target, temperature: float) -> None:
    samplings = [
        SamplingParams(temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(3)
    ]
    plain = [
        run(engine(target), [prompt], sampling, SpeculationParams("none"))[0]
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    for methods in (("auto", "ngram", "auto"), ("suffix", "auto", "none")):
        for num in ("auto", 5):
            the_engine = engine(target)
            speculations = [SpeculationParams(method, num) for method in methods]
            ended = run_to_end(the_engine, PROMPTS, samplings, speculations)
            assert [one.ids for one in ended] == plain
    assert sum(one.stats.num_accepted_tokens for one in ended) > 0 or temperature > 0


def test_a_classical_rule_has_one_member_draft() -> None:
    drafter = PortfolioDrafter(PortfolioConfig(), DrafterContext(100, 512))
    ids = np.array([1, 2, 3, 1, 2], dtype=np.int64)
    ids.flags.writeable = False
    for rule in ("rejection", "block", "traversal"):
        speculation = SpeculationParams("auto", 8, rule)
        request = Request("r", ids[:1], SamplingParams(), speculation, 0, 64, frozenset())
        plan = StepPlan((Segment(request, ids, 0, 4, 1, is_decode=True),))
        found = drafter.propose(plan, Budgets(np.array([8])))
        assert found.token_ids[0] == 3 and found.voters == ("ngram",)
    drafter.forget("r")


@pytest.mark.parametrize(
    "options",
    [
        {"members": ()},
        {"members": ("ngram", "ngram")},
        {"members": ("auto",)},
        {"members": 3},
        {"options": {"suffix2": {}}},
        {"options": 3},
        {"members": ["ngram", 3]},
        {"members": ["ngram", "none"]},
        {"members": ["ngram", "ngram"]},
        {"options": {"ngram": 5}},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        make_config(PortfolioConfig, options, "method 'auto'")


def test_members_options_are_theirs() -> None:
    config = PortfolioConfig(("ngram",), {"ngram": {"max_ngram_len": 2}})
    drafter = PortfolioDrafter(config, DrafterContext(100, 512))
    assert drafter.members["ngram"].config.max_ngram_len == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no option 'x'"):
        PortfolioDrafter(PortfolioConfig(("ngram",), {"ngram": {"x": 1}}), DrafterContext(100, 512))
