"""Looking a text up in a suffix tree, and drafting from where it is found. Compiled."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.suffix_growth import (
    COUNT,
    FIRST,
    LENGTH,
    NEXT,
    NONE,
    NUM_ACTIVE,
    NUM_TOKENS,
    SEPARATOR,
    START,
    Int32Array,
    find,
)
from foredraft.types import Int64Array

_NUM_CHILDREN = 8
"""Children of a node that are considered for a draft."""


@numba.njit(cache=True)
def walk(
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
            return NONE, 0
        if offset == nodes[node, LENGTH]:
            child = slots[find(node, token_id, tokens, nodes, slots)]
            if child == NONE:
                return NONE, 0
            node, offset = child, 1
            continue
        position = nodes[node, START] + offset
        if position >= numbers[NUM_TOKENS] or tokens[position] != token_id:
            return NONE, 0
        offset += 1
    return node, offset


@numba.njit(cache=True)
def _goes_on(
    node: int, offset: int, tokens: Int32Array, nodes: Int32Array, numbers: Int64Array
) -> bool:
    """Whether anything was ever seen after this point."""
    if offset == nodes[node, LENGTH]:
        return nodes[node, FIRST] != NONE
    position = nodes[node, START] + offset
    return position < numbers[NUM_TOKENS] and tokens[position] != SEPARATOR


@numba.njit(cache=True)
def longest(
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
        node, offset = walk(tail[tail.size - middle :], tokens, nodes, slots, numbers)
        if node >= 0 and _goes_on(node, offset, tokens, nodes, numbers):
            low = middle
        else:
            high = middle - 1
    return low


@numba.njit(cache=True)
def draft(
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
    most = numbers[NUM_ACTIVE]
    if not is_own:
        most = longest(tail, tokens, nodes, slots, numbers)
    if most == 0 or limit == 0:
        return 0, 0, 1.0
    # Nodes that may come next: where they are in the tree, below which node of the draft.
    num_matches, length = 0, most
    while length > 0:
        num_matches, length = num_matches + 1, length // 2
    room = limit * num_branches + num_matches * _NUM_CHILDREN + 1
    where = np.empty((room, 5), dtype=np.int64)  # node, offset, draft parent, depth, match
    chances = np.empty(room)
    survivals = np.empty(room)
    size = 0
    weight, first_escape = 1.0, 1.0
    last_count = -1
    length = most
    while length > 0:
        if is_own:
            place = numbers[NUM_ACTIVE] - length
            node, offset = active[place, 0], active[place, 1]
        else:
            node, offset = walk(tail[tail.size - length :], tokens, nodes, slots, numbers)
        count = nodes[node, COUNT] - (1 if is_own else 0)
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
            if length == most:
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
        token_id = tokens[nodes[node, START] + offset - 1]
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
                nodes[node, COUNT],
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
    return num_nodes, most, first_escape


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
    if offset < nodes[node, LENGTH]:
        position = nodes[node, START] + offset
        if position < numbers[NUM_TOKENS] and tokens[position] != SEPARATOR:
            where[size, 0], where[size, 1] = node, offset + 1
            where[size, 2], where[size, 3], where[size, 4] = parent, depth, match
            chances[size] = weight * count / total
            survivals[size] = survival * chances[size]
            size += 1
        return size
    child = nodes[node, FIRST]
    added = 0
    while child != NONE and added < most:
        if tokens[nodes[child, START]] != SEPARATOR:
            where[size, 0], where[size, 1] = child, 1
            where[size, 2], where[size, 3], where[size, 4] = parent, depth, match
            chances[size] = weight * min(nodes[child, COUNT], count) / total
            survivals[size] = survival * chances[size]
            size += 1
            added += 1
        child = nodes[child, NEXT]
    return size
