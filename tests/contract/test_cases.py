"""Faults that other engines had, swept: every draft length, every number of accepted tokens.

Each case is a batch of requests. Their plain texts are the right ones; then every draft of ``k``
tokens holds ``a`` right ones and goes wrong, for all ``a`` up to ``k``, so that whatever a case is
about comes to lie at every offset of a draft. Ids, text, reasons and log-probabilities must be the
same. The numbers are those of public reports, gathered in the project's reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from foredraft import LLM, Grammar, RequestOutput, SamplingParams, SpeculationParams
from foredraft.model.loader import prepare_target
from tests.folders import CONTEXT, make_model, make_tokenizer
from tests.tiny import ScriptDrafter

PLAIN = SpeculationParams("none")
SWEEP = [(k, a) for k in (1, 2, 3, 5, 8) for a in range(k + 1)]
PROMPT = "red green blue red green blue red"
PROMPTS = [PROMPT, "The sky is", "x", PROMPT * 3]

Batch = list[tuple[Any, SamplingParams]]


@functools.cache
def _target() -> Any:
    return prepare_target("tiny", make_model(), make_tokenizer(), CONTEXT)


@functools.cache
def _llm() -> tuple[LLM, list[list[int]]]:
    """The engine, and the whole texts that its drafters draft from."""
    texts: list[list[int]] = []
    vocab = _target().vocab_size
    drafters = {
        f"right-{a}": ScriptDrafter(f"first:{a}", texts, vocab_size=vocab) for a in range(9)
    }
    return LLM(target=_target(), drafters=drafters, kv_cache_gb=0.1, reuse_prefixes=False), texts


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "logprobs": 2, **options})


@functools.cache
def free(prompt: str, temperature: float = 0.0) -> RequestOutput:
    """What plain decoding writes where nothing ends it."""
    return _llm()[0].generate(prompt, sampling(temperature=temperature, seed=1), PLAIN)[0]


def stops_across_tokens() -> Batch:
    """B01, B06: a string of two tokens ends inside a draft, at every offset; kept or not."""
    tokenizer = _target().tokenizer
    ids = free(PROMPT).token_ids
    batch: Batch = []
    for first in range(12):
        stop = tokenizer.decode(ids[first : first + 2])[-6:]
        for include in (False, True):
            batch.append((PROMPT, sampling(stop=(stop,), include_stop=include)))
    return batch


def histories() -> Batch:
    """B03: what penalties and min_tokens count is each row's own path."""
    end = free(PROMPT).token_ids[3]
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.0},
        {"min_tokens": 12, "stop_token_ids": (end,)},
        {"min_tokens": 12, "stop_token_ids": (end,), "frequency_penalty": 0.7},
    ]
    return [(prompt, sampling(**one)) for one in options for prompt in PROMPTS[:2]]


def log_probabilities() -> Batch:
    """B04: one entry a token, from the target, as documented."""
    return [
        (prompt, sampling(logprobs=number, temperature=heat, seed=2, top_k=20, logprobs_kind=kind))
        for number in (0, 1, 5)
        for heat in (0.0, 0.8)
        for kind in ("raw", "processed")
        for prompt in PROMPTS[:2]
    ]


def prompt_log_probabilities() -> Batch:
    """B04: of the prompt, too."""
    return [(prompt, sampling(prompt_logprobs=1)) for prompt in PROMPTS]


def seeds() -> Batch:
    """B13: a seed fixes the text, in whatever company."""
    return [(prompt, sampling(temperature=1.0, seed=seed)) for seed in (7, 8) for prompt in PROMPTS]


def ends_of_the_context() -> Batch:
    """B14: as many tokens as there is room for, whatever a draft would like."""
    ids = _llm()[0].encode(PROMPT * 40)
    return [(ids[:length].tolist(), sampling(max_tokens=100)) for length in range(244, CONTEXT)]


def unequal_neighbours() -> Batch:
    """B15: rows of short and long prompts, few and many tokens, in one batch."""
    ids = _llm()[0].encode(PROMPT * 8)
    return [
        (ids[:length].tolist(), sampling(max_tokens=most, temperature=heat, seed=length))
        for length, most in ((1, 20), (3, 2), (17, 30), (40, 9), (5, 1), (5, 33))
        for heat in (0.0, 1.0)
    ]


