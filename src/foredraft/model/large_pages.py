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


def gather_into_large_pages(weight_bytes: int) -> int:
    """Ask for large pages behind this process's memory, as it stands; return the bytes asked for.

    Call it when the weights are in place and before the KV cache is reserved: the cache must keep
    small pages, so that it takes up no more than what is in use.

    Args:
        weight_bytes: Size of the weights; small models are left alone.
    """
    if not sys.platform.startswith("linux") or weight_bytes < _WORTH_IT_FROM:
        return 0
    try:
        madvise = ctypes.CDLL(None).madvise
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    deadline = time.monotonic() + _MOST_SECONDS
    num_bytes = 0
    for mapping in mappings:
        fields = mapping.split()
        is_anonymous = len(fields) == 5 or fields[5] == "[heap]"
        if not is_anonymous or not fields[1].startswith("rw"):
            continue
        begin, end = (int(address, 16) for address in fields[0].split("-"))
        begin, end = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if end <= begin:
            continue
        if time.monotonic() > deadline:
            break
        if madvise(begin, end - begin, _MADV_HUGEPAGE) == 0:
            madvise(begin, end - begin, _MADV_COLLAPSE)
            num_bytes += end - begin
    return num_bytes
