"""What the classical rules share: the draft read once, residuals, and drawing a token from a law.

A "law" here is one row of probabilities over the vocabulary, float64 [V]. Rows are numpy arrays or
torch tensors on any device that has float64; they are converted one at a time, when a rule first
needs more of a row than the probabilities of its drafted tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.types import Int64Array

Probs: TypeAlias = "NDArray[np.floating[Any]] | torch.Tensor"
"""Rows of probabilities, float32 or float64 [num_rows, V]."""

Law: TypeAlias = Any
"""One row, float64 [V]: a numpy array or a torch tensor, like the table it came from."""


def draw_token(law: Law, uniform: float) -> int:
    """Draw a token from a law by inverting its cumulative sum. Exact up to rounding.

    Args:
        law: float64 [V], not negative, not all zero; need not sum to 1.
        uniform: In [0, 1).

    Returns:
        The token id. Never one of probability zero and never out of range, however the sums round
        and however near to 1 the uniform is.

    Raises:
        ValueError: The law is all zero, or not finite.
    """
    if isinstance(law, torch.Tensor):
        cumulative = law.cumsum(0)
        total = float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, uniform * total, right=True))
    else:
        cumulative = law.cumsum()
        total = float(cumulative[-1])
        index = int(cumulative.searchsorted(uniform * total, side="right"))
    if not 0.0 < total < math.inf:
        raise ValueError(
            f"a law to draw from sums to {total}; allowed is a finite sum above 0. "
            "Check the target's probabilities for rows that are zero or not finite."
        )
    if index < len(law) and law[index] > 0:
        return index
    # Rounding led past the end, or (parallel sums need not rise evenly) to a token without mass.
    positive: list[int] = np.flatnonzero(np.asarray((law > 0).tolist())).tolist()
    return next((token for token in positive if token >= index), positive[-1])


@dataclass(frozen=True, slots=True)
class ReadDraft:
    """One request's draft, read into host lists once; the tables stay where they are.

    Attributes:
        token_ids: The token of each node; node k is at index k - 1.
        children: For each row, the nodes below it in draft order.
        dist_ids: For each node, the row of ``draft_probs`` it was drawn from; -1 for a chosen one.
        target_at: For each node, the target's probability of its token at its parent.
        draft_at: For each node, the probability of its token in the row it was drawn from, before
            any sibling is taken out; 1 for a chosen one.
        target_probs: float [1 + num_nodes, V].
        draft_probs: float [num_dists, V], or ``None`` where every token was chosen.
    """

    token_ids: list[int]
    children: list[list[int]]
    dist_ids: list[int]
    target_at: list[float]
    draft_at: list[float]
    target_probs: Probs
    draft_probs: Probs | None


def read_draft(
    token_ids: Int64Array,
    parents: Int64Array,
    target_probs: Probs,
    draft_probs: Probs | None,
    dist_ids: Int64Array | None,
) -> ReadDraft:
    """Check one request's draft and gather what every rule asks for first.

    Args:
        token_ids: int64 [num_nodes].
        parents: int64 [num_nodes], the parent's row; a parent comes before its children, siblings
            are in draft order.
        target_probs: float [1 + num_nodes, V].
        draft_probs: float [num_dists, V] or ``None``.
        dist_ids: int64 [num_nodes], a row of ``draft_probs`` or -1; ``None`` means all -1.

    Returns:
        The draft.

    Raises:
        ValueError: Shapes that do not fit together, or an id out of range.
    """
    num_nodes = len(token_ids)
    if dist_ids is None:
        dist_ids = np.full(num_nodes, -1, dtype=np.int64)
    if not len(parents) == len(dist_ids) == num_nodes or len(target_probs) != num_nodes + 1:
        raise ValueError(
            f"a draft of {num_nodes} tokens came with {len(parents)} parents, {len(dist_ids)} "
            f"dist_ids and {len(target_probs)} rows of target_probs; allowed are as many parents "
            "and dist_ids as tokens, and one row more."
        )
    vocab_size = int(target_probs.shape[1])
    num_dists = 0
    if draft_probs is not None:
        num_dists = len(draft_probs)
        if draft_probs.shape[1] != vocab_size:
            raise ValueError(
                f"draft_probs has {draft_probs.shape[1]} columns and target_probs {vocab_size}; "
                "both must be over the target's vocabulary."
            )
    tokens: list[int] = token_ids.tolist()
    dists: list[int] = dist_ids.tolist()
    rows: list[int] = parents.tolist()
    children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
    for node, parent in enumerate(rows, start=1):
        token, dist_id = tokens[node - 1], dists[node - 1]
        if not (0 <= parent < node and 0 <= token < vocab_size and -1 <= dist_id < num_dists):
            raise ValueError(
                f"node {node} has parent {parent}, token id {token} and dist id {dist_id}; allowed "
                f"are a parent in [0, {node}), a token id in [0, {vocab_size}) and a dist id in "
                f"[-1, {num_dists})."
            )
        children[parent].append(node)
    target_at: list[float] = []
    draft_at = [1.0] * num_nodes
    if num_nodes:
        target_at = target_probs[rows, tokens].tolist()
    if num_nodes and draft_probs is not None and num_dists:
        # A dist id of -1 reads the last row, and what it reads is not used.
        found = draft_probs[dists, tokens].tolist()
        draft_at = [1.0 if dists[k] < 0 else found[k] for k in range(num_nodes)]
    return ReadDraft(tokens, children, dists, target_at, draft_at, target_probs, draft_probs)


class Residual:
    """What is left of the target's law at one row while the row's children are rejected in order.

    It starts as the target's own law with a weight. Rejecting a child with law ``draft_law``
    leaves the positive part of ``weight * target_law - draft_law``: its normalised form is the new
    law, and its mass ``S`` gives the new weight ``S / (S + 1 - weight)``, which is never larger.
    A weight of 1 stays 1, which is recursive rejection; other weights are those of block and
    traversal verification.

    The law of a drawn child is its row of ``draft_probs``, without the siblings before it that
    were drawn from the same row (renormalised), unless siblings are drawn with replacement. The
    law of a chosen child is a point mass. A drawn child whose token has no mass under its law is
    passed over as if it were not there (``foredraft.verify.reference`` says when that is exact).

    No division by zero and no NaN: where the positive part has no mass, the law stays as it is.
    Up to rounding that happens with probability zero, or where the new weight is 0 and the law is
    not used.

    Attributes:
        weight: In [0, 1].
    """

    __slots__ = (
        "_draft",
        "_draft_laws",
        "_law",
        "_mass",
        "_row",
        "_spent",
        "_with_replacement",
        "weight",
    )

    def __init__(
        self, draft: ReadDraft, row: int, weight: float = 1.0, *, with_replacement: bool = False
    ) -> None:
        """Start at the target's law of ``row``."""
        self.weight = weight
        self._draft = draft
        self._row = row
        self._with_replacement = with_replacement
        # The law is the table's row until something was rejected; from then on `_law / _mass`.
        self._law: Law | None = None
        self._mass = 1.0
        self._draft_laws: dict[int, Law] = {}
        self._spent: dict[int, int] = {}

    def draw(self, uniform: float) -> int:
        """Draw a token from what is left."""
        if self._law is None:
            return draw_token(_row_of(self._draft.target_probs, self._row), uniform)
        return draw_token(self._law, uniform)

    def acceptance(self, node: int) -> float:
        """Return ``min(1, weight * target / draft)`` of a child's token; 0 if it has no mass."""
        draft_prob = self._draft_prob(node)
        if not draft_prob > 0.0:
            return 0.0
        if self._law is None:
            target_prob = self._draft.target_at[node - 1]
        else:
            target_prob = float(self._law[self._draft.token_ids[node - 1]]) / self._mass
        return min(self.weight * target_prob / draft_prob, 1.0)

    def reject(self, node: int) -> None:
        """Take a rejected child, the next one in draft order, out of the law."""
        if not self._draft_prob(node) > 0.0:
            return
        token = self._draft.token_ids[node - 1]
        dist_id = self._draft.dist_ids[node - 1]
        if self._law is None:
            left = _row_of(self._draft.target_probs, self._row)
        else:
            left = self._law / self._mass
        if self.weight != 1.0:
            left *= self.weight
        if dist_id < 0:
            left[token] = 0.0
        else:
            left = _positive_part(left, self._draft_law(dist_id))
            if not self._with_replacement:
                self._spent[dist_id] = token
        mass = float(left.sum())
        if 0.0 < mass < math.inf:
            self._law, self._mass = left, mass
        else:
            mass = 0.0
        # Added in this order so that a weight of 1 stays exactly 1.
        total = mass + (1.0 - self.weight)
        self.weight = mass / total if total > 0.0 else 1.0

    def _draft_prob(self, node: int) -> float:
        dist_id = self._draft.dist_ids[node - 1]
        if dist_id not in self._spent and dist_id not in self._draft_laws:
            return self._draft.draft_at[node - 1]
        return float(self._draft_law(dist_id)[self._draft.token_ids[node - 1]])

    def _draft_law(self, dist_id: int) -> Law:
        """Return the law of the next child drawn from a row: the row itself, or a changed copy.

        A rejected token is taken out only when a later sibling asks, for the last one none does.
        """
        draft_probs = self._draft.draft_probs
        assert draft_probs is not None, "a dist id is checked against draft_probs when it is read"
        token = self._spent.pop(dist_id, None)
        if token is not None:
            law = self._draft_laws.get(dist_id)
            if law is None:
                law = self._draft_laws[dist_id] = _row_of(draft_probs, dist_id)
            law[token] = 0.0
            mass = float(law.sum())
            if mass > 0.0:
                law /= mass
        return self._draft_laws.get(dist_id, draft_probs[dist_id])


def _row_of(probs: Probs, row: int) -> Law:
    """Return a float64 copy of one row."""
    if isinstance(probs, torch.Tensor):
        return probs[row].to(torch.float64, copy=True)
    return probs[row].astype(np.float64)


def _positive_part(minuend: Law, subtrahend: Law) -> Law:
    """Return the positive part of a difference, in the float64 memory of ``minuend``."""
    minuend -= subtrahend
    if isinstance(minuend, torch.Tensor):
        return minuend.clamp_(min=0.0)
    return np.maximum(minuend, 0.0, out=minuend)
