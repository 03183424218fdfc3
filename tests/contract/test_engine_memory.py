"""Keys and values: bounded, counted, given back, and never mixed up when slots are used again."""

from __future__ import annotations

import dataclasses
import os
import sys

import numpy as np
import psutil
import pytest
import torch

from foredraft.engine.engine import Engine
from foredraft.errors import InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import DraftBatch, Segment, StepPlan
from tests.tiny import (
    CONTEXT,
    VOCAB,
    ScriptDrafter,
    engine,
    family_model,
    family_target,
    run,
    table_target,
)

PLAIN = SpeculationParams("none")
SAMPLING = SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True)
_RNG = np.random.default_rng(4)
PROMPTS = [_RNG.integers(3, VOCAB, length).tolist() for length in (1, 30, 8, 17, 60, 3)]


@pytest.fixture(scope="module")
def target():
    return family_target("llama")


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    return [run(engine(target), [prompt], SAMPLING, PLAIN)[0] for prompt in PROMPTS]


def gigabytes(target, num_rows: float) -> float:
    """A bound that holds so many tokens, and not one more."""
    return (num_rows + 0.5) * engine(target).cache.bytes_per_row / 2**30


def scripted(texts: list[list[int]], width: int = 2) -> dict[str, ScriptDrafter]:
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    return {"half": ScriptDrafter("half", whole, width)}


def test_bytes_in_use_stay_below_the_bound(target, texts) -> None:
    """Whoever does not fit waits; memory is counted at every step, and is zero in the end."""
    bound = gigabytes(target, 130)
    the_engine = engine(target, scripted(texts), kv_cache_gb=bound, max_num_requests=6)
    names = [the_engine.add(p, SAMPLING, SpeculationParams("half", 6)) for p in PROMPTS]
    states = [the_engine.request_state(name) for name in names]
    most = most_running = 0
    while the_engine.has_work:
        the_engine.step()
        cache = the_engine.cache
        running = list(the_engine.scheduler.running.values())
        assert cache.bytes_in_use <= bound * 2**30
        # Rows of committed tokens, and at most the nodes of the last draft behind them.
        rows = sum(state.num_cached for state in running)
        assert rows <= cache.bytes_in_use // cache.bytes_per_row <= rows + 7 * len(running)
        assert cache.num_slots - cache.num_free_slots == len(running)
        most = max(most, cache.bytes_in_use)
        most_running = max(most_running, len(running))
    assert [state.output_ids.tolist() for state in states] == texts
    assert most > bound * 2**30 / 2 and most_running > 1
    assert the_engine.scheduler.num_preemptions > 0  # it was not enough for all to the end
    assert the_engine.cache.bytes_in_use == 0
    assert the_engine.cache.num_free_slots == 6


def test_no_row_is_written_beyond_what_was_reserved(target, texts) -> None:
    """Draft nodes lie behind the root, and never past prompt and ``max_tokens``."""
    the_engine = engine(target, scripted(texts, 3), max_num_requests=6)
    most: dict[str, int] = {}
    forward = the_engine.runner.forward

    def watched(plan: StepPlan, drafts: DraftBatch):
        for index, segment in enumerate(plan.segments):
            end = segment.start + segment.num_rows + int(drafts.num_nodes[index])
            name = segment.request.request_id
            most[name] = max(most.get(name, 0), end)
            assert end < len(segment.request.prompt_ids) + segment.request.max_tokens
        return forward(plan, drafts)

    the_engine.runner.forward = watched  # type: ignore[method-assign]
    for num in (6, 128):
        assert run(the_engine, PROMPTS, SAMPLING, SpeculationParams("half", num)) == texts
    assert len(most) == 12


def test_a_request_that_can_never_fit_is_refused(target) -> None:
    the_engine = engine(target, kv_cache_gb=gigabytes(target, 40))
    words = r"prompt and max_tokens come to 50 tokens; the KV memory bound holds 40.*kv_cache_gb"
    waiting = the_engine.add([5] * 20, SAMPLING, PLAIN)
    with pytest.raises(InvalidRequestError, match=words):
        the_engine.add([5] * 30, SAMPLING, PLAIN)
    assert waiting in the_engine.scheduler and "request-1" not in the_engine.scheduler
    the_engine.add([5] * 20, SAMPLING, PLAIN)
    while the_engine.has_work:
        the_engine.step()
    nothing = engine(target, kv_cache_gb=1e-9)
    with pytest.raises(InvalidRequestError, match="the KV memory bound holds 0"):
        nothing.add([5], SAMPLING, PLAIN)
    assert not nothing.has_work


def test_slots_used_again_keep_texts_right(target, texts) -> None:
    """One and two slots for many requests of different lengths, long ones before short ones."""
    for num_slots in (1, 2):
        the_engine = engine(target, scripted(texts), max_num_requests=num_slots)
        order = [4, 0, 1, 5, 4, 2, 0, 3]
        outputs = run(
            the_engine,
            [PROMPTS[i] for i in order],
            SAMPLING,
            [SpeculationParams(m, 6) for m in ("half", "none", "ngram", "half") * 2],
        )
        assert outputs == [texts[i] for i in order]
        assert the_engine.cache.bytes_in_use == 0


