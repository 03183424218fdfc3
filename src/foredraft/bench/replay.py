"""Recorded answers through drafters, without a model: what they draft, and what that costs.

The text is there already, so a draft is accepted as far as it agrees with it. What drafters learn
of tokens alone is then as it is in an engine; those that learn of the target's other choices cannot
be replayed.

With the controller between, in a time that is reckoned and not measured (``decided``), a method's
speed is known to the last digit: what one machine's hour does to a figure of a few percent is gone.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foredraft.bench import harness
from foredraft.bench.simulate import Cost, cost_table_of
from foredraft.bench.streams import Stream
from foredraft.control.controller import MAX_AUTO_NODES, Controller, MethodTraits
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN, drafter_class
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Request,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)

BUDGET = 16
"""Draft tokens of a step, where a number is fixed."""

_LONG = (1_000, 4_000, 16_000, 64_000)
_NUM_LATE_STEPS = 200
_FORESEEN = 10
"""Of a prediction every so manieth token is wrong."""

_NO_LOGITS = torch.empty(0)


@dataclass(slots=True)
class Run:
    """One answer on its way.

    Attributes:
        request: Whose answer it is.
        text: int64, prompt and whole answer.
        length: Tokens of it that are committed.
        category: The question's.
    """

    request: Request
    text: Int64Array
    length: int
    category: str

    @property
    def is_done(self) -> bool:
        """Whether the answer is whole."""
        return self.length >= len(self.text)

    def segment(self, length: int | None = None) -> Segment:
        """What a drafter sees of it, at its length or another."""
        length = self.length if length is None else length
        view = self.text[:length]
        view.flags.writeable = False
        num_output = length - len(self.request.prompt_ids)
        return Segment(self.request, view, num_output, length - 1, 1, is_decode=True)

    def accept(self, token_ids: Int64Array, parents: Int64Array) -> tuple[list[int], Int64Array]:
        """Go on by what a draft has right and one token; return the path and the tokens."""
        path: list[int] = []
        row = 0
        while self.length + len(path) + 1 < len(self.text):
            wanted = self.text[self.length + len(path)]
            found = np.nonzero((parents == row) & (token_ids == wanted))[0]
            if not len(found):
                break
            row = int(found[0]) + 1
            path.append(row)
        emitted = self.text[self.length : self.length + len(path) + 1]
        self.length += len(emitted)
        return path, emitted


def begin(stream: Stream, name: str, method: str, number: int | str, vocab_size: int) -> Run:
    """An answer of which the first token, that comes with the prompt, is there."""
    text = np.concatenate([stream.prompt_ids, stream.output_ids])
    prediction = None
    if method == "prediction":
        is_wrong = np.arange(len(stream.output_ids)) % _FORESEEN == _FORESEEN - 1
        foreseen = np.where(is_wrong, (stream.output_ids + 7) % vocab_size, stream.output_ids)
        prediction = tuple(foreseen.tolist())
    speculation = SpeculationParams(method, number, prediction=prediction)
    request = Request(
        name,
        stream.prompt_ids,
        SamplingParams(),
        speculation,
        0,
        len(stream.output_ids),
        frozenset(),
    )
    return Run(request, text, len(stream.prompt_ids) + 1, stream.category)


def drafter_of(
    method: str, vocab_size: int, num_requests: int = 1, options: Mapping[str, Any] | None = None
) -> Drafter:
    """A drafter that knows nothing yet."""
    cls = drafter_class(method)
    context = DrafterContext(vocab_size, 1 << 20, method=method, max_num_requests=num_requests)
    drafter: Drafter = cls(cls.Config(**(options or {})), context)
    return drafter


def replayed(
    method: str, texts: Sequence[Stream], vocab_size: int, is_warm: bool
) -> dict[str, Any]:
    """Replay every answer, one at a time; with ``is_warm``, after all of them were seen once."""
    drafter = drafter_of(method, vocab_size)
    if is_warm:
        for index, stream in enumerate(texts):
            run = begin(stream, f"w{index}", method, BUDGET, vocab_size)
            drafter.finish(run.request, run.text)
    replay(drafter_of(method, vocab_size), method, texts[:2], vocab_size)  # compiled and loaded
    counts, whole, again = replay(drafter, method, texts, vocab_size)
    by_category: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for stream, (accepted, steps, _) in zip(texts, counts, strict=True):
        by_category[stream.category].append((accepted, steps))
    steps = sum(count[1] for count in counts)
    proposing = statistics.median(again)
    return {
        "what": "replay",
        "method": method,
        "warm": is_warm,
        "accepted_per_step": sum(count[0] for count in counts) / steps,
        "drafted_per_step": sum(count[2] for count in counts) / steps,
        "us_per_step": statistics.median(whole) * 1e6,
        "us_to_propose": proposing * 1e6,
        "us_to_update": max(0.0, statistics.median(whole) - proposing) * 1e6,
        "by_category": {
            name: sum(a for a, _ in pairs) / sum(s for _, s in pairs)
            for name, pairs in sorted(by_category.items())
        },
    }


def replay(
    drafter: Drafter, method: str, texts: Sequence[Stream], vocab_size: int
) -> tuple[list[tuple[int, int, int]], list[float], list[float]]:
    """Replay answers one by one.

    Returns:
        Accepted tokens, steps and drafted tokens of each answer; each step's seconds to draft,
        with what is learnt of the tokens since the last draft; and the seconds of the same draft
        asked for again, with nothing left to learn.
    """
    counts = []
    whole: list[float] = []
    again: list[float] = []
    for index, stream in enumerate(texts):
        run = begin(stream, f"r{index}", method, BUDGET, vocab_size)
        accepted = steps = drafted = 0
        while not run.is_done:
            plan = StepPlan((run.segment(),))
            budgets = Budgets(np.array([min(BUDGET, len(run.text) - run.length)]))
            for times in (whole, again):
                started = time.perf_counter()
                batch = drafter.propose(plan, budgets)
                times.append(time.perf_counter() - started)
            path, _ = run.accept(batch.token_ids, batch.parents)
            accepted, steps = accepted + len(path), steps + 1
            drafted += len(batch.token_ids)
        drafter.finish(run.request, run.text)
        drafter.forget(run.request.request_id)
        counts.append((accepted, steps, drafted))
    return counts, whole, again


def long_history(
    method: str, texts: Sequence[Stream], vocab_size: int, progress: harness.Progress
) -> list[dict[str, Any]]:
    """Time of a step, and bytes a token, as the history of one request grows."""
    every = np.concatenate([np.concatenate([s.prompt_ids, s.output_ids]) for s in texts])
    longest = _LONG[-1] + 3 * _NUM_LATE_STEPS
    # Beyond what was recorded it comes again, with every eleventh token another.
    text = np.resize(every, longest)
    again = np.arange(longest) >= len(every)
    text = np.where(again & (np.arange(longest) % 11 == 0), (text + 7) % vocab_size, text)
    cells = []
    for size in _LONG:
        progress(f"{method} after {size} tokens")
        run = begin(Stream("long", text[:1], text[1:]), "long", method, BUDGET, vocab_size)
        drafter = drafter_of(method, vocab_size)
        times = []
        for step in range(_NUM_LATE_STEPS):
            plan = StepPlan((run.segment(size + 3 * step),))
            started = time.perf_counter()
            drafter.propose(plan, Budgets(np.array([BUDGET])))
            times.append(time.perf_counter() - started)
        kept = getattr(drafter, "num_state_bytes", None)
        cells.append(
            {
                "what": "long history",
                "method": method,
                "num_tokens": size,
                "us_per_step": statistics.median(times[1:]) * 1e6,
                "us_per_prompt_token": times[0] / size * 1e6,
                "bytes_per_token": None if kept is None else kept / (size + 3 * _NUM_LATE_STEPS),
            }
        )
        size_said = "" if kept is None else f", {cells[-1]['bytes_per_token']:.0f} bytes a token"
        progress.say(
            f"{method:10} after {size:6} tokens: {cells[-1]['us_per_step']:6.1f} us a step of "
            f"three tokens, {cells[-1]['us_per_prompt_token']:.2f} us a prompt token{size_said}"
        )
    return cells


def decided(
    method: str,
    texts: Sequence[Stream],
    num_requests: int,
    cost: Cost,
    vocab_size: int,
    options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Replay answers as ``auto`` decides, and reckon the time.

    Args:
        method: A method of tokens alone, ``none`` or ``auto``.
        texts: Recorded answers, taken in turn.
        num_requests: Requests at once.
        cost: Seconds of a pass. The controller's table holds the very same.
        vocab_size: Of the target.
        options: Of the method.

    Returns:
        Tokens per second by category, one after the other, and of all answers as ``""``.
    """
    controller = Controller(lambda name: MethodTraits(), MAX_AUTO_NODES)
    controller.cost_table = cost_table_of(cost, num_requests)
    drafter = None if method == PLAIN else drafter_of(method, vocab_size, num_requests, options)
    waiting = [
        begin(stream, f"r{index}", method, "auto", vocab_size)
        for index, stream in reversed(list(enumerate(texts)))
    ]
    running: list[Run] = []
    tokens: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    while waiting or running:
        while waiting and len(running) < num_requests:
            if running and running[0].category != waiting[-1].category:
                break  # or one kind of text would pay for the steps of another
            running.append(waiting.pop())
        plan = StepPlan(tuple(run.segment() for run in running))
        drafts = DraftBatch.empty(len(running))
        if drafter is not None:
            drafts = controller.trim(plan, drafter.propose(plan, controller.budget(plan)))
        spent = cost(len(running), float(len(running) + len(drafts.token_ids)))
        walked = [
            run.accept(drafts.token_ids[nodes], drafts.parents[nodes])
            for run, nodes in zip(running, _slices(drafts), strict=True)
        ]
        for run, (_, emitted) in zip(running, walked, strict=True):
            for category in (run.category, ""):
                tokens[category] += len(emitted)
                seconds[category] += spent / len(running)
        if drafter is not None:
            verdict = _verdict(walked)
            num_rows = np.concatenate([[0], np.cumsum(1 + drafts.num_nodes)])
            target = TargetOutput(_NO_LOGITS, num_rows, {}, num_rows)
            controller.observe(plan, drafts, target, verdict, spent, {method: 1e-6})
            drafter.observe(plan, drafts, target, verdict)
            for run in running:
                if run.is_done:
                    drafter.finish(run.request, run.text)
                    drafter.forget(run.request.request_id)
                    controller.forget(run.request.request_id)
        running = [run for run in running if not run.is_done]
    return {category: tokens[category] / seconds[category] for category in tokens}


def _slices(drafts: DraftBatch) -> list[slice]:
    return [slice(*ends) for ends in zip(drafts.offsets[:-1], drafts.offsets[1:], strict=True)]


def _verdict(walked: Sequence[tuple[list[int], Int64Array]]) -> Verdict:
    paths = [np.array(path, dtype=np.int64) for path, _ in walked]
    tokens = [emitted for _, emitted in walked]
    return Verdict(
        np.concatenate(paths),
        np.concatenate([[0], np.cumsum([len(path) for path in paths])]),
        np.concatenate(tokens),
        np.concatenate([[0], np.cumsum([len(emitted) for emitted in tokens])]),
        np.ones(len(walked), dtype=np.bool_),
    )
