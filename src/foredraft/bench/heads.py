"""``make bench-heads``: heads on Spec-Bench's questions: what is accepted, what it costs, and wins.

A fixed spread of questions, 128 tokens each, greedily and at temperature 1, one request at a time
and eight. Every side writes every question, in turn with the others, in an engine of its own; plain
decoding is among them. At a temperature the best head drafts its likeliest words as well, under the
default rule and under traversal, beside what the target's noise makes likeliest. Texts run to their
full length, so that all sides write as many tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.bench import harness
from foredraft.bench.streams import find_questions, questions_of
from foredraft.bench.workloads import as_chat
from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.engine.llm import LLM
from foredraft.engine.request_state import RequestState
from foredraft.errors import InvalidRequestError
from foredraft.heads.shape import KINDS as HEADS
from foredraft.heads.trained import shipped_head
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN, PORTFOLIO, PORTFOLIO_MEMBERS

KINDS = (*HEADS, "draft-model")
"""What can be measured: heads, and a draft model of the target's layers."""

_NUM_TOKENS = 128
_PER_ROUND = 12
_MOST_QUESTIONS = 60

_NODES = {1: 12, 8: 4}
"""Draft tokens of a head by batch."""

_TEMPERATURES = (0.0, 1.0)

_BEST = ("eagle3", "mtp", "eagle")
"""What drafts beside the free methods, the first of them that there is."""


