"""Tiny temperatures, broken logits and broken drafters: one request's trouble stays its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.drafters.base import Needs
from foredraft.engine import near_tie
from foredraft.engine.near_tie import check_greedy
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, StepPlan
from tests.tiny import (
    Ended,
    ScriptDrafter,
    TableModel,
    engine,
    family_target,
    run,
    run_to_end,
    table_target,
    table_text,
    warnings_logged,
)

VOCAB = 40
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))
PLAIN = SpeculationParams("none")
PROMPT = [3, 1, 4]
GREEDY = SamplingParams(max_tokens=24)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=24)


# ----------------------------------------------------------------------------------- temperatures


@pytest.mark.parametrize("method", ["none", "ngram", "half", "tree"])
def test_all_temperatures_in_one_batch(method: str) -> None:
    """From 0 to 100, beside each other; below 1e-5 the text is that of temperature 0."""
    temperatures = (0.0, 1e-8, 1e-6, 1e-4, 0.01, 1.0, 100.0)
    samplings = [SamplingParams(t, seed=i, max_tokens=20) for i, t in enumerate(temperatures)]
    texts = [table_text(TABLE, PROMPT, sampling, 20) for sampling in samplings]
    assert texts[1] == texts[2] == texts[0]
    whole = [PROMPT + text for text in texts]
    drafters = {
        "half": ScriptDrafter("half", whole, vocab_size=VOCAB),
        "tree": ScriptDrafter("half", whole, 3, vocab_size=VOCAB, ragged=True),
    }
    the_engine = engine(table_target(TABLE), drafters, max_num_requests=len(samplings))
    speculation = SpeculationParams(method, 5)
    for order in (1, -1):
        outputs = run(the_engine, [PROMPT] * 7, samplings[::order], speculation)
        assert outputs == texts[::order]


def test_wide_logits() -> None:
    """Logits of 6e4, and of 3e38, at small and large temperatures: finite picks, equal texts."""
    rng = np.random.default_rng(1)
    for table in (rng.choice([-6e4, 6e4], (VOCAB, VOCAB)), rng.choice([-3e38, 3e38, 0], (9, 9))):
        table = table + rng.normal(size=table.shape)
        for temperature in (0.0, 1e-5, 0.01, 1.0, 1e6, 1e300):
            sampling = SamplingParams(temperature, seed=3, max_tokens=12, top_p=0.9, top_k=7)
            text = table_text(table, [3, 1], sampling, 12)
            drafter = ScriptDrafter("half", [[3, 1, *text]], vocab_size=len(table))
            the_engine = engine(table_target(table), {"half": drafter})
            for speculation in (PLAIN, SpeculationParams("half", 4)):
                ended = run_to_end(the_engine, [[3, 1]], sampling, speculation)[0]
                assert (ended.ids, ended.error) == (text, None)


# --------------------------------------------------------------------------------- broken targets


class BrokenModel(TableModel):
    """A table whose logits are broken wherever the row's own token is ``bad_token``."""

    def __init__(self, table: np.ndarray, bad_token: int, value: float) -> None:
        broken = table.copy()
        if np.isneginf(value):
            broken[bad_token] = value
        else:
            broken[bad_token, 7] = value
        super().__init__(broken)


def broken_target(bad_token: int, value: float, eos_ids: frozenset[int] = frozenset()) -> Target:
    model = BrokenModel(TABLE, bad_token, value)
    return dataclasses.replace(table_target(TABLE, eos_ids), model=model)  # type: ignore[arg-type]


VALUES = {"nan": np.nan, "inf": np.inf, "all -inf": -np.inf}


