"""``make bench-drafters``: what each method without weights drafts, and what that costs.

Recorded answers of the target are replayed: a method proposes, as much is accepted as agrees with
the text, and the text goes on. They are replayed again as ``auto`` decides, in a time that is
reckoned from the measured passes. Then the model itself: every method as ``auto`` decides, beside
plain decoding and beside all of them together; and predicted output, an edit of which nine words in
ten were foreseen.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.bench import harness, workloads
from foredraft.bench.replay import BUDGET, decided, long_history, replayed
from foredraft.bench.sides import Side, settle, take_turns
from foredraft.bench.streams import Stream, streams
from foredraft.cache import cache_folder
from foredraft.control.cost_table import CostTable
from foredraft.engine.llm import LLM
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN, PORTFOLIO

_METHODS = ("ngram", "suffix", "prediction")
"""Those that draft from tokens alone, so that answers can be replayed."""

_FREE = ("ngram", "suffix")
"""Those of them that need nothing from the request."""

_NUM_QUESTIONS = 96
_NUM_TOKENS = 192
_MEAN_CONTEXT = 384.0
_ARCTIC = "arctic-inference"
_PREDICTION_TOKENS = 220
_LIVE_METHODS = ("ngram", "suffix", "recycling", "lookahead")
_LIVE_BATCHES = (1, 4)
_LIVE_TOKENS = 96
_LIVE_REQUESTS = 4
"""Requests of a cell at least: with fewer, a single lucky step shows."""


def run(model: str, rounds: int, data: Path | None = None) -> dict[str, Any]:
    """Measure everything; return the report.

    Args:
        model: The target.
        rounds: Interleaved rounds.
        data: Spec-Bench's questions; ``None`` looks for them.
    """
    with harness.Progress("bench drafters") as progress:
        progress("loading")
        llm = LLM(model, notify=progress.say, reuse_prefixes=False)
        texts = streams(llm, data, _NUM_QUESTIONS, _NUM_TOKENS, progress)
        vocab_size = llm.engine.target.vocab_size
        cells = []
        for method in _METHODS:
            for is_warm in (False, True) if method == "suffix" else (False,):
                progress(f"replaying {method}")
                cells.append(replayed(method, texts, vocab_size, is_warm))
                progress.say(_line(cells[-1]))
        for method in _METHODS:
            cells += long_history(method, texts, vocab_size, progress)
        cells += _arctic(texts, progress)
        progress("measuring passes")
        cells += _reckoned(llm, texts, progress)
        progress("warming up")
        settle(
            llm.engine, max(_LIVE_BATCHES), _LIVE_TOKENS, llm.engine.controller.max_auto_nodes + 1
        )
        for kind in workloads.KINDS:
            for batch in _LIVE_BATCHES:
                cells.append(_live(llm, kind, batch, rounds, progress))
                progress.say(f"{kind:10} batch {batch}: {_shown(cells[-1]['speedup'])}")
        for cell in _work(cells):
            cells.append(cell)
            progress.say(
                f"{_line(cell)}: {cell['us_to_propose']:.0f} to propose, "
                f"{cell['us_to_update']:.0f} to update; {cell['kept_bytes'] / 1e6:.1f} MB kept"
            )
        prediction = _prediction(llm, rounds, progress)
        cells.append(prediction)
        summary = _summary(cells, prediction)
        for name, value in summary.items():
            progress.say(f"{name:28} {value if value is None else round(value, 3)}")
    return harness.report("drafters", cells, summary)


def _arctic(texts: Sequence[Stream], progress: harness.Progress) -> list[dict[str, Any]]:
    """The same replay by arctic-inference's own cache, in a virtual environment of its own."""
    folder = cache_folder() / "arctic"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            progress(f"installing {_ARCTIC}")
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(python), "-m", "pip", "install", "-q", "numpy"]
            subprocess.run(pip, check=True, capture_output=True)
            subprocess.run(
                [*pip[:-1], "--no-deps", _ARCTIC], check=True, capture_output=True, timeout=900
            )
        handed = folder / "streams.json"
        handed.write_text(
            json.dumps([[s.prompt_ids.tolist(), s.output_ids.tolist()] for s in texts])
        )
        progress(f"replaying {_ARCTIC}")
        script = Path(__file__).with_name("arctic_replay.py")
        done = subprocess.run(
            [str(python), str(script), str(handed), str(BUDGET)],
            check=True,
            capture_output=True,
            text=True,
            timeout=900,
        )
        cells: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
        told = getattr(error, "stderr", None) or ""
        last = str(told).strip().splitlines()[-1:] or [str(error)]
        progress.say(f"{_ARCTIC} cannot be had here, so there is nothing beside it ({last[0]})")
        return []
    for cell in cells:
        progress.say(_line(cell))
    return cells


