"""Every sampling feature under every method: the text of plain decoding, alone and in company.

Plain decoding itself is held against a slow loop of whole forward passes and plain Python, so that
a fault of both paths shows.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import METHODS
from tests.contract.test_drafters import engine_for
from tests.tiny import (
    VOCAB,
    ScriptDrafter,
    decode_slowly,
    engine,
    family_model,
    family_target,
    run,
    run_to_end,
    table_target,
)

PLAIN = SpeculationParams(method="none")
TEMPERATURES = (0.0, 0.7, 1.5)
_RNG = np.random.default_rng(4)
PROMPTS = [_RNG.integers(3, VOCAB, length).tolist() for length in (2, 9, 30, 5)]


def _even_only(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Depends on the whole history: only tokens of the parity of the last one but one."""
    scores = scores.clone()
    scores[:, (int(input_ids[0, -2]) + input_ids.shape[1]) % 2 :: 2] -= 4.0
    return scores


def _sequence_bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """One of Transformers' own."""
    from transformers import NoRepeatNGramLogitsProcessor

    return NoRepeatNGramLogitsProcessor(2)(input_ids, scores)


_SOME = tuple(range(3, 60))
FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "rewarded": {"presence_penalty": -1.0, "frequency_penalty": -0.7},
    "all penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "bias": {"logit_bias": {5: 4.0, 9: 3.5, 17: -100.0, 2: 2.0}},
    "allowed": {"allowed_token_ids": _SOME},
    "bad": {"bad_token_ids": tuple(range(3, 150, 2))},
    "bad sequences": {
        "allowed_token_ids": (3, 4, 5, 6),
        "bad_token_ids": ((3, 4), (4, 3, 5), (5, 5), (6, 3), (6,)),
    },
    "min tokens": {"min_tokens": 12, "logit_bias": {2: 7.0, 11: 6.0}, "stop_token_ids": (11,)},
    "min tokens alone": {"min_tokens": 12, "stop_token_ids": tuple(range(3, 120))},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "sigma": {"top_n_sigma": 1.0},
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "top_n_sigma": 2.5, "typical_p": 0.9},
    "processor": {"logits_processors": (_even_only,)},
    "processors": {"logits_processors": (_even_only, _sequence_bias)},
    "everything": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {2: 3.0, 8: 2.0},
        "allowed_token_ids": (2, *_SOME),
        "bad_token_ids": (7, (8, 8)),
        "min_tokens": 5,
        "logits_processors": (_even_only,),
        "top_k": 40,
        "typical_p": 0.95,
    },
}


def sampling_of(feature: str, temperature: float, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=50 + index, max_tokens=24, **FEATURES[feature]
    )


@functools.cache
def _target() -> Any:
    return family_target("llama")


