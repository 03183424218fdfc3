"""A suffix tree of token sequences with counts, grown a token at a time, compiled.

Every node is a string of tokens that was followed by different tokens, or ends a sequence; its
count says how often the string up to the first token of the node's edge was seen. A new token
lengthens every suffix that still runs along what is known already; one that leaves it gets a leaf
of its own, which then grows by itself, for a leaf's edge is the rest of its sequence. So a token
costs as many steps as the longest repeated suffix is long, at most ``max_depth``, and a sequence
of ``n`` tokens makes at most ``2 n`` nodes.

Sources: Weiner 1973; the use for drafting is SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.suffix_growth import (
    COUNT,
    ENDLESS,
    NONE,
    NUM_ACTIVE,
    NUM_TOKENS,
    SEPARATOR,
    Int32Array,
    extend,
    fill_slots,
)
from foredraft.drafters.suffix_walks import draft, longest, walk
from foredraft.types import Int64Array

_FIRST_CAPACITY = 64


class SuffixTree:
    """The tree. Sequences are appended; nothing is ever taken out.

    Memory: 4 bytes a token, 28 a node and 4 a hash slot, each with up to twice the room in use.

    Args:
        max_depth: Longest suffix that is followed.
    """

    __slots__ = ("_active", "_nodes", "_numbers", "_slots", "_tokens", "max_depth")

    def __init__(self, max_depth: int) -> None:
        """Make a tree of the empty string."""
        self.max_depth = max_depth
        self._tokens: Int32Array = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._nodes: Int32Array = np.full((_FIRST_CAPACITY, 7), NONE, dtype=np.int32)
        self._nodes[0] = (0, 0, NONE, 0, NONE, NONE, NONE)
        self._slots: Int32Array = np.full(2 * _FIRST_CAPACITY, NONE, dtype=np.int32)
        # Suffixes that are still in the tree, longest first: their node, and how far in its edge.
        self._active: Int32Array = np.empty((max_depth + 1, 2), dtype=np.int32)
        self._numbers: Int64Array = np.array([0, 1, 0], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens and separators that were appended."""
        return int(self._numbers[NUM_TOKENS])

    @property
    def token_ids(self) -> Int32Array:
        """int32, tokens and separators as they were appended (a view)."""
        return self._tokens[: self.num_tokens]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        arrays = (self._tokens, self._nodes, self._slots, self._active)
        return sum(array.nbytes for array in arrays)

    @property
    def matched_len(self) -> int:
        """Longest suffix of what was appended that occurs before, up to ``max_depth``."""
        return int(self._numbers[NUM_ACTIVE])

    def extend(self, token_ids: Int64Array) -> None:
        """Append tokens, int64 [n]; a separator ends the sequence.

        Raises:
            OverflowError: The tree would hold more than 2**30 tokens.
        """
        if self.num_tokens + len(token_ids) >= ENDLESS:
            raise OverflowError("a suffix tree holds at most 2**30 tokens")
        needed = self.num_tokens + len(token_ids)
        if needed > len(self._tokens):
            self._tokens = _grown(self._tokens, needed)
        done = 0
        while done < len(token_ids):
            done += extend(
                token_ids[done:],
                self._tokens,
                self._nodes,
                self._slots,
                self._active,
                self._numbers,
            )
            if done < len(token_ids):
                self._nodes = _grown(self._nodes, len(self._nodes) + 2 * self.max_depth + 4)
                self._slots = np.full(2 * len(self._nodes), NONE, dtype=np.int32)
                fill_slots(self._tokens, self._nodes, self._slots, self._numbers)

    def count(self, token_ids: Int64Array) -> int:
        """How often a string of up to ``max_depth`` tokens occurs, as far as the tree tells.

        Within an edge, that is how often its first token was seen there. 0: nowhere.
        """
        node, _ = walk(token_ids, self._tokens, self._nodes, self._slots, self._numbers)
        return 0 if node < 0 else int(self._nodes[node, COUNT])

    def holds(self, token_ids: Int64Array) -> bool:
        """Whether a string occurs, whatever its length."""
        node, _ = walk(token_ids, self._tokens, self._nodes, self._slots, self._numbers)
        return bool(node >= 0)

    def match(self, token_ids: Int64Array) -> int:
        """Longest suffix of ``token_ids`` that occurs with something after it, int."""
        tail = token_ids[max(0, len(token_ids) - self.max_depth) :]
        return int(longest(tail, self._tokens, self._nodes, self._slots, self._numbers))

    def draft(
        self,
        token_ids: Int64Array,
        is_own: bool,
        limit: int,
        num_branches: int,
        len_factor: float,
        out: tuple[Int64Array, Int64Array, NDArray[np.float64]],
    ) -> tuple[int, int, float]:
        """Write the likeliest continuations of a text, best first.

        Args:
            token_ids: int64 [n], the text; its end is looked up.
            is_own: Whether the text is the very sequence that was appended last and still goes on.
            limit: Most nodes.
            num_branches: Most children of a node.
            len_factor: A continuation is at most this many tokens long for each one that matched.
            out: Token ids, parents (0 is the root, ``k`` the k-th node) and chances, each of at
                least ``limit``. A chance is that of a node once its parent is accepted.

        Returns:
            How many nodes there are, how many tokens matched, and the chance that what comes is
            none of what followed the longest match.
        """
        tail = token_ids[max(0, len(token_ids) - self.max_depth) :]
        num_nodes, matched, escape = draft(
            tail,
            is_own,
            limit,
            num_branches,
            len_factor,
            self._tokens,
            self._nodes,
            self._slots,
            self._active,
            self._numbers,
            *out,
        )
        return int(num_nodes), int(matched), float(escape)


def _grown(array: Int32Array, least: int) -> Int32Array:
    """The array with room for at least ``least`` rows, and at least half as many again."""
    size = max(least, len(array) + len(array) // 2)
    grown = np.full((size, *array.shape[1:]), NONE, dtype=np.int32)
    grown[: len(array)] = array
    return grown


__all__ = ["SEPARATOR", "SuffixTree"]
