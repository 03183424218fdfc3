"""Recorded passes: what is played again reads the new step and nothing of the old one.

There is no CUDA graph on a CPU. Its stand-in notes down every operation that a pass runs, with the
very tensors it ran on, and plays by running those operations again: like a graph, it never runs
Python again, so whatever a step decided outside of its tensors is stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foredraft.engine.engine import Engine
from foredraft.model.graphs import MAX_GRAPHS, MAX_ROWS, Outputs, PassGraphs
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import VOCAB, ScriptDrafter, engine, family_target, run


class Tape(TorchDispatchMode):
    """Notes operations down; plays them again into the tensors they first wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.note(func, args, kwargs or {})

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    def play(self) -> None:
        for func, args, kwargs, out in self.operations:
            new = func(*args, **kwargs)
            for mine, found in zip(pytree.tree_leaves(out), pytree.tree_leaves(new), strict=True):
                if isinstance(mine, torch.Tensor) and mine.data_ptr() != found.data_ptr():
                    mine.copy_(found)


tapes: list[Tape] = []


def record_tape(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    tape = Tape()
    tapes.append(tape)
    try:
        with tape:
            outputs = run()
    finally:
        tapes.pop()

    def play() -> Outputs:
        tape.play()
        return outputs

    return play


@pytest.fixture(autouse=True)
def attention_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where it is one kernel; PyTorch would trace the uncompiled one."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        if not tapes:
            return flex.flex_attention(*args, **kwargs)
        with _disable_current_modes():
            return tapes[-1].note(flex.flex_attention, args, kwargs)

    monkeypatch.setattr("foredraft.model.paged_attention._call", lambda device: attention)


PROMPTS = [np.random.default_rng(i).integers(3, VOCAB, 9 + 40 * i).tolist() for i in range(5)]
SAMPLINGS = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=i)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.0))
]


def graphs_of(an_engine: Engine) -> PassGraphs:
    graphs = an_engine.runner.graphs
    assert graphs is not None
    return graphs


def recording_engine(family: str, known: list[list[int]], children: int) -> Engine:
    drafters = {"scripted": ScriptDrafter("half", known, children, seed=7, ragged=True)}
    made = engine(
        family_target(family),
        drafters,
        max_num_requests=3,
        max_num_batched_tokens=64,
        attention="flex",
        cuda_graphs="on",
    )
    graphs_of(made)._record = record_tape
    return made


@pytest.mark.parametrize(("family", "children"), [("llama", 3), ("gemma3", 3), ("gpt_oss", 1)])
def test_played_passes_write_what_plain_ones_write(family: str, children: int) -> None:
    """Windows, soft caps and sinks; requests that come and go; chains and trees of every size."""
    plain_way = SpeculationParams("none")
    plain = run(engine(family_target(family)), PROMPTS, SAMPLINGS, plain_way)
    known = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    made = recording_engine(family, known, children)
    for method, number in (("scripted", 6), ("none", 0), ("scripted", 3)):
        way = SpeculationParams(method, number)
        assert run(made, PROMPTS, SAMPLINGS, way, arrivals=[0, 0, 1, 4, 6]) == plain
    graphs = graphs_of(made)
    assert graphs.is_able and graphs.num_graphs >= 4


def test_hidden_states_are_those_of_the_step() -> None:
    """They are handed out for the step's own rows, and stay as they are when others are played."""
    target = family_target("llama")
    states: list[list[torch.Tensor]] = []
    for options in ({}, {"attention": "flex", "cuda_graphs": "on"}):
        made = engine(target, **options)
        made.runner.hidden_layers = (0, 2)
        if options:
            graphs_of(made)._record = record_tape
        found: list[torch.Tensor] = []
        forward = made.runner.forward

        def keep(plan: Any, drafts: Any, forward: Any = forward, found: Any = found) -> Any:
            out = forward(plan, drafts)
            assert all(len(h) == out.row_offsets[-1] for h in out.hidden_states.values())
            found += [out.logits, *out.hidden_states.values()]
            return out

        made.runner.forward = keep  # type: ignore[method-assign]
        sampling = SamplingParams(max_tokens=10, ignore_eos=True)
        for prompt in PROMPTS[:3]:
            made.add(prompt, sampling, SpeculationParams("none"))
        while made.has_work:
            made.runner.hidden_layers = (0, 2)
            made.step()
        states.append(found)
    assert len(states[0]) == len(states[1]) > 20
    for expected, got in zip(*states, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_machine_that_cannot_record_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = run(engine(family_target("llama")), PROMPTS, SAMPLINGS, SpeculationParams("none"))
    made = recording_engine("llama", [], 1)
    graphs_of(made)._record = refuse
    assert run(made, PROMPTS, SAMPLINGS, SpeculationParams("none")) == plain
    assert not graphs_of(made).is_able and graphs_of(made).num_graphs == 0
    warnings = [r.message for r in caplog.records if "cannot be recorded" in r.message]
    assert len(warnings) == 1 and "not permitted" in warnings[0]


def test_out_of_memory_while_recording_is_the_engines_to_ease() -> None:
    calls = 0

    def refuse(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run

    plain = run(engine(family_target("llama")), PROMPTS, SAMPLINGS, SpeculationParams("none"))
    made = recording_engine("llama", [], 1)
    graphs_of(made)._record = refuse
    assert run(made, PROMPTS, SAMPLINGS, SpeculationParams("none")) == plain
    assert calls > 1 and graphs_of(made).is_able


def test_no_more_shapes_are_recorded_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.model.graphs.MAX_GRAPHS", 1)
    plain = run(engine(family_target("llama")), PROMPTS, SAMPLINGS, SpeculationParams("none"))
    made = recording_engine("llama", [], 1)
    assert run(made, PROMPTS, SAMPLINGS, SpeculationParams("none")) == plain
    assert graphs_of(made).num_graphs == 1
    assert 1 < MAX_GRAPHS < MAX_ROWS


def test_every_tensor_of_a_pass_is_among_those_that_are_copied() -> None:
    """Also those that the uncompiled attention never reads: which blocks there are to visit."""
    made = recording_engine("llama", [], 1)
    graphs, passes = graphs_of(made), []
    compute = graphs._compute
    graphs._compute = lambda packed: (passes.append(packed), compute(packed))[1]
    graphs._record = lambda run: run
    run(made, PROMPTS[:2], SAMPLINGS[:2], SpeculationParams("none"))
    for packed in passes:
        own = [t for t in vars(packed).values() if isinstance(t, torch.Tensor)]
        own += [t for t in vars(packed._paged).values() if isinstance(t, torch.Tensor)]
        assert len(own) == 12
        assert {id(t) for t in own} == {id(t) for t in packed.tensors}
