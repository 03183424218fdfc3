"""Draft methods by name, imported on first use.

A new method is one file, one config and one line here. A class of your own needs no line: name it
``module:Class`` as the method.
"""

from __future__ import annotations

import importlib
from typing import Any

from foredraft.errors import InvalidRequestError, MissingExtraError

PLAIN = "none"
"""The method that drafts nothing: plain decoding through the same engine."""

PORTFOLIO = "auto"
"""The method that lets several draft together."""

PORTFOLIO_MEMBERS = ("ngram", "suffix", "prediction")
"""Those of them that do unless others are named."""

METHODS: dict[str, str] = {
    PORTFOLIO: "foredraft.drafters.portfolio:PortfolioDrafter",
    "draft-model": "foredraft.drafters.draft_model:DraftModelDrafter",
    "eagle": "foredraft.drafters.heads:EagleDrafter",
    "eagle3": "foredraft.drafters.heads:Eagle3Drafter",
    "medusa": "foredraft.drafters.medusa:MedusaDrafter",
    "mtp": "foredraft.drafters.heads:MtpDrafter",
    "ngram": "foredraft.drafters.ngram:NgramDrafter",
    "lookahead": "foredraft.drafters.lookahead:LookaheadDrafter",
    "prediction": "foredraft.drafters.prediction:PredictionDrafter",
    "recycling": "foredraft.drafters.recycling:RecyclingDrafter",
    "suffix": "foredraft.drafters.suffix:SuffixDrafter",
    "synthetic": "foredraft.drafters.synthetic:SyntheticDrafter",
}


def method_names() -> list[str]:
    """Every method name that ships with foredraft, plain decoding first."""
    return [PLAIN, *METHODS]


def check_method(name: str) -> None:
    """Raise ``InvalidRequestError`` unless ``name`` is a method or ``module:Class``."""
    if name == PLAIN or name in METHODS:
        return
    module, _, attribute = name.partition(":")
    if not (
        module and attribute.isidentifier() and all(p.isidentifier() for p in module.split("."))
    ):
        raise InvalidRequestError(
            f"method is {name!r}; allowed is one of {', '.join(method_names())}, or 'module:Class' "
            "for a drafter of your own. Choose one of these."
        )


def drafter_class(name: str) -> Any:
    """Import and return the class of a method."""
    check_method(name)
    path = METHODS.get(name, name)
    module_name, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if name in METHODS:
            raise MissingExtraError(
                f"method {name!r} needs the package {error.name!r}; install it."
            ) from error
        raise InvalidRequestError(
            f"method is {name!r}, but there is no module {error.name!r}; put it on the Python path."
        ) from error
    except AttributeError as error:
        raise InvalidRequestError(
            f"method is {name!r}, but module {module_name!r} has no {attribute!r}; check the "
            "spelling."
        ) from error
    if not isinstance(found, type) or not hasattr(found, "Config"):
        raise InvalidRequestError(
            f"method is {name!r}, but that is no drafter (a class derived from "
            "foredraft.drafters.base.Drafter, with its Config); name one."
        )
    return found
