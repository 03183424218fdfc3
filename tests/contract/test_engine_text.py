"""Stop strings, log-probabilities and grammars through the engine, the same under every method."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import LLM, Grammar, SamplingParams, SpeculationParams
from foredraft.errors import InvalidRequestError
from foredraft.model.loader import prepare_target
from tests.folders import CONTEXT, make_model, make_tokenizer
from tests.tiny import ScriptDrafter

PLAIN = SpeculationParams("none")
PROMPT = "one two three one two three one two"


@functools.cache
def _target() -> Any:
    return prepare_target("tiny", make_model(), make_tokenizer(), CONTEXT)


def llm_with(texts: list[list[int]] | None = None, **options: Any) -> LLM:
    vocab = _target().vocab_size
    drafters = {
        "half": ScriptDrafter("half", texts or [], 1, seed=3, vocab_size=vocab),
        "tree": ScriptDrafter("half", texts or [], 3, seed=4, vocab_size=vocab),
    }
    return LLM(target=_target(), drafters=drafters, kv_cache_gb=0.1, **options)


METHODS = ("half", "tree", "ngram", "suffix", "auto")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_end_where_plain_decoding_ends(temperature: float) -> None:
    base = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    llm = llm_with()
    free = llm.generate(PROMPT, base, PLAIN)[0]
    prompt_ids = llm.encode(PROMPT).tolist()
    drafting = llm_with([prompt_ids + list(free.token_ids)])
    rng = np.random.default_rng(1)
    num_stopped = 0
    for _ in range(12):
        start = int(rng.integers(0, len(free.text) - 4))
        stop = free.text[start : start + int(rng.integers(1, 5))]
        sampling = SamplingParams(
            temperature=temperature,
            seed=3,
            max_tokens=60,
            ignore_eos=True,
            stop=(stop, "never seen"),
            include_stop=bool(rng.integers(2)),
            min_tokens=int(rng.choice([0, 0, 9])),
            logprobs=1,
        )
        plain = drafting.generate(PROMPT, sampling, PLAIN)[0]
        if plain.finish_reason == "stop":
            num_stopped += 1
            assert plain.stop_string == stop and plain.stop_token_id is None
            assert plain.text.endswith(stop) == sampling.include_stop or stop in plain.text[:-1]
            assert free.text.startswith(plain.text)
        assert plain.logprobs is not None and len(plain.logprobs) == len(plain.token_ids)
        for method in METHODS:
            found = drafting.generate(PROMPT, sampling, SpeculationParams(method, 7))[0]
            assert (found.token_ids, found.text, found.finish_reason, found.stop_string) == (
                plain.token_ids,
                plain.text,
                plain.finish_reason,
                plain.stop_string,
            )
            assert len(found.logprobs or ()) == len(found.token_ids)
            chunks = list(drafting.stream(PROMPT, sampling, SpeculationParams(method, 7)))
            assert "".join(chunk.text for chunk in chunks) == plain.text
    assert num_stopped > 5


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_what_is_read_of_a_text_is_the_same_under_every_rule(rule: str) -> None:
    """Stop strings, log-probabilities and grammars, greedily, where every rule writes one text."""
    free = llm_with().generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), PLAIN)[0]
    drafting = llm_with([list(free.prompt_ids) + list(free.token_ids)])
    stops = [(free.text[place : place + 3],) for place in (4, 11, 20)]
    wanted: list[dict[str, Any]] = [{"stop": stop, "include_stop": True} for stop in stops]
    if importlib.util.find_spec("llguidance") is not None:
        wanted.append({"grammar": Grammar.regex(r"[a-z ]{3,30}")})
    num_accepted = 0
    for more in wanted:
        for kind in ("raw", "processed"):
            sampling = SamplingParams(
                max_tokens=40,
                ignore_eos="grammar" not in more,
                logprobs=2,
                logprobs_kind=kind,
                repetition_penalty=1.0 if "stop" in more else 1.1,
                **more,
            )
            plain = drafting.generate(PROMPT, sampling, PLAIN)[0]
            found = drafting.generate(PROMPT, sampling, SpeculationParams("half", 6, rule))[0]
            assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
            assert (found.finish_reason, found.stop_string) == (
                plain.finish_reason,
                plain.stop_string,
            )
            assert "stop" not in more or plain.stop_string == more["stop"][0]
            for one, other in zip(found.logprobs or (), plain.logprobs or (), strict=True):
                assert (one.token_id, one.rank) == (other.token_id, other.rank)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
            num_accepted += found.stats.num_accepted_tokens
    assert num_accepted > 5


def test_a_stop_token_wins_over_a_string_behind_it() -> None:
    llm = llm_with()
    base = SamplingParams(max_tokens=40, ignore_eos=True)
    free = llm.generate(PROMPT, base, PLAIN)[0]
    drafting = llm_with([llm.encode(PROMPT).tolist() + list(free.token_ids)])
    token = free.token_ids[5]
    first = free.token_ids.index(token)
    text_behind = llm.tokenizer.decode(free.token_ids[first : first + 8])
    sampling = SamplingParams(
        max_tokens=40, ignore_eos=True, stop_token_ids=(token,), stop=(text_behind,)
    )
    for method in ("none", *METHODS):
        number = 0 if method == "none" else 7
        found = drafting.generate(PROMPT, sampling, SpeculationParams(method, number))[0]
        assert (found.stop_token_id, found.stop_string) == (token, None)
        assert found.token_ids == free.token_ids[: first + 1]


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_whole_passes(temperature: float, kind: str) -> None:
    """Of exactly the committed tokens, with the top ones and ranks, under every method."""
    sampling = SamplingParams(
        temperature=temperature,
        seed=5,
        max_tokens=30,
        top_k=20,
        presence_penalty=0.7,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        logprobs_kind=kind,
    )
    llm = llm_with()
    plain = llm.generate(PROMPT, sampling, PLAIN)[0]
    ids = [*llm.encode(PROMPT).tolist(), *plain.token_ids]
    with torch.inference_mode():
        logits = make_model()(torch.tensor([ids])).logits[0].double()
    num_prompt = len(plain.prompt_ids)

    def expected(place: int) -> torch.Tensor:
        row = logits[place - 1].clone()
        if kind == "raw":
            return torch.log_softmax(row, -1)
        if place >= num_prompt:
            for token in set(ids[num_prompt:place]):
                row[token] -= 0.7
        if temperature:
            row[row < row.topk(20).values[-1]] = -torch.inf
            row /= temperature
        return torch.log_softmax(row, -1)

    drafting = llm_with([ids])
    for method in ("none", *METHODS):
        number = 0 if method == "none" else 7
        found = drafting.generate(PROMPT, sampling, SpeculationParams(method, number))[0]
        assert found.token_ids == plain.token_ids
        assert found.logprobs is not None and found.prompt_logprobs is not None
        assert len(found.logprobs) == len(plain.token_ids)
        assert len(found.prompt_logprobs) == num_prompt - 1
        for place, one in enumerate((*found.prompt_logprobs, *found.logprobs), start=1):
            law = expected(place)
            assert one.token_id == ids[place]
            assert one.logprob == pytest.approx(float(law[ids[place]]), abs=1e-4)
            assert one.rank == int((law > law[ids[place]]).sum()) + 1
            top = law.topk(3 if place >= num_prompt else 2)
            assert len(one.top) == len(top.values)
            for (token, value), right in zip(one.top, top.values.tolist(), strict=True):
                assert value == pytest.approx(right, abs=1e-4)
                assert float(law[token]) == pytest.approx(right, abs=1e-4)


def test_prompt_logprobs_in_chunks_are_the_same() -> None:
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
    whole = llm_with().generate(PROMPT * 4, sampling, PLAIN)[0].prompt_logprobs
    parts = llm_with(max_num_batched_tokens=7).generate(PROMPT * 4, sampling, PLAIN)[0]
    assert whole is not None and parts.prompt_logprobs is not None
    assert [one.token_id for one in whole] == [one.token_id for one in parts.prompt_logprobs]
    assert [one.logprob for one in whole] == pytest.approx(
        [one.logprob for one in parts.prompt_logprobs], abs=1e-4
    )


# ------------------------------------------------------------------------------ several texts


def test_n_texts_have_seeds_of_their_own() -> None:
    llm = llm_with()
    sampling = SamplingParams(temperature=1.0, seed=40, max_tokens=12, n=3, ignore_eos=True)
    output = llm.generate(PROMPT, sampling)[0]
    assert [one.seed for one in output.samples] == [40, 41, 42]
    assert output.token_ids == output.samples[0].token_ids
    for one in output.samples:
        alone = SamplingParams(temperature=1.0, seed=one.seed, max_tokens=12, ignore_eos=True)
        assert llm.generate(PROMPT, alone, PLAIN)[0].token_ids == one.token_ids
    assert len({one.token_ids for one in output.samples}) > 1


def test_best_of_keeps_the_likeliest() -> None:
    llm = llm_with()
    options: dict[str, Any] = {"temperature": 1.5, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    every = llm.generate(PROMPT, SamplingParams(n=6, logprobs=0, **options))[0].samples
    best = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, **options))[0]
    ranked = sorted(every, key=lambda one: -one.mean_logprob)
    assert [one.token_ids for one in best.samples] == [one.token_ids for one in ranked[:2]]
    assert best.logprobs is None


def test_a_stream_of_several_texts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a stream has one"):
        llm_with().stream(PROMPT, SamplingParams(n=2))


# ------------------------------------------------------------------------------------ grammars


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["boat", "house"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(r"[a-c]{3,9}-\d\d(x|yy)"),
    "choice": Grammar.choice(["one two three", "one two four", "five"]),
    "lark": Grammar.lark('start: "(" item ("," item)* ")"\nitem: /[a-z]{2,4}/ | start'),
}


def is_of(kind: str, text: str) -> bool:
    if kind == "schema":
        found = json.loads(text)
        return set(found) == {"name", "size", "kind"} and found["kind"] in ("boat", "house")
    if kind == "regex":
        return re.fullmatch(r"[a-c]{3,9}-\d\d(x|yy)", text) is not None
    if kind == "choice":
        return text in ("one two three", "one two four", "five")
    return re.fullmatch(r"[(),a-z]+", text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars_hold_under_every_method(kind: str, temperature: float) -> None:
    pytest.importorskip("llguidance")
    num_whole = 0
    for seed in range(4):
        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=120, grammar=GRAMMARS[kind], logprobs=0
        )
        plain = llm_with().generate(PROMPT, sampling, PLAIN)[0]
        assert plain.finish_reason in ("stop", "length")
        if plain.finish_reason == "stop":
            num_whole += 1
            assert is_of(kind, plain.text), plain.text
        drafting = llm_with([list(plain.prompt_ids) + list(plain.token_ids)])
        for method in METHODS:
            found = drafting.generate(PROMPT, sampling, SpeculationParams(method, 7))[0]
            assert (found.token_ids, found.text, found.finish_reason) == (
                plain.token_ids,
                plain.text,
                plain.finish_reason,
            )
    assert num_whole or kind == "lark" or temperature == 0  # argmax may go in circles


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.regex("(["), "kind regex cannot be compiled"),
        (Grammar.lark("start: nothing"), "kind lark cannot be compiled"),
        (Grammar.json_schema('{"type": "nonsense"}'), "kind json_schema cannot be compiled"),
        (Grammar.json_schema("no json"), "kind json_schema cannot be compiled"),
    ],
)
def test_a_bad_grammar_is_refused_and_hurts_nobody(grammar: Grammar, words: str) -> None:
    pytest.importorskip("llguidance")
    llm = llm_with()
    good = SamplingParams(max_tokens=6)
    outputs = llm.generate([PROMPT, PROMPT], [SamplingParams(grammar=grammar), good])
    assert outputs[0].finish_reason == "error" and words in str(outputs[0].error)
    assert outputs[1].token_ids == llm.generate(PROMPT, good)[0].token_ids


class Fixed(ScriptDrafter):
    """Drafts the same tokens again and again."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__("random", [])
        self._token_ids = token_ids

    def _tree(self, segment: Any, budget: int) -> tuple[list[int], list[int]]:
        found = self._token_ids[:budget]
        return found, list(range(len(found)))