def test_cancelling_in_mid_flight_frees(target, texts) -> None:
    """During the prompt, during decoding, and while it waits; the next one finds a clean slot."""
    drafters = scripted(texts)
    the_engine = engine(target, drafters, max_num_requests=1, max_num_batched_tokens=7)
    for num_steps in (0, 1, 3, 9, 12):
        victim = the_engine.add(PROMPTS[4], SAMPLING, SpeculationParams("half", 6))
        waiting = the_engine.add(PROMPTS[1], SAMPLING, SpeculationParams("half", 6))
        heir = the_engine.add(PROMPTS[2], SAMPLING, SpeculationParams("half", 6))
        state = the_engine.request_state(heir)
        for _ in range(num_steps):
            the_engine.step()
        assert the_engine.abort(victim) and the_engine.abort(waiting)
        assert not the_engine.abort(victim)
        assert the_engine.cache.num_free_slots == 1 and the_engine.cache.bytes_in_use == 0
        while the_engine.has_work:
            the_engine.step()
        assert state.output_ids.tolist() == texts[2]
        assert drafters["half"].forgotten[-3:] == [victim, waiting, heir]


def test_a_waiting_request_does_not_hold_up_a_running_one(target, texts) -> None:
    """The first in the queue does not fit yet; who runs goes on, and order is kept."""
    the_engine = engine(target, kv_cache_gb=gigabytes(target, 85))
    states, ends = {}, []
    for index in (2, 4, 0):
        name = the_engine.add(PROMPTS[index], SAMPLING, PLAIN, request_id=str(index))
        states[index] = the_engine.request_state(name)
    while the_engine.has_work:
        for delta in the_engine.step():
            if delta.finish_reason:
                ends.append(delta.request_id)
    assert ends == ["2", "4", "0"]  # the small last one does not overtake
    assert all(states[i].output_ids.tolist() == texts[i] for i in states)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_is_a_fresh_prefill_after_every_commit(family: str) -> None:
    """Rows of committed tokens, after accepted chains and trees, equal those of one plain pass."""
    target = family_target(family)
    model = family_model(family)
    sampling = dataclasses.replace(SAMPLING, max_tokens=16)
    texts = [run(engine(target), [p], sampling, PLAIN)[0] for p in PROMPTS[:3]]
    whole = [p + t for p, t in zip(PROMPTS[:3], texts, strict=True)]
    for width in (1, 3):
        the_engine = engine(
            target, {"half": ScriptDrafter("half", whole, width)}, max_num_batched_tokens=16
        )
        for prompt in PROMPTS[:3]:
            the_engine.add(prompt, sampling, SpeculationParams("half", 6))
        num_checked = 0
        while the_engine.has_work:
            the_engine.step()
            for state in the_engine.scheduler.running.values():
                if not state.is_prefilling:
                    # All but the root of the next step, whatever way the tokens came.
                    assert state.num_cached == state.num_tokens - 1
                if state.num_cached:
                    check_rows(the_engine, model, state)
                    num_checked += 1
        assert num_checked > 10


@torch.inference_mode()
def check_rows(the_engine: Engine, model, state) -> None:
    segment: Segment = state.segment(1, is_decode=True)
    ids = torch.from_numpy(segment.token_ids[: state.num_cached].copy())[None]
    cached = model(ids, use_cache=True).past_key_values
    for layer in range(len(the_engine.cache.layers)):
        keys = the_engine.cache.keys(layer)[state.slot, : state.num_cached]
        values = the_engine.cache.values(layer)[state.slot, : state.num_cached]
        expected_keys = cached.layers[layer].keys[0].transpose(0, 1)
        expected_values = cached.layers[layer].values[0].transpose(0, 1)
        num = min(len(expected_keys), len(keys))  # their sliding layers keep the last rows only
        torch.testing.assert_close(keys[-num:], expected_keys[-num:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values[-num:], expected_values[-num:], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_resident_memory_falls_when_requests_end() -> None:
    """A long text fills its slot; the engine holds what is in use, and no more, after it ended."""
    from foredraft.model.kv_cache import LayerShape

    process = psutil.Process(os.getpid())
    base = table_target(np.random.default_rng(0).normal(size=(30, 30)), max_model_len=2048)
    target = dataclasses.replace(base, layers=(LayerShape(16, 128, 128),) * 4)

    def write(plan: StepPlan, drafts: DraftBatch):
        for segment in plan.segments:
            end = segment.start + segment.num_rows
            for layer in range(4):
                for store in (the_engine.cache.keys(layer), the_engine.cache.values(layer)):
                    store[segment.slot, segment.start : end] = 1.0
        return forward(plan, drafts)

    the_engine = engine(target, max_num_batched_tokens=4096, kv_cache_gb=4.0)
    forward = the_engine.runner.forward
    the_engine.runner.forward = write  # type: ignore[method-assign]
    mebibyte = 1 << 20
    sampling = SamplingParams(max_tokens=4)
    before = process.memory_info().rss
    for _ in range(3):
        for length in (1500, 500, 1000):
            the_engine.add([5] * length, sampling, PLAIN)
        the_engine.step()
        in_use = the_engine.cache.bytes_in_use
        assert in_use == 3000 * 4 * 16 * 256 * 4
        assert process.memory_info().rss - before > 0.9 * in_use
        while the_engine.has_work:
            the_engine.step()
        assert the_engine.cache.bytes_in_use == 0
        assert process.memory_info().rss - before < 30 * mebibyte


def test_the_cache_covers_the_context(target) -> None:
    """A request of the whole context runs, with drafts, in the last slot too."""
    the_engine = engine(target, max_num_requests=2)
    sampling = dataclasses.replace(SAMPLING, max_tokens=None)
    prompt = PROMPTS[4] * 4
    outputs = run(the_engine, [prompt, prompt], sampling, SpeculationParams("ngram", 128))
    assert outputs[0] == outputs[1] and len(prompt) + len(outputs[0]) == CONTEXT
