"""From the target's tokens to a draft model's and back: same ids, shared tokens, or by way of text.

Two vocabularies are compared by what their tokens stand for, in bytes: ``Ġthe`` of a byte-level
vocabulary and ``▁the`` of SentencePiece are one token, ``<0x0A>`` and ``Ċ`` another. Special tokens
are compared by name, and those that begin and end a text by that. Where the tokens that both have
carry the same ids, ids are used as they are, whatever the padding behind them. Else a draft keeps
to the shared tokens (token-level intersection: Timor et al., "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202); and
where too few are shared, it is written in the draft model's own tokens and read again as text.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from foredraft.errors import ConfigError
from foredraft.types import Int64Array

VOCABULARIES = ("auto", "shared", "text")
"""How a draft model with another tokenizer is read: as suits it, by shared tokens, as text."""

_LEAST_SHARED = 0.2
"""Of the target's tokens: with fewer, drafts go by way of text."""

_SAME_FROM = 0.99
"""Of the tokens of either: where as many have the same id, ids are used as they are."""

_ANCHOR = 8
"""Committed tokens that are encoded together with a drafted text, so that it joins on to them."""

_WINDOW = 96
"""Most target tokens at the end of a context that are encoded anew when it grows."""

_NONE = np.empty(0, dtype=np.int64)


class Vocabulary(Protocol):
    """How tokens of the two models translate.

    Attributes:
        columns: int64 [target's vocabulary], the draft model's id of each token of the target, -1
            where it has none; ``None`` where tokens are not translated one by one.
    """

    columns: Int64Array | None

    def context(self, known: Context, token_ids: Int64Array) -> Int64Array:
        """The draft model's ids of a text, int64; what is ``known`` of it is kept up."""
        ...


class Context:
    """A request's text in the draft model's tokens, as far as it was translated.

    Attributes:
        num_tokens: Tokens of the target that are done with.
        draft_ids: int64, what they became.
    """

    def __init__(self) -> None:
        """Nothing is translated yet."""
        self.num_tokens = 0
        self.draft_ids = _NONE