def letters() -> dict[str, int]:
    tokenizer = llm_with().tokenizer
    return {
        letter: tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "xyabno"
    }


@pytest.mark.parametrize(
    "source",
    [
        'start: "x" /[ab]{2}/ rest\nrest: "x" /[ab]+/ | "y" inf\ninf: "a" inf',
        'start: ("x" | "y" inf) start | "b"\ninf: "a" inf',
        'start: ("x" | "y" inf)+\ninf: /[^\\s\\S]/',
    ],
    ids=["no end", "no end, again and again", "empty"],
)
@pytest.mark.parametrize("rule", ["walk", "rejection", "traversal"])
def test_a_draft_that_a_grammar_fails_at_ends_no_text(source: str, rule: str) -> None:
    """Below "y" the grammar cannot go on; it is drafted and never written."""
    pytest.importorskip("llguidance")
    ids = letters()
    sampling = SamplingParams(
        max_tokens=8,
        grammar=Grammar.lark(source),
        logit_bias={ids["x"]: 50, ids["y"]: -20, ids["b"]: -10},
    )
    plain = llm_with().generate(PROMPT, sampling, PLAIN)[0]
    assert plain.finish_reason == "length" and "y" not in plain.text
    llm = LLM(
        target=_target(), drafters={"fixed": Fixed([ids["y"], ids["a"], ids["a"]])}, kv_cache_gb=0.1
    )
    found = llm.generate(PROMPT, sampling, SpeculationParams("fixed", 4, rule))[0]
    assert (found.text, found.finish_reason, found.error) == (plain.text, "length", None)
    assert found.stats.num_draft_tokens > 0
    # Where the text does go there, it ends with one line.
    sampling = dataclasses.replace(sampling, logit_bias={ids["y"]: 50})
    ends = [
        one.generate(PROMPT, sampling, how)[0]
        for one, how in (
            (llm_with(), PLAIN),
            (llm, SpeculationParams("fixed", 4, rule)),
        )
    ]
    for end in ends:
        assert end.text == ends[0].text
        if end.finish_reason == "error":
            assert "the grammar cannot go on" in end.error and len(end.error.splitlines()) == 1