def texts_and_place(num: int, temperature: float = 1.0) -> tuple[list, list, int, int]:
    """Prompts and texts of several seeds, and a token that only the first one has, further on."""
    samplings = [dataclasses.replace(DRAWN, seed=seed) for seed in range(num)]
    samplings[0] = dataclasses.replace(samplings[0], temperature=temperature)
    others = [table_text(TABLE, PROMPT, sampling, 24) for sampling in samplings[1:]]
    taken = {token for text in others for token in text} | set(PROMPT)
    for start in range(3, VOCAB):
        prompt = [3, start]
        text = table_text(TABLE, prompt, samplings[0], 24)
        for place, token in enumerate(text):
            if place > 2 and token not in {*taken, *prompt, *text[:place]}:
                return [prompt] + [PROMPT] * (num - 1), [text, *others], place, token
    raise AssertionError("the table has such a text")


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_broken_row_ends_its_own_request(value: float, temperature: float) -> None:
    """However it was drafted, the tokens before the bad row are out, and the neighbours go on."""
    prompts, texts, place, bad_token = texts_and_place(3, temperature)
    samplings = [dataclasses.replace(DRAWN, seed=seed) for seed in range(3)]
    samplings[0] = dataclasses.replace(samplings[0], temperature=temperature)
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    drafters = {
        f"{kind}/{width}": ScriptDrafter(kind, whole, width, vocab_size=VOCAB)
        for kind in ("right", "half", "first:1", "first:2")
        for width in (1, 3)
    }
    for method in ("none", "ngram", *drafters):
        the_engine = engine(broken_target(bad_token, value), drafters)
        ended = run_to_end(the_engine, prompts, samplings, SpeculationParams(method, 6))
        assert ended[0].ids == texts[0][: place + 1], method
        assert ended[0].finish_reason == "error" and ended[0].stop_token_id is None
        assert "not finite" in str(ended[0].error)
        assert ended[0].stats.num_tokens == place + 1
        for one, text in zip(ended[1:], texts[1:], strict=True):
            assert (one.ids, one.finish_reason, one.error) == (text, "length", None)
        assert the_engine.cache.bytes_in_use == 0 and not the_engine.has_work


def test_a_broken_row_behind_the_end_does_not_matter() -> None:
    """The text stops at, or is cut at, the token whose row is broken: drafted or not, no error."""
    prompts, texts, place, bad_token = texts_and_place(2)
    drafter = ScriptDrafter("right", [prompts[0] + texts[0]], vocab_size=VOCAB)
    sampling = dataclasses.replace(DRAWN, seed=0)
    for options, eos_ids, reason in (
        ({}, frozenset([bad_token]), "stop"),
        ({"stop_token_ids": (bad_token,)}, frozenset(), "stop"),
        ({"max_tokens": place + 1}, frozenset(), "length"),
    ):
        the_engine = engine(broken_target(bad_token, np.nan, eos_ids), {"right": drafter})
        for speculation in (PLAIN, SpeculationParams("right", 8)):
            one = dataclasses.replace(sampling, **options)
            ended = run_to_end(the_engine, [prompts[0]], one, speculation)[0]
            assert (ended.ids, ended.finish_reason) == (texts[0][: place + 1], reason)
            assert ended.error is None


def test_a_broken_row_of_a_wrong_draft_does_not_matter() -> None:
    """A drafted token that the target rejects may lead to whatever logits it likes."""
    text = table_text(TABLE, PROMPT, DRAWN, 24)
    bad_token = next(t for t in range(VOCAB) if t not in text and t not in PROMPT)

    class Bad(ScriptDrafter):
        def _children(self, segment, depth, right, count):  # type: ignore[no-untyped-def]
            return [bad_token, *super()._children(segment, depth, right, count)][:count]

    for width in (1, 3):
        drafter = Bad("right", [PROMPT + text], width, vocab_size=VOCAB)
        the_engine = engine(broken_target(bad_token, np.nan), {"bad": drafter})
        ended = run_to_end(the_engine, [PROMPT], DRAWN, SpeculationParams("bad", 6))[0]
        assert (ended.ids, ended.error) == (text, None)
        assert ended.stats.num_draft_tokens > 0