@functools.cache
def plain(feature: str, temperature: float) -> list[list[int]]:
    """Plain texts, each alone in the engine."""
    the_engine = engine(_target())
    return [
        run(the_engine, [prompt], sampling_of(feature, temperature, i), PLAIN)[0]
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("feature", FEATURES)
def test_plain_decoding_is_the_slow_loop(feature: str, temperature: float) -> None:
    model = family_model("llama")
    for index, prompt in enumerate(PROMPTS):
        sampling = sampling_of(feature, temperature, index)
        slow, least_lead = decode_slowly(model, prompt, sampling, {2, *sampling.stop_token_ids})
        assert plain(feature, temperature)[index] == slow or least_lead < 1e-3


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_changes_some_text(feature: str) -> None:
    """A test of the tests: what changes nothing could not be seen to be honoured."""
    bare = {"min-p", "typical", "sigma", "filters"}
    for temperature in (1.5,) if feature in bare else TEMPERATURES:
        the_engine = engine(_target())
        without = [
            run(
                the_engine,
                [prompt],
                SamplingParams(temperature=temperature, seed=50 + i, max_tokens=24),
                PLAIN,
            )[0]
            for i, prompt in enumerate(PROMPTS)
        ]
        assert plain(feature, temperature) != without


ONE_OF_ALIKE = ("eagle", "medusa", "mtp")
"""Of the heads, which share what matters here, the default run takes EAGLE-3."""

ALONE = ("half", "tree", "ngram", "auto")
"""Those that the default run takes alone, too: a ragged batch asks more of the rows."""

DRAFTING = [
    pytest.param(
        method,
        batch,
        marks=[pytest.mark.slow]
        if method in ONE_OF_ALIKE or (batch == "alone" and method not in ALONE)
        else [],
    )
    for method in ("half", "tree", *METHODS)
    for batch in ("alone", "ragged")
]


@pytest.mark.parametrize(("method", "batch"), DRAFTING)
@pytest.mark.parametrize("temperature", TEMPERATURES[:2])
@pytest.mark.parametrize("feature", FEATURES)
def test_the_text_is_plain_decodings(
    feature: str, temperature: float, method: str, batch: str
) -> None:
    texts = plain(feature, temperature)
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    if method in ("half", "tree"):
        drafter = ScriptDrafter("half", whole, 3 if method == "tree" else 1, seed=7, ragged=True)
        the_engine = engine(_target(), {method: drafter})
    else:
        the_engine = engine_for(method, _target())
    samplings = [sampling_of(feature, temperature, i) for i in range(len(PROMPTS))]
    speculations = [
        SpeculationParams(method, 7, prediction=text if method == "prediction" else None)
        for text in texts
    ]
    if batch == "alone":
        found = [
            run(the_engine, [prompt], samplings[i], speculations[i])[0]
            for i, prompt in enumerate(PROMPTS)
        ]
    else:
        found = run(the_engine, PROMPTS, samplings, speculations, [0, 0, 2, 5])
    assert found == texts


def test_all_features_in_one_batch() -> None:
    """Each request of one batch asks for something else, and drafts in a way of its own."""
    features, prompts, samplings, texts = list(FEATURES), [], [], []
    for number, feature in enumerate(features):
        index = number % len(PROMPTS)
        prompts.append(PROMPTS[index])
        samplings.append(sampling_of(feature, 0.7, index))
        texts.append(plain(feature, 0.7)[index])
    whole = [p + t for p, t in zip(prompts, texts, strict=True)]
    the_engine = engine(
        _target(),
        {"half": ScriptDrafter("half", whole, 2), "random": ScriptDrafter("random", whole, 3)},
        max_num_requests=6,
    )
    methods = ["half", "auto", "none", "random", "suffix", "ngram", "recycling"]
    speculations = [
        SpeculationParams(methods[i % len(methods)], "auto" if i % 2 else 5)
        if methods[i % len(methods)] != "none"
        else PLAIN
        for i in range(len(features))
    ]
    assert run(the_engine, prompts, samplings, speculations) == texts


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_is_plain_under_every_rule(feature: str, rule: str) -> None:
    texts = plain(feature, 0.0)
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    the_engine = engine(_target(), {"half": ScriptDrafter("half", whole, 2, ragged=True)})
    samplings = [sampling_of(feature, 0.0, i) for i in range(len(PROMPTS))]
    speculation = SpeculationParams("half", 6, verification=rule)
    assert run(the_engine, PROMPTS, samplings, speculation) == texts


def test_a_processor_that_raises_ends_its_request_where_plain_decoding_would() -> None:
    def picky(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPTS[1]) + 6:
            raise RuntimeError("no further")
        return scores

    samplings = [
        SamplingParams(temperature=0.7, seed=50 + i, max_tokens=24, **more)
        for i, more in enumerate([{}, {"logits_processors": (picky,)}, {}, {}])
    ]
    calm = [SamplingParams(temperature=0.7, seed=50 + i, max_tokens=24) for i in range(4)]
    texts = run(engine(_target()), PROMPTS, calm, PLAIN)
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    for speculation in (PLAIN, SpeculationParams("half", 6)):
        the_engine = engine(_target(), {"half": ScriptDrafter("half", whole, 2)})
        ended = run_to_end(the_engine, PROMPTS, samplings, speculation)
        for index in (0, 2, 3):
            assert ended[index].ids == texts[index]
        assert ended[1].finish_reason == "error"
        assert ended[1].ids == texts[1][:6]
        assert "no further" in str(ended[1].error)
        assert the_engine.cache.num_free_slots == the_engine.cache.num_slots


@pytest.mark.parametrize("wrong", ["shape", "nan", "none"])
def test_a_processor_that_returns_nonsense(wrong: str) -> None:
    def nonsense(input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return {"shape": scores[:, :3], "nan": scores * torch.nan, "none": None}[wrong]

    sampling = SamplingParams(max_tokens=4, logits_processors=(nonsense,))
    ended = run_to_end(engine(_target()), PROMPTS[:1], sampling, PLAIN)[0]
    assert (ended.finish_reason, ended.ids) == ("error", [])
    assert "logits processor" in str(ended.error)


def test_a_processor_is_not_asked_about_what_cannot_be_reached() -> None:
    """Drafts that the request itself forbids lead nowhere: nobody's code runs for them."""
    seen: list[list[int]] = []

    def watching(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, 100:] = -torch.inf
        return scores

    drafter = ScriptDrafter("random", [], 3, seed=1)
    sampling = SamplingParams(max_tokens=20, logits_processors=(watching,))
    run(
        engine(_target(), {"random": drafter}),
        PROMPTS[:1],
        sampling,
        SpeculationParams("random", 8),
    )
    outputs = [text[len(PROMPTS[0]) :] for text in seen]
    assert all(token < 100 for text in outputs for token in text)


@pytest.mark.parametrize(
    "more", [{"allowed_token_ids": (5, 6)}, {"bad_token_ids": (9,)}, {"bad_token_ids": ((9, 9),)}]
)
def test_a_processor_is_not_asked_about_what_is_banned(more: dict[str, Any]) -> None:
    seen: list[list[int]] = []

    def watching(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    class Nines(ScriptDrafter):
        def _tree(self, segment: Any, budget: int) -> tuple[list[int], list[int]]:
            return [9] * budget, list(range(budget))

    sampling = SamplingParams(
        max_tokens=8, ignore_eos=True, logits_processors=(watching,), logit_bias={9: -50.0}, **more
    )
    the_engine = engine(_target(), {"nines": Nines("random", [])})
    found = run(the_engine, PROMPTS[:1], sampling, SpeculationParams("nines", 4))
    assert len(found[0]) == 8
    size = len(PROMPTS[0])
    most = 1 if "bad_token_ids" in more and more["bad_token_ids"] == ((9, 9),) else 0
    assert max(text[size:].count(9) for text in seen) == most


DEAD_END: dict[str, Any] = {
    "allowed_token_ids": (3, 4, 5),
    "bad_token_ids": ((4, 3), (4, 4), (4, 5)),
}
"""Behind token 4 nothing is allowed."""


class DeadEnd(ScriptDrafter):
    """Drafts the way into it, and on."""

    def _tree(self, segment: Any, budget: int) -> tuple[list[int], list[int]]:
        found = [4, 3, 5][:budget]
        return found, list(range(len(found)))


def _dead_end_engine(table: np.ndarray) -> Any:
    return engine(table_target(table), {"dead": DeadEnd("random", [])}, max_num_requests=64)


@pytest.mark.parametrize("rule", ["walk", "rejection", "block", "traversal"])
@pytest.mark.parametrize("is_broken", [False, True], ids=["nothing allowed", "not finite"])
def test_a_dead_end_that_is_only_drafted_ends_nothing(rule: str, is_broken: bool) -> None:
    table = np.random.default_rng(0).normal(size=(8, 8)) * 2
    table[:, 4] = -9.0
    if is_broken:
        table[4] = np.nan
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, **({} if is_broken else DEAD_END))
    plain = run_to_end(_dead_end_engine(table), [[3, 5]], sampling, PLAIN)[0]
    found = run_to_end(
        _dead_end_engine(table), [[3, 5]], sampling, SpeculationParams("dead", 3, rule)
    )
    assert plain.finish_reason == "length" and found[0].stats.num_draft_tokens > 0
    assert (found[0].ids, found[0].finish_reason, found[0].error) == (plain.ids, "length", None)


@pytest.mark.parametrize("rule", ["walk", "rejection", "block", "traversal"])
def test_a_dead_end_is_as_likely_as_it_is(rule: str) -> None:
    """The law of the first two tokens, where the text ends behind one of them."""
    table = np.random.default_rng(3).normal(size=(8, 8))
    allowed = np.array(DEAD_END["allowed_token_ids"])

    def law(token: int) -> np.ndarray:
        weights = np.exp(table[token, allowed])
        return weights / weights.sum()

    expected: dict[tuple[int, ...], float] = {}
    for first, share in zip(allowed.tolist(), law(5), strict=True):
        if first == 4:
            expected[(4,)] = share
            continue
        for second, other in zip(allowed.tolist(), law(first), strict=True):
            expected[(first, second)] = share * other
    counts: Counter[tuple[int, ...]] = Counter()
    the_engine, size = _dead_end_engine(table), 4096
    for begin in range(0, size, 64):
        samplings = [
            SamplingParams(1.0, seed=begin + i, max_tokens=2, ignore_eos=True, **DEAD_END)
            for i in range(64)
        ]
        speculation = SpeculationParams("dead", 3, rule)
        for ended in run_to_end(the_engine, [[3, 5]] * 64, samplings, speculation):
            counts[tuple(ended.ids)] += 1
            is_dead = ended.ids == [4]
            assert (ended.finish_reason == "error") == is_dead
            assert not is_dead or "no token is allowed" in str(ended.error)
    assert counts.keys() <= expected.keys()
    observed = [counts[text] for text in expected]
    assert stats.chisquare(observed, [size * p for p in expected.values()]).pvalue > 1e-6


def test_a_row_that_is_not_finite_stays_so() -> None:
    """Neither bans nor penalties mend what the target gave; processors are not asked."""
    table = np.random.default_rng(1).normal(size=(8, 8))
    for value, more in (
        (np.nan, {"bad_token_ids": (6,)}),
        (np.inf, {"repetition_penalty": 1.1}),
        (np.inf, {"logits_processors": (lambda ids, scores: scores.clamp(max=5),)}),
    ):
        table[5, 6] = value
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, **more)
        for speculation in (PLAIN, SpeculationParams("dead", 3)):
            ended = run_to_end(_dead_end_engine(table), [[6, 5]], sampling, speculation)[0]
            assert (ended.ids, ended.finish_reason) == ([], "error")
            assert "not finite" in str(ended.error)


def test_the_reason_is_that_of_the_row_where_a_text_ends() -> None:
    """Behind token 3 the target is not finite; a processor raises behind 4, which is drafted."""

    class Both(ScriptDrafter):
        def _tree(self, segment: Any, budget: int) -> tuple[list[int], list[int]]:
            return [4, 3][:budget], [0, 0][:budget]

    def picky(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(input_ids[0, -1]) == 4:
            raise RuntimeError("behind 4")
        return scores

    table = np.random.default_rng(2).normal(size=(8, 8))
    table[7, 5], table[5, 3], table[3] = 9.0, 9.0, np.nan
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, logits_processors=(picky,))
    for speculation in (
        PLAIN,
        SpeculationParams("both", 2),
        SpeculationParams("both", 2, "traversal"),
    ):
        the_engine = engine(table_target(table), {"both": Both("random", [])})
        ended = run_to_end(the_engine, [[6, 7]], sampling, speculation)[0]
        assert (ended.ids, ended.finish_reason) == ([5, 3], "error")
        assert "not finite" in str(ended.error)


def test_nothing_allowed_is_said() -> None:
    sampling = SamplingParams(allowed_token_ids=(5, 6), bad_token_ids=(5, (6, 6)), max_tokens=9)
    ended = run_to_end(engine(_target()), PROMPTS[:1], sampling, PLAIN)[0]
    assert (ended.finish_reason, ended.ids) == ("error", [6])
    assert "no token is allowed" in str(ended.error)