def test_what_the_prompt_repeats_ends_no_grammar() -> None:
    """The same with n-gram drafting, whose drafts are the prompt's own."""
    pytest.importorskip("llguidance")
    ids = letters()
    sampling = SamplingParams(
        max_tokens=12,
        grammar=Grammar.lark('start: ("x" | "y" inf) start | "b"\ninf: "a" inf'),
        logit_bias={ids["x"]: 50, ids["y"]: -20, ids["b"]: -50},
    )
    prompt = "xyaaaxyaaaxyaaaxx" * 2
    plain, drafted = (
        llm_with().generate(prompt, sampling, how)[0]
        for how in (PLAIN, SpeculationParams("ngram", 6))
    )
    assert plain.finish_reason == drafted.finish_reason == "length"
    assert plain.text == drafted.text and drafted.stats.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["walk", "rejection", "block", "traversal"])
def test_a_drafted_end_that_comes_too_soon_ends_no_text(rule: str, temperature: float) -> None:
    """The choice that is drafted is too short for ``min_tokens``: nothing is allowed at its end."""
    pytest.importorskip("llguidance")
    tokenizer, ids = llm_with().tokenizer, letters()
    short = tokenizer("xyes", add_special_tokens=False)["input_ids"]
    sampling = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=20,
        min_tokens=len(short) + 1,
        grammar=Grammar.choice(["xyes", "xno no no no no"]),
        logit_bias={ids["n"]: 60},
    )
    plain = llm_with().generate(PROMPT, sampling, PLAIN)[0]
    llm = LLM(target=_target(), drafters={"fixed": Fixed(short)}, kv_cache_gb=0.1)
    found = llm.generate(PROMPT, sampling, SpeculationParams("fixed", 8, rule))[0]
    assert plain.text == found.text == "xno no no no no"
    assert found.finish_reason == plain.finish_reason