def budgets() -> Batch:
    """B19: exactly so many tokens."""
    return [(prompt, sampling(max_tokens=n)) for n in (1, 2, 3, 7, 64) for prompt in PROMPTS[:3]]


def grammars() -> Batch:
    """B21: the matcher walks the draft's own path, and stops where the grammar does."""
    forms = [
        Grammar("regex", "[ab]{3}"),
        Grammar("regex", "(yes|no|maybe)"),
        Grammar(
            "json_schema",
            '{"type":"object","properties":{"ok":{"type":"boolean"},"n":{"type":"integer",'
            '"minimum":0,"maximum":9}},"required":["ok","n"],"additionalProperties":false}',
        ),
    ]
    batch: Batch = [
        (prompt, sampling(grammar=form, ignore_eos=False, max_tokens=40, temperature=heat, seed=4))
        for form in forms
        for heat in (0.0, 1.0)
        for prompt in PROMPTS[:2]
    ]
    return [*batch, *((prompt, sampling()) for prompt in PROMPTS)]  # plain neighbours


def ends_inside_a_draft() -> Batch:
    """B28: a token that ends the text, at every offset, one of several; or ignored."""
    ids = free(PROMPT).token_ids
    return [
        (PROMPT, sampling(stop_token_ids=ends))
        for place in range(10)
        for ends in ((ids[place],), (ids[place], 9), (9,))
    ]


def temperatures() -> Batch:
    """B37: next to nothing, and a hundred, side by side."""
    return [
        (prompt, sampling(temperature=heat, seed=3))
        for heat in (0.0, 1e-8, 1e-6, 1e-4, 0.01, 1.0, 100.0)
        for prompt in PROMPTS[:2]
    ]


CASES: dict[str, Callable[[], Batch]] = {
    case.__name__: case
    for case in (
        stops_across_tokens,
        histories,
        log_probabilities,
        prompt_log_probabilities,
        seeds,
        ends_of_the_context,
        unequal_neighbours,
        budgets,
        grammars,
        ends_inside_a_draft,
        temperatures,
    )
}


def same(one: RequestOutput, other: RequestOutput) -> None:
    """Equal in everything that a user is given, log-probabilities to 1e-4."""
    for name in ("token_ids", "text", "finish_reason", "stop_string", "stop_token_id", "error"):
        assert getattr(one, name) == getattr(other, name), name
    for mine, theirs in (
        (one.logprobs, other.logprobs),
        (one.prompt_logprobs, other.prompt_logprobs),
    ):
        assert (mine is None) == (theirs is None) and len(mine or ()) == len(theirs or ())
        for found, right in zip(mine or (), theirs or (), strict=True):
            assert (found.token_id, found.rank) == (right.token_id, right.rank)
            assert found.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [t for t, _ in found.top] == [t for t, _ in right.top]
            values = [value for _, value in right.top]
            assert [value for _, value in found.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_draft_changes_nothing_at_any_offset(case: str) -> None:
    llm, texts = _llm()
    batch = CASES[case]()
    prompts, samplings = [prompt for prompt, _ in batch], [one for _, one in batch]
    plain = llm.generate(prompts, samplings, PLAIN, progress=False)
    assert all(output.error is None for output in plain)
    # What a request would write, were it not ended: drafts go on behind the end.
    unended = [
        dataclasses.replace(one, stop=(), stop_token_ids=(), min_tokens=0, max_tokens=40)
        for one in samplings
    ]
    texts[:] = [
        [*output.prompt_ids, *output.token_ids]
        for output in (*llm.generate(prompts, unended, PLAIN, progress=False), *plain)
    ]
    num_accepted = 0
    for k, a in SWEEP:
        drafted = llm.generate(
            prompts, samplings, SpeculationParams(f"right-{a}", k), progress=False
        )
        for one, other in zip(drafted, plain, strict=True):
            same(one, other)
            stats = one.stats
            assert stats.num_tokens == len(one.token_ids) == len(one.logprobs or one.token_ids)
            assert stats.num_accepted_tokens <= stats.num_draft_tokens
            num_accepted += stats.num_accepted_tokens
    assert num_accepted > 100
