"""Weights in large pages: fewer address translations for a step that reads every weight once.

A decode step on a CPU streams all weights through the cores, and with pages of 4 KiB a good part
of that time is spent looking pages up, above all in a virtual machine. Linux can gather memory
that is in use already into pages of 2 MiB, on request. Nothing but speed depends on it: where the
system cannot, or will not, the pages stay as they are.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # since Linux 6.1
_WORTH_IT_FROM = 64 * 2**20
_MOST_SECONDS = 5.0


def anonymous_memory() -> list[tuple[int, int]]:
    """Return the address ranges of this process's own memory, in order; none where unknown."""
    try:
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    ranges = []
    for mapping in mappings:
        fields = mapping.split()
        is_anonymous = len(fields) == 5 or fields[5] == "[heap]"
        if is_anonymous and fields[1].startswith("rw"):
            begin, end = fields[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def gather_into_large_pages(weight_bytes: int, before: list[tuple[int, int]]) -> int:
    """Ask for large pages behind the memory that came since ``before``: the weights.

    Args:
        weight_bytes: Size of the weights; small models are left alone.
        before: What :func:`anonymous_memory` said before the model was loaded. What was there
            then belongs to others (a KV cache, say, whose pages must stay small).

    Returns:
        The bytes asked for.
    """
    if not sys.platform.startswith("linux") or weight_bytes < _WORTH_IT_FROM:
        return 0
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    deadline = time.monotonic() + _MOST_SECONDS
    num_bytes = 0
    for begin, end in _without(anonymous_memory(), before):
        begin, end = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if end <= begin:
            continue
        if time.monotonic() > deadline:
            break
        if madvise(begin, end - begin, _MADV_HUGEPAGE) == 0:
            madvise(begin, end - begin, _MADV_COLLAPSE)
            num_bytes += end - begin
    return num_bytes


def _without(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of ``ranges`` outside ``others``; both in order, neither overlapping itself."""
    parts = []
    for begin, end in ranges:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                parts.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            parts.append((begin, end))
    return parts