@pytest.mark.parametrize("width", [1, 3])
def test_a_rejected_draft_of_nan_does_not_reach_the_rows_beside_it(width: int) -> None:
    """With real attention: keys that are masked, but not finite, must not count, then or later."""
    plain = run(engine(family_target("llama")), [PROMPT], GREEDY, PLAIN)[0]
    bad_token = next(t for t in range(3, 160) if t not in plain and t not in PROMPT)
    target = family_target("llama")
    with torch.no_grad():
        target.model.get_input_embeddings().weight[bad_token] = np.nan

    class Bad(ScriptDrafter):
        def _children(self, segment, depth, right, count):  # type: ignore[no-untyped-def]
            if depth > 1:
                return super()._children(segment, depth, right, count)
            return [bad_token, *super()._children(segment, depth, right, count)][:count]

    drafter = Bad("right", [PROMPT + plain], width)
    ended = run_to_end(
        engine(target, {"bad": drafter}), [PROMPT], GREEDY, SpeculationParams("bad", 6)
    )[0]
    assert (ended.ids, ended.error) == (plain, None)
    assert ended.stats.num_draft_tokens > 0


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_prompt_that_breaks_the_target(value: float) -> None:
    the_engine = engine(broken_target(PROMPT[-1], value))
    good = [5, 6]
    text = table_text(TABLE, good, DRAWN, 24)
    if PROMPT[-1] in text:
        text = text[: text.index(PROMPT[-1]) + 1]
    ended = run_to_end(the_engine, [PROMPT, good], DRAWN, SpeculationParams("ngram"))
    assert (ended[0].ids, ended[0].finish_reason) == ([], "error")
    assert ended[0].stats.acceptance_rate is None and ended[0].stats.num_tokens == 0
    assert ended[1].ids == text


@pytest.mark.parametrize("verification", ["rejection", "block", "traversal"])
def test_a_broken_row_under_a_classical_rule(verification: str) -> None:
    bad_token = 30
    the_engine = engine(broken_target(bad_token, np.nan), max_num_requests=40)
    speculation = SpeculationParams("ngram", 4, verification)
    prompts = [[3, 5, 3, 5, 3], [bad_token, 5, bad_token]]
    ended = run_to_end(
        the_engine,
        prompts,
        [SamplingParams(1.0, seed=s, max_tokens=9) for s in (1, 2)],
        speculation,
    )
    assert ended[1].finish_reason == "error" and ended[1].ids == []
    assert ended[0].error is None or bad_token in ended[0].ids
    assert all(0 <= token < VOCAB for token in ended[0].ids)


def test_near_tie_check_does_not_pass_broken_logits() -> None:
    ids = table_text(TABLE, PROMPT, SamplingParams(), 6)
    target = table_target(TABLE)
    good = check_greedy(engine(target), PROMPT, ids)
    assert good.is_lossless and good.num_argmax == good.num_tokens == 6
    report = check_greedy(engine(broken_target(ids[1], np.nan)), PROMPT, ids)
    assert not report.is_lossless and report.worst_ulps == np.inf
    wrong = [*ids[:3], (ids[3] + 1) % VOCAB]
    report = check_greedy(engine(target), PROMPT, wrong)
    assert not report.is_lossless and report.near_ties[0][0] == 3
    ulp = torch.finfo(torch.float32).eps * 2.0  # of numbers from 2 to 4
    logits = torch.tensor([3.0, 3.0 - 3 * ulp, 0.0])
    assert near_tie._ulps_behind(logits, 1, torch.float32) == 3


def test_near_tie_check_frees_its_slot() -> None:
    the_engine = engine(family_target("llama"), max_num_requests=1)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    ids = run(the_engine, [PROMPT], sampling, SpeculationParams("ngram"))[0]
    assert check_greedy(the_engine, PROMPT, ids).is_lossless
    assert the_engine.cache.num_free_slots == 1 and the_engine.cache.bytes_in_use == 0
    assert run(the_engine, [PROMPT], sampling, PLAIN)[0] == ids
    the_engine.add(PROMPT)
    with pytest.raises(ValueError, match="has requests"):
        check_greedy(the_engine, PROMPT, ids)


# -------------------------------------------------------------------------------- broken drafters

Spoil = Callable[[DraftBatch, Budgets], DraftBatch]


def _with(batch: DraftBatch, **fields: Any) -> DraftBatch:
    return dataclasses.replace(batch, **fields)


def _set(array: np.ndarray, place: int, value: int) -> np.ndarray:
    out = array.copy()
    out[place] = value
    return out


