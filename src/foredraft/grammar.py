"""The form that a text must have: a JSON schema, a regular expression, a grammar, or a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import InvalidRequestError

KINDS = ("json", "json_schema", "regex", "lark")
"""``json`` is any JSON object."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What form a text must have. Whether it can be compiled is checked when a request comes.

    Attributes:
        kind: One of ``KINDS``.
        source: The schema as JSON text, the expression, or the grammar (in Lark's syntax, whose
            first rule is ``start``); empty for ``json``.

    Raises:
        InvalidRequestError: There is no such kind, or the source is no text.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        """Check both."""
        if self.kind not in KINDS:
            raise InvalidRequestError(
                f"the kind of grammar is {self.kind!r}; allowed is one of {', '.join(KINDS)}."
            )
        if not isinstance(self.source, str) or (self.kind != "json" and not self.source):
            raise InvalidRequestError(
                f"the source of a grammar of kind {self.kind} is {self.source!r:.60}; allowed is "
                "a text."
            )

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema describes, given as a mapping or as JSON text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the JSON schema cannot be written as JSON ({error}); mend it."
            ) from error

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A text of a context-free grammar."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise InvalidRequestError(
                f"the choice is {texts!r:.60}; allowed are one text or more, none of them empty."
            )
        return cls("lark", "start: " + " | ".join(json.dumps(text) for text in texts))
