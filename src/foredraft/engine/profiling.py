"""``foredraft profile``: the terms of the arithmetic, measured on this machine for one model.

Shapes are measured in turn, visit after visit, so that a machine that slows down slows all of them;
visits go on until the medians are steady, or the time is up. What is reported is the median of each
shape and how far its repeats lay apart.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from foredraft.engine.measure import (
    UNEVEN_ROWS,
    as_padding,
    as_passes,
    bends,
    prepared_requests,
    rows_to_measure,
    spread,
    time_padding,
    time_rows,
)
from foredraft.environment import versions
from foredraft.errors import ProfileError
from foredraft.model.machine import identity, machine, model_hash
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import DraftTime, Profile, load_profile, profile_path, stability
from foredraft.registry import PLAIN, drafter_class
from foredraft.types import Budgets, Request, Segment, StepPlan

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")

_ROWS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 32)
_FEW_ROWS = (1, 2, 3, 5, 9, 17)
_GROUPS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 128, _ROWS),
    (2, 128, _FEW_ROWS),
    (4, 128, _FEW_ROWS),
    (8, 128, _FEW_ROWS),
    (16, 128, _FEW_ROWS),
    (1, 1024, _FEW_ROWS),
    (4, 1024, _FEW_ROWS[:5]),
    (16, 1024, _FEW_ROWS[:4]),
    (1, 4096, _FEW_ROWS),
)
"""Requests, tokens of context, and rows of each request."""

_LONG_ROWS, _LONG_BATCHES = (64, 128), (1, 2, 4)
"""Rows of a request that are measured too, with these batches, where ``auto`` may draft so many."""

_UNEVEN_BATCHES = (4, 16)
"""With which the price of unequal drafts is measured."""

_ROUNDS_A_VISIT = 2
_LEAST_VISITS = 2
_STEADY = 0.015
"""Medians whose standard error is below this share are steady."""

_MOST_SECONDS = 90.0
_NUM_HOST_TOKENS = 24
_TIMED_METHODS = ("ngram", "prediction", "suffix")
_LIVE_METHODS = {"recycling": 8, "lookahead": 31, "auto": 8}
"""Methods that draft from what a pass said, timed while they do; and how many tokens they draft."""

_LIVE_PROMPT_LEN, _NUM_LIVE_TOKENS = 120, 24
_NUM_DRAFTS = 64
_HISTORY_LEN = 512


def measure_profile(
    engine: Engine,
    tell: Callable[[str, float], None] = lambda text, share: None,
    max_seconds: float = _MOST_SECONDS,
) -> Profile:
    """Measure an idle engine's model.

    Args:
        engine: Has no request; its slots decide the largest batch that is measured.
        tell: Told what is being measured, and the share that is done.
        max_seconds: When to stop; one request without a context is measured in any case, and of
            the larger shapes those that there is time for.
    """
    started = time.monotonic()
    engine.scheduler.drop_prefixes()
    groups = [
        (batch, context, rows)
        for batch, context, rows in _GROUPS
        if batch <= engine.max_num_requests and context + max(rows) < engine.cache.longest(batch)
    ]
    if not groups:
        longest = engine.cache.longest(1)
        short = max(1, longest - 34)
        rows = tuple(n for n in _ROWS if n + short < longest)
        groups = [(1, short, rows or (1,))]
    wanted = {
        (batch, context): rows_to_measure(batch, (*rows, *_long_rows(engine, batch, context)))
        for batch, context, rows in groups
    }
    times: dict[tuple[int, int], dict[int, list[float]]] = {}
    rises: dict[tuple[int, int], list[float]] = {}
    visit = 0
    while True:
        for index, (batch, context) in enumerate(wanted):
            elapsed = (time.monotonic() - started) / max_seconds
            by_count = (index / len(wanted) + visit) / (_LEAST_VISITS + 1)
            tell(
                f"batch {batch}, context {context}, visit {visit + 1}",
                min(0.99, max(elapsed, by_count)),
            )
            if times and time.monotonic() - started > max_seconds:
                break
            has_room = context + UNEVEN_ROWS < engine.cache.longest(batch)
            with prepared_requests(engine.runner, engine.cache, batch, context) as seconds:
                found = time_rows(seconds, wanted[batch, context], _ROUNDS_A_VISIT)
                if batch in _UNEVEN_BATCHES and has_room:
                    rise = time_padding(seconds, batch, _ROUNDS_A_VISIT)
                    rises.setdefault((batch, context), []).extend(rise)
            kept = times.setdefault((batch, context), {})
            for number, values in found.items():
                kept.setdefault(number, []).extend(values)
        visit += 1
        if visit == 1:
            for key, by_rows in times.items():
                medians = {rows: statistics.median(values) for rows, values in by_rows.items()}
                wanted[key] += bends(medians)
        is_late = time.monotonic() - started > max_seconds
        if is_late or (visit >= _LEAST_VISITS and _is_steady(times)):
            break
    passes = tuple(
        cell
        for (batch, context), by_rows in times.items()
        for cell in as_passes(batch, context, by_rows)
    )
    tell("drafting and the host", 0.99)
    target = engine.target
    return Profile(
        model=target.name,
        model_hash=model_hash(target),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        machine=machine(),
        versions=versions(),
        passes=passes,
        paddings=tuple(as_padding(*key, values) for key, values in rises.items()),
        drafts=_draft_times(engine),
        host_seconds=_host_seconds(engine),
        stability=stability(passes),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _long_rows(engine: Engine, num_requests: int, context: int) -> tuple[int, ...]:
    """Rows of a request beyond the usual ones that are worth to measure."""
    if num_requests not in _LONG_BATCHES or context > _GROUPS[0][1]:
        return ()
    most = min(
        engine.controller.max_auto_nodes + 1, engine.cache.longest(num_requests) - context - 1
    )
    return tuple(rows for rows in _LONG_ROWS if rows <= most)


def known_profile(target: Target) -> Profile | None:
    """The profile kept for this model on this machine with these versions, if it is whole."""
    dtype = str(target.dtype).removeprefix("torch.")
    path = profile_path(model_hash(target), dtype, identity(machine()))
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except ProfileError as error:
        _LOG.warning("%s Until then the engine measures a few shapes by itself.", error)
        return None
    facts = (profile.model_hash, profile.dtype, identity(profile.machine))
    if facts != (model_hash(target), dtype, identity(machine())):
        _LOG.warning(
            "the profile %s is of %s in %s on %s, not of this model and machine, and is not used; "
            "measure again with 'foredraft profile'",
            path,
            profile.model,
            profile.dtype,
            profile.machine.get("cpu"),
        )
        return None
    now = versions()
    stale = [
        name
        for name in ("foredraft", "torch", "transformers")
        if profile.versions.get(name) != now[name]
    ]
    if stale:
        _LOG.warning(
            "the profile %s was measured with another version of %s and is not used; measure "
            "again with 'foredraft profile'",
            path,
            ", ".join(stale),
        )
        return None
    return profile


def _is_steady(times: dict[tuple[int, int], dict[int, list[float]]]) -> bool:
    """Whether every median is known well enough: by its quartiles and the number of repeats."""
    return all(
        spread(values) * 1.5 / math.sqrt(len(values)) < _STEADY
        for by_rows in times.values()
        for values in by_rows.values()
    )


def _draft_times(engine: Engine) -> dict[str, DraftTime]:
    """Median time to draft over a text with repeats, by method."""
    rng = np.random.default_rng(0)
    phrase = rng.integers(0, engine.target.vocab_size, 40)
    ids = np.concatenate(
        [np.tile(phrase, 3), rng.integers(0, engine.target.vocab_size, _HISTORY_LEN), phrase]
    ).astype(np.int64)
    drafts = {}
    for method in _TIMED_METHODS:
        drafter = drafter_class(method)(drafter_class(method).Config(), engine.drafting.context)
        request = Request(
            "profile",
            ids[:40],
            SamplingParams(),
            SpeculationParams(method, prediction=ids[40:].tolist()),
            0,
            len(ids),
            frozenset(),
        )
        taken = []
        for number in range(_NUM_DRAFTS):
            known = ids[: len(ids) - _NUM_DRAFTS + number]
            segment = Segment(request, known, 0, len(known) - 1, 1, is_decode=True)
            started = time.perf_counter()
            drafter.propose(StepPlan((segment,)), Budgets(np.array([8])))
            taken.append(time.perf_counter() - started)
        drafts[method] = DraftTime(statistics.median(taken), drafter.needs.cost)
    prompt = ids[: min(_LIVE_PROMPT_LEN, engine.target.max_model_len // 2)]
    num_tokens = min(_NUM_LIVE_TOKENS, engine.target.max_model_len - len(prompt))
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for method, number in _LIVE_METHODS.items():
        engine.add(prompt, sampling, SpeculationParams(method, number))
        taken = []
        while engine.has_work:
            engine.step()
            if method in engine.drafting.seconds:
                taken.append(engine.drafting.seconds[method])
        if taken:
            cost = engine.drafting.needs(method).cost
            drafts[method] = DraftTime(statistics.median(taken), cost)
    return drafts


def _host_seconds(engine: Engine) -> float:
    """Median time of a plain step outside the target pass and picking."""
    sampling = SamplingParams(max_tokens=_NUM_HOST_TOKENS, ignore_eos=True)
    engine.add([0, 1, 2], sampling, SpeculationParams(PLAIN, 0))
    taken = []
    while engine.has_work:
        engine.step()
        if engine.last_step is not None:
            taken.append(engine.last_step.host_s + engine.last_step.draft_s)
    return statistics.median(taken)
