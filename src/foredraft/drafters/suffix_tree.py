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

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.types import Int64Array

Int32Array = NDArray[np.int32]

SEPARATOR = -1
"""Ends a sequence: it is no token, so nothing matches it and nothing is drafted across it."""

_FIRST_CAPACITY = 64
_NONE = -1
_ENDLESS = 1 << 30
"""Length of a leaf's edge: it goes on to the end of its sequence."""

_MAX_STEPS_FORWARD = 8
"""Places that a child moves forward among its siblings when it was seen again."""

_NUM_CHILDREN = 8
"""Children of a node that are considered for a draft."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)

_START, _LENGTH, _PARENT, _COUNT, _FIRST, _NEXT, _BEFORE = range(7)
_NUM_TOKENS, _NUM_NODES, _NUM_ACTIVE = range(3)


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
        self._nodes: Int32Array = np.full((_FIRST_CAPACITY, 7), _NONE, dtype=np.int32)
        self._nodes[0] = (0, 0, _NONE, 0, _NONE, _NONE, _NONE)
        self._slots: Int32Array = np.full(2 * _FIRST_CAPACITY, _NONE, dtype=np.int32)
        # Suffixes that are still in the tree, longest first: their node, and how far in its edge.
        self._active: Int32Array = np.empty((max_depth + 1, 2), dtype=np.int32)
        self._numbers: Int64Array = np.array([0, 1, 0], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens and separators that were appended."""
        return int(self._numbers[_NUM_TOKENS])

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
        return int(self._numbers[_NUM_ACTIVE])

    def extend(self, token_ids: Int64Array) -> None:
        """Append tokens, int64 [n]; a separator ends the sequence.

        Raises:
            OverflowError: The tree would hold more than 2**30 tokens.
        """
        if self.num_tokens + len(token_ids) >= _ENDLESS:
            raise OverflowError("a suffix tree holds at most 2**30 tokens")
        needed = self.num_tokens + len(token_ids)
        if needed > len(self._tokens):
            self._tokens = _grown(self._tokens, needed)
        done = 0
        while done < len(token_ids):
            done += _extend(
                token_ids[done:],
                self._tokens,
                self._nodes,
                self._slots,
                self._active,
                self._numbers,
            )
            if done < len(token_ids):
                self._nodes = _grown(self._nodes, len(self._nodes) + 2 * self.max_depth + 4)
                self._slots = np.full(2 * len(self._nodes), _NONE, dtype=np.int32)
                _fill_slots(self._tokens, self._nodes, self._slots, self._numbers)

    def count(self, token_ids: Int64Array) -> int:
        """How often a string of up to ``max_depth`` tokens occurs, as far as the tree tells.

        Within an edge, that is how often its first token was seen there. 0: nowhere.
        """
        node, _ = _walk(token_ids, self._tokens, self._nodes, self._slots, self._numbers)
        return 0 if node < 0 else int(self._nodes[node, _COUNT])

    def match(self, token_ids: Int64Array) -> int:
        """Longest suffix of ``token_ids`` that occurs with something after it, int."""
        tail = token_ids[max(0, len(token_ids) - self.max_depth) :]
        return int(_longest(tail, self._tokens, self._nodes, self._slots, self._numbers))

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
        num_nodes, matched, escape = _draft(
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
    grown = np.full((size, *array.shape[1:]), _NONE, dtype=np.int32)
    grown[: len(array)] = array
    return grown


@numba.njit(inline="always")
def _slot_of(node: int, token_id: int, num_slots: int) -> int:
    """Where to look first for a node's child."""
    key = (np.uint64(node) << np.uint64(32)) ^ np.uint64(token_id)
    key = (key ^ (key >> _SHIFT)) * _MIX
    slot: int = np.int64((key ^ (key >> _SHIFT)) % np.uint64(num_slots))  # type: ignore[assignment]
    return slot


@numba.njit(inline="always")
def _find(
    node: int, token_id: int, tokens: Int32Array, nodes: Int32Array, slots: Int32Array
) -> int:
    """Slot of the child that begins with a token, or of the empty slot where it would be."""
    slot = _slot_of(node, token_id, slots.size)
    while True:
        child = slots[slot]
        if child == _NONE or (
            nodes[child, _PARENT] == node and tokens[nodes[child, _START]] == token_id
        ):
            return slot
        slot += 1
        if slot == slots.size:
            slot = 0


@numba.njit(cache=True)
def _fill_slots(
    tokens: Int32Array, nodes: Int32Array, slots: Int32Array, numbers: Int64Array
) -> None:
    """Enter every node into the empty table."""
    for node in range(1, numbers[_NUM_NODES]):
        parent = nodes[node, _PARENT]
        token_id = tokens[nodes[node, _START]]
        if token_id != SEPARATOR:
            slots[_find(parent, token_id, tokens, nodes, slots)] = node


@numba.njit(cache=True)
def _new_node(
    parent: int, start: int, length: int, count: int, nodes: Int32Array, numbers: Int64Array
) -> int:
    """Make a node, not yet among its siblings."""
    node = numbers[_NUM_NODES]
    numbers[_NUM_NODES] = node + 1
    nodes[node, _START] = start
    nodes[node, _LENGTH] = length
    nodes[node, _PARENT] = parent
    nodes[node, _COUNT] = count
    nodes[node, _FIRST] = nodes[node, _NEXT] = nodes[node, _BEFORE] = _NONE
    return node


@numba.njit(cache=True)
def _link_before(node: int, other: int, nodes: Int32Array) -> None:
    """Put a child among its siblings, before another one; a child without siblings alone."""
    parent = nodes[node, _PARENT]
    before = _NONE
    if other != _NONE:
        before = nodes[other, _BEFORE]
        nodes[other, _BEFORE] = node
    nodes[node, _NEXT] = other
    nodes[node, _BEFORE] = before
    if before == _NONE:
        nodes[parent, _FIRST] = node
    else:
        nodes[before, _NEXT] = node


@numba.njit(cache=True)
def _unlink(node: int, nodes: Int32Array) -> None:
    """Take a child out of its siblings."""
    before, after = nodes[node, _BEFORE], nodes[node, _NEXT]
    if before == _NONE:
        nodes[nodes[node, _PARENT], _FIRST] = after
    else:
        nodes[before, _NEXT] = after
    if after != _NONE:
        nodes[after, _BEFORE] = before


@numba.njit(cache=True)
def _add_leaf(parent: int, start: int, nodes: Int32Array, numbers: Int64Array) -> int:
    """Make a leaf, the second of its siblings or the only one: what is new may come again soon."""
    leaf = _new_node(parent, start, _ENDLESS, 1, nodes, numbers)
    first = nodes[parent, _FIRST]
    if first == _NONE:
        _link_before(leaf, _NONE, nodes)
    else:
        after = nodes[first, _NEXT]
        nodes[first, _NEXT] = leaf
        nodes[leaf, _BEFORE] = first
        nodes[leaf, _NEXT] = after
        if after != _NONE:
            nodes[after, _BEFORE] = leaf
    return leaf


@numba.njit(cache=True)
def _see_again(node: int, nodes: Int32Array) -> None:
    """Count a child once more, and bring it forward; the most seen one is always the first."""
    nodes[node, _COUNT] += 1
    count = nodes[node, _COUNT]
    before = nodes[node, _BEFORE]
    if before == _NONE or nodes[before, _COUNT] >= count:
        return
    first = nodes[nodes[node, _PARENT], _FIRST]
    place = before
    if count > nodes[first, _COUNT]:
        place = first
    else:
        for _ in range(_MAX_STEPS_FORWARD):
            ahead = nodes[place, _BEFORE]
            if ahead == _NONE or nodes[ahead, _COUNT] >= count:
                break
            place = ahead
    _unlink(node, nodes)
    _link_before(node, place, nodes)


@numba.njit(cache=True)
def _extend(
    new: Int64Array,
    tokens: Int32Array,
    nodes: Int32Array,
    slots: Int32Array,
    active: Int32Array,
    numbers: Int64Array,
) -> int:
    """Append as many tokens as there is room for nodes; return how many."""
    max_depth = active.shape[0] - 1
    for index in range(new.size):
        num_active = numbers[_NUM_ACTIVE]
        if numbers[_NUM_NODES] + 2 * (num_active + 1) > nodes.shape[0]:
            return index
        token_id = new[index]
        position = numbers[_NUM_TOKENS]
        tokens[position] = token_id
        numbers[_NUM_TOKENS] = position + 1
        if token_id < 0:
            # What ends within an edge was not seen below this point.
            for place in range(num_active):
                node, offset = active[place, 0], active[place, 1]
                if (
                    offset != nodes[node, _LENGTH]
                    and tokens[nodes[node, _START] + offset] != SEPARATOR
                ):
                    _split(
                        node, offset, tokens, nodes, slots, active, 0, place, num_active, numbers
                    )
            numbers[_NUM_ACTIVE] = 0
            continue
        active[num_active, 0], active[num_active, 1] = 0, 0
        size = num_active + 1
        kept = 0
        for place in range(size):
            node, offset = active[place, 0], active[place, 1]
            if offset == nodes[node, _LENGTH]:
                slot = _find(node, token_id, tokens, nodes, slots)
                child = slots[slot]
                if child == _NONE:
                    slots[slot] = _add_leaf(node, position, nodes, numbers)
                    continue
                _see_again(child, nodes)
                node, offset = child, 1
            elif tokens[nodes[node, _START] + offset] == token_id:
                offset += 1
            else:
                upper = _split(
                    node, offset, tokens, nodes, slots, active, kept, place, size, numbers
                )
                slot = _find(upper, token_id, tokens, nodes, slots)
                slots[slot] = _add_leaf(upper, position, nodes, numbers)
                continue
            if size - place < max_depth:
                active[kept, 0], active[kept, 1] = node, offset
                kept += 1
        numbers[_NUM_ACTIVE] = kept
    return new.size


@numba.njit(cache=True)
def _split(
    node: int,
    offset: int,
    tokens: Int32Array,
    nodes: Int32Array,
    slots: Int32Array,
    active: Int32Array,
    kept: int,
    place: int,
    size: int,
    numbers: Int64Array,
) -> int:
    """Cut an edge where a suffix leaves it; return the new node above the cut.

    The suffix that leaves, and the active ones that did not come so far, do not count below it.
    """
    parent, start = nodes[node, _PARENT], nodes[node, _START]
    slot = _find(parent, tokens[start], tokens, nodes, slots)
    upper = _new_node(parent, start, offset, nodes[node, _COUNT], nodes, numbers)
    slots[slot] = upper
    _link_before(upper, node, nodes)
    _unlink(node, nodes)
    nodes[node, _PARENT] = upper
    nodes[node, _START] = start + offset
    if nodes[node, _LENGTH] != _ENDLESS:
        nodes[node, _LENGTH] -= offset
    nodes[node, _NEXT] = nodes[node, _BEFORE] = _NONE
    nodes[upper, _FIRST] = node
    nodes[node, _COUNT] -= 1
    for other in range(size):
        if (other < kept or other > place) and active[other, 0] == node:
            if active[other, 1] <= offset:
                active[other, 0] = upper
                nodes[node, _COUNT] -= 1
            else:
                active[other, 1] -= offset
    token_id = tokens[start + offset]
    if token_id != SEPARATOR:
        slots[_find(upper, token_id, tokens, nodes, slots)] = node
    return upper


@numba.njit(cache=True)
def _walk(
    text: Int64Array,
    tokens: Int32Array,
    nodes: Int32Array,
    slots: Int32Array,
    numbers: Int64Array,
) -> tuple[int, int]:
    """Where a string ends in the tree: node and how far in its edge; a node of -1: nowhere."""
    node, offset = 0, 0
    for place in range(text.size):
        token_id = text[place]
        if token_id < 0:
            return _NONE, 0
        if offset == nodes[node, _LENGTH]:
            child = slots[_find(node, token_id, tokens, nodes, slots)]
            if child == _NONE:
                return _NONE, 0
            node, offset = child, 1
            continue
        position = nodes[node, _START] + offset
        if position >= numbers[_NUM_TOKENS] or tokens[position] != token_id:
            return _NONE, 0
        offset += 1
    return node, offset


@numba.njit(cache=True)
def _goes_on(
    node: int, offset: int, tokens: Int32Array, nodes: Int32Array, numbers: Int64Array
) -> bool:
    """Whether anything was ever seen after this point."""
    if offset == nodes[node, _LENGTH]:
        return nodes[node, _FIRST] != _NONE
    position = nodes[node, _START] + offset
    return position < numbers[_NUM_TOKENS] and tokens[position] != SEPARATOR


@numba.njit(cache=True)
def _longest(
    tail: Int64Array,
    tokens: Int32Array,
    nodes: Int32Array,
    slots: Int32Array,
    numbers: Int64Array,
) -> int:
    """Longest suffix of the tail with something after it: if one has it, the shorter ones do."""
    low, high = 0, tail.size
    while low < high:
        middle = (low + high + 1) // 2
        node, offset = _walk(tail[tail.size - middle :], tokens, nodes, slots, numbers)
        if node >= 0 and _goes_on(node, offset, tokens, nodes, numbers):
            low = middle
        else:
            high = middle - 1
    return low


@numba.njit(cache=True)
def _draft(
    tail: Int64Array,
    is_own: bool,
    limit: int,
    num_branches: int,
    len_factor: float,
    tokens: Int32Array,
    nodes: Int32Array,
    slots: Int32Array,
    active: Int32Array,
    numbers: Int64Array,
    out_ids: Int64Array,
    out_parents: Int64Array,
    out_chances: NDArray[np.float64],
) -> tuple[int, int, float]:
    """Grow a draft from the longest match and some shorter ones, likeliest node first.

    What follows a match of ``m`` tokens that was seen ``n`` times comes with ``count / (n + 1/m)``,
    and what followed a shorter match with the rest: prediction by partial matching (Cleary and
    Witten 1984), with an escape that shrinks with the length of the match.
    """
    longest = numbers[_NUM_ACTIVE]
    if not is_own:
        longest = _longest(tail, tokens, nodes, slots, numbers)
    if longest == 0 or limit == 0:
        return 0, 0, 1.0
    # Nodes that may come next: where they are in the tree, below which node of the draft.
    room = limit * (num_branches + 1) + 4 * _NUM_CHILDREN + 4
    where = np.empty((room, 5), dtype=np.int64)  # node, offset, draft parent, depth, match
    chances = np.empty(room)
    survivals = np.empty(room)
    size = 0
    weight, first_escape = 1.0, 1.0
    last_count = -1
    length = longest
    while length > 0:
        if is_own:
            place = numbers[_NUM_ACTIVE] - length
            node, offset = active[place, 0], active[place, 1]
        else:
            node, offset = _walk(tail[tail.size - length :], tokens, nodes, slots, numbers)
        count = nodes[node, _COUNT] - (1 if is_own else 0)
        if count != last_count:
            size = _offer(
                node,
                offset,
                max(count, 1),
                0,
                0,
                length,
                weight,
                1.0,
                _NUM_CHILDREN,
                tokens,
                nodes,
                numbers,
                where,
                chances,
                survivals,
                size,
            )
            escape = 1.0 / (max(count, 1) * length + 1.0)
            if length == longest:
                first_escape = escape
            weight *= escape
            last_count = count
        length //= 2
    num_nodes = 0
    while num_nodes < limit and size > 0:
        best = 0
        for index in range(1, size):
            if survivals[index] > survivals[best]:
                best = index
        node, offset, parent, depth, match = where[best]
        chance, survival = chances[best], survivals[best]
        size -= 1
        where[best], chances[best], survivals[best] = where[size], chances[size], survivals[size]
        token_id = tokens[nodes[node, _START] + offset - 1]
        num_siblings = 0
        is_known = False
        for index in range(num_nodes):
            if out_parents[index] == parent:
                num_siblings += 1
                is_known |= out_ids[index] == token_id
        if is_known or num_siblings >= num_branches:
            continue
        out_ids[num_nodes], out_parents[num_nodes] = token_id, parent
        out_chances[num_nodes] = chance
        num_nodes += 1
        if depth + 1 < max(1.0, len_factor * match):
            size = _offer(
                node,
                offset,
                nodes[node, _COUNT],
                num_nodes,
                depth + 1,
                match,
                1.0,
                survival,
                num_branches,
                tokens,
                nodes,
                numbers,
                where,
                chances,
                survivals,
                size,
            )
    return num_nodes, longest, first_escape


@numba.njit(cache=True)
def _offer(
    node: int,
    offset: int,
    count: int,
    parent: int,
    depth: int,
    match: int,
    weight: float,
    survival: float,
    most: int,
    tokens: Int32Array,
    nodes: Int32Array,
    numbers: Int64Array,
    where: Int64Array,
    chances: NDArray[np.float64],
    survivals: NDArray[np.float64],
    size: int,
) -> int:
    """Add what may follow a point of the tree to what may come next; return how many there are."""
    total = count + 1.0 / (match + depth)
    if offset < nodes[node, _LENGTH]:
        position = nodes[node, _START] + offset
        if position < numbers[_NUM_TOKENS] and tokens[position] != SEPARATOR:
            where[size, 0], where[size, 1] = node, offset + 1
            where[size, 2], where[size, 3], where[size, 4] = parent, depth, match
            chances[size] = weight * count / total
            survivals[size] = survival * chances[size]
            size += 1
        return size
    child = nodes[node, _FIRST]
    added = 0
    while child != _NONE and added < most:
        if tokens[nodes[child, _START]] != SEPARATOR:
            where[size, 0], where[size, 1] = child, 1
            where[size, 2], where[size, 3], where[size, 4] = parent, depth, match
            chances[size] = weight * min(nodes[child, _COUNT], count) / total
            survivals[size] = survival * chances[size]
            size += 1
            added += 1
        child = nodes[child, _NEXT]
    return size
