"""What the command line says of drafters: their options, and the text that is expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.cli.files import check_output
from foredraft.config import make_config
from foredraft.errors import InvalidRequestError
from foredraft.heads.trained import ships_any
from foredraft.model.source import find_source
from foredraft.registry import METHODS, PLAIN, PORTFOLIO, PORTFOLIO_MEMBERS, drafter_class


def read_prediction(path: Path | None, method: str) -> str | None:
    """The expected text, for the methods that read it."""
    if path is None:
        return None
    if method not in ("prediction", PORTFOLIO):
        raise InvalidRequestError(
            f"--prediction-file is for --method prediction or auto, and the method is {method!r}; "
            "change one of them."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the prediction file {path} cannot be read as text ({type(error).__name__}); allowed "
            "is a UTF-8 text file."
        ) from error


def read_scope(scope: str | None, method: str) -> str:
    """Whose past responses may be drafted from, for the methods that keep some."""
    if scope is None:
        return ""
    _check_method("--suffix-scope is", method, "suffix")
    return scope


def drafter_options_of(
    method: str,
    draft_model: str | None,
    corpus: list[Path],
    store: Path | None,
    others: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Options of the drafter, where some are given; of ``auto`` those of its members.

    Args:
        method: The method.
        draft_model: Where the draft model is.
        corpus: Text files that suffix decoding learns.
        store: Where suffix decoding keeps past responses.
        others: Any option as ``NAME=VALUE``; for ``auto`` ``METHOD.NAME=VALUE``.

    Raises:
        InvalidRequestError: Something is not there, or is for another method.
        ConfigError: No option of the method has that name, or its value is not allowed.
    """
    by_method = _read_options(method, others or [])
    wants_model = method == "draft-model" or "draft-model" in by_method
    is_named = draft_model is not None or "model" in by_method.get("draft-model", {})
    if wants_model and not is_named and not ships_any("draft-model"):
        raise InvalidRequestError(
            "the method draft-model is asked for, but no draft model is given; name one with "
            "--draft-model: a Hugging Face folder or hub name, or a .gguf."
        )
    if draft_model is not None:
        _check_method("--draft-model is", method, "draft-model")
        find_source(draft_model)
        by_method.setdefault("draft-model", {})["model"] = draft_model
    if corpus or store is not None:
        _check_method("--suffix-corpus and --suffix-store are", method, "suffix")
        suffix = by_method.setdefault("suffix", {})
        for path in corpus:
            if not path.is_file():
                raise InvalidRequestError(
                    f"--suffix-corpus is {path}, and there is no such file; give a UTF-8 text file."
                )
        if corpus:
            suffix["corpus"] = tuple(map(str, corpus))
        if store is not None:
            check_output("--suffix-store", store)
            suffix["store"] = str(store)
    if method != PORTFOLIO:
        return by_method
    own = by_method.pop(PORTFOLIO, {})
    members = tuple(dict.fromkeys((*own.get("members", PORTFOLIO_MEMBERS), *by_method)))
    if members != PORTFOLIO_MEMBERS:
        own["members"] = members
    if by_method:
        own["options"] = by_method
    return {PORTFOLIO: own} if own else {}


def _check_method(what: str, method: str, wanted: str) -> None:
    if method not in (wanted, PORTFOLIO):
        raise InvalidRequestError(
            f"{what} for --method {wanted} or auto, and the method is {method!r}; change one of "
            "them."
        )


def _read_options(method: str, texts: list[str]) -> dict[str, dict[str, Any]]:
    """Options by method, each checked as the drafter's own config checks it."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        owner, has_owner, own = name.rpartition(".")
        if not is_there or not own or (has_owner and owner not in METHODS):
            raise InvalidRequestError(
                f"--drafter-option is {text!r}; allowed is NAME=VALUE, as in max_ngram_len=4, and "
                "for --method auto METHOD.NAME=VALUE, as in suffix.num_branches=2."
            )
        if method == PLAIN or (has_owner and owner != method and method != PORTFOLIO):
            raise InvalidRequestError(
                f"--drafter-option is {text!r}, and the method is {method!r}; leave one of them "
                "out."
            )
        found.setdefault(owner or method, {})[own] = _value(value)
    for owner, options in found.items():
        make_config(drafter_class(owner).Config, options, f"method {owner!r}")
    return found


def _value(text: str) -> Any:
    """A number, a truth value or a list as JSON writes it; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
