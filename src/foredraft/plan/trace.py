"""Recorded steps: one line of JSON a request, written by ``--trace FILE``, read by the planner.

    {"method": "ngram", "num_requests": 1, "temperature": 0.0, "num_tokens": 120,
     "steps": [[8, 3, 1], [6, 6, 0], ...]}

``num_requests`` is how many requests the batch held; a step is
``[draft tokens, accepted draft tokens, cut]``, where cut is 1 if the draft was as long as it was
allowed to be, or trimmed, and 0 if the drafter had no more. Without it, 1 is taken, and 0 where
nothing was drafted. ``decode_s``, the seconds of these steps, and ``plain_step_s``, those of a
plain step measured beside them, may be there too; and ``members``, where several methods drafted
together: for each what it proposed and what was accepted of it. ``is_auto`` is true where the
number of draft tokens was decided at every step, and ``model`` names the target. Keys that are not
named here are for others and are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ProfileError


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What happened in the steps of one request.

    Attributes:
        method: How it was drafted.
        num_requests: Requests in its batch.
        temperature: Of its sampling.
        num_tokens: Tokens it emitted.
        steps: Draft tokens and accepted draft tokens of every verify step, and whether the draft
            was cut.
        decode_s: Seconds of these steps; ``None`` where they were not timed.
        plain_step_s: Of a plain step of the same batch, measured beside them; ``None`` likewise.
        is_auto: Whether the number of draft tokens was decided at every step.
        model: The target's name; empty where it was not recorded.
    """

    method: str
    num_requests: int
    temperature: float
    num_tokens: int
    steps: tuple[Sequence[int], ...]
    decode_s: float | None = None
    plain_step_s: float | None = None
    is_auto: bool = False
    model: str = ""


def trace_line(
    method: str,
    num_requests: int,
    temperature: float,
    num_tokens: int,
    steps: Iterable[Sequence[int]],
    decode_s: float | None = None,
    plain_step_s: float | None = None,
    members: Mapping[str, Sequence[int]] | None = None,
    is_auto: bool = False,
    model: str = "",
) -> str:
    """Return the line of a finished request, without its end of line.

    Raises:
        ProfileError: The numbers cannot be of a request; nothing is written that could not be read.
    """
    content: dict[str, Any] = {
        "method": method,
        "num_requests": int(num_requests),
        "temperature": float(temperature),
        "num_tokens": int(num_tokens),
        "steps": [[int(number) for number in step] for step in steps],
    }
    for name, value in (("decode_s", decode_s), ("plain_step_s", plain_step_s)):
        if value is not None:
            content[name] = round(float(value), 7)
    if is_auto:
        content["is_auto"] = True
    if model:
        content["model"] = model
    if members:
        content["members"] = {method: list(counts) for method, counts in members.items()}
    try:
        _request(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ProfileError(f"a request cannot be traced: {error}.") from error
    return json.dumps(content, separators=(",", ":"))


def append_trace(path: Path, lines: Iterable[str]) -> None:
    """Append lines that :func:`trace_line` made to a file, each whole."""
    text = "".join(f"{line}\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_trace(path: Path, method: str | None = None) -> list[RequestTrace]:
    """Read a trace.

    Args:
        path: The file.
        method: Keep requests of this method only; ``None`` keeps all and wants them of one.

    Raises:
        ProfileError: There is no such file, a line is damaged, or no request is left.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"{path} cannot be read as a trace ({type(error).__name__}); write one with "
            "'foredraft generate --trace FILE'."
        ) from error
    requests = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ProfileError(
                f"line {number} of {path} is no request of a trace ({what}); delete the line, or "
                "record again with 'foredraft generate --trace FILE'."
            ) from error
    methods = sorted({request.method for request in requests})
    if method is not None:
        requests = [request for request in requests if request.method == method]
    elif len(methods) > 1:
        raise ProfileError(
            f"{path} holds requests of the methods {', '.join(methods)}; choose one with --method."
        )
    if not requests:
        held = f"requests of {', '.join(methods)} only" if methods else "no request"
        wanted = "" if method is None or not methods else f", none of the method {method}"
        raise ProfileError(
            f"{path} holds {held}{wanted}; record some with 'foredraft generate --trace {path}'."
        )
    return requests


def _request(content: Any) -> RequestTrace:
    if not isinstance(content, dict):
        raise TypeError(f"it is {content!r:.40}, not an object")
    method = content["method"]
    if not isinstance(method, str) or not method:
        raise ValueError(f"method is {method!r}, not a name")
    temperature = content["temperature"]
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"temperature is {temperature!r}, not a number")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}")
    if not isinstance(content["steps"], list):
        raise TypeError("steps is not a list")
    steps = []
    for step in content["steps"]:
        if not isinstance(step, list) or len(step) not in (2, 3):
            raise ValueError(
                f"a step is {step!r:.40}, not [draft tokens, accepted draft tokens, cut]"
            )
        drafted, accepted, *cut = (_count("a number of a step", value) for value in step)
        if accepted > drafted:
            raise ValueError(f"a step accepted {accepted} of {drafted} draft tokens")
        steps.append((drafted, accepted, bool(cut[0]) if cut else drafted > 0))
    return RequestTrace(
        method=method,
        num_requests=_count("num_requests", content["num_requests"], 1),
        temperature=float(temperature),
        num_tokens=_count("num_tokens", content["num_tokens"]),
        steps=tuple(steps),
        decode_s=_seconds("decode_s", content.get("decode_s")),
        plain_step_s=_seconds("plain_step_s", content.get("plain_step_s")),
        is_auto=content.get("is_auto", False) is True,
        model=str(content.get("model", "")),
    )


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, not a number")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value!r}, not a time above 0")
    return float(value)


def _count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, not an integer of {least} or more")
    return value
