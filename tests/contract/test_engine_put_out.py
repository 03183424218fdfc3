"""Every feature through a life with interruptions: put out, begun again, begun from others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.engine import engine as engine_module
from foredraft.engine.engine import Engine
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import VOCAB, ScriptDrafter, engine, family_target, run_to_end

PROMPTS = [[5 + i, *range(3, 32), 40 + i] for i in range(3)]
LAYOUTS = {"contiguous": {}, "blocks": {"kv_layout": "blocks"}}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias and bans": {"logit_bias": {7: 4.0, 9: -3.0}, "bad_token_ids": (11, (12, 13))},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": tuple(range(3, 90))},
    "filters": {"top_k": 20, "min_p": 0.02, "typical_p": 0.95},
    "processor": {
        "logits_processors": (lambda ids, scores: scores + 0.1 * (ids[0, -1] % 7),),
    },
    "logprobs": {"logprobs": 3, "logprobs_kind": "processed"},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
}


def lives(
    feature: str, temperature: float, layout: str, method: str
) -> tuple[list[Any], list[Any], Engine]:
    """The same requests alone in plain decoding, and drafted under memory for four in five."""
    target = family_target("llama")
    samplings = [
        SamplingParams(
            temperature,
            seed=i,
            max_tokens=50,
            **{"ignore_eos": True, **FEATURES[feature]},
        )
        for i in range(3)
    ]
    plain = [
        run_to_end(engine(target), [prompt], one, SpeculationParams("none"))[0]
        for prompt, one in zip(PROMPTS, samplings, strict=True)
    ]
    known = [prompt + list(one.ids) for prompt, one in zip(PROMPTS, plain, strict=True)]
    drafter = ScriptDrafter("half", known, 1 if method == "chain" else 3, seed=7, ragged=True)
    probe = engine(target)
    bound = 160 * probe.cache.bytes_per_row / 2**30
    the_engine = engine(
        target,
        {method: drafter},
        max_num_requests=3,
        max_num_batched_tokens=16,
        reuse_prefixes=True,
        kv_cache_gb=bound,
        **LAYOUTS[layout],
    )
    found = run_to_end(the_engine, PROMPTS, samplings, SpeculationParams(method, 6))
    return plain, found, the_engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "tree"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_being_put_out_changes_nothing(
    feature: str, layout: str, method: str, temperature: float
) -> None:
    plain, found, the_engine = lives(feature, temperature, layout, method)
    assert the_engine.scheduler.num_preemptions > 0
    for before, after in zip(plain, found, strict=True):
        assert after.ids == before.ids and after.finish_reason == before.finish_reason
        for mine, theirs in (
            (after.logprobs, before.logprobs),
            (after.prompt_logprobs, before.prompt_logprobs),
        ):
            assert len(mine) == len(theirs)
            for one, other in zip(mine, theirs, strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    if feature == "min_tokens":
        assert all(30 <= len(one.ids) < 50 for one in found)
    if feature == "prompt_logprobs":
        assert [len(one.prompt_logprobs) for one in found] == [len(p) - 1 for p in PROMPTS]
    the_engine.scheduler.drop_prefixes()
    assert the_engine.cache.bytes_in_use == 0


def test_a_shared_beginning_lets_more_run_in_blocks() -> None:
    """Eight requests of one beginning under a bound that holds five of their own."""
    target = family_target("llama")
    shared = [3 + i % (VOCAB - 3) for i in range(150)]
    prompts = [[*shared, 5 + i, 9] for i in range(8)]
    most = {}
    for layout, options in LAYOUTS.items():
        bound = 900 * engine(target).cache.bytes_per_row / 2**30
        the_engine = engine(
            target, max_num_requests=8, reuse_prefixes=True, kv_cache_gb=bound, **options
        )
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        for prompt in prompts:
            the_engine.add(prompt, sampling, SpeculationParams("none"))
        most[layout] = 0
        while the_engine.has_work:
            the_engine.step()
            most[layout] = max(most[layout], len(the_engine.scheduler.running))
            assert the_engine.cache.bytes_in_use <= the_engine.max_kv_bytes
    assert most["contiguous"] == 5 and most["blocks"] == 8


def test_what_is_shared_is_not_counted_again_for_who_comes() -> None:
    """Under a bound of ten blocks, four requests that share nine of them run at once."""
    target = family_target("llama")
    shared = [3 + i % (VOCAB - 3) for i in range(150)]
    bound = 320 * engine(target).cache.bytes_per_row / 2**30
    the_engine = engine(
        target, max_num_requests=4, reuse_prefixes=True, kv_cache_gb=bound, kv_layout="blocks"
    )
    for last in range(4):
        the_engine.add([*shared, 5 + last], SamplingParams(max_tokens=4, ignore_eos=True))
    most = 0
    while the_engine.has_work:
        the_engine.step()
        most = max(most, len(the_engine.scheduler.running))
    assert most == 4


@pytest.mark.parametrize("options", [{}, {"kv_layout": "blocks"}, {"attention": "flex"}])
def test_a_small_bound_still_holds_a_small_request(options: dict[str, Any]) -> None:
    target = family_target("llama")
    bound = 600 * engine(target).cache.bytes_per_row / 2**30
    the_engine = engine(target, max_num_requests=16, kv_cache_gb=bound, **options)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    ended = run_to_end(the_engine, [[5, 6, 7]] * 6, sampling, SpeculationParams("none"))
    assert all(len(one.ids) == 30 for one in ended)


@pytest.mark.parametrize("place", ["shape", "verify"])
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_runs_out_behind_the_pass_is_eased_too(
    place: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = family_target("llama")
    sampling = SamplingParams(1.0, seed=3, max_tokens=12, ignore_eos=True, presence_penalty=0.3)
    plain = run_to_end(engine(target), PROMPTS, sampling, SpeculationParams("none"))
    real, calls = getattr(engine_module, place), 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 7):
            raise kind("cannot allocate memory")
        return real(*args, **options)

    monkeypatch.setattr(engine_module, place, fail)
    known = [prompt + list(one.ids) for prompt, one in zip(PROMPTS, plain, strict=True)]
    drafter = ScriptDrafter("half", known, 3, seed=7, ragged=True)
    the_engine = engine(target, {"tree": drafter}, max_num_requests=3)
    found = run_to_end(the_engine, PROMPTS, sampling, SpeculationParams("tree", 6))
    assert calls > 7 and [one.ids for one in found] == [one.ids for one in plain]


def test_a_long_queue_behind_one_beginning_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a beginning that is being computed is not asked again and again."""
    target = family_target("llama")
    the_engine = engine(target, max_num_requests=4, max_num_batched_tokens=8, reuse_prefixes=True)
    shared = [3 + i % (VOCAB - 3) for i in range(200)]
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for i in range(1000):
        the_engine.add([*shared, 5 + i % 50], sampling, SpeculationParams("none"))
    asked = 0
    waits = the_engine.scheduler._waits_for_prefix

    def count(state: Any) -> bool:
        nonlocal asked
        asked += 1
        return waits(state)

    monkeypatch.setattr(the_engine.scheduler, "_waits_for_prefix", count)
    for _ in range(5):
        the_engine.step()
    assert 0 < asked <= 5 * 70


def test_odd_arguments_are_said_or_taken() -> None:
    import numpy as np

    from foredraft.errors import InvalidRequestError

    the_engine = engine(family_target("llama"))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for name in (["a"], 5, ""):
        with pytest.raises(InvalidRequestError, match="allowed is a text of a character"):
            the_engine.add([5], sampling, request_id=name)  # type: ignore[arg-type]
    the_engine.add([5], sampling, deadline_s=10**400, priority=np.int64(1))
    the_engine.add([5], sampling, deadline_s=np.float32(100))
    while the_engine.has_work:
        the_engine.step()
    tiny = SamplingParams(max_tokens=4, ignore_eos=True, repetition_penalty=1e-300)
    ended = run_to_end(the_engine, [[5, 6]], tiny, SpeculationParams("none"))
    assert ended[0].error is None and len(ended[0].ids) == 4
