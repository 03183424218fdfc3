"""What every registered method owes to the engine. A new method is tested once it is registered."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.config import make_config
from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.heads import HeadDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.drafters.recycling import RecyclingDrafter
from foredraft.drafters.synthetic import SyntheticDrafter
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.model.loader import Target
from foredraft.params import MAX_SPECULATIVE_TOKENS, SamplingParams, SpeculationParams
from foredraft.registry import METHODS, PLAIN, drafter_class
from foredraft.tree import tree
from foredraft.types import (
    Budgets,
    DraftBatch,
    Request,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)
from tests.heads import HEAD_METHODS, fake_drafter, learnt_drafter, observe_texts
from tests.tiny import (
    VOCAB,
    engine,
    family_target,
    near_target,
    run,
    run_to_end,
    warnings_logged,
)

SMALL = 12
"""A vocabulary in which anything comes again soon, so that every method finds drafts."""


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(method: str, vocab_size: int = SMALL, max_model_len: int = 512) -> Drafter:
    if method in HEAD_METHODS:
        return fake_drafter(method, vocab_size, max_model_len)
    cls = drafter_class(method)
    context = DrafterContext(vocab_size, max_model_len, method=method, max_num_requests=8)
    config = make_config(cls.Config, {}, method)
    if cls is DraftModelDrafter:  # it needs a model, which is nearly the target here
        drafter = cls(dataclasses.replace(config, num_children=2), context, _near_target())
    else:
        drafter = cls(config, context)
    assert isinstance(drafter, Drafter)
    return drafter


@functools.cache
def _near_target() -> Target:
    return near_target()


def engine_for(method: str, target: Target, **options: Any) -> Engine:
    """An engine whose drafters are the registry's, but for one that cannot be made without more."""
    drafters: dict[str, Drafter] = {}
    if method == "draft-model":
        drafters[method] = make(method, VOCAB)
    elif method in HEAD_METHODS:
        drafters[method] = learnt_drafter(method, target)
    return engine(target, drafters, **options)


def acquaint(drafter: Drafter, segments: list[Segment], rng: np.random.Generator) -> None:
    """Tell a drafter that needs it how each text goes on, or what the target thinks of it."""
    if isinstance(drafter, HeadDrafter | MedusaDrafter) and segments:
        observe_texts(drafter, segments, int(rng.integers(1000)))
    if isinstance(drafter, RecyclingDrafter) and segments:
        ends = np.arange(len(segments) + 1)
        none = np.zeros(0, dtype=np.int64)
        zeros = np.zeros(len(segments) + 1, dtype=np.int64)
        logits = torch.from_numpy(rng.normal(size=(len(segments), SMALL)).astype(np.float32))
        drafter.observe(
            StepPlan(tuple(segments)),
            DraftBatch.empty(len(segments)),
            TargetOutput(logits, ends, {}, ends),
            Verdict(none, zeros, none, ends, np.ones(len(segments), dtype=np.bool_)),
        )
    if isinstance(drafter, SyntheticDrafter):
        for segment in segments:
            coming = rng.integers(0, SMALL, 20)
            drafter.remember(segment.request, np.concatenate([segment.token_ids, coming]))


