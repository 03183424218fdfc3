"""Who runs in a step: admission by slot and memory, prompt chunks under a budget, then decoding."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable

from foredraft.engine.request_state import RequestState
from foredraft.errors import InvalidRequestError
from foredraft.model.kv_cache import KVCache
from foredraft.model.prefix_store import Match, PrefixStore, common_length
from foredraft.types import StepPlan

_SPARE = 0.02
"""Share of the memory bound that admission leaves to those who run already, to grow into."""

_FAIR_ROWS = 32
"""Prompt tokens of a step that each request in its prompt gets before the first takes the rest."""

_CALM_STEPS = 64
"""Steps without trouble after which less is no longer asked of the machine."""

_WORTH_WAITING = 64
"""Tokens of a prompt that are not computed twice at once: whoever comes second waits for them."""

_MOST_PASSED_OVER = 64
"""Requests at the head of the queue that wait for something, before nobody behind is looked at."""

_AFRESH = Match(-1, 0, is_retained=False, num_held=0)
"""Nothing to begin from."""


class Scheduler:
    """By priority, then first come, first served.

    A request is admitted when a slot is free and what it holds so far fits under the memory bound.
    Requests grow as they write; where they come to need more than there is, ended texts that were
    kept for their beginnings go first, and then whoever is least urgent and came last is put out:
    it waits with what it has written, and computes it again when there is room. A request that
    could not run alone is refused, so that one always goes on.

    Args:
        cache: Where slots come from.
        max_num_requests: Most requests that run at once.
        max_num_batched_tokens: Most prompt tokens in a step, over all requests.
        max_kv_bytes: Most bytes of keys and values, those that are kept of ended texts included.
        reuse_prefixes: Whether texts are kept for their beginnings at all.
        on_preempt: Told of a request that is put out, before it waits again.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_requests: int,
        max_num_batched_tokens: int,
        max_kv_bytes: int,
        reuse_prefixes: bool = True,
        on_preempt: Callable[[RequestState], None] = lambda state: None,
    ) -> None:
        """Start empty."""
        self._cache = cache
        self._max_num_requests = max_num_requests
        self._max_num_batched_tokens = max_num_batched_tokens
        self.max_rows = cache.usable_rows(max_kv_bytes)
        self._reuse_prefixes = reuse_prefixes
        self._on_preempt = on_preempt
        self._waiting: dict[str, RequestState] = {}
        self._timed: dict[str, RequestState] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._num_added = 0
        self.prefixes = PrefixStore(cache)
        self.running: dict[str, RequestState] = {}
        self.num_preemptions = 0
        self._most_running = max_num_requests
        self._most_prompt_rows = max_num_batched_tokens
        self._allows_drafts = True
        self._num_calm = 0

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._waiting or self.running)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request waits or runs."""
        return request_id in self.running or request_id in self._waiting

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests that are here, running ones first."""
        return [*self.running, *self._waiting]

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def state(self, request_id: str) -> RequestState:
        """Return the state of a waiting or running request; ``KeyError`` if it is not here."""
        return self.running.get(request_id) or self._waiting[request_id]

    def check_room(self, state: RequestState) -> None:
        """See to it that a request fits under the memory bound.

        Raises:
            InvalidRequestError: It could never.
        """
        if state.most_rows > self.max_rows:
            raise InvalidRequestError(
                f"prompt and max_tokens come to {state.most_rows} tokens; the KV memory bound "
                f"holds {self.max_rows}. Lower max_tokens, shorten the prompt, or raise "
                "kv_cache_gb."
            )

    def add(self, state: RequestState) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: It could never fit under the memory bound.
        """
        self.check_room(state)
        if state.deadline is not None:
            self._timed[state.request.request_id] = state
        state.number = self._num_added
        self._num_added += 1
        self._wait(state)

    @property
    def next_deadline(self) -> float | None:
        """When the first deadline passes, by the clock that deadlines are told by."""
        times = [s.deadline for s in self._timed.values() if s.deadline is not None]
        return min(times, default=None)

    def expired(self, now: float) -> list[RequestState]:
        """Requests whose deadline has passed, by the clock that deadlines are told by."""
        return [
            state
            for state in self._timed.values()
            if state.deadline is not None and state.deadline <= now
        ]

    def schedule(self) -> StepPlan:
        """Make room, admit who fits; return the step: decoding requests, then prompt chunks."""
        self._num_calm += 1
        if self._num_calm == _CALM_STEPS:
            self._most_running = self._max_num_requests
            self._most_prompt_rows = self._max_num_batched_tokens
            self._allows_drafts = True
        self._make_room()
        self._admit()
        awake = [state for state in self.running.values() if not state.is_paused]
        decodes = [state for state in awake if not state.is_prefilling]
        decodes.sort(key=lambda state: state.slot or 0)
        # What is free is shared out for drafts; without any, a request still decodes.
        spare = max(0, self._num_free_rows() - self._num_growing(decodes)) // max(1, len(decodes))
        spare = self._cache.whole_rows(spare)
        segments = [
            state.segment(
                1,
                is_decode=True,
                room=spare + self._num_held_rows(state) - state.num_tokens
                if self._allows_drafts
                else 0,
            )
            for state in decodes
        ]
        prompts = [state for state in awake if state.is_prefilling]
        for state, num_rows in zip(prompts, self._shares(prompts), strict=True):
            if num_rows:
                segments.append(state.segment(num_rows, is_decode=False))
        return StepPlan(tuple(segments))

    def finish(self, request_id: str) -> RequestState | None:
        """Take a request out, waiting or running, and free its slot; ``None`` if it is not here."""
        self._timed.pop(request_id, None)
        state = self.running.pop(request_id, None)
        if state is None:
            state = self._waiting.pop(request_id, None)
            if len(self._queue) > 2 * len(self._waiting) + 64:  # most of them ended while waiting
                waiting = self._waiting.values()
                self._queue = [(s.priority, s.number, s.request.request_id) for s in waiting]
                heapq.heapify(self._queue)
            return state
        self._leave_slot(state)
        return state

    def ease(self, plan: StepPlan) -> bool:
        """Ask less of the machine after a step that ran out of memory, for some time.

        First no drafts, then half as many requests, then shorter pieces of prompts.

        Returns:
            Whether there was something to leave out.
        """
        self._num_calm = 0
        self.drop_prefixes()
        if self._allows_drafts and any(segment.is_decode for segment in plan.segments):
            self._allows_drafts = False
            return True
        if len(self.running) > 1:
            self._most_running = (len(self.running) + 1) // 2
            while len(self.running) > self._most_running:
                self._preempt(_last(self.running.values()))
            self.drop_prefixes()
            return True
        most = max((segment.num_rows for segment in plan.segments), default=1)
        self._most_prompt_rows = max(1, most // 2)
        return most > 1

    def drop_prefixes(self) -> None:
        """Give back the memory of ended texts."""
        while self.prefixes.evict():
            pass

    def _wait(self, state: RequestState) -> None:
        name = state.request.request_id
        self._waiting[name] = state
        heapq.heappush(self._queue, (state.priority, state.number, name))

    def _next(self) -> RequestState | None:
        """Who comes first of those that wait."""
        while self._queue:
            _, number, name = self._queue[0]
            state = self._waiting.get(name)
            if state is not None and state.number == number:
                return state
            heapq.heappop(self._queue)  # it ended while it waited
        return None

    def _num_held_rows(self, state: RequestState) -> int:
        """Rows that a running request has touched, or is sure to."""
        written = 0 if state.slot is None else self._cache.num_rows(state.slot)
        return max(state.num_tokens, written)

    def _rows_due(self, state: RequestState, num_more: int = 0) -> int:
        """Free rows that a running request takes, sure to hold its text and some tokens more."""
        written = 0 if state.slot is None else self._cache.num_rows(state.slot)
        return self._cache.rows_taken(state.num_tokens + num_more, written)

    def _num_free_rows(self) -> int:
        """Rows that nobody holds, nor is sure to."""
        due = sum(self._rows_due(state) for state in self.running.values())
        return self._cache.free_rows(self.max_rows) - due

    def _num_growing(self, states: Iterable[RequestState]) -> int:
        """Free rows that some requests take with a token more each."""
        return sum(
            self._rows_due(state, 1) - self._rows_due(state)
            for state in states
            if state.num_tokens < state.most_rows
        )

    def _make_room(self) -> None:
        """See to it that every running request can take one token more."""
        while self.running:
            if self._num_free_rows() >= self._num_growing(self.running.values()):
                return
            if not self.prefixes.evict():
                if len(self.running) == 1:
                    return
                self._preempt(_last(self.running.values()))

    def _preempt(self, state: RequestState) -> None:
        del self.running[state.request.request_id]
        self._on_preempt(state)
        self._leave_slot(state)
        state.num_cached = 0
        state.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(state)

    def _leave_slot(self, state: RequestState) -> None:
        if state.slot is None:
            return
        if self._reuse_prefixes and state.request.sampling.reuse_prefix and state.num_cached:
            self.prefixes.retain(state.slot, state.token_ids[: state.num_cached])
        else:
            self.prefixes.release(state.slot)
        state.slot = None

    def _admit(self) -> None:
        later: list[tuple[int, int, str]] = []
        while (state := self._next()) is not None:
            entry = heapq.heappop(self._queue)
            if state.is_paused or self._waits_for_prefix(state):
                later.append(entry)
                if len(later) == _MOST_PASSED_OVER:
                    break
                continue
            match = self._room_for(state) if self._is_urgent_enough(state) else None
            if match is None:
                later.append(entry)
                break
            del self._waiting[state.request.request_id]
            self._give_slot(state, match)
            self.running[state.request.request_id] = state
        for entry in later:
            heapq.heappush(self._queue, entry)

    def _is_urgent_enough(self, state: RequestState) -> bool:
        """Whether there is a place to run, be it that of somebody less urgent."""
        if len(self.running) < self._most_running:
            return True
        last = _last(self.running.values())
        if not _gives_way(last, state):
            return False
        self._preempt(last)
        return True

    def _room_for(self, state: RequestState) -> Match | None:
        """How it begins, once ended texts and who is less urgent have made room for it.

        Returns ``None`` where there is no room: it waits on.
        """
        match = self._match(state)
        spare = int(_SPARE * self.max_rows) if self.running else 0
        while True:
            needed = self._cache.rows_taken(
                state.num_tokens + 1,
                match.num_held if match.is_retained else 0,
                0 if match.is_retained else match.num_rows,
            )
            has_slot = self._cache.num_free_slots > 0 or match.is_retained
            if has_slot and self._num_free_rows() >= min(needed + spare, self.max_rows):
                return match
            if has_slot and not self.running and not self.prefixes.num_retained:
                return match
            if self.prefixes.evict(but=match.slot):
                continue
            if self.prefixes.num_retained and not match.is_retained:
                match = dataclasses.replace(match, is_retained=True)  # nothing else is left
                continue
            if self.prefixes.num_retained and match.is_retained and not self.running:
                match = _AFRESH
                continue
            if not self.running or not _gives_way(_last(self.running.values()), state):
                return None
            self._preempt(_last(self.running.values()))

    def _match(self, state: RequestState) -> Match:
        """The slot to begin from; ``is_retained`` says that it is taken over, and not copied."""
        sampling = state.request.sampling
        if not sampling.reuse_prefix or sampling.prompt_logprobs is not None:
            return _AFRESH
        found = self.prefixes.find(state.token_ids, state.num_tokens - 1)
        if found is None:
            return _AFRESH
        # A text that goes on where another ended takes its place; a shared beginning is copied.
        is_near = found.slot <= self._cache.lowest_free_slot
        is_taken = found.is_retained and is_near and 2 * found.num_rows >= found.num_held
        return dataclasses.replace(found, is_retained=is_taken)

    def _give_slot(self, state: RequestState, match: Match) -> None:
        if match.is_retained:
            self.prefixes.take_over(match.slot, match.num_rows)
            state.slot = match.slot
        else:
            moved = self.prefixes.vacate_below(self._cache.lowest_free_slot)
            source = moved[1] if moved is not None and moved[0] == match.slot else match.slot
            state.slot = self._cache.allocate()
            if match.num_rows:
                self._cache.copy_rows(source, state.slot, match.num_rows)
        state.is_noted = False
        state.num_cached = match.num_rows
        state.stats.num_reused_tokens += min(match.num_rows, len(state.request.prompt_ids))

    def _waits_for_prefix(self, state: RequestState) -> bool:
        """Whether somebody is computing much of its prompt right now."""
        if not self._reuse_prefixes or not state.request.sampling.reuse_prefix:
            return False
        if state.request.sampling.prompt_logprobs is not None:
            return False
        for other in self.running.values():
            if other.is_prefilling and not other.is_paused and other.request.sampling.reuse_prefix:
                common = common_length(other.token_ids, state.token_ids[:-1])
                if common >= _WORTH_WAITING:
                    return common - self._match(state).num_rows >= _WORTH_WAITING
        return False

    def note_prompts(self) -> None:
        """Let others begin from the prompts that are computed by now."""
        if not self._reuse_prefixes:
            return
        for state in self.running.values():
            if state.is_noted or state.is_prefilling or state.slot is None:
                continue
            state.is_noted = True
            if state.request.sampling.reuse_prefix:
                self.prefixes.note(state.slot, state.request.prompt_ids)

    def _shares(self, prompts: list[RequestState]) -> list[int]:
        """Prompt tokens for each in this step: some for everybody, the rest first come first."""
        budget = self._most_prompt_rows
        wanted = [state.num_rows_due for state in prompts]
        order = sorted(range(len(prompts)), key=lambda i: (prompts[i].priority, prompts[i].number))
        shares = [0] * len(prompts)
        each = max(1, min(_FAIR_ROWS, budget // max(1, len(prompts))))
        for most in (each, budget):
            for index in order:
                more = min(most, wanted[index] - shares[index], budget)
                shares[index] += more
                budget -= more
        return shares


def _last(states: Iterable[RequestState]) -> RequestState:
    """One that rests if any does, else the least urgent; of several the one that came last."""
    return max(states, key=lambda state: (state.is_paused, state.priority, state.number))


def _gives_way(running: RequestState, waiting: RequestState) -> bool:
    """Whether a running request leaves its place to one that waits."""
    return not waiting.is_paused and (running.is_paused or waiting.priority < running.priority)
