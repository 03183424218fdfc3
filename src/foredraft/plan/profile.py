"""What was measured of a model on a machine: the terms of the arithmetic, in seconds.

Made by ``foredraft profile``, read by ``foredraft plan`` and by the engine's controller. The file
is JSON with a checksum over its content; one that does not match is refused, so that it is measured
again and never trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.cache import cache_folder
from foredraft.errors import ProfileError

FORMAT = 2
DRAFT_COSTS = ("once", "per_token", "per_level")
"""How a method's draft time counts: once a draft, once a token of it, once a level of its tree."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """One cell of the table: the time of a target pass of one shape.

    Attributes:
        num_requests: Requests in the pass.
        num_rows: Rows in the pass, all requests together; as many as requests is plain decoding.
        context: Tokens of each request that are in the cache already.
        seconds: Median time of a whole step but its drafting: target pass and picking.
        spread: Half the distance between the quartiles, as a share of the median.
    """

    num_requests: int
    num_rows: int
    context: int
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class PaddingTime:
    """What it costs that requests draft unequally: attention pads them to the longest draft.

    Attributes:
        num_requests: Requests in the passes that this was measured with.
        context: Tokens of each request that are in the cache already.
        row_seconds: Of one row of padding.
    """

    num_requests: int
    context: int
    row_seconds: float


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What a method takes to draft.

    Attributes:
        seconds: Median time, of a draft, of a token or of a level.
        cost: Which of these: one of ``DRAFT_COSTS``.
    """

    seconds: float
    cost: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured terms for one model on one machine.

    Attributes:
        model: Its name, as it was given.
        model_hash: Of its configuration and a sample of its weights.
        dtype: What it was computed in.
        device: What it was computed on.
        machine: What that is: processor, cores, threads.
        versions: Of foredraft, PyTorch, Transformers.
        passes: The table.
        paddings: The price of unequal drafts; empty where no batch was measured.
        drafts: Draft time by method.
        host_seconds: Median time of a step outside drafting, target pass and picking.
        stability: Median of the cells' spreads: 0.02 says that half of the repeats lie within 2 %.
        created_at: When, ISO 8601 in UTC.
    """

    model: str
    model_hash: str
    dtype: str
    device: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    passes: tuple[PassTime, ...]
    paddings: tuple[PaddingTime, ...]
    drafts: Mapping[str, DraftTime]
    host_seconds: float
    stability: float
    created_at: str

    def __post_init__(self) -> None:
        """Check what the arithmetic relies on."""
        for name in ("model", "model_hash", "dtype", "device", "created_at"):
            if not isinstance(getattr(self, name), str):
                raise ProfileError(
                    f"the profile's {name} is {getattr(self, name)!r}, not a text; measure again."
                )
        for name in ("machine", "versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise ProfileError(
                    f"the profile's {name} is {getattr(self, name)!r:.40}, not an object; measure "
                    "again."
                )
        if not self.passes:
            raise ProfileError("the profile holds no pass; measure it again.")
        for cell in self.passes:
            if not (
                cell.num_rows >= cell.num_requests >= 1
                and cell.context >= 0
                and 0 < cell.seconds < float("inf")
            ):
                raise ProfileError(f"the profile holds an impossible pass, {cell}; measure again.")
        times = {"host_seconds": self.host_seconds, "stability": self.stability}
        times |= {f"price of padding, {cell}": cell.row_seconds for cell in self.paddings}
        times |= {f"draft time of {name}": drafted.seconds for name, drafted in self.drafts.items()}
        for name, value in times.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < float("inf")
            ):
                raise ProfileError(
                    f"the profile's {name} is {value!r}, not a number of 0 or more; measure again."
                )

    def batches(self) -> list[int]:
        """Numbers of requests that were measured, rising."""
        return sorted({cell.num_requests for cell in self.passes})

    def contexts(self, num_requests: int) -> list[int]:
        """Contexts measured for so many requests, rising."""
        return sorted({c.context for c in self.passes if c.num_requests == num_requests})

    def seconds(self, num_requests: int, num_rows: float, context: int | None = None) -> float:
        """Time of a pass, on straight lines between the measured row counts of one batch.

        Args:
            num_requests: One of :meth:`batches`.
            num_rows: Rows, all requests together; beyond the table its last slope goes on.
            context: One of :meth:`contexts`; ``None`` takes the shortest.
        """
        if context is None:
            context = self.contexts(num_requests)[0]
        cells = sorted(
            (c.num_rows, c.seconds)
            for c in self.passes
            if c.num_requests == num_requests and c.context == context
        )
        if not cells:
            raise ProfileError(
                f"the profile holds no pass of {num_requests} requests with {context} tokens of "
                f"context; measured are batches of {', '.join(map(str, self.batches()))}."
            )
        if len(cells) == 1 or num_rows <= cells[0][0]:
            return cells[0][1]
        upper = next((i for i, cell in enumerate(cells) if num_rows <= cell[0]), len(cells) - 1)
        (rows, low), (next_rows, high) = cells[upper - 1], cells[upper]
        return max(0.0, low + (high - low) * (num_rows - rows) / (next_rows - rows))

    def verify_cost(
        self, num_speculative_tokens: float, num_requests: int = 1, context: int | None = None
    ) -> float:
        """A verify pass with so many draft tokens a request, in plain decode steps.

        At least 1, and never less than with fewer rows: where the clock says so, it is noise.
        """
        rows = num_requests * (1 + num_speculative_tokens)
        host = self.host_seconds
        plain = self.seconds(num_requests, num_requests, context)
        where = self.contexts(num_requests)[0] if context is None else context
        fewer = [
            cell.seconds
            for cell in self.passes
            if (cell.num_requests, cell.context) == (num_requests, where) and cell.num_rows <= rows
        ]
        most = max(plain, self.seconds(num_requests, rows, context), *fewer)
        return (most + host) / (plain + host)

    def is_measured(self, num_rows: float, num_requests: int, context: int) -> bool:
        """Whether so many rows lie within what was measured."""
        rows = [
            cell.num_rows
            for cell in self.passes
            if (cell.num_requests, cell.context) == (num_requests, context)
        ]
        return bool(rows) and min(rows) <= num_rows <= max(rows)

    def t_decode(self, num_requests: int = 1, context: int | None = None) -> float:
        """Seconds of a plain decode step, host time included."""
        return self.seconds(num_requests, num_requests, context) + self.host_seconds

    def alpha(self, num_requests: int = 1, context: int | None = None) -> float:
        """Marginal cost of one more draft token a request, in plain decode steps.

        The slope of a straight line through 1 at no draft token, by least squares over the measured
        row counts of up to 16 draft tokens a request; not below 0.
        """
        if context is None:
            context = self.contexts(num_requests)[0]
        points = [
            (cell.num_rows / num_requests - 1, cell.num_rows)
            for cell in self.passes
            if cell.num_requests == num_requests
            and cell.context == context
            and num_requests < cell.num_rows <= 17 * num_requests
        ]
        square = sum(n * n for n, _ in points)
        if not square:
            return 0.0
        rise = sum(n * (self.verify_cost(n, num_requests, context) - 1) for n, _ in points)
        return max(0.0, rise / square)

    def t_draft(self, method: str, num_requests: int = 1) -> float:
        """Draft time of a method in plain decode steps, per what its cost counts."""
        if method not in self.drafts:
            known = ", ".join(self.drafts) or "none"
            raise ProfileError(
                f"the profile holds no draft time of {method!r}; it has "
                f"{known}. Give t_draft (--t-draft), in plain decode steps, and how it counts "
                "(--draft-cost)."
            )
        return self.drafts[method].seconds / self.t_decode(num_requests)

    def to_json(self) -> str:
        """Return the file's text."""
        content = dataclasses.asdict(self)
        return json.dumps(
            {"format": FORMAT, "sha256": _checksum(content), "profile": content}, indent=1
        )

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: There is none, it is damaged, or it is of another format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"{path} cannot be read as a profile ({type(error).__name__}); make one with "
            "'foredraft profile'."
        ) from error
    try:
        outer = json.loads(text)
        content = outer["profile"]
        if outer["format"] != FORMAT:
            raise ProfileError(
                f"{path} is a profile of format {outer['format']!r}; this version reads {FORMAT}. "
                "Measure again with 'foredraft profile'."
            )
        if outer["sha256"] != _checksum(content):
            raise ValueError("its checksum does not match")
        fields = dict(content)
        fields["passes"] = tuple(PassTime(**cell) for cell in content["passes"])
        fields["paddings"] = tuple(PaddingTime(**cell) for cell in content["paddings"])
        fields["drafts"] = {name: DraftTime(**time) for name, time in content["drafts"].items()}
        return Profile(**fields)
    except ProfileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"{path} is damaged ({error}); measure again with 'foredraft profile'."
        ) from error


def profile_path(model_hash: str, dtype: str, machine: Mapping[str, Any]) -> Path:
    """Where the profile of a model on a machine is kept."""
    where = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / "profiles" / f"{model_hash[:16]}-{dtype}-{where}.json"


def stability(passes: tuple[PassTime, ...]) -> float:
    """Median of the cells' spreads."""
    return statistics.median(cell.spread for cell in passes)


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