def segment_of(
    history: list[int],
    request_id: str,
    verification: str = "walk",
    num_rows: int = 1,
    start: int | None = None,
    is_decode: bool = True,
) -> Segment:
    token_ids = np.array(history, dtype=np.int64)
    token_ids.flags.writeable = False
    request = Request(
        request_id,
        token_ids[: max(1, len(token_ids) // 2)],
        SamplingParams(temperature=1.0),
        # What is foreseen is the output so far and how it might go on.
        SpeculationParams(
            "ngram",
            8,
            verification,
            prediction=(*token_ids[max(1, len(token_ids) // 2) :].tolist(), 1, 2, 3, 1, 2),
        ),
        7,
        256,
        frozenset(),
    )
    begin = len(token_ids) - num_rows if start is None else start
    return Segment(request, token_ids, 0, begin, num_rows, is_decode)


def a_history(rng: np.random.Generator, vocab_size: int = SMALL) -> list[int]:
    kind = rng.integers(3)
    length = int(rng.integers(1, 80))
    if kind == 0:
        return rng.integers(0, vocab_size, length).tolist()
    if kind == 1:
        return np.resize(rng.integers(0, vocab_size, int(rng.integers(1, 6))), length).tolist()
    return [int(rng.integers(vocab_size))] * length


def check(batch: DraftBatch, plan: StepPlan, budgets: list[int], vocab_size: int) -> None:
    """The contract of ``Drafter.propose``."""
    for array in (batch.token_ids, batch.parents, batch.offsets):
        assert array.dtype == np.int64 and array.ndim == 1
    assert len(batch.offsets) == len(plan.segments) + 1 and batch.offsets[0] == 0
    assert (np.diff(batch.offsets) >= 0).all()
    assert batch.offsets[-1] == len(batch.token_ids) == len(batch.parents)
    assert ((batch.token_ids >= 0) & (batch.token_ids < vocab_size)).all()
    assert (batch.num_nodes <= budgets).all()
    if batch.dist_ids is not None:
        assert len(batch.dist_ids) == len(batch.token_ids)
        num_dists = 0 if batch.draft_probs is None else len(batch.draft_probs)
        assert ((batch.dist_ids >= -1) & (batch.dist_ids < num_dists)).all()
    for index, segment in enumerate(plan.segments):
        nodes = slice(batch.offsets[index], batch.offsets[index + 1])
        tokens, parents = batch.token_ids[nodes].tolist(), batch.parents[nodes]
        if not segment.is_decode:
            assert not tokens
        tree.check(parents)
        if not segment.request.speculation.allows_trees:
            assert tree.is_chain(parents)
        pairs = list(zip(parents.tolist(), tokens, strict=True))
        assert len(set(pairs)) == len(pairs), "siblings differ"


def test_random_plans(method: str) -> None:
    """Decode steps and prompt chunks mixed, budgets of nothing to the most, every rule."""
    drafter = make(method)
    rng = np.random.default_rng(1)
    num_nodes = 0
    for number in range(300):
        segments, budgets = [], []
        for index in range(int(rng.integers(0, 6))):
            history = a_history(rng)
            name = f"{number}/{index}"
            if rng.random() < 0.25:  # a chunk of its prompt, which may end it or not
                num_rows = int(rng.integers(1, len(history) + 1))
                start = int(rng.integers(0, len(history) - num_rows + 1))
                segments.append(
                    segment_of(history, name, num_rows=num_rows, start=start, is_decode=False)
                )
                budgets.append(0)
                continue
            rule = str(rng.choice(["walk", "rejection", "block", "traversal"]))
            segments.append(segment_of(history, name, rule))
            budgets.append(int(rng.choice([0, 1, 2, 5, 8, MAX_SPECULATIVE_TOKENS])))
        plan = StepPlan(tuple(segments))
        acquaint(drafter, segments, rng)
        batch = drafter.propose(plan, Budgets(np.array(budgets, dtype=np.int64)))
        check(batch, plan, budgets, SMALL)
        num_nodes += len(batch.token_ids)
        for segment in segments:
            if rng.random() < 0.5:
                drafter.forget(segment.request.request_id)
    assert num_nodes > 100, "it drafts nothing, so this test shows nothing"


def test_a_growing_text(method: str) -> None:
    """Several requests by turns, each met first in mid-life, growing by 1 to 9 tokens a step."""
    drafter = make(method)
    rng = np.random.default_rng(2)
    histories = {f"r{i}": a_history(rng) for i in range(4)}
    for step in range(60):
        names = [name for name in histories if rng.random() < 0.7]
        for name in names:
            histories[name] += rng.integers(0, SMALL, int(rng.integers(1, 10))).tolist()
        plan = StepPlan(tuple(segment_of(histories[name], name) for name in names))
        budgets = rng.integers(0, 9, len(names)).tolist()
        batch = drafter.propose(plan, Budgets(np.array(budgets, dtype=np.int64)))
        check(batch, plan, budgets, SMALL)
        if step % 20 == 19:  # one ends, and its name is given to another text
            gone = names[0] if names else "r0"
            drafter.forget(gone)
            histories[gone] = a_history(rng)


def test_budget_zero_is_no_draft(method: str) -> None:
    drafter = make(method)
    plan = StepPlan(tuple(segment_of([1, 2] * 20, f"r{i}") for i in range(3)))
    batch = drafter.propose(plan, Budgets(np.array([0, 8, 0])))
    assert batch.num_nodes[0] == batch.num_nodes[2] == 0
    none = drafter.propose(plan, Budgets(np.zeros(3, dtype=np.int64)))
    assert none.num_nodes.tolist() == [0, 0, 0]
    empty = drafter.propose(StepPlan(()), Budgets(np.empty(0, dtype=np.int64)))
    assert empty.offsets.tolist() == [0]


def test_ids_stay_inside_a_small_vocabulary(method: str) -> None:
    """Also where the prompt held an id that the target does not have."""
    drafter = make(method, vocab_size=5)
    plan = StepPlan((segment_of([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3], "r"),))
    batch = drafter.propose(plan, Budgets(np.array([8])))
    check(batch, plan, [8], 5)


def test_forgetting(method: str) -> None:
    """Unknown names are no error; after forgetting, a name stands for another text."""
    drafter = make(method)
    drafter.forget("nobody")
    plan = StepPlan((segment_of([4, 5, 6, 7] * 10, "r"),))
    drafter.propose(plan, Budgets(np.array([8])))
    drafter.forget("r")
    drafter.forget("r")
    other = StepPlan((segment_of([1, 2, 3] * 10, "r"),))
    fresh = make(method).propose(other, Budgets(np.array([8])))
    again = drafter.propose(other, Budgets(np.array([8])))
    np.testing.assert_array_equal(again.token_ids, fresh.token_ids)
    np.testing.assert_array_equal(again.parents, fresh.parents)


def test_declarations(method: str) -> None:
    cls = drafter_class(method)
    drafter = make(method)
    assert isinstance(drafter.needs, Needs)
    assert dataclasses.is_dataclass(cls.Config)
    assert cls.__doc__ and cls.__module__.startswith("foredraft.drafters")
    if drafter.needs.draft_probs:
        return
    segment = segment_of([1, 2] * 20, "r")
    acquaint(drafter, [segment], np.random.default_rng(0))
    batch = drafter.propose(StepPlan((segment,)), Budgets(np.array([8], dtype=np.int64)))
    assert batch.draft_probs is None
    assert batch.dist_ids is None or (batch.dist_ids < 0).all()


def test_unknown_options_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=f"method '{method}' has no option 'no_such_option'"):
        engine(family_target("llama"), drafter_options={method: {"no_such_option": 1}})


# -------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def target():
    return family_target("llama")


_RNG = np.random.default_rng(8)
PROMPTS = [
    np.resize(_RNG.integers(3, VOCAB, period), length).tolist()
    for period, length in ((3, 40), (1, 9), (7, 30), (50, 50), (1, 1))
]


TEMPERATURES = (0.0, 0.1, 1.0)


def samplings(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def plain(target) -> dict[float, list[list[int]]]:
    """Plain texts by temperature, each alone in an engine."""
    return {
        temperature: [
            run(engine(target), [prompt], sampling, SpeculationParams(PLAIN))[0]
            for prompt, sampling in zip(PROMPTS, samplings(temperature), strict=True)
        ]
        for temperature in TEMPERATURES
    }


def foreseen(
    method: str, num: int, texts: list[list[int]], verification: str = "walk"
) -> list[SpeculationParams]:
    """How each text is drafted; where a method wants to know what to expect, most of it is told."""
    return [
        SpeculationParams(method, num, verification, prediction=[*text[:9], 5, *text[10:]])
        for text in texts
    ]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("num", [1, 3, 8, 40])
def test_the_text_is_plain_decodings(
    target, plain, method: str, num: int, temperature: float
) -> None:
    """In a batch, with prompts in chunks, with a chance to draft from the first step."""
    the_engine = engine_for(method, target, max_num_requests=3, max_num_batched_tokens=16)
    if method == "synthetic":  # it drafts what it has seen before
        run(the_engine, PROMPTS, samplings(temperature), SpeculationParams(method, num))
    speculations = foreseen(method, num, plain[temperature])
    ended = run_to_end(the_engine, PROMPTS, samplings(temperature), speculations)
    assert [one.ids for one in ended] == plain[temperature]
    if temperature == 0:  # greedy texts of a random model are loops, so there is much to find
        assert sum(one.stats.num_accepted_tokens for one in ended) > 0


@pytest.mark.parametrize("verification", ["rejection", "block", "traversal"])
def test_greedy_is_plain_under_every_rule(target, plain, method: str, verification: str) -> None:
    the_engine = engine_for(method, target, max_num_requests=3)
    speculation = SpeculationParams(method, 6, verification)
    if verification not in make(method).needs.rules:
        with pytest.raises(InvalidRequestError, match=f"method '{method}' cannot serve"):
            the_engine.add(PROMPTS[0], None, speculation)
        return
    speculations = foreseen(method, 6, plain[0.0], verification)
    ended = run_to_end(the_engine, PROMPTS, samplings(0.0), speculations)
    assert [one.ids for one in ended] == plain[0.0]
    assert sum(one.stats.num_accepted_tokens for one in ended) > 0


def test_nothing_is_ever_dropped(target, method: str) -> None:
    """The engine's own check of drafts finds nothing to warn about."""
    sampling = SamplingParams(0.5, seed=1, max_tokens=60, ignore_eos=True)
    with warnings_logged() as said:
        run(engine_for(method, target), PROMPTS, sampling, SpeculationParams(method, 20))
    assert not said


def test_requests_are_forgotten_when_they_end(target, method: str) -> None:
    """However they end: by themselves, or dropped while they run or wait."""
    forgotten: list[str] = []
    drafter = learnt_drafter(method, target) if method in HEAD_METHODS else make(method, VOCAB)
    forget = drafter.forget

    def remember(request_id: str) -> None:
        forgotten.append(request_id)
        forget(request_id)

    drafter.forget = remember  # type: ignore[method-assign]
    the_engine = engine(target, {method: drafter}, max_num_requests=2)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    names = [the_engine.add(p, sampling, SpeculationParams(method, 4)) for p in PROMPTS]
    for _ in range(3):
        the_engine.step()
    the_engine.abort(names[0])
    the_engine.abort(names[-1])
    assert forgotten == [names[0], names[-1]]
    while the_engine.has_work:
        the_engine.step()
    assert sorted(forgotten) == sorted(names)
