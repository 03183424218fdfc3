"""What the engine keeps of a request while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foredraft.params import MAX_SPECULATIVE_TOKENS
from foredraft.stats import RequestStats
from foredraft.types import Int64Array, Request, Segment, TokenLogprob

if TYPE_CHECKING:
    from foredraft.engine.output_text import OutputText
    from foredraft.sampling.forms import Form


class RequestState:
    """Tokens, cache rows and counters of one request.

    Attributes:
        request: What was asked for.
        stats: Its counters.
        slot: Its KV slot, or ``None`` while it waits.
        num_cached: Committed rows in the cache, always less than ``num_tokens`` while it runs: the
            last committed token is the root of the next step, and its KV is not yet there.
        priority: The lower, the sooner it runs.
        number: Its place among all requests that came.
        deadline: Clock at which it ends whatever it has written, in seconds, or ``None``.
        is_paused: Whether it rests, since nobody reads what it writes.
        is_noted: Whether others may begin from its prompt.
        started_at: Clock at its first step, in seconds, or ``None``.
        text: Its text, where it is made.
        form: Where the text stands in the form that it must have, if it must.
        logprobs: Log-probabilities of its output, where they are asked for.
        prompt_logprobs: Of its prompt but the first token, likewise.
    """

    def __init__(self, request: Request, priority: int = 0, deadline: float | None = None) -> None:
        """Make room for prompt and output."""
        self.request = request
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids))
        self.slot: int | None = None
        self.num_cached = 0
        self.text: OutputText | None = None
        self.form: Form | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.priority = priority
        self.number = 0
        self.deadline = deadline
        self.is_paused = False
        self.is_noted = False
        self.started_at: float | None = None
        self._tokens = np.empty(len(request.prompt_ids) + request.max_tokens, dtype=np.int64)
        self._tokens[: len(request.prompt_ids)] = request.prompt_ids
        self.num_tokens = len(request.prompt_ids)

    @property
    def num_rows_due(self) -> int:
        """Rows to compute before it decodes: of its prompt, or all again after it was put out.

        A prompt's last row gives the first token. Of a text that has begun, the last token is the
        root of a decode step.
        """
        has_output = self.num_tokens > len(self.request.prompt_ids)
        return self.num_tokens - int(has_output) - self.num_cached

    @property
    def is_prefilling(self) -> bool:
        """Whether rows are due before it decodes."""
        return self.num_rows_due > 0

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

    def segment(
        self, num_rows: int, is_decode: bool, room: int = MAX_SPECULATIVE_TOKENS
    ) -> Segment:
        """Return its part of a step: the next ``num_rows`` rows that the cache lacks."""
        if self.slot is None:
            raise ValueError(f"request {self.request.request_id} has no slot")
        return Segment(
            self.request, self.token_ids, self.slot, self.num_cached, num_rows, is_decode, room
        )
