"""One request's draft while it grows: level by level, the best nodes or the drawn ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foredraft.drafters.draft_cache import Branch, Reading
from foredraft.sampling.processors import Float64Array
from foredraft.tree.tree import depths
from foredraft.types import Int64Array, Segment

if TYPE_CHECKING:
    import torch

_NONE = np.empty(0, dtype=np.int64)


class Growth:
    """A draft that grows.

    Args:
        segment: Whose.
        reading: What the draft model has read of it.
        limit: Most nodes.
        depth: Most levels.

    Attributes:
        token_ids: int64 [num_nodes], by the target's ids.
        nodes: int64 [num_nodes], by the draft model's.
        parents: int64 [num_nodes].
        confidence: float64 [num_nodes], of each node once its parent is accepted.
        frontier: Rows below which it goes on, int64: 0 is the root.
        laws: The distributions that nodes were drawn from, each float32 [V].
        dist_ids: int64 [num_nodes], which of them; -1 for a node that was not drawn.
        is_coupled: Whether nodes are chosen with the target's noise, and not drawn.
        is_chain_only: Whether it must not branch.
    """

    def __init__(self, segment: Segment, reading: Reading, limit: int, depth: int) -> None:
        """Begin at the root."""
        self.segment, self.reading = segment, reading
        self.limit, self.depth = limit, depth
        self.token_ids = self.nodes = self.parents = self.dist_ids = _NONE
        self.confidence: Float64Array = np.empty(0)
        self.frontier: Int64Array = np.zeros(1, dtype=np.int64)
        self.laws: list[torch.Tensor] = []
        self.is_coupled = segment.request.speculation.verification == "walk"
        self.is_chain_only = not segment.request.speculation.allows_trees
        self._survival: Float64Array = np.empty(0)
        self._num_levels = 0

    @property
    def is_open(self) -> bool:
        """Whether it may grow on."""
        has_room = self.is_coupled or len(self.nodes) < self.limit
        return len(self.frontier) > 0 and self._num_levels < self.depth and has_room

    def branch(self) -> Branch:
        """What the draft model must run next."""
        return Branch(self.reading, self.nodes, self.parents, self.frontier)

    def positions(self) -> Int64Array:
        """Absolute positions of the tokens that come below the frontier, int64."""
        found: Int64Array = self.segment.root_position + 1 + depths(self.parents)[self.frontier]
        return found

    def add_best(
        self,
        token_ids: Int64Array,
        confidence: Float64Array,
        columns: Int64Array,
        width: int,
        least: float,
    ) -> None:
        """Add children below the frontier and keep the likeliest nodes of all.

        Args:
            token_ids: int64 [frontier, num_children], -1 where there is none.
            confidence: float64 like it.
            columns: The draft model's id of each token of the target.
            width: Nodes of a level below which it goes on.
            least: A branch that survives with less than this chance does not go on.
        """
        survival = np.concatenate([[1.0], self._survival])
        where, which = np.nonzero(token_ids >= 0)
        found = token_ids[where, which]
        parents = self.frontier[where]
        num_old = len(self.nodes)
        self.token_ids = np.concatenate([self.token_ids, found])
        self.nodes = np.concatenate([self.nodes, columns[found]])
        self.parents = np.concatenate([self.parents, parents])
        self.confidence = np.concatenate([self.confidence, confidence[where, which]])
        self._survival = np.concatenate(
            [self._survival, survival[parents] * confidence[where, which]]
        )
        is_new = np.arange(len(self.nodes)) >= num_old
        is_new = is_new[self._keep(self.limit)]
        new = np.nonzero(is_new & (self._survival >= least))[0]
        best = new[np.argsort(-self._survival[new], kind="stable")[:width]]
        self.frontier = np.sort(best) + 1
        self.dist_ids = np.full(len(self.nodes), -1, dtype=np.int64)
        self._num_levels += 1

    def add_drawn(self, token_ids: list[int], law: torch.Tensor, columns: Int64Array) -> None:
        """Add drawn siblings below the frontier, which goes on below the first that was drawn."""
        (parent,) = self.frontier.tolist()
        count = len(token_ids)
        first = len(self.nodes) + 1
        found = np.array(token_ids, dtype=np.int64)
        self.token_ids = np.concatenate([self.token_ids, found])
        self.nodes = np.concatenate([self.nodes, columns[found]])
        self.parents = np.concatenate([self.parents, np.full(count, parent, dtype=np.int64)])
        self.confidence = np.concatenate([self.confidence, np.full(count, np.nan)])
        self.dist_ids = np.concatenate(
            [self.dist_ids, np.full(count, len(self.laws), dtype=np.int64)]
        )
        self.laws.append(law)
        self.frontier = np.array([first] if count else [], dtype=np.int64)
        self._num_levels += 1

    def write(self, node: int, *, is_last: bool) -> None:
        """Add one token of the draft model's own to a chain."""
        num_nodes = len(self.nodes)
        if not is_last:
            self.nodes = np.append(self.nodes, node)
            self.parents = np.append(self.parents, num_nodes)
        self.frontier = np.array([] if is_last else [num_nodes + 1], dtype=np.int64)
        self._num_levels += 1

    def _keep(self, limit: int) -> Int64Array:
        """Keep the likeliest nodes, which is a tree, since no node is likelier than its parent."""
        if len(self.nodes) <= limit:
            return np.arange(len(self.nodes))
        kept = np.sort(np.argsort(-self._survival, kind="stable")[:limit])
        places = np.zeros(len(self.nodes) + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, len(kept) + 1)
        self.parents = places[self.parents[kept]]
        self.token_ids, self.nodes = self.token_ids[kept], self.nodes[kept]
        self.confidence, self._survival = self.confidence[kept], self._survival[kept]
        return kept
