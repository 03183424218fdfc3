"""A separate draft model: its cache, its picks, and how it is wired to the engine."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.drafters import draft_cache
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from foredraft.drafters.draft_picks import choose
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.model.loader import Target, prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling.noise import gumbel
from foredraft.types import Budgets, Request, Segment, StepPlan
from tests.tiny import (
    CONTEXT,
    VOCAB,
    engine,
    family_model,
    family_target,
    near_target,
    run,
    run_to_end,
    table_target,
    warnings_logged,
)

METHOD = "draft-model"
_RNG = np.random.default_rng(3)
PROMPTS = [_RNG.integers(3, VOCAB, n).tolist() for n in (50, 1, 23, 9, 37)]


def drafter(model: Target, max_num_requests: int = 8, **options: object) -> DraftModelDrafter:
    context = DrafterContext(VOCAB, CONTEXT, method=METHOD, max_num_requests=max_num_requests)
    return DraftModelDrafter(DraftModelConfig(**options), context, model)  # type: ignore[arg-type]


def samplings(temperature: float, max_tokens: int = 40) -> list[SamplingParams]:
    return [
        SamplingParams(temperature, seed=i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num", "children"), [(1, 1), (3, 1), (8, 1), (7, 2), (12, 3)])
def test_a_draft_model_that_is_the_target_is_always_right(
    temperature: float, num: int, children: int
) -> None:
    """Every chain is accepted whole, at any temperature, in any company: no hole in its cache."""
    target = family_target("llama")
    own = drafter(family_target("llama"), num_children=children)
    the_engine = engine(target, {METHOD: own}, max_num_requests=3, max_num_batched_tokens=16)
    speculation = SpeculationParams(METHOD, num)
    ended = run_to_end(the_engine, PROMPTS, samplings(temperature), speculation)
    plain = run(engine(target), PROMPTS, samplings(temperature), SpeculationParams("none"))
    assert [one.ids for one in ended] == plain
    for one in ended:
        if children == 1:
            assert one.stats.num_accepted_tokens == one.stats.num_draft_tokens > 0
        else:  # the best child is accepted at every level but the last
            assert all(accepted >= 1 for _, accepted, _ in one.stats.steps[:-1])


@pytest.mark.parametrize("children", [1, 3])
def test_the_cache_holds_what_reading_anew_would(children: int) -> None:
    """After accepted, refused and trimmed drafts, it drafts as one that meets the text first."""
    model = near_target()
    old = drafter(model, num_children=children)
    rng = np.random.default_rng(5)
    texts = {f"r{i}": rng.integers(3, VOCAB, 5 + i).tolist() for i in range(4)}
    sampling = SamplingParams(temperature=0.8, seed=3)
    num_kept = 0
    for step in range(25):
        segments = []
        for name, text in texts.items():
            if step and rng.random() < 0.2:
                continue
            ids = np.array(text)
            request = Request(
                name, ids[:4], sampling, SpeculationParams(METHOD, 6), 3, 200, frozenset()
            )
            segments.append(Segment(request, ids, 0, len(ids) - 1, 1, is_decode=True))
        plan = StepPlan(tuple(segments))
        budgets = Budgets(rng.integers(0, 8, len(segments)))
        batch = old.propose(plan, budgets)
        fresh = drafter(model, num_children=children).propose(plan, budgets)
        np.testing.assert_array_equal(batch.token_ids, fresh.token_ids)
        np.testing.assert_array_equal(batch.parents, fresh.parents)
        for index, segment in enumerate(segments):
            # Some way down the draft, or another, and then a token of its own.
            tokens = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
            parents = batch.parents[batch.offsets[index] : batch.offsets[index + 1]]
            row = 0
            while (below := np.nonzero(parents == row)[0]).size and rng.random() < 0.7:
                row = int(rng.choice(below)) + 1
                texts[segment.request.request_id].append(int(tokens[row - 1]))
                num_kept += 1
            texts[segment.request.request_id].append(int(rng.integers(3, VOCAB)))
            if rng.random() < 0.1:  # many at once, as after steps without a draft
                texts[segment.request.request_id] += rng.integers(3, VOCAB, 14).tolist()
            del texts[segment.request.request_id][150:]
    assert num_kept > 20


def test_long_texts_are_read_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_cache, "_MOST_ROWS", 16)
    target = family_target("llama")
    own = drafter(family_target("llama"))
    ended = run_to_end(
        engine(target, {METHOD: own}), PROMPTS, samplings(0.0), SpeculationParams(METHOD, 4)
    )
    assert all(one.stats.num_accepted_tokens == one.stats.num_draft_tokens for one in ended)


def test_prompts_are_read_beside_the_target() -> None:
    """So that the first draft does not wait for them."""
    own = drafter(near_target())
    the_engine = engine(family_target("llama"), {METHOD: own}, max_num_batched_tokens=16)
    name = the_engine.add(PROMPTS[0], samplings(0.0)[0], SpeculationParams(METHOD, 4))
    the_engine.step()
    assert len(own._cache._states[name].ids) == 15  # a chunk of 16, but for its last
    the_engine.abort(name)
    assert not own._cache._states


@pytest.mark.parametrize("num_slots", [1, 4])
def test_what_was_read_of_an_ended_text_is_not_read_again(num_slots: int) -> None:
    """As with the target's own keys and values: copied, or gone on with where slots are few."""
    own = drafter(near_target(), max_num_requests=num_slots)
    the_engine = engine(family_target("llama"), {METHOD: own}, reuse_prefixes=True)
    rows = 0
    forward = own._cache._runner.forward

    def count(plan: Any, drafts: Any) -> Any:
        nonlocal rows
        rows += sum(segment.num_rows for segment in plan.segments)
        return forward(plan, drafts)

    own._cache._runner.forward = count  # type: ignore[method-assign]
    shared = np.resize(np.arange(3, 50), 120).tolist()
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    texts, counts = [], []
    for tail in ([], [7, 8], [9]):
        before = rows
        texts.append(run(the_engine, [[*shared, *tail]], sampling, SpeculationParams(METHOD, 4))[0])
        counts.append(rows - before)
    assert counts[0] > 120 and max(counts[1:]) < 70
    plain = engine(family_target("llama"))
    for tail, text in zip(([], [7, 8], [9]), texts, strict=True):
        assert run(plain, [[*shared, *tail]], sampling, SpeculationParams("none"))[0] == text
    assert own._cache._cache.num_free_slots + len(own._cache._ended) == num_slots


