"""How much a member whose drafts take time is asked for, beside free ones."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.control.controller import Controller
from foredraft.control.cost_table import CostTable
from foredraft.control.members import depths_that_pay
from foredraft.control.view import MethodTraits
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.portfolio import PortfolioConfig, PortfolioDrafter, _join
from foredraft.errors import ConfigError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from foredraft.types import Request, Segment, StepPlan, TargetOutput, Verdict
from tests.tiny import engine, family_target, run, run_to_end
from tests.unit.test_portfolio import batch


def best_by_trying(survival, free, rows, sure, seconds, draft):  # type: ignore[no-untyped-def]
    """Every depth and every subset of requests."""
    num, deepest = survival.shape
    best = (sure + free.sum()) / seconds(rows)
    for depth in range(1, deepest + 1):
        for subset in range(1, 2**num):
            chosen = np.array([bool(subset >> i & 1) for i in range(num)])
            gains = np.maximum(0, survival[:, :depth].sum(axis=1) - free)
            tokens = sure + free.sum() + gains[chosen].sum()
            best = max(best, tokens / (seconds(rows + depth * chosen.sum()) + draft(depth)))
    return best


def test_no_other_depth_or_choice_is_better() -> None:
    rng = np.random.default_rng(0)
    num_drafting = 0
    for _ in range(100):
        num, deepest = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        survival = np.cumprod(rng.uniform(0.3, 0.99, (num, deepest)), axis=1)
        free = rng.uniform(0, 2, num) * (rng.random(num) < 0.5)
        alpha, unit = rng.uniform(0.01, 0.2), rng.uniform(0.01, 0.6)

        def seconds(rows: float, alpha: float = alpha, num: int = num) -> float:
            return 1 + alpha * (rows - num)

        def draft(depth: int, unit: float = unit) -> float:
            return unit * depth

        chosen, plain_s = depths_that_pay(
            survival,
            free,
            float(num),
            float(num),
            lambda rows: np.array([seconds(r) for r in rows]),
            draft,
            0.0,
        )
        assert plain_s == pytest.approx(1.0)
        depth = int(chosen.max())
        gains = np.maximum(0, survival[:, :depth].sum(axis=1) - free)[chosen > 0].sum()
        cost = seconds(num + depth * (chosen > 0).sum()) + (draft(depth) if depth else 0.0)
        rate = (num + free.sum() + gains) / cost
        assert rate == pytest.approx(best_by_trying(survival, free, num, num, seconds, draft))
        num_drafting += depth > 0
    assert 20 < num_drafting < 100


@pytest.mark.parametrize(
    ("right", "unit", "free_right", "is_asked"),
    [
        (0.95, 0.05, 0.0, True),  # good and cheap
        (0.95, 3.0, 0.0, False),  # too dear
        (0.02, 0.05, 0.0, False),  # no good
        (0.95, 0.3, 1.0, False),  # what is free is as good
    ],
)
def test_a_costly_member_is_asked_where_it_pays(
    right: float, unit: float, free_right: float, is_asked: bool
) -> None:
    """A free member and one that takes time, in a world where a row costs 2 % of a step."""
    controller = Controller(
        lambda method: MethodTraits(sees_noise=True, members={"model": "per_token"})
    )
    controller.cost_table = CostTable(
        PassTime(1, rows, 0, 1 + 0.02 * (rows - 1), 0.0) for rows in range(1, 65)
    )
    rng = np.random.default_rng(1)
    ids = np.array([1, 2, 3], dtype=np.int64)
    request = Request(
        "r", ids[:1], SamplingParams(), SpeculationParams("auto"), 0, 9000, frozenset()
    )
    asked = []
    for _ in range(300):
        plan = StepPlan((Segment(request, ids, 0, 2, 1, is_decode=True),))
        depth = int(controller.budget(plan).member_nodes["model"][0])
        asked.append(depth)
        drafts = batch(([5, 6, 7], [0, 1, 2], [0.7] * 3))
        names, batches = ["free"], [drafts]
        if depth:
            names.append("model")
            tokens = list(range(100, 100 + depth))
            batches.append(batch((tokens, list(range(depth)), [0.8] * depth)))
        drafts = controller.trim(plan, _join(batches, names, np.array([31])))
        path, row = [], 0
        truth = [5, 6, 7] if rng.random() < free_right else []
        if not truth:
            while rng.random() < right:
                truth.append(100 + len(truth))
        for token in truth:
            below = np.nonzero((drafts.parents == row) & (drafts.token_ids == token))[0]
            if not len(below):
                break
            row = int(below[0]) + 1
            path.append(row)
        ends = np.array([0, 1 + len(drafts.token_ids)])
        verdict = Verdict(
            np.array(path, dtype=np.int64), np.array([0, len(path)]), np.zeros(0, dtype=np.int64),
            np.zeros(2, dtype=np.int64), np.ones(1, dtype=np.bool_),
        )  # fmt: skip
        target = TargetOutput(None, ends, {}, ends)  # type: ignore[arg-type]
        seconds = {"auto": 1e-9} | ({"model": unit * depth} if depth else {})
        controller.observe(plan, drafts, target, verdict, 1 + 0.02 * len(drafts.token_ids), seconds)
    late = np.array(asked[-100:])
    if is_asked:
        assert (late > 2).mean() > 0.9
    else:
        assert (late > 0).mean() < 0.15 and late.sum() < 20
    assert asked[0] <= 2  # before it is known what it costs


def test_the_text_and_who_wrote_it() -> None:
    """In the engine: the costly member is used where it is cheap, and the text is plain's."""
    target = family_target("llama")
    prompts = [[5, 9, 40, 2, 77, 31], [30, 8]]
    sampling = SamplingParams(1.0, seed=4, max_tokens=120, ignore_eos=True)
    plain = run(engine(target), prompts, sampling, SpeculationParams("none"))
    shares = []
    for seconds in (1e-6, 0.02):
        options = {
            "auto": {
                "members": ("ngram", "synthetic"),
                "options": {
                    "synthetic": {"acceptance": 0.95, "cost": "per_token", "seconds": seconds}
                },
            }
        }
        the_engine = engine(target, drafter_options=options)
        run(the_engine, prompts, sampling, SpeculationParams("auto"))  # it drafts what it has seen
        ended = run_to_end(the_engine, prompts, sampling, SpeculationParams("auto"))
        assert [one.ids for one in ended] == plain
        shares.append(sum(one.stats.members.get("synthetic", (0, 0))[0] for one in ended))
    assert shares[0] > 100 and shares[1] < shares[0] / 4
    ended = run_to_end(the_engine, prompts, sampling, SpeculationParams("auto", 6))
    assert [one.ids for one in ended] == plain  # a fixed number asks every member
    assert all(one.stats.members["synthetic"][1] > 20 for one in ended)


def test_members_alone_that_take_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="add a method that drafts for free"):
        PortfolioDrafter(
            PortfolioConfig(("synthetic",), {"synthetic": {"cost": "per_token"}}),
            DrafterContext(100, 512),
        )
