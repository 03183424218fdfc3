"""Keys and values: the contract of every layout, and the one with contiguous slots.

A slot is a running request's own place. Its rows lie one after another in the order of positions,
wherever the layout keeps them: in a stretch of memory of their own (here), or in blocks that are
shared where texts begin alike (``kv_blocks``).

Contiguous slots are reserved at full length. On a CPU the reservation is address space only: the
operating system commits a page when it is first written, and a freed slot gives its pages back, so
memory follows what is in use. Attention sees plain views; a slot's rows lie in position order, a
row's heads side by side.

Row ``i`` of a slot holds the token at position ``i`` once committed. During a step, draft node
``k`` lies in row ``root position + k``; accepting a path copies its few rows into place. Positions
are depths, so nothing is rotated again (design section 6).
"""

from __future__ import annotations

import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from foredraft.errors import ModelLoadError
from foredraft.types import Int64Array
from foredraft.upload import upload

ROW_BLOCK = 64
"""A slot holds whole blocks of this many rows, so that attention can read whole blocks."""

_PAGE = mmap.PAGESIZE

_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for address space that is not counted as memory before it is written; its number
where this Python has no name for it."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps a token: so many keys and values, of these sizes."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVCache(ABC):
    """What the engine asks of a layout. Who has which slot is the same in all of them.

    Args:
        layers: Shape of each layer.
        num_slots: Most requests that hold KV at once.
        capacity: Rows of a slot.
        dtype: Of keys and values.
        device: Where they lie.

    Attributes:
        is_contiguous: Whether slots side by side can be read as one view, so that it is worth to
            keep them there; a class attribute.
    """

    is_contiguous: ClassVar[bool]

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take no slot yet."""
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.capacity = capacity
        self._dtype = dtype
        self._device = device
        self._free = list(range(num_slots))
        self._num_rows = np.zeros(num_slots, dtype=np.int64)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return row_bytes(self.layers, self._dtype)

    @property
    def num_free_slots(self) -> int:
        """Slots not taken."""
        return len(self._free)

    @property
    def lowest_free_slot(self) -> int:
        """The slot that :meth:`allocate` would give; ``num_slots`` where none is free."""
        return min(self._free, default=self.num_slots)

    def allocate(self, is_highest: bool = False) -> int:
        """Take the lowest free slot, so that running slots stay side by side, or the highest."""
        slot = max(self._free) if is_highest else min(self._free)
        self._free.remove(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back, and its memory."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self.shorten(slot, 0)
        self._free.append(slot)

    def num_rows(self, slot: int) -> int:
        """Rows of a slot that have been reserved."""
        return int(self._num_rows[slot])

    @property
    @abstractmethod
    def bytes_in_use(self) -> int:
        """Bytes of all rows that are reserved, as the layout holds them."""

    @abstractmethod
    def usable_rows(self, max_bytes: int) -> int:
        """Rows that a request alone may hold, so that no more than so many bytes are in use."""

    @abstractmethod
    def free_rows(self, max_rows: int) -> int:
        """Of so many rows (``usable_rows``) those that no slot holds; a shared one is held once."""

    @abstractmethod
    def rows_taken(self, num_rows: int, num_held: int = 0, num_shared: int = 0) -> int:
        """Rows that a slot takes from those that are free, to hold so many.

        Args:
            num_rows: That it is to hold.
            num_held: That it holds already (``num_rows`` of the slot).
            num_shared: With which it begins as another slot does, where it holds none.
        """

    @abstractmethod
    def whole_rows(self, num_rows: int) -> int:
        """As many of so many free rows as a slot can take, whatever it holds already."""

    @abstractmethod
    def longest(self, num_requests: int) -> int:
        """Rows that each of so many requests more can hold at once."""

    @abstractmethod
    def reserve(self, slot: int, first: int, end: int) -> None:
        """See to it that rows ``first`` to ``end`` of a slot can be written, by it alone.

        Raises:
            MemoryError: There is no room for them; what the slot has stays.
        """

    @abstractmethod
    def shorten(self, slot: int, num_rows: int) -> None:
        """Keep the first rows of a slot; give the memory of the others back."""

    @abstractmethod
    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Let a slot that is empty begin with the first rows of another."""

    @abstractmethod
    def move_rows(self, slot: int, sources: Int64Array, target: int) -> None:
        """Copy rows ``sources`` of a slot, in order, to the rows from ``target`` on.

        Sources and targets may overlap; the targets have been reserved.
        """

    @abstractmethod
    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, [N, num_kv_heads, dim] each."""

    @abstractmethod
    def flat_rows(self, slot: int, first: int, end: int) -> Int64Array:
        """Where a slot's rows lie in :meth:`flat`, int64 [end - first]; they are reserved."""

    @abstractmethod
    def locate(self, slots: Sequence[int], num_rows: int) -> Any:
        """Find the first rows of some slots, once for all layers; what :meth:`read` takes.

        Args:
            slots: Where the layout is contiguous, side by side.
            num_rows: Of each, up to ``capacity``; those not reserved read as finite numbers.
        """

    @abstractmethod
    def read(self, layer: int, place: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that were located, [num_slots, num_rows, num_kv_heads, dim] each."""


class ContiguousKVCache(KVCache):
    """KV of every layer in ``num_slots`` slots of ``capacity`` rows.

    Args:
        layers: Shape of each layer.
        num_slots: Most requests that hold KV at once.
        capacity: Rows of a slot, rounded up to a multiple of ``ROW_BLOCK``.
        dtype: Of keys and values.
        device: Where they lie.

    Raises:
        ModelLoadError: The operating system refuses so much address space.
    """

    is_contiguous = True

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve the slots; on a CPU no page is committed yet."""
        capacity = -(-capacity // ROW_BLOCK) * ROW_BLOCK
        super().__init__(layers, num_slots, capacity, dtype, device)
        rows = num_slots, capacity
        self._stores = stores_of(self.layers, rows, dtype, device)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all rows reserved in slots that are taken (pages round this up a little)."""
        return int(self._num_rows.sum()) * self.bytes_per_row

    def usable_rows(self, max_bytes: int) -> int:
        """Rows within so many bytes."""
        return max_bytes // self.bytes_per_row

    def free_rows(self, max_rows: int) -> int:
        """Rows that no slot holds."""
        return max_rows - int(self._num_rows.sum())

    def rows_taken(self, num_rows: int, num_held: int = 0, num_shared: int = 0) -> int:
        """What it does not hold already; what is shared is copied."""
        return max(0, num_rows - num_held)

    def whole_rows(self, num_rows: int) -> int:
        """All of them."""
        return num_rows

    def longest(self, num_requests: int) -> int:
        """Rows of a slot: each has its own."""
        return self.capacity

    def reserve(self, slot: int, first: int, end: int) -> None:
        """Count rows up to ``end`` of a slot; the system gives memory as they are written."""
        self._num_rows[slot] = max(self._num_rows[slot], end)

    def shorten(self, slot: int, num_rows: int) -> None:
        """Keep the first rows of a slot; give the memory of the others back."""
        if self._num_rows[slot] <= num_rows:
            return
        for keys, values in self._stores:
            keys.release(slot, int(self._num_rows[slot]), num_rows)
            values.release(slot, int(self._num_rows[slot]), num_rows)
        self._num_rows[slot] = num_rows

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of a slot to another, which is empty."""
        for keys, values in self._stores:
            keys.tensor[target, :num_rows] = keys.tensor[source, :num_rows]
            values.tensor[target, :num_rows] = values.tensor[source, :num_rows]
        self.reserve(target, 0, num_rows)

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of a layer, [num_slots, capacity, num_kv_heads, key_dim]."""
        return self._stores[layer][0].tensor

    def values(self, layer: int) -> torch.Tensor:
        """Values of a layer, [num_slots, capacity, num_kv_heads, value_dim]."""
        return self._stores[layer][1].tensor

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, slot after slot."""
        keys, values = self._stores[layer]
        return keys.rows, values.rows

    def flat_rows(self, slot: int, first: int, end: int) -> Int64Array:
        """Where a slot's rows lie in :meth:`flat`."""
        return np.arange(first, end, dtype=np.int64) + slot * self.capacity

    def locate(self, slots: Sequence[int], num_rows: int) -> tuple[slice, slice]:
        """Find the first rows of slots that lie side by side."""
        return slice(slots[0], slots[-1] + 1), slice(0, num_rows)

    def read(self, layer: int, place: tuple[slice, slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values that were located."""
        keys, values = self._stores[layer]
        return keys.tensor[place], values.tensor[place]

    def move_rows(self, slot: int, sources: Int64Array, target: int) -> None:
        """Copy rows ``sources`` of a slot, in order, to the rows from ``target`` on.

        The copy goes through a temporary, so sources and targets may overlap.
        """
        index = upload(sources, self._device)
        end = target + len(sources)
        for keys, values in self._stores:
            keys.tensor[slot, target:end] = keys.tensor[slot].index_select(0, index)
            values.tensor[slot, target:end] = values.tensor[slot].index_select(0, index)


def stores_of(
    layers: Sequence[LayerShape], rows: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[tuple[Store, Store]]:
    """Keys and values of every layer, [*rows, num_kv_heads, dim] each."""
    return [
        (
            Store((*rows, layer.num_kv_heads, layer.key_dim), dtype, device),
            Store((*rows, layer.num_kv_heads, layer.value_dim), dtype, device),
        )
        for layer in layers
    ]


def row_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over ``layers``."""
    return (
        sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        * dtype.itemsize
    )


class Store:
    """One [num_slots, ...] tensor whose slots can be given back to the operating system."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Reserve it."""
        num_elements = math.prod(shape)
        self._map: mmap.mmap | None = None
        self._slot_bytes = num_elements * dtype.itemsize // shape[0]
        if device.type == "cpu" and sys.platform == "linux":
            self._map = _reserved(num_elements * dtype.itemsize, shape)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # large pages would commit what is not in use
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
            flat = torch.frombuffer(self._map, dtype=dtype)
            self.tensor = flat.view(shape)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = self.tensor.flatten(0, 1)  # made once: it is asked for in every layer

    def release(self, slot: int, num_rows: int, from_row: int = 0) -> None:
        """Give a slot's whole pages back and clear the rest: the next tenant finds zeros.

        Args:
            slot: Which.
            num_rows: Rows that were written.
            from_row: Rows before this one stay.
        """
        if self._map is None:
            self.tensor[slot, from_row:num_rows] = 0
            return
        row_bytes = self._slot_bytes // self.tensor.shape[1]
        first = slot * self._slot_bytes + from_row * row_bytes
        last = (slot + 1) * self._slot_bytes
        begin, end = -(-first // _PAGE) * _PAGE, last // _PAGE * _PAGE
        if end <= begin:
            self._bytes[first:last] = 0
            return
        self._bytes[first:begin] = 0
        self._bytes[end:last] = 0
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _reserved(num_bytes: int, shape: tuple[int, ...]) -> mmap.mmap:
    """Address space for a [num_slots, capacity, ...] tensor, committed page by page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        return mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise ModelLoadError(
            f"the operating system refuses {num_bytes / 2**30:.1f} GiB of addresses for the keys "
            f"or values of one layer ({shape[0]} requests of {shape[1]} tokens: {error}); lower "
            "max_model_len or max_num_requests."
        ) from error