def test_where_a_draft_may_not_pay_the_prompt_waits_for_the_first_draft() -> None:
    own = drafter(near_target())
    the_engine = engine(family_target("llama"), {METHOD: own}, max_num_batched_tokens=16)
    name = the_engine.add(PROMPTS[0], samplings(0.0)[0], SpeculationParams(METHOD, "auto"))
    the_engine.step()
    assert not own._cache._states
    the_engine.abort(name)


def test_a_text_beyond_the_draft_models_context_is_not_drafted() -> None:
    model = prepare_target("short", family_model("llama"), None, 24)
    own = drafter(model)
    target = family_target("llama")
    speculation = SpeculationParams(METHOD, 8)
    ended = run_to_end(engine(target, {METHOD: own}), PROMPTS, samplings(0.0), speculation)
    plain = run(engine(target), PROMPTS, samplings(0.0), SpeculationParams("none"))
    assert [one.ids for one in ended] == plain
    assert ended[0].stats.num_draft_tokens == 0 < ended[1].stats.num_draft_tokens
    assert sum(len(one.ids) for one in ended) == 5 * 40


def test_no_more_of_a_text_is_kept_than_the_target_can_have() -> None:
    """A draft model that could read on for longer takes no memory for it."""
    own = drafter(prepare_target("long", family_model("llama"), None, 10 * CONTEXT))
    assert own.model.max_model_len == own._cache.max_len == CONTEXT