def _reckoned(
    llm: LLM, texts: Sequence[Stream], progress: harness.Progress
) -> list[dict[str, Any]]:
    """Every method that drafts from tokens, and ``auto``, over the recorded answers.

    What a pass costs is what it was measured to; so the figures differ by what is drafted alone.
    """
    target = llm.engine.target
    llm.generate("A list:", SamplingParams(max_tokens=4), SpeculationParams("ngram"))
    table = llm.engine.controller.cost_table
    assert table is not None  # a request with auto has brought it
    cells = []
    for batch in _LIVE_BATCHES:
        rates = {}
        for method in (PLAIN, *_FREE, PORTFOLIO):
            progress(f"reckoning {method}, batch {batch}")
            rates[method] = decided(
                method, texts, batch, functools.partial(_seconds, table), target.vocab_size
            )
        for category in sorted(rates[PLAIN]):
            plain = rates[PLAIN][category]
            speedup = {name: found[category] / plain for name, found in rates.items()}
            kind = category or "all"
            cells.append({"what": "reckoned", "kind": kind, "batch": batch, "speedup": speedup})
            progress.say(f"{kind:15} batch {batch}, reckoned: {_shown(speedup)}")
    return cells


def _seconds(table: CostTable, num_requests: int, num_rows: float) -> float:
    return float(table.seconds(num_requests, np.array([num_rows]), _MEAN_CONTEXT)[0])


def _shown(speedups: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in speedups.items())