def _crowd(batch: DraftBatch, budgets: Budgets) -> DraftBatch:
    """One node more than the budget, for the first segment that has one."""
    segment = int(np.nonzero(budgets.max_nodes)[0][0])
    num_more = int(budgets.max_nodes[segment] - batch.num_nodes[segment]) + 1
    end = int(batch.offsets[segment + 1])
    offsets = batch.offsets.copy()
    offsets[segment + 1 :] += num_more
    return _with(
        batch,
        token_ids=np.insert(batch.token_ids, end, [5] * num_more),
        parents=np.insert(batch.parents, end, [0] * num_more),
        offsets=offsets,
    )


SPOILS: dict[str, Spoil] = {
    "token id = V": lambda b, _: _with(b, token_ids=_set(b.token_ids, 0, VOCAB)),
    "token id = -1": lambda b, _: _with(b, token_ids=_set(b.token_ids, -1, -1)),
    "token id = 2**40": lambda b, _: _with(b, token_ids=_set(b.token_ids, 0, 2**40)),
    "too many nodes": _crowd,
    "parent = itself": lambda b, _: _with(b, parents=_set(b.parents, 0, 1)),
    "parent = -1": lambda b, _: _with(b, parents=_set(b.parents, -1, -1)),
    "parent = 99": lambda b, _: _with(b, parents=_set(b.parents, -1, 99)),
    "no offsets": lambda b, _: _with(b, offsets=b.offsets[:-1]),
    "offsets too long": lambda b, _: _with(b, offsets=np.append(b.offsets, b.offsets[-1])),
    "offsets past the end": lambda b, _: _with(b, offsets=b.offsets + 1),
    "offsets fall": lambda b, _: _with(b, offsets=np.append(b.offsets[:-1], -1)),
    "parents missing": lambda b, _: _with(b, parents=b.parents[:-1]),
    "dist ids missing": lambda b, _: _with(b, dist_ids=np.empty(0, dtype=np.int64)),
}


class SpoiledDrafter(ScriptDrafter):
    """Right drafts, of which every third batch is spoiled."""

    def __init__(self, spoil: Spoil, kind: str, texts: list[list[int]], width: int) -> None:
        super().__init__(kind, texts, width, vocab_size=VOCAB)
        self._spoil = spoil
        self._num_calls = 0
        self.num_spoiled = 0

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        batch = super().propose(plan, budgets)
        self._num_calls += 1
        if self._num_calls % 3 == 1 and len(batch.token_ids):
            self.num_spoiled += 1
            return self._spoil(batch, budgets)
        return batch


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("spoil", SPOILS)
def test_broken_drafts_are_dropped_with_one_warning(spoil: str, width: int) -> None:
    """The text is not affected, nor are the drafts of others; it is said once."""
    samplings = [dataclasses.replace(DRAWN, seed=seed) for seed in range(4)]
    texts = [table_text(TABLE, PROMPT, sampling, 24) for sampling in samplings]
    whole = [PROMPT + text for text in texts]
    drafter = SpoiledDrafter(SPOILS[spoil], "right", whole, width)
    others = ScriptDrafter("right", whole, vocab_size=VOCAB)
    the_engine = engine(table_target(TABLE), {"spoiled": drafter, "right": others})
    methods = ["spoiled", "right", "spoiled", "none"]
    with warnings_logged() as said:
        ended = run_to_end(
            the_engine, [PROMPT] * 4, samplings, [SpeculationParams(m, 6) for m in methods]
        )
    assert [one.ids for one in ended] == texts
    assert drafter.num_spoiled >= 2
    assert len(said) == 1
    assert "'spoiled'" in said[0] and "the text is not affected" in said[0]
    assert ended[1].stats.acceptance_rate == 1
    assert ended[0].stats.num_draft_tokens > 0  # unspoiled drafts still count


