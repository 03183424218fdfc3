"""``make bench-drafters``: what each method without weights drafts, and what that costs.

Recorded answers of the target are replayed: a method proposes, as much is accepted as agrees with
the text, and the text goes on. Then the model itself: every method as ``auto`` decides, beside
plain decoding and beside all of them together; and predicted output, an edit of which nine words in
ten were foreseen.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.bench import harness, workloads
from foredraft.bench.sides import Side, settle, take_turns
from foredraft.bench.streams import Stream, streams
from foredraft.cache import cache_folder
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.engine.llm import LLM
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PORTFOLIO, drafter_class
from foredraft.types import Budgets, Request, Segment, StepPlan

_METHODS = ("ngram", "suffix")
_NUM_QUESTIONS = 96
_NUM_TOKENS = 192
_BUDGET = 16
_LONG = (1_000, 4_000, 16_000, 64_000)
_NUM_LATE_STEPS = 200
_ARCTIC = "arctic-inference"
_PREDICTION_TOKENS = 220
_LIVE_METHODS = ("ngram", "suffix", "recycling", "lookahead")
_LIVE_BATCHES = (1, 4)
_LIVE_TOKENS = 96
_LIVE_REQUESTS = 8
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
            for is_warm in (False, True):
                progress(f"replaying {method}")
                cells.append(_replayed(method, texts, vocab_size, is_warm))
                progress.say(_line(cells[-1]))
        for method in _METHODS:
            cells += _long(method, texts, vocab_size, progress)
        arctic = _arctic(texts, progress)
        cells += arctic
        progress("warming up")
        settle(
            llm.engine, max(_LIVE_BATCHES), _LIVE_TOKENS, llm.engine.controller.max_auto_nodes + 1
        )
        for kind in workloads.KINDS:
            for batch in _LIVE_BATCHES:
                cells.append(_live(llm, kind, batch, rounds, progress))
                speedups = cells[-1]["speedup"]
                shown = "  ".join(f"{name} {value:.2f}" for name, value in speedups.items())
                progress.say(f"{kind:10} batch {batch}: {shown}")
        prediction = _prediction(llm, rounds, progress)
        cells.append(prediction)
        summary = _summary(cells, prediction)
        for name, value in summary.items():
            progress.say(f"{name:28} {value if value is None else round(value, 3)}")
    return harness.report("drafters", cells, summary)


def _drafter(method: str, vocab_size: int) -> Drafter:
    cls = drafter_class(method)
    drafter: Drafter = cls(cls.Config(), DrafterContext(vocab_size, 1 << 20))
    return drafter


def _segment(stream: Stream, name: str, text: np.ndarray, length: int) -> Segment:
    request = Request(
        name,
        stream.prompt_ids,
        SamplingParams(),
        SpeculationParams("ngram", _BUDGET),
        0,
        len(text),
        frozenset(),
    )
    view = text[:length]
    view.flags.writeable = False
    return Segment(request, view, 0, length - 1, 1, is_decode=True)


def _replayed(
    method: str, texts: Sequence[Stream], vocab_size: int, is_warm: bool
) -> dict[str, Any]:
    """Replay every answer; with ``is_warm``, after all of them were seen once."""
    drafter = _drafter(method, vocab_size)
    if is_warm:
        for index, stream in enumerate(texts):
            text = np.concatenate([stream.prompt_ids, stream.output_ids])
            drafter.finish(_segment(stream, f"w{index}", text, len(text)).request, text)
    _replay(_drafter(method, vocab_size), texts[:2], [])  # compiled and loaded
    times: list[float] = []
    counts = _replay(drafter, texts, times)
    by_category: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for stream, (accepted, steps, _) in zip(texts, counts, strict=True):
        by_category[stream.category].append((accepted, steps))
    steps = sum(count[1] for count in counts)
    return {
        "what": "replay",
        "method": method,
        "warm": is_warm,
        "accepted_per_step": sum(count[0] for count in counts) / steps,
        "drafted_per_step": sum(count[2] for count in counts) / steps,
        "us_per_step": statistics.median(times) * 1e6,
        "by_category": {
            name: sum(a for a, _ in pairs) / sum(s for _, s in pairs)
            for name, pairs in sorted(by_category.items())
        },
    }


def _replay(
    drafter: Drafter, texts: Sequence[Stream], times: list[float]
) -> list[tuple[int, int, int]]:
    """Accepted tokens, steps and drafted tokens of each answer; each step's time to draft.

    What a drafter learns of the tokens since its last draft is within that time.
    """
    counts = []
    for index, stream in enumerate(texts):
        text = np.concatenate([stream.prompt_ids, stream.output_ids])
        length = len(stream.prompt_ids) + 1
        accepted = steps = drafted = 0
        while length < len(text):
            plan = StepPlan((_segment(stream, f"r{index}", text, length),))
            budgets = Budgets(np.array([min(_BUDGET, len(text) - length)]))
            started = time.perf_counter()
            batch = drafter.propose(plan, budgets)
            times.append(time.perf_counter() - started)
            row = num = 0
            while True:
                found = (batch.parents == row) & (batch.token_ids == text[length + num])
                children = np.nonzero(found)[0]
                if not len(children) or length + num + 1 >= len(text):
                    break
                row, num = int(children[0]) + 1, num + 1
            accepted, steps, drafted = accepted + num, steps + 1, drafted + len(batch.token_ids)
            length += num + 1
        request = _segment(stream, f"r{index}", text, len(text)).request
        drafter.finish(request, text)
        drafter.forget(request.request_id)
        counts.append((accepted, steps, drafted))
    return counts


def _long(
    method: str, texts: Sequence[Stream], vocab_size: int, progress: harness.Progress
) -> list[dict[str, Any]]:
    """Time of a step, and bytes a token, as the history of one request grows."""
    every = np.concatenate([np.concatenate([s.prompt_ids, s.output_ids]) for s in texts])
    longest = _LONG[-1] + 3 * _NUM_LATE_STEPS
    # Beyond what was recorded it comes again, with every eleventh token another.
    text = np.resize(every, longest)
    again = np.arange(longest) >= len(every)
    text = np.where(again & (np.arange(longest) % 11 == 0), (text + 7) % vocab_size, text)
    stream = Stream("long", text[:1], text[1:])
    cells = []
    for size in _LONG:
        progress(f"{method} after {size} tokens")
        drafter = _drafter(method, vocab_size)
        started = time.perf_counter()
        drafter.propose(
            StepPlan((_segment(stream, "long", text, size),)), Budgets(np.array([_BUDGET]))
        )
        first = time.perf_counter() - started
        times = []
        for step in range(1, _NUM_LATE_STEPS):
            plan = StepPlan((_segment(stream, "long", text, size + 3 * step),))
            started = time.perf_counter()
            drafter.propose(plan, Budgets(np.array([_BUDGET])))
            times.append(time.perf_counter() - started)
        cells.append(
            {
                "what": "long history",
                "method": method,
                "num_tokens": size,
                "us_per_step": statistics.median(times) * 1e6,
                "us_per_prompt_token": first / size * 1e6,
                "bytes_per_token": drafter.num_state_bytes / (size + 3 * _NUM_LATE_STEPS),  # type: ignore[attr-defined]
            }
        )
        progress.say(
            f"{method:8} after {size:6} tokens: {cells[-1]['us_per_step']:6.1f} us a step of three "
            f"tokens, {cells[-1]['us_per_prompt_token']:.2f} us a prompt token, "
            f"{cells[-1]['bytes_per_token']:.0f} bytes a token"
        )
    return cells


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
            [str(python), str(script), str(handed), str(_BUDGET)],
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


def _live(
    llm: LLM, kind: str, batch: int, rounds: int, progress: harness.Progress
) -> dict[str, Any]:
    """One kind of work at one batch size: plain, every method, and all of them together."""
    # More prompts than run at once, so that no request comes twice: suffix would know its answer.
    prompts = workloads.prompts_of(kind, workloads.MOST_PROMPTS)
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
    kind = "warm" if cell["warm"] else "cold"
    return (
        f"{cell['method']:16} {kind}: {cell['accepted_per_step']:.2f} of "
        f"{cell['drafted_per_step']:.1f} drafted tokens accepted a step, "
        f"{cell['us_per_step']:.1f} us a step"
    )
