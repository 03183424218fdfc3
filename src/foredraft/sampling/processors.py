"""Logits to processed logits: temperature and the filters, for target and draft alike.

All filters but one keep the likeliest tokens down to some logit, so that together they come to one
number a row, the *cut*: a token is kept if its logit is at or above it. Logits are never edited;
whoever wants the raw ones still has them. Ties at a cut are kept together, so that the result does
not depend on the order of equal logits, on the device, or on what else is in the batch.

Order: temperature, then top-k, then top-p over the mass that top-k kept, then min-p, then
top-n-sigma. Typical-p, which also takes out tokens that are too likely, comes last, over what the
others kept, and makes a copy of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.params import SamplingParams
from foredraft.upload import upload

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

_INT64_MAX = 2**63 - 1
_HOTTEST = 1e38
"""Top-p weights are float32: above this temperature all are equal, and infinity would make NaN."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of every row, as arrays of length num_rows.

    Attributes:
        temperature: float64; 0 where the row is greedy.
        top_k: int64; 0 where off.
        top_p: float64; 1 where off.
        min_p: float64; 0 where off.
        top_n_sigma: float64; 0 where off.
        typical_p: float64; 1 where off.
    """

    temperature: Float64Array
    top_k: NDArray[np.int64]
    top_p: Float64Array
    min_p: Float64Array
    top_n_sigma: Float64Array
    typical_p: Float64Array

    @staticmethod
    def of(params: Sequence[SamplingParams], repeats: NDArray[np.int64]) -> RowParams:
        """Lay out each request's parameters over its ``repeats`` rows."""
        temperature = np.array([0.0 if p.is_greedy else p.temperature for p in params])
        return RowParams(
            np.repeat(temperature, repeats),
            np.repeat(np.array([min(p.top_k, _INT64_MAX) for p in params], np.int64), repeats),
            np.repeat(np.array([p.top_p for p in params]), repeats),
            np.repeat(np.array([p.min_p for p in params]), repeats),
            np.repeat(np.array([p.top_n_sigma for p in params]), repeats),
            np.repeat(np.array([p.typical_p for p in params]), repeats),
        )

    def rows(self, index: NDArray[np.int64] | slice) -> RowParams:
        """Return the parameters of some rows."""
        return RowParams(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.top_n_sigma[index],
            self.typical_p[index],
        )

    @property
    def has_cut(self) -> NDArray[np.bool_]:
        """Bool [num_rows], whether a filter that makes a cut is on."""
        is_on = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0) | (self.top_n_sigma > 0)
        return is_on & (self.temperature > 0)


def filtered(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and cuts: a token is kept if its logit is at or above its row's cut.

    Args:
        logits: float32 [R, V]; a row that is not finite comes back as it is.
        params: Parameters of the R rows.

    Returns:
        float32 [R, V], the logits themselves or, where typical-p is on, a copy with -inf for what
        it took out; and float32 [R], as :func:`cuts`.
    """
    cut = cuts(logits, params)
    is_on = (params.typical_p < 1) & (params.temperature > 0)
    index = np.nonzero(is_on)[0]
    if not len(index):
        return logits, cut
    chosen = params.rows(index)
    where = upload(index, logits.device)
    rows = logits[where]
    scale = upload(chosen.temperature, logits.device)[:, None]
    mass = upload(chosen.typical_p, logits.device)[:, None]
    scaled = (rows.double() / scale).masked_fill(rows < cut[where][:, None], -torch.inf)
    logs = torch.log_softmax(scaled, dim=-1)
    weights = logs.exp()
    surprise = -torch.where(weights > 0, logs, 0.0)
    mean = (weights * surprise).sum(dim=-1, keepdim=True)
    distance = torch.where(weights > 0, (surprise - mean).abs(), torch.inf)
    ranked, order = distance.sort(dim=-1)
    before = weights.gather(1, order).cumsum(dim=-1) - weights.gather(1, order)
    count = (before < mass).sum(dim=-1, keepdim=True)
    last = ranked.gather(1, (count - 1).clamp(min=0))  # those as far away are kept with it
    out = logits.clone()
    out[where] = rows.masked_fill(distance > last, -torch.inf)
    return out, cut


def cuts(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Return the cut of every row: the least logit that the row's filters keep.

    Args:
        logits: float32 [R, V], finite, as the target or draft model gave them.
        params: Parameters of the R rows.

    Returns:
        float32 [R] on the logits' device; -inf for greedy rows and rows without a filter.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(_cuts_cpu(logits, params))
    return cuts_by_sorting(logits, params)


def cuts_by_sorting(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Plain twin of :func:`cuts`: sorts whole rows, all at once; any device."""
    num_rows, vocab_size = logits.shape
    out = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=logits.device)
    index = np.nonzero(params.has_cut)[0]
    if not len(index):
        return out
    chosen = params.rows(index)

    def column(values: NDArray[np.generic]) -> torch.Tensor:
        return upload(values, logits.device)[:, None]

    where = upload(index, logits.device)
    ranked = logits[where].sort(dim=-1, descending=True).values
    no_cut = torch.full_like(ranked[:, :1], -torch.inf)
    has_top_k = (chosen.top_k > 0) & (chosen.top_k < vocab_size)
    kth = ranked.gather(1, column(np.where(has_top_k, chosen.top_k, 1) - 1))
    cut = torch.where(column(has_top_k), kth, no_cut)
    scale = column(np.minimum(chosen.temperature, _HOTTEST).astype(np.float32))
    weights = torch.exp((ranked - ranked[:, :1]) / scale).double().masked_fill(ranked < cut, 0.0)
    before = torch.cumsum(weights, 1) - weights
    # The first of equal logits decides for all of them: ties are kept together.
    is_kept = before < column(chosen.top_p) * weights.sum(dim=1, keepdim=True)
    last = ranked.gather(1, (is_kept.sum(dim=1, keepdim=True) - 1).clamp(min=0))
    cut = torch.where(column(chosen.top_p < 1), torch.maximum(cut, last), cut)
    has_min_p = chosen.min_p > 0
    margin = chosen.temperature * np.log(np.where(has_min_p, chosen.min_p, 1.0))
    is_kept = ranked.double() >= ranked[:, :1].double() + column(margin)
    last = ranked.gather(1, is_kept.sum(dim=1, keepdim=True) - 1)
    cut = torch.where(column(has_min_p), torch.maximum(cut, last), cut)
    is_finite = ranked.isfinite()
    spread = _deviation(ranked.double(), is_finite)[:, None]
    is_kept = is_finite & (
        ranked.double() >= ranked[:, :1].double() - column(chosen.top_n_sigma) * spread
    )
    last = ranked.gather(1, is_kept.sum(dim=1, keepdim=True) - 1)
    cut = torch.where(column(chosen.top_n_sigma > 0), torch.maximum(cut, last), cut)
    out[where] = cut[:, 0]
    return out


