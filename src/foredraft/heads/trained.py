"""Heads that ship with foredraft, by the target they were trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PLACES = (
    Path(__file__).parents[1] / "trained",  # in a package
    Path(__file__).parents[3] / "trained",  # in a checkout
)


def shipped_head(kind: str, target: Any) -> str | None:
    """The folder of the head of a kind that ships for a target, if one does.

    A target is known by its sizes and its vocabulary: the name that it is loaded by is anybody's.

    Args:
        kind: As in ``HeadShape``.
        target: The target's config.
    """
    for place in _PLACES:
        for path in sorted(place.glob(f"*/{kind}/config.json")):
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if not any(path.parent.glob("*.safetensors")):
                continue
            made_for = config.get("target_sizes") or {}
            if made_for and made_for == target_sizes(target):
                return str(path.parent)
    return None


def survival_of(folder: str | Path) -> float:
    """The share of first drafts that were right on held-out answers, by a head's record; else 0."""
    try:
        record = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
        return float(record["held_out_survival"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0.0


def ships_any(kind: str) -> bool:
    """Whether something of a kind ships for any target."""
    return any(True for place in _PLACES for _ in place.glob(f"*/{kind}/config.json"))


def target_sizes(target: Any) -> dict[str, Any]:
    """What tells one target from another, as written beside a head."""
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: getattr(target, name, None) for name in names}
