"""Large pages: asked for behind new memory only, and never in the way."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.model import large_pages
from foredraft.model.large_pages import _without, anonymous_memory, gather_into_large_pages

SPANS = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: [(a, b) for a, b in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)
MANY = 1 << 30


@given(SPANS, SPANS)
def test_the_parts_outside(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def members(spans: list[tuple[int, int]]) -> set[int]:
        return {x for begin, end in spans for x in range(begin, end)}

    parts = _without(ranges, others)
    assert members(parts) == members(ranges) - members(others)
    assert parts == sorted(parts) and all(begin < end for begin, end in parts)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@linux
def test_own_memory_is_found() -> None:
    size = 8 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        inside = [begin <= address and address + size <= end for begin, end in anonymous_memory()]
        assert sum(inside) == 1


def own_memory(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


@linux
def test_only_new_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another engine has had since before, its KV cache say, keeps its small pages."""
    # Straight from the system: an allocator may have room left in what it has had for long.
    old = own_memory(16 << 20)
    before = anonymous_memory()
    new = own_memory(64 << 20)
    asked: list[tuple[int, int]] = []

    class Madvise:
        argtypes: tuple[type, ...] = ()

        def __call__(self, begin: int, size: int, advice: int) -> int:
            asked.append((begin, begin + size))
            return 0

    class Library:
        madvise = Madvise()

    monkeypatch.setattr(large_pages.ctypes, "CDLL", lambda name: Library)
    num_bytes = gather_into_large_pages(MANY, before)
    assert num_bytes >= len(new) - (4 << 20)
    assert all(begin % (2 << 20) == 0 == end % (2 << 20) for begin, end in asked)

    def is_asked(tensor: torch.Tensor) -> bool:
        place = tensor.data_ptr() + len(tensor) // 2
        return any(begin <= place < end for begin, end in asked)

    assert is_asked(new) and not is_asked(old)


@linux
def test_contents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = anonymous_memory()
    new = torch.arange(16 << 20, dtype=torch.int32)
    gather_into_large_pages(MANY, before)
    assert torch.equal(new, torch.arange(16 << 20, dtype=torch.int32))


def test_small_models_and_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather_into_large_pages(1 << 20, []) == 0
    monkeypatch.setattr("foredraft.model.large_pages.sys.platform", "other")
    assert gather_into_large_pages(MANY, []) == 0


@linux
def test_where_the_maps_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> str:
        raise PermissionError

    monkeypatch.setattr(large_pages.Path, "read_text", refuse)
    assert anonymous_memory() == [] and gather_into_large_pages(MANY, []) == 0
