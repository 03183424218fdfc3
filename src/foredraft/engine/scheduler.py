"""Who runs in a step: admission by slot and memory, prompt chunks under a budget, then decoding."""

from __future__ import annotations

from collections.abc import Iterable

from foredraft.engine.request_state import RequestState
from foredraft.errors import InvalidRequestError
from foredraft.model.kv_cache import ContiguousKVCache
from foredraft.types import StepPlan


class Scheduler:
    """First come, first served.

    A request is admitted when a slot is free and all the KV it may come to need fits under the
    bound, so that none is ever put out again.

    Args:
        cache: Where slots come from.
        max_num_requests: Most requests that run at once.
        max_num_batched_tokens: Most prompt tokens in a step, over all requests.
        max_kv_bytes: Most bytes of keys and values over all running requests.
    """

    def __init__(
        self,
        cache: ContiguousKVCache,
        max_num_requests: int,
        max_num_batched_tokens: int,
        max_kv_bytes: int,
    ) -> None:
        """Start empty."""
        self._cache = cache
        self._max_num_requests = max_num_requests
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_rows = max_kv_bytes // cache.bytes_per_row
        self._waiting: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}

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

    def state(self, request_id: str) -> RequestState:
        """Return the state of a waiting or running request; ``KeyError`` if it is not here."""
        return self.running.get(request_id) or self._waiting[request_id]

    def add(self, state: RequestState) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: It could never fit under the memory bound.
        """
        if state.most_rows > self._max_rows:
            raise InvalidRequestError(
                f"prompt and max_tokens come to {state.most_rows} tokens; the KV memory bound "
                f"holds {self._max_rows}. Lower max_tokens, shorten the prompt, or raise "
                "kv_cache_gb."
            )
        self._waiting[state.request.request_id] = state

    def schedule(self) -> StepPlan:
        """Admit who fits; return the step: decoding requests in slot order, then prompt chunks."""
        self._admit()
        chunks, decodes = [], []
        budget = self._max_num_batched_tokens
        for state in self.running.values():
            if not state.is_prefilling:
                decodes.append(state)
            elif budget > 0:
                num_rows = min(budget, state.num_tokens - state.num_cached)
                budget -= num_rows
                chunks.append(state.segment(num_rows, is_decode=False))
        decodes.sort(key=lambda state: state.slot or 0)
        return StepPlan(tuple([s.segment(1, is_decode=True) for s in decodes] + chunks))

    def finish(self, request_id: str) -> RequestState | None:
        """Take a request out, waiting or running, and free its slot; ``None`` if it is not here."""
        state = self.running.pop(request_id, None)
        if state is None:
            return self._waiting.pop(request_id, None)
        if state.slot is not None:
            self._cache.free(state.slot)
            state.slot = None
        return state

    def _admit(self) -> None:
        rows = _rows(self.running.values())
        while self._waiting and len(self.running) < self._max_num_requests:
            request_id, state = next(iter(self._waiting.items()))
            if rows + state.most_rows > self._max_rows or not self._cache.num_free_slots:
                return
            rows += state.most_rows
            state.slot = self._cache.allocate()
            self.running[request_id] = self._waiting.pop(request_id)


def _rows(states: Iterable[RequestState]) -> int:
    return sum(state.most_rows for state in states)