def test_a_grammar_that_nothing_satisfies_ends_its_request_alone() -> None:
    """Allowed ids leave no token that the form allows: said, and the rest of the batch goes on."""
    pytest.importorskip("llguidance")
    llm = llm_with()
    letter = llm.tokenizer("z")["input_ids"][0]
    bad = SamplingParams(grammar=Grammar.regex("a+"), allowed_token_ids=(letter,), max_tokens=8)
    outputs = llm.generate([PROMPT, PROMPT], [bad, SamplingParams(max_tokens=8)])
    assert outputs[0].finish_reason == "error"
    assert "no token is allowed" in str(outputs[0].error)
    assert outputs[1].finish_reason != "error"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_and_plain_requests_in_one_batch_do_not_meet(temperature: float) -> None:
    """Each writes what it writes alone, with drafts that the form allows and others."""
    pytest.importorskip("llguidance")
    prompts = [PROMPT, "seven", PROMPT, "A letter to the harbour"]
    samplings = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, grammar=grammar)
        for i, grammar in enumerate(
            [GRAMMARS["schema"], None, Grammar.regex("[ab]{3}(one|two)+x"), None]
        )
    ]
    alone = [
        llm_with().generate(prompt, sampling, PLAIN)[0]
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    whole = [list(one.prompt_ids) + list(one.token_ids) for one in alone]
    for method in METHODS:
        llm = llm_with(whole)
        found = llm.generate(prompts, samplings, SpeculationParams(method, 7))
        assert [(f.token_ids, f.finish_reason) for f in found] == [
            (one.token_ids, one.finish_reason) for one in alone
        ]


def test_what_a_grammar_forces_is_drafted_for_free() -> None:
    """A method that finds nothing still has the tokens that the form leaves no choice about."""
    pytest.importorskip("llguidance")
    form = Grammar.lark('start: "the harbour library opened its new reading room " /[ab]/')
    sampling = SamplingParams(max_tokens=60, grammar=form)
    plain = llm_with().generate("seven", sampling, PLAIN)[0]
    found = llm_with().generate("seven", sampling, SpeculationParams("ngram", 16))[0]
    assert found.token_ids == plain.token_ids
    assert found.stats.members["grammar"][1] > 0
    assert found.stats.num_verify_steps < plain.stats.num_verify_steps
