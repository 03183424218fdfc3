"""Tensor parallelism: one rank leads an engine, the others run the passes that it tells of.

Transformers' own plan splits the layers; each rank keeps the keys and values of its own heads.
Started by ``torchrun``, every rank runs the same program. The first decides everything: it tells
the others what became of its cache since the last pass, and the rows of the next one, and all run
it together. So no decision that depends on a clock is made twice.

The others stay where they make their engine until the first closes its own, and leave the program
there.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import distributed

from foredraft.model.kv_cache import KVCache
from foredraft.model.runner import Runner
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN
from foredraft.types import DraftBatch, Int64Array, Request, Segment, StepPlan, TargetOutput

_NO_IDS = np.empty(0, dtype=np.int64)
_PLAIN = SpeculationParams(PLAIN, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What the others must know of a segment: no text but the rows to compute, no sampling."""

    slot: int
    start: int
    token_ids: Int64Array
    length: int
    is_decode: bool
    wants_prompt_logits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    """Changes of the cache since the last pass, and the next pass; without one it is the end."""

    changes: Sequence[tuple[str, tuple[Any, ...]]]
    parts: tuple[_Part, ...] | None = None
    drafts: tuple[Int64Array, Int64Array, Int64Array] | None = None


def agree(number: int) -> int:
    """The first rank's number, on every rank."""
    found = [number]
    distributed.broadcast_object_list(found, src=0, group=_control())
    return found[0]


class LeadingCache:
    """The first rank's cache: what is done to it is noted down for the others."""

    _CHANGES = frozenset({"allocate", "free", "reserve", "shorten", "copy_rows", "move_rows"})

    def __init__(self, cache: KVCache) -> None:
        """Stand before a cache."""
        self._cache = cache
        self._changes: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        """The cache's own, noted down where it changes something."""
        found = getattr(self._cache, name)
        if name not in self._CHANGES:
            return found

        def noted(*args: Any, **kwargs: Any) -> Any:
            # By place alone, as the others call it.
            self._changes.append((name, (*args, *kwargs.values())))
            return found(*args, **kwargs)

        return noted

    def take_changes(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What was done since the last time."""
        changes, self._changes = self._changes, []
        return changes


class LeadingRunner(Runner):
    """The first rank's runner: tells the others of a pass before it takes part in it."""

    def __init__(self, runner: Runner) -> None:
        """Take the place of a runner."""
        super().__init__(
            runner.target,
            LeadingCache(runner.cache),  # type: ignore[arg-type]
            runner.hidden_layers,
            runner.is_paged,
        )
        self._has_stopped = False
        atexit.register(self.stop)

    def forward(self, plan: StepPlan, drafts: DraftBatch) -> TargetOutput:
        """Compute a pass together with the other ranks."""
        parts = tuple(
            _Part(
                segment.slot,
                segment.start,
                segment.token_ids[segment.start : segment.start + segment.num_rows],
                len(segment.token_ids),
                segment.is_decode,
                segment.wants_prompt_logits,
            )
            for segment in plan.segments
        )
        drafted = drafts.token_ids, drafts.parents, drafts.offsets
        _tell(_Message(self._take_changes(), parts, drafted))
        return super().forward(plan, drafts)

    def stop(self) -> None:
        """Let the other ranks go; safe to repeat."""
        if not self._has_stopped and distributed.is_initialized():
            self._has_stopped = True
            atexit.unregister(self.stop)
            _tell(_Message(self._take_changes()))
            _part()

    def _take_changes(self) -> list[tuple[str, tuple[Any, ...]]]:
        cache = self.cache
        assert isinstance(cache, LeadingCache)
        return cache.take_changes()


def follow(runner: Runner) -> None:
    """Run the passes that the first rank tells of, until it stops."""
    while True:
        message = _hear()
        for name, args in message.changes:
            try:
                getattr(runner.cache, name)(*args)
            except MemoryError:
                continue  # the first rank ran out of room as well, and saw to it
        if message.parts is None or message.drafts is None:
            _part()
            return
        plan = StepPlan(tuple(_segment(part) for part in message.parts))
        try:
            runner.forward(plan, DraftBatch(*message.drafts))
        except MemoryError:
            continue


def _segment(part: _Part) -> Segment:
    """A segment of which only the rows of the pass are known."""
    token_ids = np.zeros(part.length, dtype=np.int64)
    end = part.start + len(part.token_ids)
    token_ids[part.start : end] = part.token_ids
    wanted = SamplingParams(prompt_logprobs=0 if part.wants_prompt_logits else None)
    request = Request("followed", _NO_IDS, wanted, _PLAIN, 0, part.length, frozenset())
    return Segment(request, token_ids, part.slot, part.start, len(part.token_ids), part.is_decode)


@functools.cache
def _control() -> Any:
    """The group that messages go by: through the host, whatever the model lies on."""
    return distributed.new_group(backend="gloo")


def _tell(message: _Message) -> None:
    distributed.broadcast_object_list([message], src=0, group=_control())


def _hear() -> _Message:
    found: list[Any] = [None]
    distributed.broadcast_object_list(found, src=0, group=_control())
    message: _Message = found[0]
    return message


def _part() -> None:
    """Leave together: who ends while another still listens may take it down."""
    distributed.barrier(group=_control())
    distributed.destroy_process_group()
    _control.cache_clear()


def is_leading() -> bool:
    """Whether this is the first rank."""
    rank: int = distributed.get_rank()
    return rank == 0
