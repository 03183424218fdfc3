"""The near-tie check: it passes the engine's own texts, and fails on a text that is not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from foredraft.engine.engine import Engine
from foredraft.engine.near_tie import DEFAULT_MAX_ULPS, check_greedy
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import CONTEXT, VOCAB, engine, family_target, run, table_target

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(20, 60)), [9]]
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
NGRAM = SpeculationParams("ngram", 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_speculative_texts_pass(family: str, dtype: torch.dtype) -> None:
    the_engine = engine(family_target(family, dtype))
    for prompt, text in zip(PROMPTS, run(the_engine, PROMPTS, GREEDY, NGRAM), strict=True):
        report = check_greedy(the_engine, prompt, text)
        assert report.num_tokens == len(text) == 60
        assert report.is_lossless, report
        assert report.max_ulps == DEFAULT_MAX_ULPS[dtype]
        assert report.num_argmax == report.num_tokens - len(report.near_ties)
        if dtype in (torch.float32, torch.float64):
            assert report.num_argmax == report.num_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", [0, 1, 30, 59])
def test_one_wrong_token_fails(dtype: torch.dtype, place: int) -> None:
    the_engine = engine(family_target("llama", dtype))
    text = run(the_engine, PROMPTS[:1], GREEDY, NGRAM)[0]
    text[place] = (text[place] + 1) % VOCAB
    # What follows must fit the wrong token, so that this token alone is at fault.
    known = PROMPTS[0] + text[: place + 1]
    rest = run(the_engine, [known], dataclasses.replace(GREEDY, max_tokens=70), NGRAM)[0]
    tampered = (text[: place + 1] + rest)[:60]
    report = check_greedy(the_engine, PROMPTS[0], tampered)
    assert not report.is_lossless
    assert max(report.near_ties, key=lambda tie: tie[1])[0] == place
    assert report.worst_ulps > 3 * report.max_ulps


def test_the_text_of_another_prompt_fails() -> None:
    the_engine = engine(family_target("llama", torch.bfloat16))
    texts = run(the_engine, PROMPTS, GREEDY, NGRAM)
    assert not check_greedy(the_engine, PROMPTS[0], texts[1]).is_lossless


def _table(*rows: tuple[float, ...]) -> Engine:
    """An engine whose logits after token t are row t of a table, called bfloat16."""
    target = table_target(np.array(rows, dtype=np.float32))
    return engine(dataclasses.replace(target, dtype=torch.bfloat16))


def test_distances_are_in_units_of_the_last_place_of_the_logits_scale() -> None:
    # bfloat16 has 8 bits: between 8 and 16 neighbours are 1/16 apart, between 0.25 and 0.5 1/512.
    the_engine = _table((8.0, 8.0 - 1 / 16, 7.0), (0.25, 0.25 - 3 / 512, 0.25), (-2.0, -4.0, -2.5))
    assert check_greedy(the_engine, [0], [0, 0]).near_ties == ()
    assert check_greedy(the_engine, [0], [1]).near_ties == ((0, 1.0),)
    assert check_greedy(the_engine, [0], [2]).near_ties == ((0, 16.0),)
    report = check_greedy(the_engine, [0], [1, 1, 2, 1])
    assert report.near_ties == ((0, 1.0), (1, 3.0), (3, 2.0 / (2 / 128)))
    assert (report.num_argmax, report.worst_ulps) == (1, 128.0)
    assert check_greedy(the_engine, [1], [2, 0]).near_ties == ()  # an exact tie is no distance


def test_a_best_logit_near_zero_among_large_ones_is_no_finer_than_they_are() -> None:
    row = (0.25, 0.25 - 1 / 16, -10.0, -9.0, -11.0)
    the_engine = _table(row, row, row, row, row)
    assert check_greedy(the_engine, [0], [1]).near_ties == ((0, 1.0),)  # between 8 and 16: 1/16
    forbidden = (0.25, 0.25 - 1 / 512, 0.0, 0.125, -3e38)
    the_engine = _table(forbidden, forbidden, forbidden, forbidden, forbidden)
    assert check_greedy(the_engine, [0], [1]).near_ties == ((0, 1.0),)


def test_the_bound_is_what_is_given_or_that_of_the_dtype() -> None:
    the_engine = _table((8.0, 8.0 - 4 / 16, 8.0 - 5 / 16), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    assert DEFAULT_MAX_ULPS[torch.bfloat16] == 4
    assert check_greedy(the_engine, [0], [1]).is_lossless
    assert not check_greedy(the_engine, [0], [2]).is_lossless
    assert check_greedy(the_engine, [0], [2], max_ulps=5).is_lossless
    assert not check_greedy(the_engine, [0], [1], max_ulps=0).is_lossless
    assert check_greedy(the_engine, [0], [0], max_ulps=0).is_lossless


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_pass_nothing_off(value: float) -> None:
    the_engine = _table((1.0, value, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    assert not check_greedy(the_engine, [0], [1]).is_lossless
    if value != -math.inf:
        assert not check_greedy(the_engine, [0], [0]).is_lossless


def test_a_long_prompt_is_taken_in_the_engines_own_chunks() -> None:
    prompt = list(range(3, 150))
    for chunk in (1, 7, 146, 147, 512):
        the_engine = engine(family_target(), max_num_batched_tokens=chunk)
        text = run(the_engine, [prompt], GREEDY, NGRAM)[0]
        report = check_greedy(the_engine, prompt, text)
        assert report.num_argmax == 60


def test_what_the_engine_cannot_have_made_is_refused() -> None:
    the_engine = engine(family_target())
    for prompt, text in (
        ([], [5]),
        ([5], [VOCAB]),
        ([5], [-1]),
        ([-1], [5]),
        ([5] * CONTEXT, [5]),
    ):
        with pytest.raises(ValueError, match=r"allowed is a prompt|outside of the vocabulary"):
            check_greedy(the_engine, prompt, text)
    assert check_greedy(the_engine, [5], []).is_lossless


def test_it_needs_an_idle_engine_and_leaves_it_idle() -> None:
    the_engine = engine(family_target(), max_num_requests=1)
    the_engine.add([5, 6], GREEDY)
    with pytest.raises(ValueError, match="idle"):
        check_greedy(the_engine, [5], [6])
    while the_engine.has_work:
        the_engine.step()
    for _ in range(3):  # there is one slot, so it must come back
        check_greedy(the_engine, [5], [6])
    assert the_engine.cache.num_free_slots == 1 and not the_engine.has_work
