"""What the command line says of picking: read from its strings and files, and said in words."""

from __future__ import annotations

from pathlib import Path

from foredraft.errors import InvalidRequestError
from foredraft.grammar import Grammar
from foredraft.params import SamplingParams


def read_biases(entries: list[str]) -> dict[int, float]:
    """Biases by token id, of strings such as ``17=-3.5``."""
    found: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            found[int(token_id)] = float(bias)
        except ValueError as error:
            raise InvalidRequestError(
                f"--logit-bias is {entry!r}; allowed is ID=NUMBER, such as 17=-3.5."
            ) from error
    return found


def read_grammar(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """The form that the text must have, of at most one of the three options."""
    given = [
        name
        for name, value in (("--json-schema", schema), ("--regex", regex), ("--grammar", grammar))
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; allowed is one of them.")
    if schema is not None:
        return Grammar.json_schema(_read(schema))
    if regex is not None:
        return Grammar.regex(regex)
    return None if grammar is None else Grammar.lark(_read(grammar))


def describe(sampling: SamplingParams) -> str:
    """Say in a few words how tokens are picked, as far as it is not by default."""
    if sampling.is_greedy:
        parts = ["temperature 0 (argmax)"]
    else:
        parts = [f"temperature {sampling.temperature:g}"]
    default = SamplingParams()
    names = ["repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"]
    if not sampling.is_greedy:
        names = ["top_k", "top_p", "min_p", "top_n_sigma", "typical_p", *names]
    for name in names:
        value = getattr(sampling, name)
        if value != getattr(default, name):
            parts.append(f"{name} {value:g}")
    if sampling.logit_bias:
        parts.append(f"{len(sampling.logit_bias)} biased tokens")
    if sampling.bad_token_ids:
        parts.append(f"{len(sampling.bad_token_ids)} tokens never picked")
    if sampling.grammar is not None:
        parts.append(f"{sampling.grammar.kind} grammar")
    return ", ".join(parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read as text ({type(error).__name__}); allowed is a UTF-8 text file."
        ) from error