def _deviation(rows: torch.Tensor, is_finite: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the finite logits of every row, float64 [R]."""
    count = is_finite.sum(dim=-1).clamp(min=1)
    finite = torch.where(is_finite, rows, 0.0)
    mean = finite.sum(dim=-1) / count
    off = torch.where(is_finite, rows - mean[:, None], 0.0)
    return (off.square().sum(dim=-1) / count).sqrt()


def probs(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Return the processed distribution of every row, float32 [R, V].

    This is what the classical rules call ``target_probs`` or ``draft_probs``. A greedy row is a
    point mass on its first largest logit.

    Args:
        logits: float32 [R, V], finite.
        params: Parameters of the R rows.
    """
    logits, cut = filtered(logits, params)
    temperature = upload(params.temperature, logits.device)
    is_greedy = temperature == 0
    scaled = logits.double() / torch.where(is_greedy, 1.0, temperature)[:, None]
    scaled = scaled.masked_fill(logits < cut[:, None], -torch.inf)
    out = torch.softmax(scaled, dim=-1)
    if bool(is_greedy.any()):
        rows = is_greedy.nonzero()[:, 0]
        out[rows] = 0.0
        out[rows, logits[rows].argmax(dim=-1)] = 1.0
    return out.float()


_NUM_BUCKETS = 1024
_SORT_BELOW = 256


@numba.njit(cache=True)
def _finite_span(row, members):  # type: ignore[no-untyped-def]
    """Largest and least finite logit among some tokens, and how many are finite."""
    top, bottom, num_finite = np.float32(-np.inf), np.float32(np.inf), 0
    for token in members:
        value = row[token]
        if value > -np.inf:
            num_finite += 1
            top = max(top, value)
            bottom = min(bottom, value)
    return top, bottom, num_finite


@numba.njit(inline="always")
def _bucket(value, top, scale):  # type: ignore[no-untyped-def]
    """Bucket of a finite logit by its distance from the largest; rises as the logit falls."""
    return min(_NUM_BUCKETS - 1, int((np.float64(top) - np.float64(value)) * scale))


@numba.njit(cache=True)
def _descending(row, members):  # type: ignore[no-untyped-def]
    """Tokens by falling logit, equal ones by rising id."""
    return members[np.argsort(-row[members], kind="mergesort")]


@numba.njit(cache=True)
def _reaches(row, members, amounts, before, wanted):  # type: ignore[no-untyped-def]
    """Whether the running sum over the finite logits, from ``before`` on, reaches ``wanted``."""
    for token in members:
        if not before < wanted:
            break
        if row[token] > -np.inf:
            before += amounts[token]
    return not before < wanted


@numba.njit(cache=True)
def _boundary(row, members, amounts, wanted):  # type: ignore[no-untyped-def]
    """The logit of the first token at which the running sum of ``amounts`` reaches ``wanted``.

    Tokens count from the largest logit down. Bucket by bucket, ever narrower: a far-out logit makes
    the first buckets wide, and the next ones are cut from what is left, so that a handful of tokens
    is sorted and never the row. ``members`` are the tokens that count.
    """
    before = 0.0
    while True:
        top, bottom, num_finite = _finite_span(row, members)
        if members.size <= _SORT_BELOW:
            break
        if not top > bottom:  # all that is finite ties: nothing to sort
            if num_finite < members.size and not _reaches(row, members, amounts, before, wanted):
                return np.float32(-np.inf)
            return top
        scale = np.float64(_NUM_BUCKETS - 1) / (np.float64(top) - np.float64(bottom))
        sums = np.zeros(_NUM_BUCKETS, dtype=np.float64)
        counts = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        for token in members:
            if row[token] > -np.inf:
                bucket = _bucket(row[token], top, scale)
                sums[bucket] += amounts[token]
                counts[bucket] += 1
        chosen = -1
        last = 0
        reached = before
        for bucket in range(_NUM_BUCKETS):
            if counts[bucket] > 0:
                if reached + sums[bucket] >= wanted:
                    chosen = bucket
                    break
                last = bucket
                reached += sums[bucket]
        if chosen < 0:
            if num_finite < members.size:
                return np.float32(-np.inf)  # finite logits do not reach it
            return bottom if last >= 0 else top  # rounding: all are wanted
        before = reached
        inside = np.empty(counts[chosen], dtype=np.int64)
        num_inside = 0
        for token in members:
            if row[token] > -np.inf and _bucket(row[token], top, scale) == chosen:
                inside[num_inside] = token
                num_inside += 1
        members = inside
    order = _descending(row, members)
    least = row[order[0]]
    for token in order:
        if not before < wanted:
            break
        least = row[token]
        before += amounts[token]
    return least


_BLOCK = 64
_NUM_CANDIDATES = 512


@numba.njit(cache=True, fastmath={"nnan"})
def _block_maxima(row, out):  # type: ignore[no-untyped-def]
    for block in range(out.size):
        most = np.float32(-np.inf)
        for token in range(block * _BLOCK, min(row.size, (block + 1) * _BLOCK)):
            most = max(most, row[token])
        out[block] = most


@numba.njit(cache=True)
def _likeliest(row, count):  # type: ignore[no-untyped-def]
    """Some tokens that hold the ``count`` likeliest and all ties with them; all where that is many.

    The ``count``-th largest of the block maxima has ``count`` logits at or above it.
    """
    num_blocks = (row.size + _BLOCK - 1) // _BLOCK
    if count > num_blocks // 2:
        return np.arange(row.size)
    maxima = np.empty(num_blocks, dtype=np.float32)
    _block_maxima(row, maxima)
    least = np.sort(maxima)[num_blocks - count]
    members = np.empty(row.size, dtype=np.int64)
    num_members = 0
    for block in range(num_blocks):
        if maxima[block] >= least:
            for token in range(block * _BLOCK, min(row.size, (block + 1) * _BLOCK)):
                if row[token] >= least:
                    members[num_members] = token
                    num_members += 1
    return members[:num_members]


@numba.njit(cache=True)
def _row_cut(row, weights, temperature, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    cut = np.float32(-np.inf)
    members = np.empty(0, dtype=np.int64)
    if 0 < top_k < row.size:
        members = _likeliest(row, top_k)
        cut = _boundary(row, members, np.ones(row.size), np.float64(top_k))
        members = members[row[members] >= cut]
    if top_p < 1:
        total = 0.0
        if members.size > 0:
            for token in members:
                total += weights[token]
        else:
            for weight in weights:
                total += weight
            members = _likeliest(row, min(_NUM_CANDIDATES, row.size))
            mass = 0.0
            for token in members:
                mass += weights[token]
            if mass < top_p * total:
                members = np.arange(row.size)
        cut = max(cut, _boundary(row, members, weights, top_p * total))
    if min_p > 0:
        top = row[0]
        for value in row:
            top = max(top, value)
        threshold = np.float64(top) + temperature * np.log(min_p)
        least = top
        for value in row:
            if value < least and np.float64(value) >= threshold:
                least = value
        cut = max(cut, least)
    return cut


def _cuts_cpu(logits: torch.Tensor, params: RowParams) -> Float32Array:
    out = np.full(len(params.temperature), -np.inf, dtype=np.float32)
    for row in np.nonzero(params.has_cut)[0]:
        line = logits[row]
        temperature = params.temperature[row]
        if params.top_p[row] < 1:
            scale = float(np.float32(min(temperature, _HOTTEST)))
            weights = torch.exp((line - line.max()) / scale).double().numpy()
        else:
            weights = np.empty(0, dtype=np.float64)
        out[row] = _row_cut(
            line.numpy(),
            weights,
            temperature,
            params.top_k[row],
            params.top_p[row],
            params.min_p[row],
        )
        if params.top_n_sigma[row] > 0:
            exact = line.double()
            is_finite = line.isfinite()
            spread = _deviation(exact[None], is_finite[None])[0]
            is_kept = is_finite & (exact >= exact.max() - params.top_n_sigma[row] * spread)
            out[row] = max(out[row], float(line[is_kept].min()))
    return out