class SameIds:
    """Both number their tokens alike, as far as both go."""

    def __init__(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Tokens that one of them lacks are never drafted, and read as token 0."""
        ids = np.arange(vocab_size, dtype=np.int64)
        self.columns: Int64Array | None = np.where(ids < draft_vocab_size, ids, -1)
        self._draft_vocab_size = draft_vocab_size

    def context(self, known: Context, token_ids: Int64Array) -> Int64Array:
        """The same ids."""
        if len(token_ids) and token_ids.max() >= self._draft_vocab_size:
            return np.where(token_ids < self._draft_vocab_size, token_ids, 0)
        return token_ids


class SharedTokens:
    """Tokens that both have are translated one by one; others of the target are spelt out."""

    def __init__(self, spelling: Spelling, draft_spelling: Spelling) -> None:
        """Find the shared tokens."""
        self.columns: Int64Array | None = draft_spelling.ids_of(spelling)
        self._spelling, self._draft_spelling = spelling, draft_spelling
        self._begin = draft_spelling.begin if draft_spelling.begins and not spelling.begins else -1
        self._spelt: dict[int, list[int]] = {
            token: [draft_id]
            for token, draft_id in enumerate(self.columns.tolist())
            if draft_id >= 0
        }

    def context(self, known: Context, token_ids: Int64Array) -> Int64Array:
        """Translate what was added since the last time."""
        if known.num_tokens > len(token_ids):
            known.num_tokens, known.draft_ids = 0, _NONE
        if not known.num_tokens and self._begin >= 0:
            known.draft_ids = np.array([self._begin], dtype=np.int64)
        added = [
            draft_id
            for token in token_ids[known.num_tokens :].tolist()
            for draft_id in self._spell(token)
        ]
        if added:
            known.draft_ids = np.concatenate([known.draft_ids, np.array(added, dtype=np.int64)])
        known.num_tokens = len(token_ids)
        return known.draft_ids

    def _spell(self, token: int) -> list[int]:
        if token not in self._spelt:
            surface = self._spelling.surfaces[token]
            self._spelt[token] = (
                self._draft_spelling.spell(surface) if isinstance(surface, bytes) else []
            )
        return self._spelt[token]


class Text:
    """By way of text: the context is encoded for the draft model, its draft for the target."""

    def __init__(
        self, tokenizer: Any, draft_tokenizer: Any, spelling: Spelling, draft_spelling: Spelling
    ) -> None:
        """Keep both tokenizers."""
        self.columns: Int64Array | None = None
        self._tokenizer, self._draft_tokenizer = tokenizer, draft_tokenizer
        self._spelling, self._draft_spelling = spelling, draft_spelling
        self._begin = draft_spelling.begin if draft_spelling.begins else -1

    def context(self, known: Context, token_ids: Int64Array) -> Int64Array:
        """Encode the end of the text anew, up to some tokens; what lies before stays."""
        if known.num_tokens > len(token_ids):
            known.num_tokens, known.draft_ids = 0, _NONE
        if not known.num_tokens and self._begin >= 0:
            known.draft_ids = np.array([self._begin], dtype=np.int64)
        if len(token_ids) - known.num_tokens > _WINDOW:
            end = self._boundary(token_ids, known.num_tokens)
            fixed = self._encoded(token_ids[known.num_tokens : end])
            known.draft_ids = np.concatenate([known.draft_ids, fixed])
            known.num_tokens = end
        return np.concatenate([known.draft_ids, self._encoded(token_ids[known.num_tokens :])])

    def drafted(self, token_ids: Int64Array, draft_ids: Int64Array) -> Int64Array:
        """Encode what was drafted behind the last committed tokens; whole characters only."""
        written = self._draft_spelling.bytes_of(draft_ids).decode("utf-8", "ignore")
        anchor = token_ids[-_ANCHOR:].tolist()
        before = self._spelling.bytes_of(token_ids[-_ANCHOR:]).decode("utf-8", "ignore")
        together = self._ids(before + written)
        if together[: len(anchor)] == anchor:
            return np.array(together[len(anchor) :], dtype=np.int64)
        return np.array(self._spelling.spell(written.encode()), dtype=np.int64)

    def _ids(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(token) for token in encoded]

    def _encoded(self, token_ids: Int64Array) -> Int64Array:
        text = self._spelling.bytes_of(token_ids).decode("utf-8", "replace")
        encoded = self._draft_tokenizer(text, add_special_tokens=False, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int64)

    def _boundary(self, token_ids: Int64Array, begin: int) -> int:
        """Where the window may begin: before a token that begins a word, half a window back."""
        last = len(token_ids) - _WINDOW // 2
        for place in range(last, max(begin, last - _WINDOW // 4), -1):
            surface = self._spelling.surfaces[int(token_ids[place])]
            if isinstance(surface, bytes) and surface[:1].isspace():
                return place
        return last


class Spelling:
    """What the tokens of a vocabulary stand for.

    Args:
        tokenizer: A tokenizer of Transformers.
        vocab_size: Width of the model's logits; ids behind it are left out.

    Attributes:
        surfaces: For every id the bytes of an ordinary token, the name of a special one, or
            ``None`` for an id that is no token.
        begin: Id of the token that begins a text, or -1.
        end: Id of the one that ends it, or -1.
        begins: Whether the tokenizer puts ``begin`` before a text by itself.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Read the vocabulary."""
        vocab: dict[str, int] = tokenizer.get_vocab()
        special = set(tokenizer.all_special_ids)
        special |= {
            number
            for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.special
        }
        num_byte_level = sum("Ġ" in token for token in vocab)
        num_spaced = sum("▁" in token for token in vocab)
        alphabet = _byte_alphabet() if num_byte_level > num_spaced else None
        self.surfaces: list[bytes | str | None] = [None] * vocab_size
        for token, number in vocab.items():
            if number < vocab_size:
                self.surfaces[number] = token if number in special else _surface(token, alphabet)
        self.begin = _id_or_none(tokenizer.bos_token_id, vocab_size)
        self.end = _id_or_none(tokenizer.eos_token_id, vocab_size)
        empty = tokenizer("", verbose=False)["input_ids"]
        self.begins = self.begin >= 0 and list(empty)[:1] == [self.begin]
        self._places: dict[bytes | str, int] = {}
        for number, surface in enumerate(self.surfaces):
            if surface is not None:
                self._places.setdefault(surface, number)
        self._longest = max((len(s) for s in self.surfaces if isinstance(s, bytes)), default=0)

    @property
    def num_tokens(self) -> int:
        """Ids that are tokens."""
        return sum(surface is not None for surface in self.surfaces)

    def ids_of(self, other: Spelling) -> Int64Array:
        """For every id of another vocabulary the id here of the same token, or -1."""
        found = np.full(len(other.surfaces), -1, dtype=np.int64)
        for number, surface in enumerate(other.surfaces):
            if surface is not None:
                found[number] = self._places.get(surface, -1)
        for theirs, ours in ((other.begin, self.begin), (other.end, self.end)):
            if theirs >= 0 and found[theirs] < 0:
                found[theirs] = ours
        return found

    def spell(self, text: bytes) -> list[int]:
        """Tokens that stand for some bytes, the longest first; bytes that none has are left out."""
        found = []
        begin = 0
        while begin < len(text):
            for end in range(min(len(text), begin + self._longest), begin, -1):
                token = self._places.get(text[begin:end])
                if token is not None:
                    found.append(token)
                    begin = end
                    break
            else:
                begin += 1
        return found

    def bytes_of(self, token_ids: Int64Array) -> bytes:
        """What ordinary tokens stand for, special ones left out."""
        surfaces = (self.surfaces[token] for token in token_ids.tolist())
        return b"".join(surface for surface in surfaces if isinstance(surface, bytes))


def match_vocabularies(
    tokenizer: Any,
    vocab_size: int,
    draft_tokenizer: Any,
    draft_vocab_size: int,
    how: str,
    name: str,
) -> Vocabulary:
    """Find how a target and a draft model can understand each other.

    Args:
        tokenizer: The target's, or ``None``: then both are taken to number their tokens alike.
        vocab_size: The target's.
        draft_tokenizer: The draft model's, or ``None``, likewise.
        draft_vocab_size: The draft model's.
        how: One of ``VOCABULARIES``.
        name: The draft model's, for messages.

    Raises:
        ConfigError: They share no token.
    """
    if tokenizer is None or draft_tokenizer is None:
        if how == "text":
            raise ConfigError(
                f"drafts of {name} cannot go by way of text, since the draft model or the target "
                "has no tokenizer; leave vocabulary out."
            )
        return SameIds(vocab_size, draft_vocab_size)
    spelling = Spelling(tokenizer, vocab_size)
    draft_spelling = Spelling(draft_tokenizer, draft_vocab_size)
    shared = spelling.ids_of(draft_spelling)
    num_shared = int((shared >= 0).sum())
    if not num_shared:
        raise ConfigError(
            f"the draft model {name} shares no token with the target, so that nothing it drafts "
            "can be verified; choose a draft model of the same family."
        )
    if how != "text":
        is_same = shared == np.arange(draft_vocab_size)
        # A few tokens may differ, as where a chat model gives names to spare ones.
        least = _SAME_FROM * max(spelling.num_tokens, draft_spelling.num_tokens)
        if is_same.sum() >= least:
            return SameIds(vocab_size, draft_vocab_size)
    if how == "shared" or (how == "auto" and num_shared >= _LEAST_SHARED * spelling.num_tokens):
        return SharedTokens(spelling, draft_spelling)
    return Text(tokenizer, draft_tokenizer, spelling, draft_spelling)


def _id_or_none(token_id: Any, vocab_size: int) -> int:
    return int(token_id) if isinstance(token_id, int) and 0 <= token_id < vocab_size else -1


def _surface(token: str, alphabet: dict[str, int] | None) -> bytes:
    """The bytes that an ordinary token stands for."""
    if alphabet is not None:
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Characters by which byte-level vocabularies write bytes: printable ones write themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    found.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return found
