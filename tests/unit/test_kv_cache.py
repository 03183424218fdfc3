"""Slots of keys and values: who has which, what is counted, and what goes back to the system."""

from __future__ import annotations

import os
import sys

import numpy as np
import psutil
import pytest
import torch

from foredraft.errors import ModelLoadError
from foredraft.model.kv_cache import ContiguousKVCache, LayerShape, row_bytes

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 3, 5))


def make(
    num_slots: int = 3,
    capacity: int = 8,
    layers: tuple[LayerShape, ...] = LAYERS,
    dtype: torch.dtype = torch.float32,
) -> ContiguousKVCache:
    return ContiguousKVCache(layers, num_slots, capacity, dtype, CPU)


def fill(cache: ContiguousKVCache, slot: int, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(cache.layers)):
        for store in (cache.keys(layer), cache.values(layer)):
            rows = store[slot, :num_rows]
            rows.copy_(torch.randn(rows.shape, generator=generator))
    cache.reserve(slot, 0, num_rows)


def copy_of(cache: ContiguousKVCache, slot: int) -> list[torch.Tensor]:
    return [
        store[slot].clone()
        for layer in range(len(cache.layers))
        for store in (cache.keys(layer), cache.values(layer))
    ]


def test_shapes_and_sizes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cache = make(dtype=dtype)
        rows = cache.capacity
        assert rows >= 8
        assert cache.keys(0).shape == cache.values(0).shape == (3, rows, 2, 4)
        assert cache.keys(1).shape == (3, rows, 1, 3)
        assert cache.values(1).shape == (3, rows, 1, 5)
        assert cache.keys(0).dtype == cache.values(1).dtype == dtype
        assert cache.bytes_per_row == row_bytes(LAYERS, dtype) == (16 + 8) * dtype.itemsize
        assert cache.keys(0).data_ptr() != cache.values(0).data_ptr()


