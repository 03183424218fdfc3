"""Token ids to text, piece by piece, so that the joined pieces equal the whole text decoded at once.

A character may span tokens: bytes of an emoji, say. A piece is held back while its last character
could still be completed by bytes to come, and is let go as soon as it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MOST_PENDING = 3
"""Bytes that an unfinished UTF-8 character can have, so tokens that can be part of one."""


class Detokenizer:
    """Decodes one request's output as it grows.

    Args:
        tokenizer: The target's.
        skip_special_tokens: Leave special tokens (end of sequence, roles) out of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True
    ) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # Text up to token _num_read has been given out; decoding starts some tokens before that,
        # at _window, since a token's text may depend on the token before it.
        self._window = 0
        self._num_read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._ids.extend(token_ids)
        given = self._decode(self._window, self._num_read)
        end = len(self._ids)
        for end in range(
            len(self._ids), max(self._num_read, len(self._ids) - 1 - _MOST_PENDING), -1
        ):
            text = self._decode(self._window, end)
            if not text.endswith(_REPLACEMENT):
                break
        else:
            # Every way of holding back up to three tokens ends in a broken character: it is broken
            # for good, unless it is still among the last three.
            end = len(self._ids) - _MOST_PENDING
            if end <= self._num_read:
                return ""
            text = self._decode(self._window, end)
        if len(text) <= len(given):
            return ""
        self._window, self._num_read = self._num_read, end
        return text[len(given) :]

    def flush(self) -> str:
        """Return what is still held back; nothing more is coming."""
        given = self._decode(self._window, self._num_read)
        text = self._decode(self._window, len(self._ids))
        self._window = self._num_read = len(self._ids)
        return text[len(given) :]

    def _decode(self, begin: int, end: int) -> str:
        text = self._tokenizer.decode(
            self._ids[begin:end], skip_special_tokens=self._skip_special_tokens
        )
        assert isinstance(text, str)
        return text
