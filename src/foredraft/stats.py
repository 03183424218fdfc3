"""Every counter and every derived figure, here and nowhere else, the same way for every method.

Definitions, for one request or summed over many:

* A *verify step* is a target pass in which the request decoded, with a draft or without one; the
  pass that ends its prompt emits a token too, but verifies nothing and is not counted.
* ``num_drafts`` counts verify steps that had at least one draft token.
* A draft token is *accepted* if it was emitted: one cut off by a stop rule is not.
* Position ``k`` is the depth ``k`` of a draft (from 1): accepted at ``k`` means at least ``k``
  draft tokens of that step were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.types import StepStats


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, and what follows from them.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        num_tokens: Tokens emitted.
        num_first_tokens: How many of these were the first of their request.
        num_verify_steps: Target passes in which it decoded.
        num_drafts: Of these, passes with a draft.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens emitted.
        accepted_at: ``accepted_at[k - 1]`` counts steps in which at least ``k`` were accepted.
        draft_s, target_s, verify_s, host_s: The request's share of the time of its steps, in
            seconds; a step's time is shared evenly among those who took part.
        first_token_s: From its first step to its first token.
        elapsed_s: From its first step to its last token, wall time.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_verify_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    first_token_s: float = 0.0
    elapsed_s: float = 0.0

    def record_prefill(self, num_emitted: int) -> None:
        """Count a pass over a chunk of the prompt, and the token that the last one emits."""
        self.num_tokens += num_emitted
        self.num_first_tokens += num_emitted

    def record_verify(self, num_draft_tokens: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verify step: what was drafted, accepted and emitted, after every stop rule."""
        self.num_verify_steps += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.num_tokens += num_emitted
        while len(self.accepted_at) < num_accepted:
            self.accepted_at.append(0)
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def record_time(self, step: StepStats) -> None:
        """Add this request's share of one step."""
        share = 1.0 / step.num_segments
        self.draft_s += step.draft_s * share
        self.target_s += step.target_s * share
        self.verify_s += step.verify_s * share
        self.host_s += step.host_s * share

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens emitted per second of wall time, prompt included; ``None`` before the first."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first (of each request) per second of wall time after the first."""
        seconds = self.elapsed_s - self.first_token_s
        num_tokens = self.num_tokens - self.num_first_tokens
        return num_tokens / seconds if seconds > 0 and num_tokens > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """Tau: 1 + accepted / verify steps; ``None`` before the first verify step."""
        if not self.num_verify_steps:
            return None
        return 1 + self.num_accepted_tokens / self.num_verify_steps

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; ``None`` where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts with at least ``k`` accepted tokens, for k = 1, 2, ...; never rises."""
        return [count / self.num_drafts for count in self.accepted_at]

    def add(self, other: RequestStats) -> None:
        """Add another request's counters and times (wall times are summed too)."""
        for name in self.__dataclass_fields__:
            if name != "accepted_at":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for position, count in enumerate(other.accepted_at):
            if position == len(self.accepted_at):
                self.accepted_at.append(0)
            self.accepted_at[position] += count
