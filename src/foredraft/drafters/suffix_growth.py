"""How a suffix tree grows: its arrays, and the compiled steps that append tokens.

A node is a row of ``nodes``: where its edge's tokens begin, how many there are, its parent, its
count, its first child, the next sibling and the one before. Children are found by a hash table from
parent and first token; they are also a list with the most seen one first, nearly in order.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.types import Int64Array

Int32Array = NDArray[np.int32]

SEPARATOR = -1
"""Ends a sequence: it is no token, so nothing matches it and nothing is drafted across it."""

NONE = -1
ENDLESS = 1 << 30
"""Length of a leaf's edge: it goes on to the end of its sequence."""

_MAX_STEPS_FORWARD = 8
"""Places that a child moves forward among its siblings when it was seen again."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)

START, LENGTH, PARENT, COUNT, FIRST, NEXT, BEFORE = range(7)
NUM_TOKENS, NUM_NODES, NUM_ACTIVE = range(3)


@numba.njit(inline="always")
def _slot_of(node: int, token_id: int, num_slots: int) -> int:
    """Where to look first for a node's child."""
    key = (np.uint64(node) << np.uint64(32)) ^ np.uint64(token_id)
    key = (key ^ (key >> _SHIFT)) * _MIX
    slot: int = np.int64((key ^ (key >> _SHIFT)) % np.uint64(num_slots))  # type: ignore[assignment]
    return slot


@numba.njit(inline="always")
def find(node: int, token_id: int, tokens: Int32Array, nodes: Int32Array, slots: Int32Array) -> int:
    """Slot of the child that begins with a token, or of the empty slot where it would be."""
    slot = _slot_of(node, token_id, slots.size)
    while True:
        child = slots[slot]
        if child == NONE or (
            nodes[child, PARENT] == node and tokens[nodes[child, START]] == token_id
        ):
            return slot
        slot += 1
        if slot == slots.size:
            slot = 0


@numba.njit(cache=True)
def fill_slots(
    tokens: Int32Array, nodes: Int32Array, slots: Int32Array, numbers: Int64Array
) -> None:
    """Enter every node into the empty table."""
    for node in range(1, numbers[NUM_NODES]):
        parent = nodes[node, PARENT]
        token_id = tokens[nodes[node, START]]
        if token_id != SEPARATOR:
            slots[find(parent, token_id, tokens, nodes, slots)] = node


@numba.njit(cache=True)
def _new_node(
    parent: int, start: int, length: int, count: int, nodes: Int32Array, numbers: Int64Array
) -> int:
    """Make a node, not yet among its siblings."""
    node = numbers[NUM_NODES]
    numbers[NUM_NODES] = node + 1
    nodes[node, START] = start
    nodes[node, LENGTH] = length
    nodes[node, PARENT] = parent
    nodes[node, COUNT] = count
    nodes[node, FIRST] = nodes[node, NEXT] = nodes[node, BEFORE] = NONE
    return node


@numba.njit(cache=True)
def _link_before(node: int, other: int, nodes: Int32Array) -> None:
    """Put a child among its siblings, before another one; a child without siblings alone."""
    parent = nodes[node, PARENT]
    before = NONE
    if other != NONE:
        before = nodes[other, BEFORE]
        nodes[other, BEFORE] = node
    nodes[node, NEXT] = other
    nodes[node, BEFORE] = before
    if before == NONE:
        nodes[parent, FIRST] = node
    else:
        nodes[before, NEXT] = node


@numba.njit(cache=True)
def _unlink(node: int, nodes: Int32Array) -> None:
    """Take a child out of its siblings."""
    before, after = nodes[node, BEFORE], nodes[node, NEXT]
    if before == NONE:
        nodes[nodes[node, PARENT], FIRST] = after
    else:
        nodes[before, NEXT] = after
    if after != NONE:
        nodes[after, BEFORE] = before


