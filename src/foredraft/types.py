"""What travels along the one data path: Request, StepPlan, DraftBatch, TargetOutput, Verdict.

All are frozen. Token ids and indices are host arrays (numpy); logits, hidden states and draft
probabilities are tensors on the model's device. "Segment" is one request's part of one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foredraft.params import MAX_SPECULATIVE_TOKENS, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    import torch

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for, after validation.

    Attributes:
        request_id: Unique within an engine.
        prompt_ids: int64 [num_prompt_tokens], at least one.
        sampling: How tokens are picked.
        speculation: How it speculates.
        seed: The seed in force (the user's, or the random one drawn for it).
        max_tokens: Most tokens to generate, already cut to the context length.
        stop_ids: Every token id that ends the text.
    """

    request_id: str
    prompt_ids: Int64Array
    sampling: SamplingParams
    speculation: SpeculationParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's part of a step: a chunk of its prompt, or its root.

    Attributes:
        request: The request.
        token_ids: int64 [length], prompt and output committed so far (a read-only view).
        slot: Where its KV lies.
        start: Position of the first row of this pass, which equals the KV rows already cached.
        num_rows: Rows of committed tokens to compute: ``token_ids[start:start + num_rows]``.
        is_decode: Whether this is a decode step (one row, the root, plus its draft nodes).
        room: Most draft nodes that there is memory for.
    """

    request: Request
    token_ids: Int64Array
    slot: int
    start: int
    num_rows: int
    is_decode: bool
    room: int = MAX_SPECULATIVE_TOKENS

    @property
    def wants_pick(self) -> bool:
        """Whether the last row is the root, so that its logits and a pick are wanted."""
        return self.start + self.num_rows == len(self.token_ids)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, and this is a part of it."""
        return not self.is_decode and self.request.sampling.prompt_logprobs is not None

    @property
    def root_position(self) -> int:
        """Absolute position of the last row of committed tokens."""
        return self.start + self.num_rows - 1

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs in this step, in row order."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Budgets:
    """How much each segment may draft.

    Attributes:
        max_nodes: int64 [num_segments]; 0 is plain decoding.
        member_nodes: Where a method has members whose drafts take time, for each of them int64
            [num_segments]: the most nodes that it may draft, of those in ``max_nodes``.
    """

    max_nodes: Int64Array
    member_nodes: Mapping[str, Int64Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What was proposed for a step: one token tree a segment, flat. A chain is a tree.

    Attributes:
        token_ids: int64 [num_nodes].
        parents: int64 [num_nodes], the parent's row within its own segment's tree: 0 is the root,
            ``k`` is the segment's k-th node (1-based). A parent comes before its children.
        offsets: int64 [num_segments + 1], where each segment's nodes begin and end.
        draft_probs: float [num_dists, V] or ``None``: the very distributions the tokens were drawn
            from. Only for the classical rules; the default rule never looks.
        dist_ids: int64 [num_nodes], the row of ``draft_probs`` a node was drawn from, or -1 for a
            token that was not drawn but chosen (a point mass); ``None`` where all are chosen.
        is_with_replacement: bool [num_segments], whether siblings with one ``dist_id`` were drawn
            independently, so that they may repeat; ``None`` where all were drawn without
            replacement, in node order. Only for ``rejection`` and ``traversal``.
        confidence: float64 [num_nodes] in [0, 1), how sure the drafter is of each node once its
            parent is accepted, on a scale of its own: what it is worth is learnt from outcomes.
            ``None``, or NaN for a node, where a drafter cannot say. It never decides whether a
            token is accepted.
        votes: float64 [num_voters, num_nodes], where several methods drafted together: the
            confidence of each, NaN where it cannot say, -1 where it did not propose the node.
        voters: Their names.
    """

    token_ids: Int64Array
    parents: Int64Array
    offsets: Int64Array
    draft_probs: torch.Tensor | None = None
    dist_ids: Int64Array | None = None
    is_with_replacement: NDArray[np.bool_] | None = None
    confidence: NDArray[np.float64] | None = None
    votes: NDArray[np.float64] | None = None
    voters: tuple[str, ...] = ()

    @staticmethod
    def empty(num_segments: int) -> DraftBatch:
        """Return a batch with no node for any of ``num_segments`` segments."""
        none = np.empty(0, dtype=np.int64)
        return DraftBatch(none, none, np.zeros(num_segments + 1, dtype=np.int64))

    @staticmethod
    def of_trees(
        trees: Sequence[tuple[Int64Array, Int64Array, NDArray[np.float64]] | None],
    ) -> DraftBatch:
        """Return a batch of chosen tokens.

        Args:
            trees: For each segment its token ids, parents and confidence, or ``None``.
        """
        drafted = [tree for tree in trees if tree is not None]
        if not drafted:
            return DraftBatch.empty(len(trees))
        token_ids, parents, confidence = (
            np.concatenate(part) for part in zip(*drafted, strict=True)
        )
        sizes = [0 if tree is None else len(tree[0]) for tree in trees]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return DraftBatch(token_ids, parents, offsets, confidence=confidence)

    @property
    def num_nodes(self) -> Int64Array:
        """int64 [num_segments], draft nodes of each segment."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What the one target pass gave.

    Attributes:
        logits: float32 [num_logit_rows, V], for each segment that wants a pick its root and then
            its draft nodes.
        offsets: int64 [num_segments + 1], where each segment's rows begin and end; none for a
            prompt chunk that does not end its prompt.
        hidden_states: For each tapped layer, [num_rows, hidden] for every row of the pass.
        row_offsets: int64 [num_segments + 1], where each segment's rows lie in the pass.
        prompt_logits: float32 [num_rows, V] of prompt rows whose log-probabilities are wanted, by
            segment.
    """

    logits: torch.Tensor
    offsets: Int64Array
    hidden_states: dict[int, torch.Tensor]
    row_offsets: Int64Array
    prompt_logits: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided, before any stop rule.

    Attributes:
        path: int64 [num_accepted], accepted nodes (1-based within their segment), root to leaf.
        path_offsets: int64 [num_segments + 1].
        token_ids: int64 [num_emitted], for each segment the accepted tokens and then one more.
        token_offsets: int64 [num_segments + 1].
        is_finite: bool [num_segments]; False where the target's logits were not finite, in which
            case the segment emits the accepted tokens before that, if any, and no further one.
        picks: int64 [num_rows], the target's own token at every row of its logits, at rejected
            nodes too; ``None`` where a verdict was made without.
    """

    path: Int64Array
    path_offsets: Int64Array
    token_ids: Int64Array
    token_offsets: Int64Array
    is_finite: NDArray[np.bool_]
    picks: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token at its position.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability; -inf where a filter took it out.
        rank: 1 for the likeliest of the position, and so on; ties count as one place.
        top: The likeliest tokens of the position and their log-probabilities, as many as were asked
            for, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request, after every stop rule.

    Attributes:
        request_id: Whose.
        token_ids: Tokens emitted by this step, in order.
        num_accepted: How many of them, from the first, were draft tokens.
        finish_reason: ``None`` while the request runs; then ``stop``, ``length``, ``deadline``
            or ``error``.
        stop_token_id: The token id that ended it, for ``stop``.
        stop_string: The string that ended it, for ``stop``, if that was no token id.
        error: What went wrong, for ``error``.
        pieces: Text that became certain with this step, where text is made: each piece with whether
            the token that completed it was an accepted draft token.
        logprobs: Log-probabilities of ``token_ids``, where they are asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: str | None = None
    pieces: tuple[tuple[str, bool], ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """Where the time of one step went, in seconds, and what it held.

    Attributes:
        draft_s, target_s, verify_s, host_s: Wall time by phase.
        num_rows: Rows of the target pass.
        num_segments: Requests in it.
        num_decoding: Of these, requests that decoded.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens emitted.
        num_tokens: Tokens emitted.
        expected_tokens: What the controller expected to be emitted; ``None`` without a cost table.
        predicted_s: The time that it expected; ``None`` likewise.
        plain_s: The time that the same step would have taken without a draft, as estimated;
            ``None`` likewise.
    """

    draft_s: float
    target_s: float
    verify_s: float
    host_s: float
    num_rows: int
    num_segments: int
    num_decoding: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int
    expected_tokens: float | None = None
    predicted_s: float | None = None
    plain_s: float | None = None

    @property
    def total_s(self) -> float:
        """Wall time of the step."""
        return self.draft_s + self.target_s + self.verify_s + self.host_s