def _work(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each method drafted over all kinds of work, and what that took of the host."""
    found = []
    live = [cell["work"] for cell in cells if cell["what"] == "embedded model"]
    for method in (*_LIVE_METHODS, PORTFOLIO):
        mine = [work[method] for work in live]
        total = {key: sum(work[key] for work in mine) for key in mine[0]}
        found.append(
            {
                "what": "host work",
                "method": method,
                "warm": None,
                "accepted_per_step": total["accepted"] / total["requests"],
                "drafted_per_step": total["drafted"] / total["requests"],
                "us_to_propose": total["proposing_s"] / total["steps"] * 1e6,
                "us_to_update": total["updating_s"] / total["steps"] * 1e6,
                "us_per_step": (total["proposing_s"] + total["updating_s"]) / total["steps"] * 1e6,
                "kept_bytes": max(work["kept_bytes"] for work in mine),
            }
        )
    return found


def _live(
    llm: LLM, kind: str, batch: int, rounds: int, progress: harness.Progress
) -> dict[str, Any]:
    """One kind of work at one batch size: plain, every method, and all of them together."""
    # More prompts than run at once, so that no request comes twice: suffix would know its answer.
    prompts = workloads.prompts_of(kind, workloads.FEW_PROMPTS)
    ids = [llm.encode(prompt) for prompt in prompts]
    ways = {"plain": SpeculationParams("none", 0)}
    ways |= {method: SpeculationParams(method) for method in (*_LIVE_METHODS, PORTFOLIO)}
    sides = {
        name: Side(llm.engine.target, ids, way, _LIVE_TOKENS, batch) for name, way in ways.items()
    }
    rounds = max(rounds, _LIVE_REQUESTS // batch)
    take_turns(
        sides, rounds, _LIVE_TOKENS * batch, lambda text: progress(f"{kind}, batch {batch}, {text}")
    )
    return {
        "what": "embedded model",
        "kind": kind,
        "batch": batch,
        "speedup": {name: side.rate / sides["plain"].rate for name, side in sides.items()},
        "work": {name: side.work() for name, side in sides.items()},
    }


def _prediction(llm: LLM, rounds: int, progress: harness.Progress) -> dict[str, Any]:
    """The model's own answer to an edit, with every tenth word changed, as its prediction."""
    sampling = SamplingParams(max_tokens=_PREDICTION_TOKENS)
    prompt = workloads.as_chat(workloads.EDIT)
    answer = llm.generate(prompt, sampling, SpeculationParams("none"))[0]
    words = answer.text.split(" ")
    foreseen = " ".join(word if index % 10 != 7 else word[::-1] for index, word in enumerate(words))
    sides = {
        "plain": SpeculationParams("none"),
        "ngram": SpeculationParams("ngram"),
        "prediction": SpeculationParams("prediction", prediction=foreseen),
    }
    outputs: dict[str, Any] = {}

    def side(name: str) -> float:
        outputs[name] = llm.generate(prompt, sampling, sides[name])[0]
        stats = outputs[name].stats
        return float((stats.num_tokens - 1) / (stats.elapsed_s - stats.first_token_s))

    rates = harness.interleave(
        {name: functools.partial(side, name) for name in sides}, rounds, tell=progress
    )
    return {
        "what": "predicted output, nine words in ten right",
        "speedup": {name: harness.ratio(rates[name], rates["plain"]) for name in sides},
        "acceptance_length": {
            name: output.stats.acceptance_length for name, output in outputs.items()
        },
        "same_text_as_plain": {
            name: output.token_ids == outputs["plain"].token_ids for name, output in outputs.items()
        },
    }


def _summary(cells: Sequence[dict[str, Any]], prediction: dict[str, Any]) -> dict[str, Any]:
    def replay(method: str, is_warm: bool) -> dict[str, Any] | None:
        return next(
            (
                cell
                for cell in cells
                if cell["what"] == "replay" and (cell["method"], cell["warm"]) == (method, is_warm)
            ),
            None,
        )

    summary: dict[str, Any] = {"suffix_vs_arctic_accepted": None, "suffix_vs_arctic_time": None}
    pairs = [
        (ours, theirs)
        for is_warm in (False, True)
        if (ours := replay("suffix", is_warm)) and (theirs := replay(_ARCTIC, is_warm))
    ]
    if pairs:
        summary = {
            "suffix_vs_arctic_accepted": min(
                ours["accepted_per_step"] / theirs["accepted_per_step"] for ours, theirs in pairs
            ),
            "suffix_vs_arctic_time": max(
                ours["us_per_step"] / theirs["us_per_step"] for ours, theirs in pairs
            ),
        }
    live = [cell["speedup"] for cell in cells if cell["what"] == "embedded model"]
    singles = [[cell[method] for method in _LIVE_METHODS] for cell in live]
    summary["min_auto_vs_plain"] = min(min(values) for values in singles)
    summary["min_portfolio_vs_plain"] = min(cell[PORTFOLIO] for cell in live)
    summary["min_auto_vs_best_method"] = min(
        cell[PORTFOLIO] / max(values) for cell, values in zip(live, singles, strict=True)
    )
    reckoned = [cell["speedup"] for cell in cells if cell["what"] == "reckoned"]
    summary["min_reckoned_vs_best_method"] = min(
        cell[PORTFOLIO] / max(cell[method] for method in (PLAIN, *_FREE)) for cell in reckoned
    )
    summary["prediction_speedup"] = prediction["speedup"]["prediction"]
    for method in _METHODS:
        late = [
            cell["us_per_step"]
            for cell in cells
            if cell["what"] == "long history" and cell["method"] == method
        ]
        summary[f"{method}_64k_vs_1k_time"] = late[-1] / late[0]
    return summary


def _line(cell: dict[str, Any]) -> str:
    kind = {True: "warm", False: "cold", None: "live"}[cell["warm"]]
    return (
        f"{cell['method']:16} {kind}: {cell['accepted_per_step']:.2f} of "
        f"{cell['drafted_per_step']:.1f} drafted tokens accepted a step, "
        f"{cell['us_per_step']:.1f} us a step"
    )