@numba.njit(cache=True)
def _add_leaf(parent: int, start: int, nodes: Int32Array, numbers: Int64Array) -> int:
    """Make a leaf, the second of its siblings or the only one: what is new may come again soon."""
    leaf = _new_node(parent, start, ENDLESS, 1, nodes, numbers)
    first = nodes[parent, FIRST]
    if first == NONE:
        _link_before(leaf, NONE, nodes)
    else:
        after = nodes[first, NEXT]
        nodes[first, NEXT] = leaf
        nodes[leaf, BEFORE] = first
        nodes[leaf, NEXT] = after
        if after != NONE:
            nodes[after, BEFORE] = leaf
    return leaf


@numba.njit(cache=True)
def _see_again(node: int, nodes: Int32Array) -> None:
    """Count a child once more, and bring it forward; the most seen one is always the first."""
    nodes[node, COUNT] += 1
    count = nodes[node, COUNT]
    before = nodes[node, BEFORE]
    if before == NONE or nodes[before, COUNT] >= count:
        return
    first = nodes[nodes[node, PARENT], FIRST]
    place = before
    if count > nodes[first, COUNT]:
        place = first
    else:
        for _ in range(_MAX_STEPS_FORWARD):
            ahead = nodes[place, BEFORE]
            if ahead == NONE or nodes[ahead, COUNT] >= count:
                break
            place = ahead
    _unlink(node, nodes)
    _link_before(node, place, nodes)


@numba.njit(cache=True)
def extend(
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
        num_active = numbers[NUM_ACTIVE]
        if numbers[NUM_NODES] + 2 * (num_active + 1) > nodes.shape[0]:
            return index
        token_id = new[index]
        position = numbers[NUM_TOKENS]
        tokens[position] = token_id
        numbers[NUM_TOKENS] = position + 1
        if token_id < 0:
            # What ends within an edge was not seen below this point.
            for place in range(num_active):
                node, offset = active[place, 0], active[place, 1]
                if (
                    offset != nodes[node, LENGTH]
                    and tokens[nodes[node, START] + offset] != SEPARATOR
                ):
                    _split(
                        node, offset, tokens, nodes, slots, active, 0, place, num_active, numbers
                    )
            numbers[NUM_ACTIVE] = 0
            continue
        active[num_active, 0], active[num_active, 1] = 0, 0
        size = num_active + 1
        kept = 0
        for place in range(size):
            node, offset = active[place, 0], active[place, 1]
            if offset == nodes[node, LENGTH]:
                slot = find(node, token_id, tokens, nodes, slots)
                child = slots[slot]
                if child == NONE:
                    slots[slot] = _add_leaf(node, position, nodes, numbers)
                    continue
                _see_again(child, nodes)
                node, offset = child, 1
            elif tokens[nodes[node, START] + offset] == token_id:
                offset += 1
            else:
                upper = _split(
                    node, offset, tokens, nodes, slots, active, kept, place, size, numbers
                )
                slot = find(upper, token_id, tokens, nodes, slots)
                slots[slot] = _add_leaf(upper, position, nodes, numbers)
                continue
            if size - place < max_depth:
                active[kept, 0], active[kept, 1] = node, offset
                kept += 1
        numbers[NUM_ACTIVE] = kept
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
    parent, start = nodes[node, PARENT], nodes[node, START]
    slot = find(parent, tokens[start], tokens, nodes, slots)
    upper = _new_node(parent, start, offset, nodes[node, COUNT], nodes, numbers)
    slots[slot] = upper
    _link_before(upper, node, nodes)
    _unlink(node, nodes)
    nodes[node, PARENT] = upper
    nodes[node, START] = start + offset
    if nodes[node, LENGTH] != ENDLESS:
        nodes[node, LENGTH] -= offset
    nodes[node, NEXT] = nodes[node, BEFORE] = NONE
    nodes[upper, FIRST] = node
    nodes[node, COUNT] -= 1
    for other in range(size):
        if (other < kept or other > place) and active[other, 0] == node:
            if active[other, 1] <= offset:
                active[other, 0] = upper
                nodes[node, COUNT] -= 1
            else:
                active[other, 1] -= offset
    token_id = tokens[start + offset]
    if token_id != SEPARATOR:
        slots[find(upper, token_id, tokens, nodes, slots)] = node
    return upper