def test_more_requests_than_slots() -> None:
    """The one that has waited longest is read again when it comes back."""
    own = drafter(near_target(), max_num_requests=2)

    def propose(names: list[str]) -> list[int]:
        segments = []
        for name in names:
            ids = np.array(PROMPTS[int(name)])
            request = Request(
                name, ids, SamplingParams(), SpeculationParams(METHOD, 3), 0, 200, frozenset()
            )
            segments.append(Segment(request, ids, 0, len(ids) - 1, 1, is_decode=True))
        batch = own.propose(StepPlan(tuple(segments)), Budgets(np.full(len(names), 3)))
        return batch.num_nodes.tolist()

    assert propose(["0", "1"]) == [3, 3]
    assert propose(["2", "1"]) == [3, 3]
    assert set(own._cache._states) == {"1", "2"}
    assert propose(["0", "2", "3"]) == [3, 3, 0]


@pytest.mark.parametrize(
    ("children", "verification"),
    [
        (1, "block"),
        (2, "traversal"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, "rejection"), (1, "traversal"), (2, "rejection"), (2, "block")]
        ),
    ],
)
def test_the_law_under_classical_rules(children: int, verification: str) -> None:
    """First three tokens of many seeds against the target's own law, by chi-square."""
    rng = np.random.default_rng(11)
    table, other = rng.normal(size=(2, 4, 4)).astype(np.float32) * 1.2
    context = DrafterContext(4, CONTEXT, method=METHOD, max_num_requests=64)
    own = DraftModelDrafter(DraftModelConfig(num_children=children), context, table_target(other))
    the_engine = engine(table_target(table), {METHOD: own}, max_num_requests=64)
    num = 6000
    prompts = [[0]] * num
    sampling = [
        SamplingParams(1.0, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(num)
    ]
    ended = run_to_end(the_engine, prompts, sampling, SpeculationParams(METHOD, 3, verification))
    assert (
        0
        < sum(one.stats.num_accepted_tokens for one in ended)
        < sum(one.stats.num_draft_tokens for one in ended)
    )
    seen = Counter(tuple(one.ids) for one in ended)
    laws = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    statistic, cells = 0.0, 0
    for text in itertools.product(range(4), repeat=4):
        chance = np.prod([laws[a, b] for a, b in itertools.pairwise((0, *text))])
        if chance * num >= 5:
            statistic += (seen[text] - chance * num) ** 2 / (chance * num)
            cells += 1
    assert cells > 50
    assert statistic < cells + 4 * np.sqrt(2 * cells)


def test_children_are_the_best_by_the_targets_noise() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(2, 300)).astype(np.float32) * 3
    requests = [
        Request(name, np.array([1]), sampling, SpeculationParams(), seed, 9, frozenset())
        for name, sampling, seed in (("a", SamplingParams(0.7), 5), ("b", SamplingParams(), 6))
    ]
    positions = np.array([17, 4])
    tokens, sure = choose(torch.from_numpy(logits.copy()), requests, positions, 4)
    scores = logits[0] / 0.7 + gumbel(5, positions[:1], np.arange(300))[0]
    assert tokens[0].tolist() == np.argsort(-scores)[:4].tolist()
    assert tokens[1].tolist() == np.argsort(-logits[1])[:4].tolist()
    assert (np.diff(sure, axis=1) < 0).all() and (sure > 0).all() and (sure < 1).all()
    few = torch.full((1, 300), -torch.inf)
    few[0, 7] = 1.0
    tokens, sure = choose(few, requests[1:], positions[1:], 3)
    assert tokens[0].tolist() == [7, -1, -1] and sure[0, 0] < 1


