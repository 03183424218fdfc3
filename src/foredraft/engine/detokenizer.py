"""Token ids to text, piece by piece; the joined pieces equal the whole text decoded at once.

A character may span tokens (bytes of an emoji, say), and a token may end one and begin the next. A
piece is held back while its last character could still be completed by bytes to come, and is let go
as soon as it cannot.

Some tokenizers (those with byte fallback) decode a whole run of byte tokens to replacement marks
for one bad byte in it. Good characters that were let go before the bad byte came stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MOST_PENDING = 3
"""Bytes that an unfinished UTF-8 character can have, so tokens that are held back for one."""
_MOST_BROKEN = 64
"""Tokens without the end of a whole character after which what came before is let go."""
_KEPT = 16
"""Tokens of these that are kept: many enough that the last characters decode as they did."""


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
        # All text up to token _num_read has been given out. Decoding starts some tokens before, at
        # _window, since a token's text may depend on the token before it; of what it gives, the
        # first _num_given characters are out.
        self._window = 0
        self._num_read = 0
        self._num_given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._ids.extend(token_ids)
        num_ids = len(self._ids)
        text = self._decode(self._window, num_ids)
        if not text.endswith(_REPLACEMENT):
            return self._give(text, num_ids)
        # The last character is broken, or unfinished: then it began in one of the last 3 tokens.
        for end in range(num_ids - 1, max(self._num_read, num_ids - 1 - _MOST_PENDING), -1):
            shorter = self._decode(self._window, end)
            if not shorter.endswith(_REPLACEMENT):
                return self._give(shorter, end)
        if num_ids - self._num_read <= _MOST_PENDING:
            return ""
        # No token of the last four ends a whole character. Whatever is broken before the last
        # character is so for good, and what is whole there began and ended inside of tokens.
        piece = text[self._num_given : -1]
        self._num_given = max(self._num_given, len(text) - 1)
        if num_ids - self._window > _MOST_BROKEN:
            self._window = self._num_read = num_ids - _KEPT
            self._num_given = len(self._decode(self._window, num_ids)) - 1
        return piece

    def flush(self) -> str:
        """Return what is still held back; nothing more is coming."""
        return self._give(self._decode(self._window, len(self._ids)), len(self._ids))

    def _give(self, text: str, end: int) -> str:
        """Give out what is new in the text of all tokens before ``end``."""
        piece = text[self._num_given :]
        if piece:
            self._window, self._num_read = self._num_read, end
            self._num_given = len(self._decode(self._window, end))
        return piece

    def _decode(self, begin: int, end: int) -> str:
        # Never tidied up: that would change text that is out already, and the spaces of code.
        text = self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text
