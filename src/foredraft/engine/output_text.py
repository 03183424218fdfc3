"""A request's text as it grows, and the strings that end it.

Stop strings are looked for token by token, in the text that the tokens so far complete, so that a
request ends at the same token whether tokens come one by one or many in a step. What may be the
beginning of a stop string is held back until it is one, or is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.engine.detokenizer import Detokenizer

Piece = tuple[str, bool]
"""Text, and whether the token that completed it was an accepted draft token."""


@dataclass(frozen=True, slots=True)
class Added:
    """What adding tokens did.

    Attributes:
        num_tokens: Tokens that were taken: all, or those up to the one that completed a stop
            string.
        stop: That string, or ``None``.
    """

    num_tokens: int
    stop: str | None


class OutputText:
    """The text of one request.

    Args:
        detokenizer: At the beginning of the output.
        stops: Strings that end the text.
        include_stop: Whether the one that ended it stays in it.
        min_tokens: Tokens whose text no stop string may touch.
        by_token: Whether pieces are wanted for each token, or only for each step.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        by_token: bool = False,
    ) -> None:
        """Start with no text."""
        self.by_token = by_token
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held: list[Piece] = []
        self._ready: list[Piece] = []

    def add(self, token_ids: Sequence[int], num_accepted: int) -> Added:
        """Add tokens, of which the first ``num_accepted`` were drafted."""
        if not (self.by_token or self._stops):
            self._num_tokens += len(token_ids)
            self._hold(self._detokenizer.push(token_ids), False)
            self._release()
            return Added(len(token_ids), None)
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._hold(self._detokenizer.push([token_id]), index < num_accepted)
            if self._num_tokens < self._min_tokens:
                self._release()
                continue
            found = self._find()
            if found is not None:
                start, stop = found
                self._cut(start + len(stop) if self._include_stop else start)
                return Added(index + 1, stop)
            self._release(self._num_doubtful())
        return Added(len(token_ids), None)

    def end(self, is_stopped: bool = False) -> None:
        """Nothing more comes: let everything go but, where a stop string ended it, what follows."""
        if not is_stopped:
            self._hold(self._detokenizer.flush(), False)
            self._release()

    def take(self) -> tuple[Piece, ...]:
        """Return the text that has become certain since the last call."""
        ready, self._ready = tuple(self._ready), []
        return ready

    def _hold(self, text: str, is_drafted: bool) -> None:
        if text:
            self._held.append((text, is_drafted))

    def _find(self) -> tuple[int, str] | None:
        """The first stop string in the text that is held: its place and itself."""
        text = "".join(piece for piece, _ in self._held)
        found = [(text.find(stop), stop) for stop in self._stops]
        places = [(place, len(stop), stop) for place, stop in found if place >= 0]
        if not places:
            return None
        place, _, stop = min(places)
        return place, stop

    def _num_doubtful(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        text = "".join(piece for piece, _ in self._held)
        most = 0
        for stop in self._stops:
            for length in range(min(len(text), len(stop) - 1), most, -1):
                if text.endswith(stop[:length]):
                    most = length
                    break
        return most

    def _cut(self, length: int) -> None:
        """End the text after so many of the characters that are held."""
        kept: list[Piece] = []
        for text, is_drafted in self._held:
            kept.append((text[:length], is_drafted))
            length -= len(kept[-1][0])
        self._held = kept
        self._release()

    def _release(self, num_doubtful: int = 0) -> None:
        """Let go of what is held but for so many characters at its end."""
        length = sum(len(text) for text, _ in self._held) - num_doubtful
        still: list[Piece] = []
        for text, is_drafted in self._held:
            head, tail = text[: max(0, length)], text[max(0, length) :]
            length -= len(text)
            if head:
                self._ready.append((head, is_drafted))
            if tail:
                still.append((tail, is_drafted))
        self._held = still