def test_a_branch_ends_where_it_is_unlikely() -> None:
    target = family_target("llama")
    lengths = []
    for least in (0.0, 0.9):
        own = drafter(near_target(noise=0.1), min_confidence=least)
        ended = run_to_end(
            engine(target, {METHOD: own}), PROMPTS, samplings(1.0), SpeculationParams(METHOD, 8)
        )
        lengths.append(sum(one.stats.num_draft_tokens for one in ended))
    assert lengths[1] < lengths[0] / 2


def test_a_tree_is_accepted_more_than_its_best_chain() -> None:
    target = family_target("llama")
    accepted = []
    for children in (1, 4):
        own = drafter(near_target(noise=0.1), num_children=children, max_depth=3)
        ended = run_to_end(
            engine(target, {METHOD: own}), PROMPTS, samplings(1.0), SpeculationParams(METHOD, 24)
        )
        steps = sum(len(one.stats.steps) for one in ended)
        accepted.append(sum(one.stats.num_accepted_tokens for one in ended) / steps)
    assert accepted[1] > 1.15 * accepted[0]


def test_it_says_what_is_wrong() -> None:
    context = DrafterContext(VOCAB, CONTEXT)
    with pytest.raises(ConfigError, match="needs a draft model; name one"):
        DraftModelDrafter(DraftModelConfig(), context)
    with pytest.raises(ModelLoadError, match="no/such/folder"):
        DraftModelDrafter(DraftModelConfig("./no/such/folder"), context)
    for options, message in (
        ({"num_children": 0}, "num_children is 0; allowed is an integer from 1 to 16"),
        ({"max_depth": 99}, "max_depth is 99; allowed is an integer from 1 to 64"),
        ({"min_confidence": 1}, "min_confidence is 1; allowed is a number in"),
        ({"vocabulary": "both"}, "vocabulary is 'both'; allowed is one of auto, shared, text"),
        ({"dtype": "int3"}, "dtype is 'int3'; allowed is one of"),
        ({"model": 3}, "model is 3; allowed is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            DraftModelConfig(**options)  # type: ignore[arg-type]


def test_a_dear_draft_model_is_said_so() -> None:
    target = family_target("llama")
    weight_bytes = target.weight_bytes
    context = DrafterContext(VOCAB, CONTEXT, weight_bytes=weight_bytes)
    with warnings_logged() as said:
        DraftModelDrafter(DraftModelConfig(), context, copy.copy(target))
    assert len(said) == 1 and "at most 1.0 times plain speed" in said[0]
    with warnings_logged() as said:
        context = DrafterContext(VOCAB, CONTEXT, weight_bytes=10 * weight_bytes)
        DraftModelDrafter(DraftModelConfig(), context, copy.copy(target))
    assert not said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [16, 63, 512])
def test_common_beginnings_and_being_put_out_lower_no_acceptance(
    temperature: float, chunk: int
) -> None:
    """The target skips what is in its cache already; the draft model must not miss it."""
    target = family_target("llama")
    shared = _RNG.integers(3, VOCAB, 90).tolist()
    prompts = [shared, shared, [*shared[:70], *PROMPTS[3]], [*shared, *PROMPTS[2]], shared[:64]]
    plain = run(engine(target), prompts, samplings(temperature), SpeculationParams("none"))
    row_bytes = engine(target).cache.bytes_per_row
    for num_rows in (2000, 300):
        the_engine = engine(
            target,
            {METHOD: drafter(family_target("llama"))},
            max_num_requests=3,
            max_num_batched_tokens=chunk,
            reuse_prefixes=True,
            kv_cache_gb=(num_rows + 0.5) * row_bytes / 2**30,
        )
        for _ in range(2):  # cold, then warm
            ended = run_to_end(
                the_engine, prompts, samplings(temperature), SpeculationParams(METHOD, 4)
            )
            assert [one.ids for one in ended] == plain
            for one in ended:
                assert one.stats.num_accepted_tokens == one.stats.num_draft_tokens > 0
        assert sum(one.stats.num_reused_tokens for one in ended) > 200
        assert (the_engine.scheduler.num_preemptions > 0) == (num_rows == 300)
