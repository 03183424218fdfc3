"""Texts whose keys and values are still in some slot: a request that begins alike starts from them.

What a slot holds is found by content: blocks of tokens, each hashed with all before it. A running
request's prompt can be copied from as soon as it is computed. When a request ends, its slot is
retained with what it holds, until the memory or the slot is needed: the one that was used longest
ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from foredraft.model.kv_cache import KVCache
from foredraft.types import Int64Array

BLOCK = 32
"""Tokens of a block: shorter common beginnings are not looked for."""


@dataclass(frozen=True, slots=True)
class Match:
    """Where the beginning of a text lies.

    Attributes:
        slot: Whose keys and values it is.
        num_rows: Tokens of it.
        is_retained: Whether nobody runs in that slot.
        num_held: Tokens that the slot holds.
    """

    slot: int
    num_rows: int
    is_retained: bool
    num_held: int


class PrefixStore:
    """Finds common beginnings among the slots of a cache, and keeps ended ones.

    Args:
        cache: The cache; slots that are retained count as taken there.
    """

    def __init__(self, cache: KVCache) -> None:
        """Start with nothing."""
        self._cache = cache
        self._token_ids: dict[int, Int64Array] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._slots: dict[bytes, dict[int, None]] = {}
        self._retained: OrderedDict[int, int] = OrderedDict()

    @property
    def num_retained(self) -> int:
        """Slots that are retained."""
        return len(self._retained)

    def note(self, slot: int, token_ids: Int64Array) -> None:
        """Record what a slot holds: the keys and values of these tokens, from position 0 on."""
        self._forget(slot)
        keys = _keys(token_ids)
        if not keys:
            return
        self._token_ids[slot] = np.array(token_ids)
        self._keys[slot] = keys
        for key in keys:
            self._slots.setdefault(key, {})[slot] = None

    def find(self, token_ids: Int64Array, most: int) -> Match | None:
        """The longest beginning of a text that some slot holds, of at most so many tokens."""
        found = None
        for key in _keys(token_ids[:most]):
            if key not in self._slots:
                break
            found = key
        if found is None:
            return None
        best = None
        for slot in self._slots[found]:
            held = self._token_ids[slot]
            length = common_length(held, token_ids[:most])
            match = Match(slot, length, slot in self._retained, len(held))
            # Of equal ones a retained slot, which could be taken over as it is.
            if best is None or (length, match.is_retained) > (best.num_rows, best.is_retained):
                best = match
        if best is not None and best.is_retained:
            self._retained.move_to_end(best.slot)
        return best

    def retain(self, slot: int, token_ids: Int64Array) -> None:
        """Keep a slot that its request leaves, with the keys and values of these tokens."""
        self.note(slot, token_ids)
        if slot in self._token_ids:
            self._cache.shorten(slot, len(token_ids))
            self._retained[slot] = len(token_ids)
        else:
            self._cache.free(slot)

    def take_over(self, slot: int, num_rows: int) -> None:
        """Give a retained slot to a request that begins with so many of its tokens."""
        del self._retained[slot]
        self._forget(slot)
        self._cache.shorten(slot, num_rows)

    def vacate_below(self, slot: int) -> tuple[int, int] | None:
        """Move what the lowest retained slot below a free one holds to the far end.

        Slots that run should lie side by side, for they are attended to together.

        Returns:
            From where, and where to; ``None`` where nothing was moved.
        """
        lowest = min(self._retained, default=slot)
        if lowest >= slot or not self._cache.is_contiguous:
            return None
        target = self._cache.allocate(is_highest=True)
        self._cache.copy_rows(lowest, target, self._retained[lowest])
        self.note(target, self._token_ids[lowest])
        self._retained = OrderedDict(
            (target if held == lowest else held, num_rows)
            for held, num_rows in self._retained.items()
        )
        self._forget(lowest)
        self._cache.free(lowest)
        return lowest, target

    def release(self, slot: int) -> None:
        """Free a slot, and forget what it holds."""
        self._retained.pop(slot, None)
        self._forget(slot)
        self._cache.free(slot)

    def evict(self, but: int | None = None) -> bool:
        """Free the retained slot that was used longest ago, of others than ``but``; if any."""
        for slot in self._retained:
            if slot != but:
                self.release(slot)
                return True
        return False

    def _forget(self, slot: int) -> None:
        self._token_ids.pop(slot, None)
        for key in self._keys.pop(slot, ()):
            slots = self._slots[key]
            del slots[slot]
            if not slots:
                del self._slots[key]


def _keys(token_ids: Int64Array) -> list[bytes]:
    """A key for each whole block, of its content and all before it."""
    keys: list[bytes] = []
    key = b""
    data = np.ascontiguousarray(token_ids, dtype=np.int64)
    for end in range(BLOCK, len(data) + 1, BLOCK):
        key = hashlib.blake2b(key + data[end - BLOCK : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def common_length(first: Int64Array, second: Int64Array) -> int:
    """How many tokens two texts have in common from the beginning."""
    length = min(len(first), len(second))
    is_other = first[:length] != second[:length]
    return int(np.argmax(is_other)) if is_other.any() else length
