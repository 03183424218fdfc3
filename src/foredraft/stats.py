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
        num_reused_tokens: Tokens of the prompt whose keys and values were there already.
        num_preemptions: How often it was put out, to go on later.
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
        decode_s: Wall time of the steps in which it decoded and of which a forecast exists.
        plain_s: What its tokens of these steps would have taken without drafts, as estimated.
        expected_plain_s: The same of the tokens that the controller expected.
        predicted_s: What the controller expected these steps to take.
        steps: For each verify step the draft tokens verified, and the accepted ones.
        members: Where several methods drafted together, for each of them the draft tokens that it
            proposed and that were verified, and the accepted ones; one that several proposed counts
            for each.
    """

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_preemptions: int = 0
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
    decode_s: float = 0.0
    plain_s: float = 0.0
    expected_plain_s: float = 0.0
    predicted_s: float = 0.0
    steps: list[tuple[int, int, bool]] = field(default_factory=list)
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def record_prefill(self, num_emitted: int) -> None:
        """Count a pass over a chunk of the prompt, and the token that the last one emits."""
        self.num_tokens += num_emitted
        self.num_first_tokens += num_emitted

    def record_verify(
        self, num_draft_tokens: int, num_accepted: int, num_emitted: int, is_cut: bool = True
    ) -> None:
        """Count one verify step: what was drafted, accepted and emitted, after every stop rule.

        ``is_cut`` says that the draft was as long as it was allowed to be, or trimmed; else the
        drafter had no more.
        """
        self.num_verify_steps += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.num_tokens += num_emitted
        self.steps.append((num_draft_tokens, num_accepted, is_cut))
        while len(self.accepted_at) < num_accepted:
            self.accepted_at.append(0)
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def record_member(self, method: str, num_proposed: int, num_accepted: int) -> None:
        """Add what one of several methods proposed in a step, and how much of it was accepted."""
        before = self.members.get(method, (0, 0))
        self.members[method] = (before[0] + num_proposed, before[1] + num_accepted)

    def record_time(self, step: StepStats) -> None:
        """Add this request's share of one step."""
        share = 1.0 / step.num_segments
        self.draft_s += step.draft_s * share
        self.target_s += step.target_s * share
        self.verify_s += step.verify_s * share
        self.host_s += step.host_s * share

    def record_forecast(self, step: StepStats, num_emitted: int) -> None:
        """Add a step in which the request decoded: what it took, and would have taken plain."""
        if step.plain_s is None or step.predicted_s is None or step.expected_tokens is None:
            return
        self.decode_s += step.total_s
        self.plain_s += step.plain_s * num_emitted
        self.predicted_s += step.predicted_s
        self.expected_plain_s += step.plain_s * step.expected_tokens / step.num_segments

    @property
    def num_wasted_tokens(self) -> int:
        """Draft tokens that were verified and not emitted."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def estimated_speedup(self) -> float | None:
        """Over plain decoding, prompt apart: measured time against plain time as estimated."""
        return self.plain_s / self.decode_s if self.decode_s > 0 else None

    @property
    def predicted_speedup(self) -> float | None:
        """The same as the controller expected it: by forecast acceptance and the cost table."""
        return self.expected_plain_s / self.predicted_s if self.predicted_s > 0 else None

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
            if name not in ("accepted_at", "steps", "members"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.steps += other.steps
        for method, counts in other.members.items():
            self.record_member(method, *counts)
        for position, count in enumerate(other.accepted_at):
            if position == len(self.accepted_at):
                self.accepted_at.append(0)
            self.accepted_at[position] += count


_RECENT = 1 / 32
"""Weight of a step in what :class:`EngineStats` calls recent."""


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine over all requests, and how speculation does right now.

    Attributes:
        num_steps: Steps run.
        num_tokens: Tokens emitted.
        spec_decode_num_drafts: Steps that verified a draft, counted once a step.
        spec_decode_num_draft_tokens: Draft tokens verified.
        spec_decode_num_accepted_tokens: Of these, emitted.
        draft_s, target_s, verify_s, host_s: Wall time by phase, in seconds.
        recent_num_draft_tokens: Draft tokens a decoding request, in recent steps.
        recent_plain_tokens_per_s: Tokens per second that recent steps would have emitted without
            drafts, as estimated; ``None`` before there is a cost table.
        recent_tokens_per_s: Tokens per second of recent decode steps.
        recent_predicted_tokens_per_s: The same as the controller expected it; ``None`` likewise.
    """

    num_steps: int = 0
    num_tokens: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    recent_num_draft_tokens: float = 0.0
    recent_plain_tokens_per_s: float | None = None
    recent_tokens_per_s: float | None = None
    recent_predicted_tokens_per_s: float | None = None
    _weighted: list[float] = field(default_factory=lambda: [0.0] * 6)

    @property
    def num_wasted_tokens(self) -> int:
        """Draft tokens that were verified and not emitted."""
        return self.spec_decode_num_draft_tokens - self.spec_decode_num_accepted_tokens

    @property
    def recent_speedup(self) -> float | None:
        """Recent tokens per second against plain decoding as estimated."""
        if not self.recent_plain_tokens_per_s or self.recent_tokens_per_s is None:
            return None
        return self.recent_tokens_per_s / self.recent_plain_tokens_per_s

    @property
    def recent_predicted_speedup(self) -> float | None:
        """The same as the controller expected it."""
        if not self.recent_plain_tokens_per_s or self.recent_predicted_tokens_per_s is None:
            return None
        return self.recent_predicted_tokens_per_s / self.recent_plain_tokens_per_s

    def record(self, step: StepStats) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        self.spec_decode_num_drafts += step.num_draft_tokens > 0
        self.spec_decode_num_draft_tokens += step.num_draft_tokens
        self.spec_decode_num_accepted_tokens += step.num_accepted_tokens
        self.draft_s += step.draft_s
        self.target_s += step.target_s
        self.verify_s += step.verify_s
        self.host_s += step.host_s
        if not step.num_decoding or step.num_decoding < step.num_segments:
            return
        num_drafted = step.num_draft_tokens / step.num_decoding
        self.recent_num_draft_tokens += _RECENT * (num_drafted - self.recent_num_draft_tokens)
        if step.plain_s is None or step.predicted_s is None or step.expected_tokens is None:
            return
        for index, value in enumerate(
            (
                step.num_tokens,
                step.total_s,
                step.num_decoding,
                step.plain_s,
                step.expected_tokens,
                step.predicted_s,
            )
        ):
            self._weighted[index] += _RECENT * (value - self._weighted[index])
        tokens, seconds, plain, plain_s, expected, predicted_s = self._weighted
        self.recent_tokens_per_s = tokens / seconds
        self.recent_plain_tokens_per_s = plain / plain_s
        self.recent_predicted_tokens_per_s = expected / predicted_s
