"""The target's own token at a row: argmax of processed logits / temperature plus Gumbel noise.

The pick never looks at a draft. It is a function of the row's logits, the request's sampling
parameters and seed, and the absolute position of the token it picks; so plain decoding and every
way of drafting pick the same tokens (design section 5). Equal scores go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.sampling.noise import Stream, gumbel, position_keys, unit, units_torch
from foredraft.sampling.processors import RowParams, filtered
from foredraft.upload import upload

_STEPS_PER_UNIT = 4
_NUM_BOUNDS = 38 * _STEPS_PER_UNIT
# 52 bits give noise of at most 53 * log(2) < 36.8: a token further behind the leader cannot win.
_MOST_NOISE = 36.8
_BOUNDS = np.exp(-np.arange(_NUM_BOUNDS) / _STEPS_PER_UNIT)
_PARALLEL_FROM = 1 << 16


@dataclass(frozen=True, slots=True)
class Picks:
    """What the target chose.

    Attributes:
        token_ids: int64 [R]; undefined where not finite.
        is_finite: bool [R]; False for a row with NaN or +inf among its logits, or none finite.
    """

    token_ids: NDArray[np.int64]
    is_finite: NDArray[np.bool_]


def pick(
    logits: torch.Tensor,
    params: RowParams,
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Picks:
    """Pick the target's token at every row.

    Args:
        logits: float32 [R, V], contiguous.
        params: Parameters of the R rows.
        seeds: int64 [R], the seed of the row's request.
        positions: int64 [R], the absolute position of the token to pick (the row's own plus 1).

    Returns:
        The R picks.
    """
    if logits.device.type != "cpu":
        return _pick_torch(logits, params, seeds, positions)
    rows = logits.numpy()
    out = np.empty(len(rows), dtype=np.int64)
    if not params.temperature.any():
        if _is_parallel(rows):
            _in_parallel(_argmax_parallel, rows, out)
        else:
            _argmax(rows, out)
        return _as_picks(out)
    is_finite = np.isfinite(logits.amax(dim=-1).numpy())
    cut = np.full(len(rows), -np.inf, dtype=np.float32)
    if is_finite.any():
        index = np.nonzero(is_finite)[0]
        usable = params if len(index) == len(rows) else params.rows(index)
        chosen = logits if len(index) == len(rows) else logits[torch.from_numpy(index)]
        kept, chosen_cut = filtered(chosen, usable)
        cut[index] = chosen_cut.numpy()
        if kept is not chosen:
            rows = rows.copy()
            rows[index] = kept.numpy()
    keys = position_keys(seeds, positions)
    if _is_parallel(rows):
        _in_parallel(_pick_rows_parallel, rows, params.temperature, cut, keys, out)
    else:
        _pick_rows(rows, params.temperature, cut, keys, out)
    return _as_picks(out)


def _is_parallel(rows: NDArray[np.float32]) -> bool:
    return rows.size >= _PARALLEL_FROM and len(rows) > 1 and torch.get_num_threads() > 1


def _in_parallel(kernel: Callable[..., None], *arguments: NDArray[Any]) -> None:
    """Run a kernel on as many threads as PyTorch has, and leave that number as it was.

    Numba's OpenMP layer and PyTorch share one OpenMP runtime. When the layer starts, it sets the
    number of threads to that of all cores, for PyTorch too, whatever the user had chosen.
    """
    num_threads = torch.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(num_threads, most))
    kernel(*arguments)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _as_picks(out: NDArray[np.int64]) -> Picks:
    """Kernels mark a row without a usable logit by a token id that no vocabulary has."""
    return Picks(out, out >= 0)


def pick_slowly(
    logits: NDArray[np.float32],
    params: RowParams,
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Plain twin of :func:`pick` for finite logits: whole noise vectors and one argmax a row."""
    from foredraft.sampling.processors import cuts_by_sorting, filtered

    cut = cuts_by_sorting(torch.from_numpy(logits), params).numpy()
    logits = filtered(torch.from_numpy(logits), params)[0].numpy()
    tokens = np.arange(logits.shape[1], dtype=np.int64)
    out = np.empty(len(logits), dtype=np.int64)
    for row in range(len(logits)):
        scores = logits[row].astype(np.float64)
        if params.temperature[row] > 0:
            noise = gumbel(int(seeds[row]), positions[row : row + 1], tokens)[0]
            scores = scores / params.temperature[row] + noise
            scores[logits[row] < cut[row]] = -np.inf
        out[row] = int(np.argmax(scores))
    return out


def _pick_torch(
    logits: torch.Tensor, params: RowParams, seeds: NDArray[np.int64], positions: NDArray[np.int64]
) -> Picks:
    is_finite = torch.isfinite(logits.amax(dim=-1))
    scores = logits.double()
    if params.temperature.any():
        temperature = upload(params.temperature, logits.device)
        is_drawn = (temperature > 0)[:, None]
        keys = position_keys(seeds, positions, Stream.PICK).view(np.int64)
        tokens = torch.arange(logits.shape[1], device=logits.device)
        noise = -torch.log(-torch.log1p(-units_torch(upload(keys, logits.device), tokens)))
        drawn = scores / torch.where(temperature > 0, temperature, 1.0)[:, None] + noise
        kept, cut = filtered(torch.where(is_finite[:, None], logits, 0.0), params)
        drawn = drawn.masked_fill((kept < cut[:, None]) | kept.isneginf(), -torch.inf)
        scores = torch.where(is_drawn, drawn, scores)
    best = scores.amax(dim=-1, keepdim=True)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(scores == best, tokens, logits.shape[1]).amin(dim=-1)
    # One tensor: reading it is the one time that a step waits for the device.
    return _as_picks(torch.where(is_finite, first, -1).cpu().numpy())


@numba.njit(inline="always")
def _argmax_row(row):  # type: ignore[no-untyped-def]
    best = row[0]
    token = 0
    bad = not best < np.inf
    for index in range(1, row.size):
        value = row[index]
        if not value <= best:
            if not value < np.inf:
                bad = True
            best = value
            token = index
    return -1 if bad or not best > -np.inf else token


@numba.njit(cache=True)
def _argmax(rows, out):  # type: ignore[no-untyped-def]
    for row in range(rows.shape[0]):
        out[row] = _argmax_row(rows[row])


@numba.njit(cache=True, parallel=True)
def _argmax_parallel(rows, out):  # type: ignore[no-untyped-def]
    for row in numba.prange(rows.shape[0]):
        out[row] = _argmax_row(rows[row])


@numba.njit(inline="always")
def _pick_row(row, temperature, cut, key):  # type: ignore[no-untyped-def]
    token = _argmax_row(row)
    if token < 0 or temperature == 0:
        return token
    inverse = 1.0 / temperature
    # The likeliest token goes first: it sets a lead that most others cannot reach.
    lead = np.float64(row[token]) / temperature - np.log(-np.log1p(-unit(key, token)))
    leader = token
    for index in range(row.size):
        value = row[index]
        if not value >= cut or index == token:
            continue
        # A screen with slack; what passes is computed as the slow form does.
        behind = lead - np.float64(value) * inverse - 1e-6 * (1.0 + abs(lead))
        if behind > _MOST_NOISE:
            continue
        v = unit(key, index)
        # -log(v) is at least the noise, so winning needs v <= exp(-behind).
        if behind > 0 and v > _BOUNDS[int(behind * _STEPS_PER_UNIT)]:
            continue
        score = np.float64(value) / temperature - np.log(-np.log1p(-v))
        if score > lead or (score == lead and index < leader):
            lead = score
            leader = index
    return leader


@numba.njit(cache=True)
def _pick_rows(rows, temperature, cut, keys, out):  # type: ignore[no-untyped-def]
    for row in range(rows.shape[0]):
        out[row] = _pick_row(rows[row], temperature[row], cut[row], keys[row])


@numba.njit(cache=True, parallel=True)
def _pick_rows_parallel(rows, temperature, cut, keys, out):  # type: ignore[no-untyped-def]
    for row in numba.prange(rows.shape[0]):
        out[row] = _pick_row(rows[row], temperature[row], cut[row], keys[row])
