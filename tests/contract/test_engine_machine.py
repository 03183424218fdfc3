"""Random lives of an engine: whatever comes, goes, rests and is put out, every text is its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foredraft.engine.engine import Engine
from foredraft.model.kv_blocks import BLOCK_ROWS
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import (
    VOCAB,
    ScriptDrafter,
    engine,
    family_target,
    run,
    table_target,
    table_text,
)

_RNG = np.random.default_rng(8)
_SHARED = _RNG.integers(3, VOCAB, 70).tolist()
PROMPTS = [
    *(_RNG.integers(3, VOCAB, length).tolist() for length in (1, 9, 33)),
    _SHARED[:40],
    _SHARED,
    [*_SHARED[:64], *_RNG.integers(3, VOCAB, 5).tolist()],
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.8, "logprobs": 1},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9, "min_tokens": 5},
    {"repetition_penalty": 1.3, "reuse_prefix": False},
]
METHODS = ("none", "half", "tree", "ngram", "suffix", "auto")
NUM_ROWS = 190


@functools.cache
def _target() -> Any:
    return family_target("llama")


@functools.cache
def plain(prompt: int, sampling: int, max_tokens: int) -> list[int]:
    """What the request writes alone, without a draft."""
    params = SamplingParams(max_tokens=max_tokens, **SAMPLINGS[sampling])
    return run(engine(_target()), [PROMPTS[prompt]], params, SpeculationParams("none"))[0]


class EngineLife(RuleBasedStateMachine):
    """Requests come, run, rest, run out of time and are called off, in memory for few of them."""

    @initialize(
        reuse=st.booleans(),
        num_requests=st.integers(1, 4),
        chunk=st.sampled_from([7, 64]),
        layout=st.sampled_from(["contiguous", "blocks"]),
    )
    def start(self, reuse: bool, num_requests: int, chunk: int, layout: str) -> None:
        self.num_rows = NUM_ROWS
        if layout == "blocks":
            self.num_rows += -self.num_rows % BLOCK_ROWS
        texts = [p + plain(i, s, 20) for i, p in enumerate(PROMPTS) for s in range(2)]
        self.engine: Engine = engine(
            _target(),
            {
                "half": ScriptDrafter("half", texts, 1, seed=1, ragged=True),
                "tree": ScriptDrafter("half", texts, 3, seed=2, ragged=True),
            },
            max_num_requests=num_requests,
            max_num_batched_tokens=chunk,
            reuse_prefixes=reuse,
            kv_layout=layout,
            kv_cache_gb=(self.num_rows + 0.5) * _row_bytes() / 2**30,
        )
        assert NUM_ROWS <= self.engine.scheduler.max_rows < NUM_ROWS + BLOCK_ROWS
        self.open: dict[str, Any] = {}
        self.expected: dict[str, list[int]] = {}
        self.deltas: dict[str, list[int]] = {}

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_tokens=st.sampled_from([5, 11, 20]),
        method=st.sampled_from(METHODS),
        number=st.sampled_from([1, 5, "auto"]),
        priority=st.integers(-1, 1),
    )
    def add(
        self,
        prompt: int,
        sampling: int,
        max_tokens: int,
        method: str,
        number: int | str,
        priority: int,
    ) -> None:
        name = self.engine.add(
            PROMPTS[prompt],
            SamplingParams(max_tokens=max_tokens, **SAMPLINGS[sampling]),
            SpeculationParams(method, 0 if method == "none" else number),
            priority=priority,
            deadline_s=1e6,
        )
        self.open[name] = self.engine.request_state(name)
        self.expected[name] = plain(prompt, sampling, max_tokens)
        self.deltas[name] = []

    @rule(num=st.integers(1, 6))
    def step(self, num: int) -> None:
        for _ in range(num):
            self._step()

    @rule(number=st.integers(0, 99))
    def abort(self, number: int) -> None:
        name = self._any(number)
        if name is None:
            return
        state = self.open.pop(name)
        assert self.engine.abort(name)
        written = state.output_ids.tolist()
        assert written == self.expected[name][: len(written)]

    @rule(number=st.integers(0, 99))
    def pause_or_resume(self, number: int) -> None:
        name = self._any(number)
        if name is None:
            return
        if self.open[name].is_paused:
            self.engine.resume(name)
        else:
            self.engine.pause(name)

    @rule(number=st.integers(0, 99))
    def run_out_of_time(self, number: int) -> None:
        name = self._any(number)
        if name is None:
            return
        self.open[name].deadline = 0.0
        self._step()
        assert name not in self.open

    @rule()
    def forget_beginnings(self) -> None:
        self.engine.scheduler.drop_prefixes()

    @invariant()
    def memory_is_bounded_and_counted(self) -> None:
        if not hasattr(self, "engine"):
            return
        cache, scheduler = self.engine.cache, self.engine.scheduler
        assert cache.bytes_in_use <= self.num_rows * cache.bytes_per_row
        used = len(scheduler.running) + scheduler.prefixes.num_retained
        assert cache.num_slots - cache.num_free_slots == used
        slots = [state.slot for state in scheduler.running.values()]
        assert len(set(slots)) == len(slots) and None not in slots

    def _any(self, number: int) -> str | None:
        """One of those that are here.

        How far requests are depends on the clock, since ``auto`` does; what hypothesis draws must
        not, or it could not come back to an example.
        """
        names = sorted(self.open)
        return names[number % len(names)] if names else None

    def _step(self) -> None:
        for delta in self.engine.step():
            name = delta.request_id
            assert name in self.open
            self.deltas[name] += delta.token_ids
            expected = self.expected[name]
            assert self.deltas[name] == expected[: len(self.deltas[name])]
            if delta.finish_reason is None:
                continue
            state = self.open.pop(name)
            assert state.output_ids.tolist() == self.deltas[name]
            if delta.finish_reason != "deadline":
                assert self.deltas[name] == expected

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.open):
            self.engine.resume(name)
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.open and not self.engine.has_work
        self.engine.scheduler.drop_prefixes()
        assert self.engine.cache.bytes_in_use == 0  # no row, or block, is held for nobody
        assert self.engine.cache.num_free_slots == self.engine.cache.num_slots
        assert not self.engine.controller._requests


@functools.cache
def _row_bytes() -> int:
    return engine(_target()).cache.bytes_per_row


EngineLife.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
TestEngineLife = EngineLife.TestCase


@pytest.mark.parametrize("layout", ["contiguous", "blocks"])
def test_no_slot_or_block_is_lost_in_ten_thousand_operations(layout: str) -> None:
    """Random adds, steps, cancels and rests on a target that costs nothing; counted throughout."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(50, 50)).astype(np.float32)
    num_rows = 400
    if layout == "blocks":
        num_rows += -num_rows % BLOCK_ROWS
    the_engine = engine(
        table_target(table),
        kv_cache_gb=(num_rows + 0.5) * 8 / 2**30,
        max_num_requests=5,
        reuse_prefixes=True,
        max_num_batched_tokens=32,
        kv_layout=layout,
    )
    assert 400 <= the_engine.scheduler.max_rows < 400 + BLOCK_ROWS
    states: dict[str, Any] = {}
    expected: dict[str, list[int]] = {}
    num_ended = 0
    for number in range(10_000):
        choice = rng.random()
        if choice < 0.12 and len(states) < 40:
            length = int(rng.choice([1, 5, 40, 90]))
            prompt = [int(t) for t in (np.arange(length) * int(rng.integers(1, 3))) % 50]
            sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=12)
            name = the_engine.add(
                prompt,
                sampling,
                SpeculationParams("ngram", int(rng.integers(1, 6))),
                priority=int(rng.integers(-1, 2)),
            )
            states[name] = the_engine.request_state(name)
            expected[name] = table_text(table, prompt, sampling, 12)
        elif choice < 0.15 and states:
            name = sorted(states)[int(rng.integers(len(states)))]
            assert the_engine.abort(name)
            del states[name]
        elif choice < 0.18 and states:
            name = sorted(states)[int(rng.integers(len(states)))]
            states[name].is_paused = not states[name].is_paused
        else:
            for delta in the_engine.step():
                if delta.finish_reason is not None:
                    state = states.pop(delta.request_id)
                    assert state.output_ids.tolist() == expected.pop(delta.request_id)
                    num_ended += 1
        scheduler, cache = the_engine.scheduler, the_engine.cache
        assert cache.bytes_in_use <= num_rows * cache.bytes_per_row
        used = len(scheduler.running) + scheduler.prefixes.num_retained
        assert cache.num_slots - cache.num_free_slots == used
    assert num_ended > 300
    assert the_engine.scheduler.num_preemptions > 10
    for name in list(states):
        the_engine.abort(name)
    the_engine.scheduler.drop_prefixes()
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots
    assert the_engine.cache.bytes_in_use == 0
