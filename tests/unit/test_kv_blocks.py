"""Blocks of keys and values: what a slot holds is what it would hold alone, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.model.kv_blocks import BlockKVCache
from foredraft.model.kv_cache import ContiguousKVCache, KVCache, LayerShape
from foredraft.types import Int64Array

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5))


def make(num_slots: int = 4, num_blocks: int = 40, block_rows: int = 16) -> BlockKVCache:
    return BlockKVCache(LAYERS, num_slots, 128, torch.float32, CPU, num_blocks, block_rows)


def write(cache: KVCache, slot: int, first: int, end: int, seed: int) -> None:
    """Write rows that tell layer, row and seed."""
    cache.reserve(slot, first, end)
    rows = torch.from_numpy(cache.flat_rows(slot, first, end))
    for layer in range(len(cache.layers)):
        for number, store in enumerate(cache.flat(layer)):
            values = torch.arange(first, end) + 1000.0 * seed + 100_000.0 * (2 * layer + number)
            store[rows] = values[:, None, None].expand(-1, *store.shape[1:])


def rows_of(cache: KVCache, slot: int, num_rows: int) -> list[torch.Tensor]:
    place = cache.locate((slot,), num_rows)
    return [store[0] for layer in (0, 1) for store in cache.read(layer, place)]


def test_a_beginning_is_shared_and_its_rest_copied() -> None:
    cache = make()
    one, other = cache.allocate(), cache.allocate()
    write(cache, one, 0, 40, 1)
    cache.copy_rows(one, other, 37)
    assert cache.num_holders(one) == [2, 2, 1] and cache.num_holders(other) == [2, 2, 1]
    assert cache.bytes_in_use == 4 * 16 * cache.bytes_per_row  # of six blocks two are shared
    write(cache, other, 37, 50, 2)
    write(cache, one, 40, 45, 3)
    for slot, seeds in ((one, {38: 1, 42: 3}), (other, {38: 2, 42: 2})):
        keys = rows_of(cache, slot, 45)[0]
        assert keys[30, 0, 0] == 1030
        assert {row: int(keys[row, 0, 0]) // 1000 for row in seeds} == seeds
    cache.free(one)
    assert cache.num_holders(other) == [1, 1, 1, 1]
    assert [int(v) for v in rows_of(cache, other, 37)[0][:, 0, 0]] == list(range(1000, 1037))
    cache.free(other)
    assert cache.bytes_in_use == 0 and cache.num_free_blocks == cache.num_blocks


def test_who_writes_into_a_shared_block_gets_a_copy() -> None:
    cache = make()
    one, other = cache.allocate(), cache.allocate()
    write(cache, one, 0, 32, 1)
    cache.copy_rows(one, other, 32)
    write(cache, other, 10, 12, 2)
    assert cache.num_holders(one) == [1, 2] and cache.num_holders(other) == [1, 2]
    assert int(rows_of(cache, one, 16)[0][11, 0, 0]) == 1011
    assert int(rows_of(cache, other, 16)[0][11, 0, 0]) == 2011
    assert int(rows_of(cache, other, 16)[0][12, 0, 0]) == 1012


def test_full_is_said_and_nothing_is_lost() -> None:
    cache = make(num_blocks=3)
    one, other = cache.allocate(), cache.allocate()
    write(cache, one, 0, 33, 1)
    with pytest.raises(MemoryError, match="of 3 blocks of keys and values 0 are free, and 1"):
        cache.reserve(other, 0, 1)
    assert int(rows_of(cache, one, 33)[0][32, 0, 0]) == 1032
    cache.shorten(one, 16)
    assert cache.num_free_blocks == 2
    write(cache, other, 0, 20, 2)
    with pytest.raises(ValueError, match="is not empty"):
        cache.copy_rows(one, other, 3)
    cache.free(other)
    with pytest.raises(ValueError, match="slot 1 is free already"):
        cache.free(other)


def test_what_does_not_fit_takes_nothing() -> None:
    """A slot that asks for more than there is holds no block of it when it is freed."""
    cache = make(num_blocks=4)
    one, other = cache.allocate(), cache.allocate()
    write(cache, one, 0, 32, 1)
    with pytest.raises(MemoryError, match="2 are free, and 3"):
        cache.reserve(other, 0, 48)
    assert cache.num_free_blocks == 2 and cache.num_rows(other) == 0
    cache.copy_rows(one, other, 32)
    with pytest.raises(MemoryError, match="2 are free, and 3"):
        cache.reserve(other, 0, 48)  # two copies and a new one
    assert cache.num_holders(other) == [2, 2] and cache.num_rows(other) == 32
    cache.free(other)
    cache.free(one)
    assert cache.num_free_blocks == 4


def test_rows_that_nobody_wrote_read_as_zeros() -> None:
    """A masked NaN times nothing would be NaN: neither old tenants nor missing blocks show."""
    cache = make()
    slot = cache.allocate()
    write(cache, slot, 0, 64, 1)
    for store in cache.flat(0):
        store[torch.from_numpy(cache.flat_rows(slot, 0, 64))] = torch.nan
    cache.free(slot)
    slot = cache.allocate()
    write(cache, slot, 0, 3, 2)
    for store in rows_of(cache, slot, 128):
        assert store.shape[0] == 128 and not store[3:].any() and not store.isnan().any()


def test_what_is_free_is_shared_out() -> None:
    cache = make(num_blocks=9)
    assert [cache.longest(number) for number in (1, 2, 4)] == [128, 64, 32]
    cache.reserve(cache.allocate(), 0, 17)
    assert [cache.longest(number) for number in (1, 2, 4)] == [112, 48, 16]


def test_the_bound_holds_however_rows_are_spread() -> None:
    cache = make(num_slots=4, num_blocks=20)
    max_bytes = 20 * 16 * cache.bytes_per_row
    usable = cache.usable_rows(max_bytes)
    assert usable == 20 * 16
    assert cache.usable_rows(max_bytes - 1) == 19 * 16
    for spread in ([usable - 3 * 16, 1, 1, 1], [usable // 4] * 4, [17, 33, 49, usable - 99]):
        slots = [cache.allocate() for _ in spread]
        free = cache.free_rows(usable)
        assert free == usable
        for slot, num_rows in zip(slots, spread, strict=True):
            num_rows = min(num_rows, cache.capacity)
            taken = cache.rows_taken(num_rows)
            if taken > free:
                continue
            cache.reserve(slot, 0, num_rows)
            free -= taken
            assert cache.free_rows(usable) == free
            more = cache.rows_taken(num_rows + 1, num_rows)
            assert more == (16 if num_rows % 16 == 0 else 0)
        assert cache.bytes_in_use <= max_bytes
        for slot in slots:
            cache.free(slot)


def test_what_is_shared_is_counted_once() -> None:
    cache = make(num_slots=4, num_blocks=20)
    one, other = cache.allocate(), cache.allocate()
    cache.reserve(one, 0, 40)
    assert cache.free_rows(320) == 320 - 48
    taken = cache.rows_taken(50, num_shared=40)
    cache.copy_rows(one, other, 40)
    cache.reserve(other, 40, 50)
    assert taken == 32 and cache.free_rows(320) == 320 - 48 - 32
    assert [cache.whole_rows(rows) for rows in (0, 15, 16, 47)] == [0, 0, 16, 32]


@pytest.mark.parametrize("block_rows", [16, 32, 128])
def test_ten_thousand_operations_beside_contiguous_slots(block_rows: int) -> None:
    """Both layouts do the same; what is read is the same; no block is lost or held for nothing."""
    rng = np.random.default_rng(block_rows)
    blocks = make(5, 5 * 128 // block_rows, block_rows)
    slots = ContiguousKVCache(LAYERS, 5, 128, torch.float32, CPU)
    held: dict[int, int] = {}
    num_shared = 0
    for number in range(10_000):
        choice = rng.random()
        if choice < 0.2 and len(held) < 5:
            slot = blocks.allocate()
            assert slots.allocate() == slot
            held[slot] = 0
            if len(held) > 1 and rng.random() < 0.7:
                source = int(rng.choice([other for other in held if other != slot]))
                num_rows = int(rng.integers(0, held[source] + 1))
                for cache in (blocks, slots):
                    cache.copy_rows(source, slot, num_rows)
                held[slot] = num_rows
        elif not held:
            continue
        else:
            slot = int(rng.choice(list(held)))
            length = held[slot]
            if choice < 0.6:
                end = min(128, length + int(rng.integers(1, 20)))
                first = max(0, length - int(rng.integers(0, 3)))
                if first < end:
                    for cache in (blocks, slots):
                        write(cache, slot, first, end, number % 97)
                    held[slot] = max(end, length)
            elif choice < 0.75 and length > 8:
                sources: Int64Array = np.sort(rng.choice(np.arange(length - 6, length), 3, False))
                for cache in (blocks, slots):
                    cache.move_rows(slot, sources, length - 7)
            elif choice < 0.85:
                held[slot] = int(rng.integers(0, length + 1))
                for cache in (blocks, slots):
                    cache.shorten(slot, held[slot])
            else:
                for cache in (blocks, slots):
                    cache.free(slot)
                del held[slot]
        if number % 10 == 0 and held:
            slot = int(rng.choice(list(held)))
            pairs = zip(
                rows_of(blocks, slot, held[slot]), rows_of(slots, slot, held[slot]), strict=True
            )
            assert all(torch.equal(one, other) for one, other in pairs)
        counted: dict[int, int] = {}
        for slot in held:
            assert blocks.num_rows(slot) == slots.num_rows(slot) == held[slot]
            table = blocks.block_table(slot)
            assert len(table) == -(-held[slot] // block_rows)
            for block in table:
                counted[block] = counted.get(block, 0) + 1
            assert blocks.num_holders(slot) == [int(blocks._counts[block]) for block in table]
        assert {block: int(blocks._counts[block]) for block in counted} == counted
        assert blocks.num_blocks - blocks.num_free_blocks == len(counted)
        num_shared += any(count > 1 for count in counted.values())
    assert num_shared > (1000 if block_rows < 128 else -1)
    for slot in held:
        blocks.free(slot)
    assert blocks.num_free_blocks == blocks.num_blocks and blocks.bytes_in_use == 0
