"""Keys and values in blocks: a slot is a table of blocks, and texts that begin alike share theirs.

A block is some rows of every layer. It is counted how many slots hold it: a shared beginning is
counted once more instead of being copied (but for the part of a block at its end), whoever is to
write into a shared block gets a copy of it first, and a block that nobody holds goes back. So
memory follows what is in use in steps of a block, wherever the device takes memory at once.

Back-ends that know block tables read in place (``paged_attention``); the reference reads a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.model.kv_cache import ROW_BLOCK, KVCache, LayerShape, stores_of
from foredraft.types import Int64Array
from foredraft.upload import upload

BLOCK_ROWS = 32
"""Rows of a block where nothing else is asked for."""


class BlockKVCache(KVCache):
    """KV of every layer in ``num_blocks`` blocks, shared out among ``num_slots`` tables.

    Args:
        layers: Shape of each layer.
        num_slots: Most requests that hold KV at once.
        capacity: Most rows of a slot, rounded up to a multiple of ``ROW_BLOCK``.
        dtype: Of keys and values.
        device: Where they lie.
        num_blocks: Blocks in all.
        block_rows: Rows of a block, a divisor or a multiple of ``ROW_BLOCK``.

    Raises:
        ModelLoadError: The operating system refuses so much address space.
    """

    is_contiguous = False

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        """Reserve the blocks; on a CPU no page is committed yet."""
        step = max(ROW_BLOCK, block_rows)
        super().__init__(layers, num_slots, -(-capacity // step) * step, dtype, device)
        self.block_rows = block_rows
        # More than every slot can hold is never used; one more reads as the rows nobody wrote.
        self.num_blocks = min(num_blocks, num_slots * (self.capacity // block_rows))
        self._empty = self.num_blocks
        rows = self.num_blocks + 1, block_rows
        self._stores = stores_of(self.layers, rows, dtype, device)
        self._free_blocks = list(range(self.num_blocks - 1, -1, -1))
        self._counts = np.zeros(self.num_blocks, dtype=np.int64)
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all blocks that somebody holds; a shared one counts once."""
        num_used = self.num_blocks - len(self._free_blocks)
        return num_used * self.block_rows * self.bytes_per_row

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free_blocks)

    def usable_rows(self, max_bytes: int) -> int:
        """Rows of all blocks within so many bytes."""
        num_blocks = min(self.num_blocks, max_bytes // (self.block_rows * self.bytes_per_row))
        return num_blocks * self.block_rows

    def free_rows(self, max_rows: int) -> int:
        """Rows of blocks that nobody holds."""
        num_used = self.num_blocks - len(self._free_blocks)
        return max_rows - num_used * self.block_rows

    def rows_taken(self, num_rows: int, num_held: int = 0, num_shared: int = 0) -> int:
        """Whole blocks; those that are shared whole are no one's anew."""
        num_had = self._num_blocks(num_held) if num_held else num_shared // self.block_rows
        return max(0, self._num_blocks(num_rows) - num_had) * self.block_rows

    def whole_rows(self, num_rows: int) -> int:
        """Whole blocks."""
        return num_rows // self.block_rows * self.block_rows

    def longest(self, num_requests: int) -> int:
        """Rows that each of so many requests more can hold at once, of the blocks that are free."""
        return min(self.capacity, len(self._free_blocks) // num_requests * self.block_rows)

    def num_holders(self, slot: int) -> list[int]:
        """How many slots hold each of a slot's blocks."""
        return self._counts[self._tables[slot]].tolist()

    def block_table(self, slot: int) -> list[int]:
        """A slot's blocks in the order of its rows."""
        return list(self._tables[slot])

    def reserve(self, slot: int, first: int, end: int) -> None:
        """Give a slot blocks up to row ``end``, and its own copies of those it would write into.

        Raises:
            MemoryError: There are not enough blocks; what the slot has stays.
        """
        table = self._tables[slot]
        written = range(first // self.block_rows, -(-end // self.block_rows))
        shared = [p for p in written if p < len(table) and self._counts[table[p]] > 1]
        num_new = max(0, written.stop - len(table))
        if len(shared) + num_new > len(self._free_blocks):
            raise MemoryError(
                f"of {self.num_blocks} blocks of keys and values {len(self._free_blocks)} are "
                f"free, and {len(shared) + num_new} are needed"
            )
        for place in shared:
            own = self._take_block()
            self._copy_block(table[place], own)
            self._drop_block(table[place])
            table[place] = own
        table.extend(self._take_block() for _ in range(num_new))
        self._num_rows[slot] = max(self._num_rows[slot], end)

    def shorten(self, slot: int, num_rows: int) -> None:
        """Keep the first rows of a slot; drop the blocks behind them."""
        if self._num_rows[slot] <= num_rows:
            return
        table = self._tables[slot]
        num_kept = -(-num_rows // self.block_rows)
        for block in table[num_kept:]:
            self._drop_block(block)
        del table[num_kept:]
        self._num_rows[slot] = num_rows

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Let an empty slot hold the whole blocks of another's first rows, and copy the rest."""
        if self._tables[target]:
            raise ValueError(f"slot {target} is not empty")
        num_whole = num_rows // self.block_rows
        shared = self._tables[source][:num_whole]
        self._counts[shared] += 1
        self._tables[target].extend(shared)
        if num_rows % self.block_rows:
            own = self._take_block()
            self._copy_block(self._tables[source][num_whole], own)
            self._tables[target].append(own)
        self._num_rows[target] = num_rows

    def move_rows(self, slot: int, sources: Int64Array, target: int) -> None:
        """Copy rows ``sources`` of a slot, in order, to the rows from ``target`` on."""
        end = target + len(sources)
        self.reserve(slot, target, end)
        where = self.flat_rows(slot, 0, max(end, int(sources.max()) + 1))
        from_rows = upload(where[sources], self._device)
        to_rows = upload(where[target:end], self._device)
        for layer in range(len(self.layers)):
            for store in self.flat(layer):
                store[to_rows] = store[from_rows]

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, block after block."""
        keys, values = self._stores[layer]
        return keys.rows, values.rows

    def flat_rows(self, slot: int, first: int, end: int) -> Int64Array:
        """Where a slot's rows lie in :meth:`flat`."""
        rows = np.arange(first, end, dtype=np.int64)
        table = np.array(self._tables[slot], dtype=np.int64)
        found: Int64Array = table[rows // self.block_rows] * self.block_rows
        return found + rows % self.block_rows

    def locate(self, slots: Sequence[int], num_rows: int) -> tuple[torch.Tensor, int]:
        """Blocks of the first rows of some slots, int64 [num_slots, num_blocks of each]."""
        num_blocks = -(-num_rows // self.block_rows)
        places = np.full((len(slots), num_blocks), self._empty, dtype=np.int64)
        for index, slot in enumerate(slots):
            table = self._tables[slot][:num_blocks]
            places[index, : len(table)] = table
        return upload(places, self._device), num_rows

    def read(
        self, layer: int, place: tuple[torch.Tensor, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values that were located."""
        blocks, num_rows = place
        keys, values = self._stores[layer]
        return (
            keys.tensor[blocks].flatten(1, 2)[:, :num_rows],
            values.tensor[blocks].flatten(1, 2)[:, :num_rows],
        )

    def _num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self.block_rows)

    def _take_block(self) -> int:
        block = self._free_blocks.pop()
        self._counts[block] = 1
        return block

    def _drop_block(self, block: int) -> None:
        self._counts[block] -= 1
        if self._counts[block]:
            return
        for keys, values in self._stores:  # whoever comes next finds zeros: a masked NaN would show
            keys.release(block, self.block_rows)
            values.release(block, self.block_rows)
        self._free_blocks.append(block)

    def _copy_block(self, source: int, target: int) -> None:
        for keys, values in self._stores:
            keys.tensor[target] = keys.tensor[source]
            values.tensor[target] = values.tensor[source]
