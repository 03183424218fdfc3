"""What the engine keeps of a request while it runs."""

from __future__ import annotations

import numpy as np

from foredraft.stats import RequestStats
from foredraft.types import Int64Array, Request, Segment


class RequestState:
    """Tokens, cache rows and counters of one request.

    Attributes:
        request: What was asked for.
        stats: Its counters.
        slot: Its KV slot, or ``None`` while it waits.
        num_cached: Committed rows in the cache, always less than ``num_tokens`` while it runs: the
            last committed token is the root of the next step, and its KV is not yet there.
        started_at: Clock at its first step, in seconds, or ``None``.
    """

    def __init__(self, request: Request) -> None:
        """Make room for prompt and output."""
        self.request = request
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids))
        self.slot: int | None = None
        self.num_cached = 0
        self.started_at: float | None = None
        self._tokens = np.empty(len(request.prompt_ids) + request.max_tokens, dtype=np.int64)
        self._tokens[: len(request.prompt_ids)] = request.prompt_ids
        self.num_tokens = len(request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.num_cached < len(self.request.prompt_ids)

    @property
    def most_rows(self) -> int:
        """Rows of KV it may come to hold."""
        return len(self._tokens)

    @property
    def token_ids(self) -> Int64Array:
        """int64, prompt and output so far (a read-only view)."""
        view = self._tokens[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def output_ids(self) -> Int64Array:
        """int64, tokens generated so far."""
        return self._tokens[len(self.request.prompt_ids) : self.num_tokens]

    def append(self, token_ids: Int64Array) -> None:
        """Commit tokens."""
        self._tokens[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)

    def segment(self, num_rows: int, is_decode: bool) -> Segment:
        """Return its part of a step: the next ``num_rows`` rows that the cache lacks."""
        if self.slot is None:
            raise ValueError(f"request {self.request.request_id} has no slot")
        return Segment(
            self.request, self.token_ids, self.slot, self.num_cached, num_rows, is_decode
        )
