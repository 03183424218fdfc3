"""Where a text ends: the same token, reason and counts whatever was drafted around the end.

The texts are those of a table target, written by a loop that has nothing of the engine in it; the
drafts are scripted, so that the end falls on every place of a block.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, DraftBatch, Segment, StepPlan
from tests.tiny import (
    Ended,
    ScriptDrafter,
    engine,
    family_target,
    run,
    run_to_end,
    table_target,
    table_text,
)

VOCAB = 40
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))
PROMPT = [3, 1, 4]
KS = (1, 2, 3, 5, 8)
WIDTHS = (1, 3)
LENGTH = 24
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=1.0, seed=5)
PLAIN = SpeculationParams("none")


class CountingDrafter(ScriptDrafter):
    """A script that checks that it is never given more room than the request has left."""

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        for segment, budget in zip(plan.segments, budgets.max_nodes.tolist(), strict=True):
            request = segment.request
            assert 0 <= budget <= request.speculation.num_speculative_tokens
            if budget:
                assert segment.is_decode
                assert budget <= request.max_tokens - segment.num_output_tokens - 1
        return super().propose(plan, budgets)


class StopDrafter(CountingDrafter):
    """Right tokens but for one: at the depth given by the kind, a token that ends texts."""

    def _children(self, segment: Segment, depth: int, right: int | None, count: int) -> list[int]:
        if depth != int(self._kind.split(":")[1]) + 1:
            return super()._children(segment, depth, right, count)
        stop = min(segment.request.stop_ids)
        others = [t for t in range(3, self._vocab_size) if t not in (stop, right)]
        return [stop, *others][:count]


def text_of(sampling: SamplingParams, num: int = LENGTH + 80) -> list[int]:
    return table_text(TABLE, PROMPT, sampling, num)


def expected(text: list[int], stop_ids: set[int], max_tokens: int) -> tuple:
    """Ids, finish reason and stopping id, by the words of the parameters."""
    for place, token in enumerate(text[:max_tokens]):
        if token in stop_ids:
            return text[: place + 1], "stop", token
    return text[:max_tokens], "length", None


def found(ended: Ended) -> tuple:
    assert ended.error is None
    assert ended.stats.num_tokens == len(ended.ids)
    assert ended.stats.num_accepted_tokens <= ended.stats.num_draft_tokens
    return ended.ids, ended.finish_reason, ended.stop_token_id


def scripts(texts: list[list[int]], kinds: list[str]) -> dict[str, ScriptDrafter]:
    return {
        f"{kind}/{width}": (StopDrafter if kind.startswith("stop") else CountingDrafter)(
            kind, texts, width, vocab_size=VOCAB
        )
        for kind in kinds
        for width in WIDTHS
    }


def sweep() -> list[tuple[str, int]]:
    """Every k with every number of right tokens, in chains and trees; and plain decoding."""
    every = [(f"first:{a}/{w}", k) for k in KS for a in range(k + 1) for w in WIDTHS]
    return [*every, ("none", 0), ("ngram", 8)]


def check(
    sampling: SamplingParams,
    eos_ids: frozenset[int],
    cases: list[tuple[SamplingParams, set[int]]],
    methods: list[tuple[str, int]],
) -> None:
    """Run every case with every method, all in one engine, against the words."""
    text = text_of(sampling)
    kinds = sorted({m.split("/")[0] for m, _ in methods if "/" in m})
    the_engine = engine(
        table_target(TABLE, eos_ids), scripts([PROMPT + text], kinds), max_num_requests=64
    )
    runs = [(case, method) for case in cases for method in methods]
    ended = run_to_end(
        the_engine,
        [PROMPT] * len(runs),
        [case[0] for case, _ in runs],
        [SpeculationParams(method, k) for _, (method, k) in runs],
    )
    for (case, method), one in zip(runs, ended, strict=True):
        assert found(one) == expected(text, case[1], case[0].max_tokens or 10**9), (case, method)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_stop_ids_at_every_offset(sampling: SamplingParams) -> None:
    """Each of the first tokens of the text is declared to end it; every block shape."""
    text = text_of(sampling)
    cases = []
    for offset in range(11):
        stop = text[offset]
        options = {"max_tokens": LENGTH, "stop_token_ids": (stop,)}
        cases.append((dataclasses.replace(sampling, **options), {stop}))
    check(sampling, frozenset(), cases, sweep())


@pytest.mark.parametrize("num_eos", [0, 1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_end_of_sequence_ids(sampling: SamplingParams, num_eos: int) -> None:
    """None, one, or two (the second is the one met first); with stop ids besides; and ignored."""
    text = text_of(sampling)
    never = next(token for token in range(VOCAB) if token not in text)
    eos_ids = frozenset([[], [text[4]], [never, text[4]]][num_eos])
    stop = text[7]
    cases = [
        (dataclasses.replace(sampling, max_tokens=LENGTH), set(eos_ids)),
        (
            dataclasses.replace(sampling, max_tokens=LENGTH, stop_token_ids=(stop,)),
            {stop, *eos_ids},
        ),
        (dataclasses.replace(sampling, max_tokens=LENGTH, ignore_eos=True), set()),
        (
            dataclasses.replace(
                sampling, max_tokens=LENGTH, ignore_eos=True, stop_token_ids=(stop,)
            ),
            {stop},
        ),
    ]
    check(sampling, eos_ids, cases, sweep())


def test_the_very_first_token_ends_the_text() -> None:
    """It comes out of the prompt's own pass: one token, no verify step."""
    text = text_of(DRAWN)
    the_engine = engine(
        table_target(TABLE, frozenset([text[0]])), scripts([PROMPT + text], ["right"])
    )
    for method, k in (("none", 0), ("right/1", 8), ("right/3", 8), ("ngram", 8)):
        ended = run_to_end(the_engine, [PROMPT], DRAWN, SpeculationParams(method, k))[0]
        assert found(ended) == ([text[0]], "stop", text[0])
        assert ended.stats.num_verify_steps == ended.stats.num_draft_tokens == 0
        assert the_engine.cache.bytes_in_use == 0


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_drafted_end_that_the_target_rejects_changes_nothing(sampling: SamplingParams) -> None:
    """The stop id is drafted at each depth, where the target says otherwise."""
    text = text_of(sampling)
    never = next(token for token in range(VOCAB) if token not in text)
    methods = [(f"stop:{a}/{w}", k) for k in KS for a in range(k) for w in WIDTHS]
    cases = [
        (dataclasses.replace(sampling, max_tokens=LENGTH), {never}),
        (dataclasses.replace(sampling, max_tokens=LENGTH, ignore_eos=True), set()),
    ]
    cases[1] = (dataclasses.replace(cases[1][0], stop_token_ids=(never,)), {never})
    check(sampling, frozenset([never]), cases, methods)


