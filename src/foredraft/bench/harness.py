"""What every benchmark shares: the machine, interleaved rounds, medians, and one JSON line.

Every figure is a ratio against a baseline of the same run. Sides are run in turn, round by round,
and the ratio is the median of the rounds' own ratios, so that a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foredraft.environment import versions
from foredraft.model.machine import machine


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    warmups: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Run every side once a round, in turn, and return what each returned, round by round."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(-warmups, rounds):
        for name, side in sides.items():
            tell(f"{name}, round {max(round_index + 1, 0)} of {rounds}")
            value = side()
            if round_index >= 0:
                results[name].append(value)
    return results


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def report(name: str, cells: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """The one object that a benchmark ends in."""
    return {
        "bench": name,
        "machine": machine(),
        "versions": versions(),
        "cells": cells,
        "summary": summary,
    }


class Progress:
    """Says on standard error what is running, on one line where that is a terminal."""

    def __init__(self, title: str) -> None:
        """Keep the title; nothing is shown yet."""
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._title = title
        self._status = self._console.status(title) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        """Start."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        """Say what is running now."""
        if self._status is not None:
            self._status.update(f"{self._title}: {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)
