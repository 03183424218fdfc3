"""What comes of a request: pieces of text as it runs, and its output when it has ended."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from foredraft.engine.request_state import RequestState
from foredraft.stats import RequestStats
from foredraft.types import Delta, TokenLogprob


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

    Attributes:
        request_id: Its name in the engine; empty if it was refused.
        prompt_ids: The prompt's token ids; empty if it was refused.
        token_ids: What was generated, the stopping token included.
        text: The same as text, without special tokens and without a stopping token.
        finish_reason: ``stop``, ``length``, ``deadline``, ``abort`` or ``error``.
        stop_token_id: The token id that ended it, for ``stop``.
        seed: The seed in force: with it, the same prompt and parameters give the same text again.
        stats: Its counters.
        error: What went wrong, for ``error``.
        stop_string: The string that ended it, for ``stop``, if that was no token id.
        logprobs: Log-probability of every token generated, where asked for.
        prompt_logprobs: Of every prompt token but the first, where asked for.
        samples: Where ``n`` is above 1, all texts of the prompt, this one first: by sample, or with
            ``best_of`` the likeliest first.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_token_id: int | None
    seed: int | None
    stats: RequestStats
    error: str | None = None
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    samples: tuple[RequestOutput, ...] = ()

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of a token, of those that were reported; -inf of none."""
        values = [one.logprob for one in self.logprobs or ()]
        return sum(values) / len(values) if values else -math.inf


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed request.

    Attributes:
        text: Text that this step completed; may be empty.
        pieces: The same text in pieces, each with whether the token that completed it was an
            accepted draft token.
        token_ids: Tokens that this step emitted.
        num_accepted: How many of them, from the first, were draft tokens.
        finish_reason: ``None`` while it runs.
        output: The whole result, with the last chunk.
    """

    text: str
    pieces: tuple[tuple[str, bool], ...]
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None = None
    output: RequestOutput | None = None


class Run:
    """One request on its way from deltas to an output; a stream's chunks are kept until read."""

    def __init__(self, state: RequestState) -> None:
        """Start with no text."""
        self._state = state
        self._text: list[str] = []
        self.request_id: str = state.request.request_id
        self.output: RequestOutput | None = None
        self.chunks: deque[StreamChunk] | None = None

    def take(self, delta: Delta) -> None:
        """Add what a step did."""
        self._text.extend(text for text, _ in delta.pieces)
        if delta.finish_reason is not None:
            self.output = self._output(delta)
        if self.chunks is not None:
            chunk = StreamChunk(
                "".join(text for text, _ in delta.pieces),
                delta.pieces,
                delta.token_ids,
                delta.num_accepted,
                delta.finish_reason,
                self.output,
            )
            self.chunks.append(chunk)

    def finished(self) -> RequestOutput:
        """Return the output of a run that has ended."""
        if self.output is None:
            raise RuntimeError(f"request {self.request_id} has not ended")
        return self.output

    def _output(self, delta: Delta) -> RequestOutput:
        request = self._state.request
        return RequestOutput(
            request_id=self.request_id,
            prompt_ids=tuple(request.prompt_ids.tolist()),
            token_ids=tuple(self._state.output_ids.tolist()),
            text="".join(self._text),
            finish_reason=str(delta.finish_reason),
            stop_token_id=delta.stop_token_id,
            seed=request.seed,
            stats=self._state.stats,
            error=delta.error,
            stop_string=delta.stop_string,
            logprobs=(None if request.sampling.logprobs is None else tuple(self._state.logprobs)),
            prompt_logprobs=(
                None
                if request.sampling.prompt_logprobs is None
                else tuple(self._state.prompt_logprobs)
            ),
        )