def test_a_token_that_ends_the_text_later_is_drafted_too_early() -> None:
    text = text_of(DRAWN)
    stop = text[9]
    assert stop not in text[:9]
    methods = [(f"stop:{a}/{w}", k) for k in KS for a in range(k) for w in WIDTHS]
    case = (dataclasses.replace(DRAWN, max_tokens=LENGTH), {stop})
    check(DRAWN, frozenset([stop]), [case], methods)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_max_tokens_is_met_exactly(sampling: SamplingParams) -> None:
    methods = [(f"first:{a}/{w}", 8) for a in range(9) for w in WIDTHS]
    methods += [("right/1", 8), ("right/3", 8), ("none", 0), ("ngram", 8), ("right/1", 128)]
    cases = [(dataclasses.replace(sampling, max_tokens=num), set()) for num in (1, 2, 3, 7, 9, 64)]
    check(sampling, frozenset(), cases, methods)


def test_stop_and_limit_on_the_same_token() -> None:
    """The stop is what is reported, as in plain decoding."""
    text = text_of(DRAWN)
    cases = [
        (dataclasses.replace(DRAWN, max_tokens=num, stop_token_ids=(text[6],)), {text[6]})
        for num in (6, 7, 8)
    ]
    check(DRAWN, frozenset(), cases, sweep())
    assert expected(text, {text[6]}, 6)[1] == "length"
    assert expected(text, {text[6]}, 7)[1] == "stop"


def test_many_short_requests_finish() -> None:
    text = text_of(DRAWN)
    the_engine = engine(
        table_target(TABLE), scripts([PROMPT + text], ["right"]), max_num_requests=32
    )
    sampling = dataclasses.replace(DRAWN, max_tokens=1)
    for method in ("none", "right/1", "ngram"):
        ended = run_to_end(the_engine, [PROMPT] * 200, sampling, SpeculationParams(method, 8))
        assert all(found(one) == (text[:1], "length", None) for one in ended)
        assert not the_engine.has_work and the_engine.cache.num_free_slots == 32
        assert the_engine.step() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_with_a_real_cache_behind_them(temperature: float) -> None:
    """A random model; slots are used again and again after texts that ended inside a block."""
    base = family_target("llama")
    sampling = SamplingParams(temperature=temperature, seed=8, max_tokens=14, ignore_eos=True)
    text = run(engine(base), [PROMPT], sampling, PLAIN)[0]
    firsts = [place for place, token in enumerate(text) if token not in text[:place]][:12]
    texts = [PROMPT + text]
    drafters = {
        f"{kind}/{width}": ScriptDrafter(kind, texts, width)
        for kind in ("right", "half", "first:1", "first:2", "first:3")
        for width in WIDTHS
    }
    target = dataclasses.replace(base, eos_ids=frozenset([text[firsts[3]]]))
    the_engine = engine(target, drafters, max_num_requests=5)
    runs = list(itertools.product(firsts, [*drafters, "ngram"]))
    samplings = [dataclasses.replace(sampling, stop_token_ids=(text[place],)) for place, _ in runs]
    ended = run_to_end(
        the_engine, [PROMPT] * len(runs), samplings, [SpeculationParams(m, 5) for _, m in runs]
    )
    for (place, method), one in zip(runs, ended, strict=True):
        assert found(one) == (text[: place + 1], "stop", text[place]), method
    # The model's own end-of-sequence id, not ignored now, and nothing else.
    samplings = [dataclasses.replace(sampling, ignore_eos=False)] * len(drafters)
    for one in run_to_end(
        the_engine, [PROMPT] * len(drafters), samplings, [SpeculationParams(m, 5) for m in drafters]
    ):
        assert found(one) == (text[: firsts[3] + 1], "stop", text[firsts[3]])
    assert the_engine.cache.bytes_in_use == 0
