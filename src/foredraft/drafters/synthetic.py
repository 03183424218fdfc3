"""A drafter with the acceptance that you set: for checking formulas, controllers and engines.

It drafts texts that it has seen come out before (the same prompt with the same seed and parameters
gives the same text), each token right with the chance that was set, and wrong otherwise. So the
target verifies it like any other drafter, exactly, and what is accepted follows the setting: no
result is made up. A text that is not known yet is not drafted; the first run makes it known.

Cost: next to nothing, or what ``seconds`` says, to try what a dearer drafter would bring.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.errors import ConfigError
from foredraft.sampling.noise import Stream, units
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Request,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)

_LOG = logging.getLogger("foredraft")

_MOST_TEXTS = 256


@dataclass(frozen=True, slots=True)
class SyntheticConfig:
    """Options of the synthetic drafter. None of them can change a text.

    Attributes:
        acceptance: Chance that a drafted token is right once those before it were: one number, or
            one for each position (the last goes on).
        changes: Pairs of a number of output tokens and the acceptance from there on, rising: a
            request whose text becomes harder or easier to draft.
        seconds: Time to spend on a draft, for each unit of what ``cost`` counts by.
        cost: ``once``, ``per_token`` or ``per_level``.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    acceptance: float | tuple[float, ...] = 0.8
    changes: tuple[tuple[int, float | tuple[float, ...]], ...] = ()
    seconds: float = 0.0
    cost: str = "once"

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "acceptance", _checked(self.acceptance))
        if not isinstance(self.changes, (tuple, list)) or any(
            not isinstance(change, (tuple, list)) or len(change) != 2 for change in self.changes
        ):
            raise ConfigError(
                f"changes is {self.changes!r}; allowed are pairs of a number of output tokens and "
                "the acceptance from there on."
            )
        changes = tuple((place, _checked(chances)) for place, chances in self.changes)
        places = [place for place, _ in changes]
        is_number = all(isinstance(p, int) and not isinstance(p, bool) for p in places)
        if not is_number or places != sorted(set(places)) or any(p < 1 for p in places):
            raise ConfigError(
                f"changes begin at {places}; allowed are rising numbers of output tokens of 1 or "
                "more."
            )
        object.__setattr__(self, "changes", changes)
        if (
            isinstance(self.seconds, bool)
            or not isinstance(self.seconds, (int, float))
            or not 0 <= self.seconds < math.inf
        ):
            raise ConfigError(f"seconds is {self.seconds!r}; allowed is a number of 0 or more.")
        if self.cost not in ("once", "per_token", "per_level"):
            raise ConfigError(
                f"cost is {self.cost!r}; allowed is 'once', 'per_token' or 'per_level'."
            )

    def chances_at(self, num_output_tokens: int) -> tuple[float, ...]:
        """Acceptance by position for a draft after so many output tokens."""
        chances = self.acceptance
        for place, later in self.changes:
            if num_output_tokens >= place:
                chances = later
        assert isinstance(chances, tuple)
        return chances


def _checked(acceptance: float | tuple[float, ...]) -> tuple[float, ...]:
    chances = acceptance if isinstance(acceptance, (tuple, list)) else (acceptance,)
    if not chances or not all(
        isinstance(c, (int, float)) and not isinstance(c, bool) and 0 <= c <= 1 for c in chances
    ):
        raise ConfigError(
            f"acceptance is {acceptance!r}; allowed is a number in [0, 1], or one for each "
            "position."
        )
    return tuple(float(chance) for chance in chances)


class SyntheticDrafter(Drafter):
    """Drafts known texts, spoilt at a set rate (module docstring). Exact, like every drafter.

    Under a classical rule it would know what the coins decided the last time, and the law would
    suffer; so it serves the default rule only, and drafts chains.
    """

    Config = SyntheticConfig

    def __init__(self, config: SyntheticConfig, context: DrafterContext) -> None:
        """Make a drafter that knows no text."""
        self.config = config
        self.context = context
        self.needs = Needs(cost=config.cost, sees_noise=True, rules=("walk",))
        self._texts: OrderedDict[bytes, Int64Array] = OrderedDict()
        self._has_parted = False

    def remember(self, request: Request, token_ids: Int64Array) -> None:
        """Learn the text (prompt and output) that comes of a request."""
        self._texts[_key(request)] = np.array(token_ids, dtype=np.int64)
        while len(self._texts) > _MOST_TEXTS:
            self._texts.popitem(last=False)

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose a chain along each known text, each token right with the chance that was set."""
        token_ids: list[Int64Array] = []
        offsets = np.zeros(len(plan.segments) + 1, dtype=np.int64)
        for index, (segment, limit) in enumerate(
            zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ):
            drafted = self._draft(segment, limit)
            token_ids.append(drafted)
            offsets[index + 1] = offsets[index] + len(drafted)
        lengths = np.diff(offsets)
        if self.config.seconds and lengths.any():
            wanted = self.config.seconds * (1 if self.config.cost == "once" else lengths.max())
            time.sleep(wanted)
        parents = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths] or [lengths])
        return DraftBatch(np.concatenate(token_ids or [lengths]), parents, offsets)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Keep up with the texts that run, to know them the next time."""
        for index, segment in enumerate(plan.segments):
            emitted = verdict.token_ids[
                verdict.token_offsets[index] : verdict.token_offsets[index + 1]
            ]
            if not len(emitted):
                continue
            key = _key(segment.request)
            text = np.concatenate([segment.token_ids, emitted])
            known = self._texts.get(key)
            if known is None or len(known) < len(text) or not _starts(known, text):
                self.remember(segment.request, text)

    def _draft(self, segment: Segment, limit: int) -> Int64Array:
        """The next tokens of a known text, spoilt; none where the text is not known."""
        request: Request = segment.request
        text = self._texts.get(_key(request))
        length = len(segment.token_ids)
        if limit < 1 or text is None:
            return np.empty(0, dtype=np.int64)
        if not _starts(text, segment.token_ids):
            if not self._has_parted:
                self._has_parted = True
                _LOG.warning(
                    "method 'synthetic' knows another text for a prompt than the one that comes "
                    "out (bfloat16 rounds a request by its company), and drafts nothing for it "
                    "from there on; check with float32"
                )
            return np.empty(0, dtype=np.int64)
        drafted = text[length : length + limit].copy()
        chances = self.config.chances_at(segment.num_output_tokens)
        positions = np.minimum(np.arange(len(drafted)), len(chances) - 1)
        root = np.array([segment.root_position], dtype=np.int64)
        coins = units(request.seed, Stream.DRAFT, root, np.arange(len(drafted)))[0]
        is_wrong = coins >= np.array(chances)[positions]
        drafted[is_wrong] = (drafted[is_wrong] + 1) % self.context.vocab_size
        return drafted


def _key(request: Request) -> bytes:
    """A prompt and what its text depends on: at temperature 0 that is no seed."""
    seed = 0 if request.sampling.is_greedy else request.seed
    return request.prompt_ids.tobytes() + seed.to_bytes(8, "little")


def _starts(text: Int64Array, beginning: Int64Array) -> bool:
    return len(text) >= len(beginning) and bool((text[: len(beginning)] == beginning).all())