def run(
    model: str,
    rounds: int,
    data: Path | None = None,
    heads: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure every head that ships for the target, or is named; return the report.

    Args:
        model: The target.
        rounds: Of twelve questions each, up to five.
        data: Spec-Bench's questions; ``None`` looks for them.
        heads: Folders by method, besides those that ship.

    Raises:
        InvalidRequestError: There is no head.
    """
    path = find_questions(data)
    with harness.Progress("bench heads") as progress:
        progress("loading")
        llm = LLM(model, notify=progress.say, reuse_prefixes=False)
        target = llm.engine.target
        found = {kind: shipped_head(kind, target.model.config) for kind in KINDS}
        folders = {kind: folder for kind, folder in found.items() if folder is not None}
        folders.update(heads or {})
        if not folders:
            raise InvalidRequestError(
                f"no head ships for {target.name}; name one with --head METHOD=FOLDER."
            )
        num_questions = min(_MOST_QUESTIONS, rounds * _PER_ROUND)
        prompts = [llm.encode(as_chat(text)) for text in questions_of(path, num_questions)]
        cells = [
            _cell(target, prompts, folders, temperature, batch, progress)
            for batch in _NODES
            for temperature in _TEMPERATURES
        ]
        summary = _summary(cells, list(folders))
        for name, value in summary.items():
            progress.say(f"{name:36} {value:.3f}")
    return harness.report("heads", cells, summary)


def _cell(
    target: Target,
    prompts: Sequence[np.ndarray],
    folders: Mapping[str, str],
    temperature: float,
    batch: int,
    progress: harness.Progress,
) -> dict[str, Any]:
    """All sides at one temperature and batch."""
    number = _NODES[batch]
    best = next((kind for kind in _BEST if kind in folders), None)
    ways = {PLAIN: SpeculationParams(PLAIN, 0)}
    options: dict[str, dict[str, Any]] = {PLAIN: {}}
    for kind, folder in folders.items():
        ways[kind] = SpeculationParams(kind, number)
        options[kind] = {kind: _options(kind, folder)}
        ways[f"{kind} chain"] = SpeculationParams(kind, 4)
        options[f"{kind} chain"] = {kind: _options(kind, folder, num_children=1)}
    if best is not None and temperature > 0:
        ways[f"{best} likeliest"] = SpeculationParams(best, number)
        options[f"{best} likeliest"] = {best: _options(best, folders[best], is_coupled=False)}
        ways[f"{best} traversal"] = SpeculationParams(best, number, "traversal")
        options[f"{best} traversal"] = {best: _options(best, folders[best])}
    ways[PORTFOLIO] = SpeculationParams(PORTFOLIO)
    options[PORTFOLIO] = {}
    if best is not None:
        options[PORTFOLIO] = {
            PORTFOLIO: {
                "members": (*PORTFOLIO_MEMBERS, best),
                "options": {best: _options(best, folders[best])},
            }
        }
    engines = {}
    for name in ways:
        config = EngineConfig(
            max_num_requests=batch, reuse_prefixes=False, drafter_options=options[name]
        )
        engines[name] = Engine(config, target=target)
    states: dict[str, list[RequestState]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    plain_steps: list[float] = []
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        for name, way in ways.items():
            progress(
                f"temperature {temperature:.0f}, batch {batch}, question {first + 1} of "
                f"{len(prompts)}, {name}"
            )
            served, steps = _serve(engines[name], group, way, temperature, first)
            states[name] += served
            seconds[name].append(sum(steps))
            if name == PLAIN:
                plain_steps += steps
    plain_step = statistics.median(plain_steps)
    speedup = {name: harness.ratio(seconds[PLAIN], seconds[name]) for name in ways}
    shown = "  ".join(f"{name} {value:.2f}" for name, value in speedup.items())
    progress.say(f"temperature {temperature:.0f}, batch {batch}: {shown}")
    return {
        "temperature": temperature,
        "batch": batch,
        "num_questions": len(prompts),
        "speedup": speedup,
        "accepted": {name: _accepted(states[name], plain_step) for name in ways if name != PLAIN},
    }


def _options(kind: str, folder: str, **more: Any) -> dict[str, Any]:
    return {"model" if kind == "draft-model" else "path": folder, **more}


def _serve(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    way: SpeculationParams,
    temperature: float,
    seed: int,
) -> tuple[list[RequestState], list[float]]:
    """Write the answers of a group; seconds of each step in which nobody read a prompt."""
    states = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature, seed=seed + index, max_tokens=_NUM_TOKENS, ignore_eos=True
        )
        states.append(engine.request_state(engine.add(prompt, sampling, way)))
    steps = []
    while engine.has_work:
        engine.step()
        step = engine.last_step
        if step is not None and step.num_decoding == step.num_segments:
            steps.append(step.total_s)
    return states, steps


def _accepted(states: Sequence[RequestState], plain_step: float) -> dict[str, Any]:
    """What became of the drafts of a side."""
    drafts = sum(state.stats.num_drafts for state in states)
    steps = sum(state.stats.num_verify_steps for state in states)
    accepted = sum(state.stats.num_accepted_tokens for state in states)
    deepest = max((len(state.stats.accepted_at) for state in states), default=0)
    by_place = [
        sum(s.stats.accepted_at[place] for s in states if place < len(s.stats.accepted_at))
        for place in range(deepest)
    ]
    draft_s = sum(state.stats.draft_s for state in states)
    return {
        "survival": [count / max(1, drafts) for count in by_place],
        "acceptance_length": 1 + accepted / max(1, steps),
        "draft_cost": draft_s / max(1, drafts) / plain_step,
    }


def _summary(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Greedy, batch 1."""
    cell = next(one for one in cells if one["batch"] == 1 and one["temperature"] == 0)
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, suffix in ((kind, ""), (f"{kind} chain", "_chain")):
            one = cell["accepted"][name]
            found[f"{kind}_first_position_acceptance{suffix}"] = (one["survival"] or [0.0])[0]
            found[f"{kind}_acceptance_length{suffix}"] = one["acceptance_length"]
            found[f"{kind}_speedup{suffix}"] = cell["speedup"][name]
        chain = cell["accepted"][f"{kind} chain"]
        # A chain of four is four levels, but for Medusa, which drafts once.
        levels = 1 if kind == "medusa" else 4
        found[f"{kind}_draft_step_cost"] = chain["draft_cost"] / levels
    found["auto_speedup"] = cell["speedup"][PORTFOLIO]
    return found
