"""The default rule: the text is plain decoding's, token for token, whatever is drafted.

All on random models in float32. Plain decoding by the engine is itself held against a slow loop of
whole forward passes, so that a fault of both paths shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling.pick import Picks
from foredraft.types import DraftBatch
from foredraft.verify.reference import walk_reference
from foredraft.verify.walk import walk
from tests.tiny import (
    VOCAB,
    ScriptDrafter,
    decode_slowly,
    engine,
    family_model,
    family_target,
    run,
)

TEMPERATURES = (0.0, 0.3, 1.0, 2.0)
KINDS = ("right", "half", "wrong", "random", "noise", "against")
PLAIN = SpeculationParams(method="none")
_RNG = np.random.default_rng(11)
PROMPTS = [_RNG.integers(3, VOCAB, length).tolist() for length in (1, 3, 17, 40, 5, 5)]


def _sampling(temperature: float, index: int, **more: object) -> SamplingParams:
    options = {"max_tokens": 40, "seed": 100 + index, **more}
    return SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target():
    return family_target("llama")


@pytest.fixture(scope="module")
def plain(target):
    """Plain texts of each prompt, alone in the engine, by temperature."""
    the_engine = engine(target)
    return {
        temperature: [
            run(the_engine, [prompt], _sampling(temperature, i), PLAIN)[0]
            for i, prompt in enumerate(PROMPTS)
        ]
        for temperature in TEMPERATURES
    }


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_plain_decoding_is_the_slow_loop(plain, temperature: float) -> None:
    model = family_model("llama")
    for index, prompt in enumerate(PROMPTS):
        slow, least_lead = decode_slowly(model, prompt, _sampling(temperature, index))
        assert plain[temperature][index] == slow or least_lead < 1e-3


@pytest.mark.parametrize("batch", ["alone", "ragged"])
@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_text_is_plain_decodings(
    target, plain, temperature: float, kind: str, width: int, batch: str
) -> None:
    texts = [p + t for p, t in zip(PROMPTS, plain[temperature], strict=True)]
    drafter = ScriptDrafter(kind, texts, width, seed=5, ragged=batch == "ragged")
    the_engine = engine(target, {"script": drafter}, max_num_requests=4)
    speculation = SpeculationParams("script", 6)
    samplings = [_sampling(temperature, i) for i in range(len(PROMPTS))]
    if batch == "alone":
        texts_now = [
            run(the_engine, [prompt], samplings[i], speculation)[0]
            for i, prompt in enumerate(PROMPTS)
        ]
    else:
        texts_now = run(the_engine, PROMPTS, samplings, speculation, [0, 0, 2, 3, 9, 9])
    assert texts_now == plain[temperature]


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
def test_right_drafts_are_accepted_and_wrong_ones_are_not(target, plain, width: int) -> None:
    """A test of the test: the scripts do draft, and acceptance is what the script says."""
    for temperature in TEMPERATURES:
        texts = [p + t for p, t in zip(PROMPTS, plain[temperature], strict=True)]
        for kind, expected in (("right", 1.0), ("wrong", 0.0), ("against", 0.0)):
            drafter = ScriptDrafter(kind, texts, width)
            the_engine = engine(target, {"script": drafter})
            name = the_engine.add(
                PROMPTS[3], _sampling(temperature, 3), SpeculationParams("script", 6)
            )
            state = the_engine.request_state(name)
            while the_engine.has_work:
                the_engine.step()
            stats = state.stats
            assert stats.num_draft_tokens > 0
            if width == 1:
                assert stats.acceptance_rate == expected
            else:
                assert (stats.num_accepted_tokens > 0) == (expected > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_neox", "mixtral"])
def test_other_families(family: str, temperature: float) -> None:
    target = family_target(family)
    samplings = [_sampling(temperature, i, ignore_eos=True) for i in range(len(PROMPTS))]
    texts = [run(engine(target), [p], s, PLAIN)[0] for p, s in zip(PROMPTS, samplings, strict=True)]
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    for width in (1, 3):
        drafter = ScriptDrafter("half", whole, width, ragged=True)
        the_engine = engine(target, {"script": drafter}, max_num_batched_tokens=16)
        assert run(the_engine, PROMPTS, samplings, SpeculationParams("script", 6)) == texts


def test_filters_keep_the_identity(target) -> None:
    """Each request of one batch has filters of its own, and a method of its own."""
    samplings = [
        SamplingParams(temperature=1.0, top_k=5, seed=1, max_tokens=30),
        SamplingParams(temperature=1.5, top_p=0.8, seed=2, max_tokens=30),
        SamplingParams(temperature=0.8, min_p=0.1, seed=3, max_tokens=30),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=4, max_tokens=30),
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=1e-6, seed=9, max_tokens=30),
    ]
    texts = [run(engine(target), [p], s, PLAIN)[0] for p, s in zip(PROMPTS, samplings, strict=True)]
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    the_engine = engine(
        target,
        {"half": ScriptDrafter("half", whole, 2), "noise": ScriptDrafter("noise", whole, 3)},
    )
    methods = ["half", "noise", "ngram", "none", "half", "ngram"]
    speculations = [SpeculationParams(method, 5) for method in methods]
    assert run(the_engine, PROMPTS, samplings, speculations) == texts


def test_seed_fixes_the_text_wherever_it_runs(target) -> None:
    """Alone, after fifty others, and in every place of a batch; other seeds give other texts."""
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=30)
    the_engine = engine(target)
    alone = run(the_engine, [PROMPTS[2]], sampling, PLAIN)[0]
    for i in range(50):
        run(the_engine, [PROMPTS[0]], SamplingParams(temperature=1.0, seed=i, max_tokens=2), PLAIN)
    for place in (0, 5):
        prompts = list(PROMPTS)
        prompts[place] = PROMPTS[2]
        samplings = [SamplingParams(temperature=1.0, seed=i, max_tokens=9) for i in range(6)]
        samplings[place] = sampling
        for speculation in (PLAIN, SpeculationParams("ngram", 5)):
            assert run(the_engine, prompts, samplings, speculation)[place] == alone
    others = {
        tuple(run(the_engine, [PROMPTS[2]], SamplingParams(temperature=1.0, seed=s), PLAIN)[0])
        for s in range(10)
    }
    assert len(others) >= 9


def test_walk_is_the_slow_walk() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        trees, picks, rows = [], [], [0]
        for _ in range(int(rng.integers(1, 5))):
            num_nodes = int(rng.integers(0, 8))
            has_rows = num_nodes > 0 or rng.random() < 0.7
            parents = [int(rng.integers(0, k + 1)) for k in range(num_nodes)]
            trees.append((rng.integers(0, 3, num_nodes), np.array(parents, dtype=np.int64)))
            picks.append(rng.integers(0, 3, 1 + num_nodes if has_rows else 0))
            rows.append(rows[-1] + len(picks[-1]))
        sizes = [len(tokens) for tokens, _ in trees]
        drafts = DraftBatch(
            np.concatenate([t for t, _ in trees]).astype(np.int64),
            np.concatenate([p for _, p in trees]).astype(np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )
        flat = np.concatenate(picks).astype(np.int64)
        verdict = walk(drafts, Picks(flat, np.ones(len(flat), dtype=bool)), np.array(rows))
        for index, (tokens, parents) in enumerate(trees):
            path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
            emitted = verdict.token_ids[
                verdict.token_offsets[index] : verdict.token_offsets[index + 1]
            ]
            if rows[index] == rows[index + 1]:
                assert len(emitted) == 0
                continue
            slow_path, slow_tokens = walk_reference(tokens, parents, picks[index])
            assert path.tolist() == list(slow_path)
            assert emitted.tolist() == list(slow_tokens)
