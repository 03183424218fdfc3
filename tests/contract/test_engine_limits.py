"""The end of the context: a text that comes to it ends there, and nobody else minds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import (
    ScriptDrafter,
    decode_slowly,
    engine,
    family_model,
    family_target,
    run_to_end,
    table_target,
    table_text,
)

CONTEXT = 64
LENGTHS = range(50, 64)
PLAIN = SpeculationParams("none")
METHODS = ("right/1", "right/3", "half/1", "half/3", "wrong/1", "ngram")
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 40, length).tolist()


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(family_target("llama"), max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def texts(target):
    """Plain texts by prompt length; the shortest and longest are held against the slow loop."""
    plain = {
        length: run_to_end(engine(target), [prompt_of(length)], SAMPLING, PLAIN)[0]
        for length in LENGTHS
    }
    model = family_model("llama")
    for length in (50, 57, 63):
        slow = dataclasses.replace(SAMPLING, max_tokens=CONTEXT - length)
        ids, least_lead = decode_slowly(model, prompt_of(length), slow)
        assert plain[length].ids == ids or least_lead < 1e-3
    return plain


def drafters(texts) -> dict[str, ScriptDrafter]:
    whole = [prompt_of(length) + texts[length].ids for length in texts]
    return {
        name: ScriptDrafter(name.split("/")[0], whole, int(name.split("/")[1]))
        for name in METHODS
        if "/" in name
    }


@pytest.mark.parametrize("num_speculative_tokens", [1, 8, 128])
def test_every_text_ends_at_the_context(target, texts, num_speculative_tokens: int) -> None:
    """All prompt lengths and methods in one engine; drafts of up to 128 tokens."""
    the_engine = engine(target, drafters(texts))
    runs = [(length, method) for length in LENGTHS for method in METHODS]
    ended = run_to_end(
        the_engine,
        [prompt_of(length) for length, _ in runs],
        SAMPLING,
        [SpeculationParams(method, num_speculative_tokens) for _, method in runs],
    )
    for (length, method), one in zip(runs, ended, strict=True):
        assert length + len(one.ids) == CONTEXT
        assert one.finish_reason == "length"
        assert one.ids == texts[length].ids, (length, method)
        if method == "right/1" and one.stats.num_draft_tokens:
            assert one.stats.acceptance_rate == 1


def test_a_long_neighbour_does_not_stop_others_from_drafting(target, texts) -> None:
    short = [prompt_of(length) for length in (5, 6, 7)]
    sampling = dataclasses.replace(SAMPLING, max_tokens=30)
    plain = run_to_end(engine(target), short, sampling, PLAIN)
    whole = [prompt + one.ids for prompt, one in zip(short, plain, strict=True)]
    whole.append(prompt_of(60) + texts[60].ids)
    the_engine = engine(target, {"right": ScriptDrafter("right", whole)})
    ended = run_to_end(
        the_engine,
        [prompt_of(60), *short],
        [SAMPLING] + [sampling] * 3,
        SpeculationParams("right", 8),
    )
    assert ended[0].ids == texts[60].ids
    for one, other in zip(ended[1:], plain, strict=True):
        assert one.ids == other.ids
        assert one.stats.acceptance_rate == 1
        assert one.stats.num_verify_steps == one.stats.num_drafts == 4  # 29 tokens, 9 a step


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_that_leaves_no_room_is_refused(target, length: int) -> None:
    the_engine = engine(target)
    name = the_engine.add(prompt_of(50), SAMPLING, PLAIN)
    words = rf"prompt has {length} tokens; allowed are 63.*context of 64"
    with pytest.raises(InvalidRequestError, match=words):
        the_engine.add(prompt_of(length), SAMPLING, PLAIN)
    assert name in the_engine.scheduler  # nobody is disturbed
    while the_engine.has_work:
        the_engine.step()


def test_the_config_shortens_a_loaded_target() -> None:
    table = np.random.default_rng(0).normal(size=(9, 9))
    the_engine = engine(table_target(table), max_model_len=10)
    assert the_engine.target.max_model_len == 10
    sampling = SamplingParams(max_tokens=None)
    ended = run_to_end(the_engine, [[1, 2, 3]], sampling, SpeculationParams())[0]
    assert (ended.ids, ended.finish_reason) == (table_text(table, [1, 2, 3], sampling, 7), "length")
    with pytest.raises(
        ConfigError, match="max_model_len is 300; the loaded target allows up to 256"
    ):
        engine(table_target(table), max_model_len=300)


def test_max_tokens_of_none_goes_to_the_context(target, texts) -> None:
    sampling = dataclasses.replace(SAMPLING, max_tokens=None)
    assert run_to_end(engine(target), [prompt_of(50)], sampling, PLAIN)[0].ids == texts[50].ids


BAD_PROMPTS = [
    ([], "the prompt is empty"),
    ([[1, 2]], r"shape \(1, 2\)"),
    (7, r"shape \(\)"),
    ([1.0, 2.0], "kind float64"),
    (["a"], "kind <U1"),
    ([True, False], "kind bool"),
    ([3, 40], "holds token id 40 at position 1; allowed are ids from 0 to 39"),
    ([3, -1], "holds token id -1 at position 1"),
    ([2**63], "holds token id 9223372036854775808 at position 0"),
    ([2**70], "kind object"),
    ([[1], [1, 2]], "no sequence of token ids"),
    (None, "kind object"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda value: repr(value)[:20])
def test_bad_prompts_are_refused(prompt: object, words: str) -> None:
    the_engine = engine(table_target(np.zeros((40, 40))))
    with pytest.raises(InvalidRequestError, match=words):
        the_engine.add(prompt)  # type: ignore[arg-type]
    assert not the_engine.has_work


def test_stop_ids_outside_the_vocabulary_are_refused() -> None:
    the_engine = engine(table_target(np.zeros((40, 40))))
    with pytest.raises(
        InvalidRequestError, match=r"stop_token_ids holds 40.*vocabulary size of 40"
    ):
        the_engine.add([1], SamplingParams(stop_token_ids=(39, 40)))
    assert the_engine.add([1], SamplingParams(stop_token_ids=(39,)))


def test_names_are_unique() -> None:
    the_engine = engine(table_target(np.zeros((40, 40))), max_num_requests=1)
    sampling = SamplingParams(max_tokens=3)
    assert the_engine.add([1], sampling, request_id="request-1") == "request-1"
    made = [the_engine.add([1], sampling) for _ in range(3)]
    assert len({"request-1", *made}) == 4
    the_engine.step()
    for name in ("request-1", made[-1]):  # running, waiting
        with pytest.raises(InvalidRequestError, match=f"request_id '{name}' is in use"):
            the_engine.add([1], sampling, request_id=name)
    while the_engine.has_work:
        the_engine.step()
    assert the_engine.add([1], sampling, request_id="request-1") == "request-1"  # free again


def test_unknown_methods_are_refused_before_anything_is_queued() -> None:
    the_engine = engine(table_target(np.zeros((40, 40))))
    with pytest.raises(InvalidRequestError, match="'nosuch'"):
        the_engine.add([1], SamplingParams(), SpeculationParams("nosuch"))
    assert not the_engine.has_work
    with pytest.raises(ConfigError, match="method 'ngram' has no option 'no_such'"):
        engine(table_target(np.zeros((40, 40))), drafter_options={"ngram": {"no_such": 1}})
