"""What the command line says of drafters: their options, and the text that is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.cli.files import check_output
from foredraft.errors import InvalidRequestError
from foredraft.model.source import find_source
from foredraft.registry import PORTFOLIO, PORTFOLIO_MEMBERS


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


def drafter_options_of(
    method: str, draft_model: str | None, corpus: list[Path], store: Path | None
) -> dict[str, dict[str, Any]]:
    """Options of the drafter, where some are given."""
    options: dict[str, Any] = {}
    if method == "draft-model" and draft_model is None:
        raise InvalidRequestError(
            "--method is draft-model, but no draft model is given; name one with --draft-model: a "
            "Hugging Face folder or hub name, or a .gguf."
        )
    if draft_model is not None and method not in ("draft-model", PORTFOLIO):
        raise InvalidRequestError(
            f"--draft-model is for --method draft-model or auto, and the method is {method!r}; "
            "change one of them."
        )
    model = {} if draft_model is None else {"model": draft_model}
    if draft_model is not None:
        find_source(draft_model)
        if method != PORTFOLIO:
            return {method: model}
    if corpus:
        options["corpus"] = tuple(map(str, corpus))
    if store is not None:
        check_output("--suffix-store", store)
        options["store"] = str(store)
    if (corpus or store is not None) and method not in ("suffix", PORTFOLIO):
        raise InvalidRequestError(
            f"--suffix-corpus and --suffix-store are for --method suffix or auto, and the method "
            f"is {method!r}; change one of them."
        )
    if method == PORTFOLIO:
        options = {"options": {"suffix": options}} if options else {}
        if model:
            options["members"] = (*PORTFOLIO_MEMBERS, "draft-model")
            options.setdefault("options", {})["draft-model"] = model
    return {method: options} if options else {}