@pytest.mark.parametrize("verification", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_broken_drafts_under_a_classical_rule_end_their_request(
    spoil: str, verification: str
) -> None:
    """There nothing drawn may be dropped, so that request cannot go on; its neighbours do."""
    text = table_text(TABLE, PROMPT, DRAWN, 24)
    drafter = SpoiledDrafter(SPOILS[spoil], "wrong", [], 1)
    the_engine = engine(table_target(TABLE), {"spoiled": drafter})
    speculations = [SpeculationParams("spoiled", 6, verification), PLAIN]
    ended = run_to_end(the_engine, [PROMPT] * 2, DRAWN, speculations)
    assert ended[0].finish_reason == "error"
    assert "method 'spoiled'" in ended[0].error and "mend the drafter" in ended[0].error
    assert (ended[1].ids, ended[1].error) == (text, None)
    assert the_engine.cache.bytes_in_use == 0


def test_a_tree_under_block_verification_ends_its_request() -> None:
    text = table_text(TABLE, PROMPT, DRAWN, 24)

    class Branching(ScriptDrafter):
        needs = Needs()

        def _tree(self, segment, budget):  # type: ignore[no-untyped-def]
            return ([1, 2], [0, 0]) if budget > 1 else ([], [])

    the_engine = engine(
        table_target(TABLE), {"branching": Branching("right", [PROMPT + text], 3, vocab_size=VOCAB)}
    )
    speculations = [SpeculationParams("branching", 6, "block"), PLAIN]
    ended = run_to_end(the_engine, [PROMPT] * 2, DRAWN, speculations)
    assert "branches under a rule that knows chains only" in ended[0].error
    assert ended[1].ids == text


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_raises_hurts_nobody_else(where: str) -> None:
    text = table_text(TABLE, PROMPT, DRAWN, 24)

    class Raising(ScriptDrafter):
        def propose(self, plan, budgets):  # type: ignore[no-untyped-def]
            if where == "propose":
                raise KeyError("out of ideas")
            return super().propose(plan, budgets)

        def observe(self, plan, drafts, target, verdict):  # type: ignore[no-untyped-def]
            if where == "observe":
                raise KeyError("out of ideas")

    whole = [PROMPT + text]
    the_engine = engine(
        table_target(TABLE),
        {
            "raising": Raising("right", whole, vocab_size=VOCAB),
            "right": ScriptDrafter("right", whole, vocab_size=VOCAB),
        },
    )
    speculations = [
        SpeculationParams("raising", 6),
        SpeculationParams("right", 6),
        SpeculationParams("raising", 6, "rejection"),
        PLAIN,
    ]
    with warnings_logged() as said:
        ended = run_to_end(the_engine, [PROMPT] * 4, DRAWN, speculations)
    assert [one.ids for one in (ended[0], ended[1], ended[3])] == [text] * 3
    assert ended[1].stats.acceptance_rate == 1
    assert len(said) == 1 and "out of ideas" in said[0]
    if where == "propose":
        assert ended[0].stats.num_draft_tokens == 0
        assert ended[2].finish_reason == "error" and "out of ideas" in ended[2].error
    else:
        assert ended[2].error is None


def test_a_drawn_draft_without_its_distributions_ends_a_classical_request() -> None:
    """A drafter that says it draws must hand over what it drew from; under walk nobody asks."""
    text = table_text(TABLE, PROMPT, DRAWN, 24)

    class Forgetful(ScriptDrafter):
        needs = Needs(draft_probs=True)

    the_engine = engine(
        table_target(TABLE), {"forgetful": Forgetful("random", [], vocab_size=VOCAB)}
    )
    ended = {}
    for verification in ("rejection", "walk"):
        speculation = SpeculationParams("forgetful", 6, verification)
        ended[verification] = run_to_end(the_engine, [PROMPT], DRAWN, speculation)[0]
    assert "without the distributions it was drawn from" in str(ended["rejection"].error)
    assert ended["walk"].ids == text and ended["walk"].stats.num_draft_tokens > 0


def ended_without_error(ended: list[Ended]) -> bool:
    return all(one.error is None for one in ended)


def test_repeated_siblings_change_nothing() -> None:
    """Not asked for, and no reason to drop a draft: the first of them is walked."""
    text = table_text(TABLE, PROMPT, DRAWN, 24)

    class Twins(ScriptDrafter):
        def _tree(self, segment, budget):  # type: ignore[no-untyped-def]
            right = self._right(segment, 1)
            return ([right] * budget, [0] * budget) if right is not None else ([], [])

    the_engine = engine(
        table_target(TABLE), {"twins": Twins("right", [PROMPT + text], 3, vocab_size=VOCAB)}
    )
    ended = run_to_end(the_engine, [PROMPT], DRAWN, SpeculationParams("twins", 5))
    assert ended_without_error(ended) and ended[0].ids == text
    assert ended[0].stats.accepted_at == [ended[0].stats.num_drafts]
