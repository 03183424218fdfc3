"""``make bench-adapt``: does the controller find the best number of draft tokens by itself?

On the embedded model: kinds of work by batch sizes, plain, fixed numbers and ``auto``, interleaved;
the rates are those of decoding, prompts apart, since prompts cost the same on every side. Then the
same controller in a world that is known, up to batches of 512 (``simulate``).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foredraft.bench import harness, workloads
from foredraft.bench.sides import PassTimes, Side, settle, take_turns
from foredraft.bench.simulate import simulate
from foredraft.engine.llm import LLM
from foredraft.engine.profiling import known_profile, measure_profile
from foredraft.params import SpeculationParams
from foredraft.plan.profile import Profile
from foredraft.registry import PLAIN

BATCHES = (1, 2, 4, 8, 16)
FIXED = (1, 2, 4, 8, 16)
_NUM_TOKENS = 96
_ROWS = (1, 2, 3, 5, 9, 17, 32)
"""Of a request, in the passes that predictions are made from."""

_NUM_LOOP_TOKENS = 160
_LEAST_REQUESTS = 4
"""Requests that a round decodes at least: a small batch takes more rounds, for more texts."""

_SIDES: dict[str, SpeculationParams] = {
    "plain": SpeculationParams(PLAIN, 0),
    **{f"fixed {n}": SpeculationParams("ngram", n) for n in FIXED},
    "auto": SpeculationParams("ngram"),
}

_SIM_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SIM_ACCEPTANCES = (0.95, 0.9, 0.8, 0.6, 0.3, 0.05)
_SIM_STEPS = 150
_SIM_CHANGE = (0.9, 0.3, 60)
"""Acceptance before and after the change, and the steps of each."""

_SIM_WINDOW = 8


def run(
    model: str,
    rounds: int,
    batches: Sequence[int] = BATCHES,
    kinds: Sequence[str] = workloads.KINDS,
    num_tokens: int = _NUM_TOKENS,
    sim_batches: Sequence[int] = _SIM_BATCHES,
    trace: Callable[[list[str]], None] = lambda lines: None,
) -> dict[str, Any]:
    """Measure every cell on ``model``, simulate the rest; return the report.

    Args:
        model: The target.
        rounds: Interleaved rounds.
        batches: Requests that decode at once.
        kinds: Of work.
        num_tokens: Counted tokens a request and round.
        sim_batches: Of the simulation.
        trace: Given the trace lines of every request that drafted as ``auto`` decided.
    """
    with harness.Progress("bench adapt") as progress:
        progress("loading")
        llm = LLM(model, notify=progress.say, reuse_prefixes=False)
        profile = known_profile(llm.engine.target)
        if profile is None:
            profile = measure_profile(llm.engine, lambda text, share: progress(f"profile, {text}"))
        cells: list[dict[str, Any]] = []
        progress("warming up")
        settle(llm.engine, max(batches), num_tokens, 1 + max(FIXED))
        ids = [llm.encode(prompt) for prompt in workloads.prompts_of("copy", 2)]
        Side(llm.engine.target, ids, _SIDES["auto"], num_tokens, len(ids)).advance(4 * num_tokens)
        for kind in kinds:
            for batch in batches:
                cell, lines = _cell(llm, profile, kind, batch, rounds, num_tokens, progress)
                cells.append(cell)
                trace(lines)
                progress.say(_line(cells[-1]))
        peak = _peak(llm, rounds, progress)
        simulated = _simulated(sim_batches, progress)
        summary = _summary(cells, simulated, peak, profile)
        for name, value in summary.items():
            progress.say(f"{name:28} {value:.3f}" if value is not None else f"{name:28} none")
    return harness.report("adapt", [*cells, peak, *simulated], summary)


def _tell(progress: harness.Progress, what: str, text: str) -> None:
    progress(f"{what}, {text}")


def _cell(
    llm: LLM,
    profile: Profile,
    kind: str,
    batch: int,
    rounds: int,
    num_tokens: int,
    progress: harness.Progress,
) -> tuple[dict[str, Any], list[str]]:
    """One kind of work at one batch size: every side, in turn; and what ``auto`` traced."""
    prompts = workloads.prompts_of(kind, workloads.FEW_PROMPTS)
    ids = [llm.encode(prompt) for prompt in prompts]
    target = llm.engine.target
    sides = {name: Side(target, ids, how, num_tokens, batch) for name, how in _SIDES.items()}
    rounds *= max(1, _LEAST_REQUESTS // batch)
    tell = functools.partial(_tell, progress, f"{kind}, batch {batch}")
    context = int(np.mean([len(prompt) for prompt in ids])) + num_tokens // 2
    passes = PassTimes(llm.engine, batch, context, _ROWS)
    take_turns(sides, rounds, num_tokens * batch, tell, passes)
    measured = dataclasses.replace(profile, passes=passes.passes)
    speedups = {name: side.rate / sides["plain"].rate for name, side in sides.items()}
    best = max((name for name in sides if name.startswith("fixed")), key=speedups.__getitem__)
    auto = sides["auto"]
    plain_texts = sides["plain"].texts
    cell = {
        "what": "embedded model",
        "kind": kind,
        "batch": batch,
        "tokens_per_s": {name: side.rate for name, side in sides.items()},
        "speedup": speedups,
        "best_fixed": best,
        "auto_vs_best_fixed": speedups["auto"] / speedups[best],
        "auto_vs_plain": speedups["auto"],
        "auto_num_draft_tokens": sum(n for n, _, _ in auto.steps)
        / sum(r for _, r, _ in auto.steps),
        "predicted_speedup": {
            name: _predicted(measured, side.steps) for name, side in sides.items()
        },
        "foreseen_speedup": auto.foreseen,
        "controller_share": auto.deciding / auto.seconds,
        "same_text_as_plain": {
            name: statistics.mean(
                all(a == b for a, b in zip(ours, theirs, strict=False))
                for ours, theirs in zip(side.texts, plain_texts, strict=True)
            )
            for name, side in sides.items()
        },
    }
    return cell, auto.traces(sides["plain"].seconds / len(sides["plain"].steps))


def _predicted(profile: Profile, steps: Sequence[tuple[int, int, int]]) -> float:
    """Speedup by the arithmetic: measured costs of passes, recorded acceptance, draft time.

    It checks the arithmetic of a step, not the forecast of acceptance: that is the controller's own
    (``foreseen_speedup``), made before each step.
    """
    plain_s = predicted_s = 0.0
    for num_nodes, num_requests, num_tokens in steps:
        plain = profile.t_decode(num_requests)
        predicted_s += plain * profile.verify_cost(num_nodes / num_requests, num_requests)
        predicted_s += profile.drafts["ngram"].seconds * num_requests if num_nodes else 0.0
        plain_s += plain * num_tokens / num_requests
    return plain_s / predicted_s


def _peak(llm: LLM, rounds: int, progress: harness.Progress) -> dict[str, Any]:
    """The most that drafting brings here: a text that repeats itself."""
    ids = [llm.encode(workloads.LOOP)]
    sides = {
        name: Side(llm.engine.target, ids, _SIDES[name], _NUM_LOOP_TOKENS, 1)
        for name in ("plain", "auto")
    }
    take_turns(sides, rounds, _NUM_LOOP_TOKENS, functools.partial(_tell, progress, "loop"))
    return {
        "what": "a text that repeats itself",
        "speedup": sides["auto"].rate / sides["plain"].rate,
        "tokens_per_s": {name: side.rate for name, side in sides.items()},
    }


def _gpu(num_requests: int, num_rows: float) -> float:
    """Seconds of a pass of an 8B model in bfloat16 on one H100, by its roofline.

    16 GB of weights at 3.35 TB/s, 16 GFLOP a row at 600 TFLOP/s reached, and launches.
    """
    return max(16e9 / 3.35e12, 16e9 * num_rows / 600e12) + 4e-4 + 2e-6 * num_rows


def _cpu(num_requests: int, num_rows: float) -> float:
    """Seconds of a pass where every row costs 3 % of the first."""
    return 0.035 * (1 + 0.03 * (num_rows - 1))


def _simulated(batches: Sequence[int], progress: harness.Progress) -> list[dict[str, Any]]:
    """Regret by batch and acceptance, and recovery from a change, where the best is known."""
    cells = []
    for name, cost in (("roofline", _gpu), ("linear", _cpu)):
        for batch in batches:
            progress(f"simulated, {name}, batch {batch}")
            num_seeds = 3 if batch <= 16 else 1
            regret = {}
            for acceptance in _SIM_ACCEPTANCES:
                steps = [
                    step
                    for seed in range(num_seeds)
                    for step in simulate([acceptance] * _SIM_STEPS, batch, cost, seed)
                ]
                rate = sum(s.expected_tokens for s in steps) / sum(s.seconds for s in steps)
                regret[str(acceptance)] = 1 - rate / steps[0].best_rate
            before, after, length = _SIM_CHANGE
            recovery = []
            for seed in range(num_seeds):
                steps = simulate([before] * length + [after] * length, batch, cost, seed)
                shares = [step.share_of_best for step in steps[length:]]
                recovery.append(
                    next(
                        (
                            index
                            for index in range(length - _SIM_WINDOW)
                            if np.mean(shares[index : index + _SIM_WINDOW]) >= 0.97
                        ),
                        length,
                    )
                )
            cells.append(
                {
                    "what": "simulated",
                    "cost": name,
                    "batch": batch,
                    "regret": regret,
                    "recovery_steps": statistics.median(recovery),
                }
            )
    return cells


def _summary(
    cells: Sequence[dict[str, Any]],
    simulated: Sequence[dict[str, Any]],
    peak: dict[str, Any],
    profile: Profile,
) -> dict[str, float | None]:
    def seconds_of_mix(side: str) -> float:
        """Time for the same number of tokens of every cell, against plain."""
        return sum(1 / cell["speedup"][side] for cell in cells)

    fixed = [f"fixed {number}" for number in FIXED]
    errors = [
        abs(cell["predicted_speedup"][side] / cell["speedup"][side] - 1)
        for cell in cells
        if cell["batch"] == 1
        for side in cell["speedup"]
    ]
    foreseen = [
        abs(cell["foreseen_speedup"] / cell["speedup"]["auto"] - 1)
        for cell in cells
        if cell["batch"] == 1 and cell["foreseen_speedup"]
    ]
    alpha = profile.alpha()
    return {
        "min_auto_vs_best_fixed": min(cell["auto_vs_best_fixed"] for cell in cells),
        "min_auto_vs_plain": min(cell["auto_vs_plain"] for cell in cells),
        "auto_vs_best_fixed_over_mix": min(seconds_of_mix(side) for side in fixed)
        / seconds_of_mix("auto"),
        "sim_regret": max((r for cell in simulated for r in cell["regret"].values()), default=None),
        "sim_recovery_steps": max((cell["recovery_steps"] for cell in simulated), default=None),
        "controller_share": max(cell["controller_share"] for cell in cells),
        "max_prediction_error_b1": max(errors, default=None),
        "max_foreseen_error_b1": max(foreseen, default=None),
        "peak_speedup": peak["speedup"],
        "ceiling": 1 / alpha if alpha > 0 else None,
    }


def _line(cell: dict[str, Any]) -> str:
    speedups = " ".join(f"{cell['speedup'][f'fixed {n}']:5.2f}" for n in FIXED)
    return (
        f"{cell['kind']:10} batch {cell['batch']:2}: fixed {speedups}  auto "
        f"{cell['auto_vs_plain']:5.2f} ({cell['auto_num_draft_tokens']:.1f} tokens), "
        f"{cell['auto_vs_best_fixed']:.3f} of the best"
    )
