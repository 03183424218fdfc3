"""Position-keyed noise: a pure function of (seed, stream, position, token id), hashed, not drawn.

Every token of a position gets a 64-bit hash (the SplitMix64 finaliser, Steele et al. 2014, over a
key of the seed, the stream and the position). Its upper 52 bits make ``v`` in (0, 1), and

    exponential = -log1p(-v)            gumbel = -log(exponential)

so that ``argmax(logits / temperature + gumbel)`` is a draw from ``softmax(logits / temperature)``
(the Gumbel-max trick). The race is decided by small exponentials: ``v`` down to 2**-53 keeps their
relative precision, and with it the law of rare tokens. The bits of ``v`` are the same in numba, in
numpy and in torch on any device; only the logarithms may differ, in the last place.

Nothing here is shared between positions or tokens, so only tokens that survive the filters need
their noise, and a drafter that draws with the target's own noise can ask for just those.
"""

from __future__ import annotations

from enum import IntEnum

import numba
import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_12 = np.uint64(12)
_TO_UNIT = 2.0**-52


class Stream(IntEnum):
    """Independent streams of one seed. The default rule needs ``PICK`` alone."""

    PICK = 0
    """The target's own picks (and a model drafter's, on purpose, under the default rule)."""
    DRAFT = 1
    """Drafts drawn for a classical rule. Block and traversal look at deeper tokens before shorter
    prefixes fail, so a position may be drafted again from noise already spent: such noise must be
    keyed by the root position of the step, and by node within it, not by position alone."""
    ACCEPT = 2
    """Accept-or-reject coins of a classical rule."""
    RECOVER = 3
    """The draw from a residual."""
    BONUS = 4
    """The draw from the target after a whole path was accepted."""


@numba.njit(inline="always")
def mix64(x):  # type: ignore[no-untyped-def]
    """SplitMix64 finaliser: uint64 to uint64, a bijection."""
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return x ^ (x >> _SHIFT_31)


@numba.njit(inline="always")
def position_key(seed, stream, position):  # type: ignore[no-untyped-def]
    """Key of one position: uint64 from a seed, a stream and an absolute position."""
    key = mix64(np.uint64(seed) + _GOLDEN * (np.uint64(stream) + np.uint64(1)))
    return mix64(key + _GOLDEN * (np.uint64(position) + np.uint64(1)))


@numba.njit(inline="always")
def unit(key, index):  # type: ignore[no-untyped-def]
    """``v`` in (0, 1) for a token (or index) of a position, an odd multiple of 2**-53."""
    bits = mix64(key + _GOLDEN * (np.uint64(index) + np.uint64(1))) >> _SHIFT_12
    return (np.float64(bits) + 0.5) * _TO_UNIT


@numba.njit(cache=True)
def _units(seed, stream, positions, indices, out):  # type: ignore[no-untyped-def]
    for row in range(positions.size):
        key = position_key(seed, stream, positions[row])
        for column in range(indices.size):
            out[row, column] = unit(key, indices[column])


def units(
    seed: int, stream: Stream, positions: NDArray[np.int64], indices: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return ``v`` for every pair of a position and an index.

    Args:
        seed: The request's seed, 0 <= seed < 2**63.
        stream: Which independent stream.
        positions: int64 [P], absolute positions.
        indices: int64 [I], token ids (or any other index within the position).

    Returns:
        float64 [P, I] in (0, 1), exclusive.
    """
    out = np.empty((len(positions), len(indices)), dtype=np.float64)
    _units(
        np.uint64(seed),
        np.uint64(int(stream)),
        np.ascontiguousarray(positions, dtype=np.int64),
        np.ascontiguousarray(indices, dtype=np.int64),
        out,
    )
    return out


def gumbel(
    seed: int,
    positions: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    stream: Stream = Stream.PICK,
) -> NDArray[np.float64]:
    """Return the Gumbel noise of every pair of a position and a token id, float64 [P, I].

    Arguments are those of :func:`units`. With the default stream this is the very noise the target
    picks with, which a model drafter adds to its own logits / temperature.
    """
    return -np.log(-np.log1p(-units(seed, stream, positions, token_ids)))


@numba.njit(cache=True)
def _units_of(keys, token_ids, out):  # type: ignore[no-untyped-def]
    for row in range(token_ids.shape[0]):
        for column in range(token_ids.shape[1]):
            out[row, column] = unit(keys[row], token_ids[row, column])


def gumbel_of(
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    token_ids: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the noise that the target picks with, of chosen tokens of each row, float64 [R, I].

    Args:
        seeds: int64 [R].
        positions: int64 [R], absolute positions of the tokens.
        token_ids: int64 [R, I].
    """
    out = np.empty(token_ids.shape, dtype=np.float64)
    _units_of(position_keys(seeds, positions), np.ascontiguousarray(token_ids), out)
    return -np.log(-np.log1p(-out))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64_torch(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(int(_MIX_1))
    x = (x ^ _shift_right(x, 27)) * _signed(int(_MIX_2))
    return x ^ _shift_right(x, 31)


def _signed(x: int) -> int:
    """The int64 with the same 64 bits as ``x`` taken modulo 2**64."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


def units_torch(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Twin of :func:`units` on any device, from the keys of :func:`position_keys`.

    Args:
        keys: int64 [P].
        token_ids: int64 [I].

    Returns:
        float64 [P, I], bit for bit what :func:`units` gives.
    """
    steps = (token_ids + 1) * _signed(int(_GOLDEN))
    bits = _shift_right(_mix64_torch(keys[:, None] + steps[None, :]), 12)
    return (bits.to(torch.float64) + 0.5) * _TO_UNIT


@numba.njit(cache=True)
def _position_keys(seeds, stream, positions, out):  # type: ignore[no-untyped-def]
    for row in range(positions.size):
        out[row] = position_key(seeds[row], stream, positions[row])


def position_keys(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], stream: Stream = Stream.PICK
) -> NDArray[np.uint64]:
    """Return the key of each row, uint64 [R], from its seed int64 [R] and position int64 [R]."""
    out = np.empty(len(positions), dtype=np.uint64)
    _position_keys(seeds.astype(np.uint64), np.uint64(int(stream)), positions, out)
    return out
