"""Grammars at work: which tokens the form of a text allows next, by llguidance.

One matcher a running request, which stands behind the last committed token. For a draft it walks
along the tree and comes back; what is committed moves it on for good. A matcher that fails at a
draft does not come back: another takes its place, so that a draft ends no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import InvalidRequestError, MissingExtraError
from foredraft.grammar import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_FORCED = 32
"""Most forced tokens that are drafted at once."""


class Form:
    """The form of one request's text, as far as it has come.

    Args:
        matcher: An ``llguidance.LLMatcher`` at the beginning of the text.
        eos_ids: Tokens that end a text.
        vocab_size: Of the target.
    """

    def __init__(self, matcher: Any, eos_ids: frozenset[int], vocab_size: int) -> None:
        """Stand at the beginning."""
        self._matcher = matcher
        self._first = matcher.deep_copy()
        self._committed: list[int] = []
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size

    def accept(self, token_ids: Iterable[int]) -> None:
        """Move on behind committed tokens."""
        for token_id in token_ids:
            if token_id in self._eos_ids:
                return  # the request ends with it
            self._matcher.consume_token(token_id)
            self._committed.append(token_id)

    def walk(
        self,
        draft_ids: NDArray[np.int64],
        parents: NDArray[np.int64],
        visit: Callable[[int, NDArray[np.bool_]], None],
    ) -> list[str | None]:
        """Visit the root and every draft node that the form allows, and come back.

        Args:
            draft_ids: int64 [num_nodes].
            parents: int64 [num_nodes], as in ``DraftBatch``.
            visit: Called with a row (0 for the root) and bool [vocab_size], what is allowed there.

        Returns:
            For every row ``None``, or why nothing can be picked there.
        """
        problems: list[str | None] = [None] * (len(draft_ids) + 1)
        children: list[list[int]] = [[] for _ in problems]
        for node, parent in enumerate(parents.tolist()):
            children[parent].append(node + 1)
        tokens = draft_ids.tolist()

        def enter(row: int, path: tuple[int, ...]) -> None:
            allowed = self._allowed()
            if allowed is None:
                problems[row] = self._problem()
                return
            visit(row, allowed)
            for child in children[row]:
                token_id = tokens[child - 1]
                # Nothing follows a token that ends the text.
                if token_id in self._eos_ids or not allowed[token_id]:
                    continue
                is_in = self._matcher.try_consume_tokens([token_id]) == 1
                if is_in:
                    enter(child, (*path, token_id))
                else:  # it was allowed, and nothing can follow it
                    problems[child] = self._problem()
                if self._matcher.is_error() or (is_in and not self._matcher.rollback(1)):
                    self._matcher = self._at(path)

        enter(0, ())
        return problems

    def forced(self) -> list[int]:
        """Tokens that the form leaves no choice about, from here on, as drafts."""
        was_error = self._matcher.is_error()
        found: list[int] = self._matcher.compute_ff_tokens()
        if self._matcher.is_error() and not was_error:
            self._matcher = self._at(())
            return []
        return found[:_LONGEST_FORCED]

    def _problem(self) -> str:
        return f"the grammar cannot go on ({_first_line(self._matcher.get_error())}); mend it"

    def _at(self, path: tuple[int, ...]) -> Any:
        """A matcher behind the committed tokens and some of a draft."""
        matcher = self._first.deep_copy()
        for token_id in (*self._committed, *path):
            matcher.consume_token(token_id)
        return matcher

    def _allowed(self) -> NDArray[np.bool_] | None:
        """Bool [vocab_size], what may come next; ``None`` where the matcher failed."""
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return None
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        every = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(every)] = every
        return allowed


class Forms:
    """Makes the forms of requests.

    Args:
        tokenizer: The target's.
        vocab_size: Of the target.
        eos_ids: Its tokens that end a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        """Read nothing yet: the first grammar does."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._ll_tokenizer: Any = None

    def make(self, grammar: Grammar) -> Form:
        """Return the form that a grammar describes.

        Raises:
            InvalidRequestError: It cannot be compiled, or not for this model.
        """
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtraError(
                "a grammar needs the package llguidance; install foredraft[structured]."
            ) from error
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._make_tokenizer()
        matcher_class = llguidance.LLMatcher
        try:
            source = _SOURCES[grammar.kind](matcher_class, grammar.source)
        except ValueError as error:
            raise InvalidRequestError(_refusal(grammar, str(error))) from error
        is_error, messages = matcher_class.validate_grammar_with_warnings(
            source, self._ll_tokenizer
        )
        if is_error:
            raise InvalidRequestError(_refusal(grammar, messages[0]))
        matcher = matcher_class(self._ll_tokenizer, source, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(_refusal(grammar, matcher.get_error()))
        return Form(matcher, self._eos_ids, self._vocab_size)

    def _make_tokenizer(self) -> Any:
        import llguidance.hf

        if self._tokenizer is None:
            raise InvalidRequestError(
                "a grammar was given, but this model's folder holds no tokenizer, so that its "
                "tokens have no text. Leave the grammar out."
            )
        if not self._eos_ids:
            raise InvalidRequestError(
                "a grammar was given, but this model has no end-of-sequence token to end a text "
                "with. Leave the grammar out."
            )
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, eos_token=sorted(self._eos_ids))
        except Exception as error:  # whatever a tokenizer may hold
            raise InvalidRequestError(
                f"a grammar was given, but this model's tokenizer cannot be read for it ({error})."
            ) from error


_ANY_OBJECT = '{"type": "object"}'

_SOURCES: dict[str, Callable[[Any, str], str]] = {
    "json": lambda cls, source: cls.grammar_from_json_schema(_ANY_OBJECT),
    "json_schema": lambda cls, source: cls.grammar_from_json_schema(source),
    "regex": lambda cls, source: cls.grammar_from_regex(source),
    "lark": lambda cls, source: cls.grammar_from_lark(source),
}


def _refusal(grammar: Grammar, message: str) -> str:
    why = _first_line(message)
    return f"the grammar of kind {grammar.kind} cannot be compiled ({why}); mend it."


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:200] if message.strip() else "no reason given"