def test_the_lowest_free_slot_is_taken() -> None:
    cache = make(4)
    assert [cache.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert cache.num_free_slots == 0
    cache.free(2)
    cache.free(1)
    assert cache.num_free_slots == 2
    assert [cache.allocate(), cache.allocate()] == [1, 2]


def test_a_slot_is_not_freed_twice() -> None:
    cache = make()
    slot = cache.allocate()
    cache.free(slot)
    with pytest.raises(ValueError, match="slot 0 is free already"):
        cache.free(slot)
    assert [cache.allocate() for _ in range(3)] == [0, 1, 2]


def test_rows_in_use_are_counted() -> None:
    cache = make()
    assert cache.bytes_in_use == 0
    one, other = cache.allocate(), cache.allocate()
    cache.reserve(one, 0, 5)
    cache.reserve(one, 0, 3)  # a step that starts further back takes nothing away
    cache.reserve(other, 0, 8)
    assert cache.bytes_in_use == 13 * cache.bytes_per_row
    cache.free(one)
    assert cache.bytes_in_use == 8 * cache.bytes_per_row
    cache.free(other)
    assert cache.bytes_in_use == 0
    assert cache.allocate() == one and cache.bytes_in_use == 0


@pytest.mark.parametrize("sources", [[2], [2, 4], [3, 4, 5], [1, 3], [5, 6, 7], [2, 3, 7]], ids=str)
def test_moving_rows_copies_and_touches_nothing_else(sources: list[int]) -> None:
    """Sources and targets overlap; other rows and other slots stay."""
    cache = make()
    for slot in range(3):
        fill(cache, slot, 8, slot)
    before = [copy_of(cache, slot) for slot in range(3)]
    cache.move_rows(1, np.array(sources), 1)
    for old, new in zip(before[1], copy_of(cache, 1), strict=True):
        expected = old.clone()
        for place, source in enumerate(sources):
            expected[1 + place] = old[source]
        assert torch.equal(new, expected)
    for slot in (0, 2):
        for old, new in zip(before[slot], copy_of(cache, slot), strict=True):
            assert torch.equal(old, new)


def test_freeing_leaves_neighbours_alone() -> None:
    """Slots that share a page with a freed one, and slots of several pages, keep every byte."""
    for capacity in (3, 100, 1500):
        cache = make(5, capacity, (LayerShape(1, 3, 5),))
        capacity = cache.capacity
        for slot in range(5):
            assert cache.allocate() == slot
            fill(cache, slot, capacity, slot)
        before = {slot: copy_of(cache, slot) for slot in (0, 2, 4)}
        cache.free(1)
        cache.free(3)
        for slot, old in before.items():
            for one, other in zip(old, copy_of(cache, slot), strict=True):
                assert torch.equal(one, other)


def test_without_a_memory_map_slots_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages cannot be given back, a slot's next tenant finds zeros all the same."""
    monkeypatch.setattr("foredraft.model.kv_cache.sys.platform", "other")
    cache = make()
    assert all(store._map is None for pair in cache._stores for store in pair)
    for slot in range(3):
        assert cache.allocate() == slot
        fill(cache, slot, 5 + slot, slot)
    before = copy_of(cache, 0)
    cache.move_rows(2, np.array([4, 6]), 1)
    assert torch.equal(cache.keys(0)[2, 1:3], cache.keys(0)[2, [4, 6]])
    cache.free(1)
    assert not any(store.any() for store in copy_of(cache, 1))
    for one, other in zip(before, copy_of(cache, 0), strict=True):
        assert torch.equal(one, other)
    assert cache.bytes_in_use == (5 + 7) * cache.bytes_per_row and cache.allocate() == 1


def resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_memory_follows_what_is_in_use() -> None:
    """Making a cache costs nothing, writing costs what is written, freeing gives it back."""
    mebibyte = 1 << 20
    start = resident()
    # 1 KiB a row and store: 4 slots of 16 MiB in each of 4 stores, 256 MiB in all.
    cache = make(4, 16384, (LayerShape(4, 64, 64),) * 2)
    assert resident() - start < 16 * mebibyte
    stores = [cache.keys(0), cache.values(0), cache.keys(1), cache.values(1)]
    for slot in [cache.allocate() for _ in range(4)][:3]:
        for store in stores:
            store[slot].fill_(slot + 1)
        cache.reserve(slot, 0, 16384)
    full = resident()
    assert full - start > 180 * mebibyte
    cache.free(0)
    assert full - resident() > 60 * mebibyte
    cache.free(2)
    assert full - resident() > 120 * mebibyte
    assert cache.bytes_in_use == 64 * mebibyte
    assert all(float(store[1].min()) == float(store[1].max()) == 2 for store in stores)
    cache.free(1)
    assert resident() - start < 16 * mebibyte
    assert cache.bytes_in_use == 0
    assert cache.allocate() == 0
    assert not stores[0][0, :9].any()  # what was there before is gone


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are reserved on Linux only")
def test_a_long_context_is_reserved_though_memory_is_short() -> None:
    """Of 67 GB of addresses in two pieces, the machine gives pages for what is written alone."""
    start = resident()
    cache = make(16, 1_024_000, (LayerShape(8, 128, 128),), torch.bfloat16)
    assert cache.allocate() == 0
    cache.keys(0)[0, 1_023_999].fill_(1.0)
    cache.reserve(0, 0, 1_024_000)
    assert float(cache.keys(0)[0, 1_023_999].sum()) == 8 * 128
    assert resident() - start < 16 << 20
    cache.free(0)
    assert not cache.keys(0)[0, 1_023_999].any()


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are reserved on Linux only")
@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), OverflowError("too big")])
def test_a_refused_reservation_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("foredraft.model.kv_cache.mmap.mmap", refused)
    with pytest.raises(ModelLoadError) as caught:
        make(16, 1_024_000, (LayerShape(8, 128, 128),), torch.bfloat16)
    sentence = str(caught.value)
    for part in ("31.2 GiB", "16 requests of 1024000 tokens", "lower max_model_len or max_num_req"):
        assert part in sentence
    assert sentence.count(".") == 2  # that of the number, and that at the end
