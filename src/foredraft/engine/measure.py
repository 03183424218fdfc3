"""The time of target passes of chosen shapes, on this machine, through the engine's own runner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from foredraft.model.kv_cache import KVCache
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PaddingTime, PassTime
from foredraft.registry import PLAIN
from foredraft.types import DraftBatch, Request, Segment, StepPlan
from foredraft.verify.step import verify

_BEND = 0.025
"""A straight line that may be wrong by this share of a pass is looked into."""

_QUICK_SECONDS = 1.6
_QUICK_SURE = 2
"""Numbers of rows that are timed for a batch although its share of the time is over."""

_QUICK_ROUNDS = 2
_QUICK_SHAPES = (
    (1, 128, (1, 2, 3, 5, 9, 17, 32)),
    (4, 128, (4, 5, 12, 36)),
    (4, 512, (4, 12, 36)),
    (16, 128, (16, 17, 32, 80)),
)
"""Requests, context, and rows of all: enough to begin with, since steps correct the table."""


_UNEVEN_NODES = 8
"""Draft nodes a request where padding is timed; every other request has all of them."""

UNEVEN_ROWS = 1 + 2 * _UNEVEN_NODES
"""Rows of a request that has all."""


class Clock(Protocol):
    """Times a step of the prepared requests."""

    def __call__(self, num_rows: int, *, is_even: bool = True) -> float:
        """Seconds of a step with so many rows, all requests together.

        Draft nodes are spread evenly, what is left over going to the first requests; or every
        other request has twice its share and the rest none.
        """
        ...


@contextmanager
def prepared_requests(
    runner: Runner, cache: KVCache, num_requests: int, context: int
) -> Iterator[Clock]:
    """Yield what times a step of ``num_requests`` requests with so many rows together.

    Their cache holds ``context`` tokens of noise. The time is that of the target pass and of
    picking and verifying, in seconds.

    Args:
        runner: Runs the pass.
        cache: Has at least ``num_requests`` free slots of ``context`` tokens and the rows to time.
        num_requests: Requests in the pass.
        context: Tokens of each in the cache.
    """
    slots = [cache.allocate() for _ in range(num_requests)]
    try:
        for slot in slots:
            _fill(cache, slot, context)
        vocab_size = runner.target.vocab_size
        ids = np.arange(context + 1, dtype=np.int64) % vocab_size
        plain = SpeculationParams(PLAIN, 0)
        segments = []
        for slot in slots:
            request = Request(
                f"measure-{slot}", ids, SamplingParams(), plain, 0, cache.capacity, frozenset()
            )
            segments.append(Segment(request, ids, slot, context, 1, is_decode=True))
        plan = StepPlan(tuple(segments))

        def seconds(num_rows: int, *, is_even: bool = True) -> float:
            each, extra = divmod(num_rows - num_requests, num_requests)
            number = np.arange(num_requests)
            num_nodes = each + (number < extra) if is_even else 2 * each * (number % 2)
            nodes = np.concatenate([np.arange(number, dtype=np.int64) for number in num_nodes])
            drafts = DraftBatch(
                nodes % vocab_size, nodes, np.concatenate([[0], np.cumsum(num_nodes)])
            )
            started = time.perf_counter()
            verify(plan, drafts, runner.forward(plan, drafts))
            if runner.target.device.type == "cuda":
                torch.cuda.synchronize(runner.target.device)
            return time.perf_counter() - started

        yield seconds
    finally:
        for slot in slots:
            cache.free(slot)


def quick_times(
    runner: Runner, cache: KVCache
) -> tuple[tuple[PassTime, ...], tuple[PaddingTime, ...]]:
    """Measure a few shapes in about a second or two, for want of a profile.

    At least plain decoding and one draft length of one request are measured, however slow the
    model is; larger batches only as far as slots and time allow.
    """
    began = time.monotonic()
    cells: list[PassTime] = []
    paddings: list[PaddingTime] = []
    rows: tuple[int, ...]
    for number, (num_requests, context, rows) in enumerate(_QUICK_SHAPES, 1):
        # Every batch has a share: what is known of one request alone says little of sixteen.
        deadline = began + _QUICK_SECONDS * number / len(_QUICK_SHAPES)
        is_late = time.monotonic() > began + 2 * _QUICK_SECONDS
        if num_requests > cache.num_free_slots or (cells and is_late):
            break
        most = cache.longest(num_requests)
        longest = most - 1 - max(rows) // num_requests
        if longest < 1:
            if most < 2:
                break
            rows, longest = (num_requests,), most - 2
        context = min(context, longest)
        with prepared_requests(runner, cache, num_requests, context) as seconds:
            # From both ends, so that what time allows spans the range.
            order = [rows[0], *reversed(rows[1:])]
            times = time_rows(
                seconds,
                order,
                _QUICK_ROUNDS,
                lambda deadline=deadline: time.monotonic() > deadline,  # type: ignore[misc]
                _QUICK_SURE,
            )
            has_room = context + UNEVEN_ROWS < most
            if num_requests > 1 and has_room and time.monotonic() < deadline:
                rises = time_padding(seconds, num_requests, _QUICK_ROUNDS)
                paddings.append(as_padding(num_requests, context, rises))
        cells += as_passes(num_requests, context, times)
    return tuple(cells), tuple(paddings)


def rows_to_measure(num_requests: int, rows: Sequence[int]) -> list[int]:
    """Rows of all requests where each has so many; also one more than plain, and half as many.

    The first draft node costs more than the next ones: another kind of attention, and with 16
    requests another tile of the matrix products.
    """
    first = () if num_requests == 1 else (num_requests + 1, num_requests + num_requests // 2)
    return sorted({*(num_requests * number for number in rows), *first})


def bends(seconds: Mapping[int, float]) -> list[int]:
    """Rows, between measured ones, at which a pass may take far less than a straight line says.

    Up to some number of rows a pass is bound by memory, beyond it by arithmetic: two lines. Where
    those on both sides of a gap would meet far below the straight line across, there it is worth to
    measure.

    Args:
        seconds: Time by rows of all requests.
    """
    rows = sorted(seconds)
    found = []
    for index in range(len(rows) - 2):
        low, high, beyond = rows[index : index + 3]
        chord = (seconds[high] - seconds[low]) / (high - low)
        right = (seconds[beyond] - seconds[high]) / (beyond - high)
        before = [row for row in rows[:index] if low - row >= (high - low) / 2]
        left = (seconds[low] - seconds[before[-1]]) / (low - before[-1]) if before else 0.0
        left = max(0.0, left)
        if left >= chord or right <= chord:
            continue
        offset = (right - chord) * (high - low) / (right - left)
        at = low + round(offset)
        if low < at < high and (chord - left) * offset > _BEND * seconds[low]:
            found.append(at)
    return found


def time_rows(
    seconds: Clock,
    rows: Sequence[int],
    rounds: int,
    is_over: Callable[[], bool] = lambda: False,
    num_sure: int | None = None,
) -> dict[int, list[float]]:
    """Time each number of rows so many times in a row, after one that is not counted.

    Passes of one size follow each other, as they do in decoding: after a large pass a small one
    finds its keys and weights gone from the processor's caches. However late ``is_over`` says it
    is, the first ``num_sure`` numbers are timed once; ``None`` stands for all.
    """
    times: dict[int, list[float]] = {}
    for number in rows:
        if num_sure is not None and len(times) >= num_sure and is_over():
            break
        seconds(number)
        times[number] = [seconds(number)]
        while len(times[number]) < rounds and not is_over():
            times[number].append(seconds(number))
    return times


def time_padding(seconds: Clock, num_requests: int, rounds: int) -> list[float]:
    """What a row of padding costs: an uneven step less an even one with as many rows, in turn."""
    num_rows = num_requests * (1 + _UNEVEN_NODES)
    seconds(num_rows, is_even=False)
    num_padded = num_requests * UNEVEN_ROWS - num_rows
    return [
        (seconds(num_rows, is_even=False) - seconds(num_rows)) / num_padded for _ in range(rounds)
    ]


def as_padding(num_requests: int, context: int, rises: Sequence[float]) -> PaddingTime:
    """The price of a row of padding; what is below nothing is noise."""
    return PaddingTime(num_requests, context, max(0.0, statistics.median(rises)))


def as_passes(
    num_requests: int, context: int, times: Mapping[int, Sequence[float]]
) -> list[PassTime]:
    """The table's cells of one batch and context, from times by rows of all requests."""
    return [
        PassTime(num_requests, number, context, statistics.median(values), spread(values))
        for number, values in sorted(times.items())
    ]


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


def _fill(cache: KVCache, slot: int, context: int) -> None:
    """Write what looks like keys and values: reading unwritten pages would be too cheap."""
    generator = torch.Generator().manual_seed(slot)
    cache.reserve(slot, 0, context)
    rows = torch.from_numpy(cache.flat_rows(slot, 0, context))
    for layer in range(len(cache.layers)):
        for store in cache.flat(layer):
            noise = torch.rand(store.shape[1:], generator=generator).to(store)
            store[rows.to(store.device)] = noise
