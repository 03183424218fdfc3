"""What is proposed below a row of a drafter's logits: coupled picks, or classical draws.

A draft model's logits are first laid out by the target's token ids, so that filters, noise and
distributions mean the same tokens for both models. Of a head's only the largest are looked at, and
a draw is never made: see :func:`rank`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.sampling.noise import Stream, gumbel_of, units
from foredraft.sampling.pick import pick
from foredraft.sampling.processors import Float64Array, RowParams, probs
from foredraft.types import Int64Array, Request
from foredraft.upload import upload

_NUM_RIVALS = 16
"""Likeliest tokens that a confidence is weighed against."""

_MOST_CONFIDENCE = 1 - 1e-9
"""So that no node is as sure as its parent."""


def by_target_id(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Logits float32 [n, draft vocabulary] as [n, target vocabulary], -inf where there is none.

    Args:
        logits: Of the draft model.
        columns: int64 [target vocabulary], the draft model's id of each token of the target, or -1.
    """
    laid_out = logits.index_select(1, columns.clamp(min=0))
    return laid_out.masked_fill_(columns < 0, -torch.inf)


def choose(
    logits: torch.Tensor,
    requests: Sequence[Request],
    positions: Int64Array,
    num_children: int,
) -> tuple[Int64Array, Float64Array]:
    """The best tokens at each row, by the draft model's logits and the target's own noise.

    Args:
        logits: float32 [n, V], by the target's token ids; it is written over.
        requests: The request of each row.
        positions: int64 [n], the absolute position of the token to choose.
        num_children: How many.

    Returns:
        Token ids int64 [n, num_children], -1 where there is no other token, and the confidence of
        each: its share among its likeliest rivals, the noise counted in.
    """
    params = RowParams.of([r.sampling for r in requests], np.ones(len(requests), dtype=np.int64))
    seeds = np.array([r.seed for r in requests], dtype=np.int64)
    num_rivals = min(_NUM_RIVALS, logits.shape[1])
    top = logits.topk(num_rivals, dim=1)
    rivals = top.indices.cpu().numpy()
    rival_scores = _scores(top.values.double().cpu().numpy(), rivals, params, seeds, positions)
    highest = rival_scores.max(axis=1)
    mass = np.exp(rival_scores - highest[:, None]).sum(axis=1)
    token_ids = np.full((len(logits), num_children), -1, dtype=np.int64)
    confidence = np.zeros((len(logits), num_children))
    for child in range(num_children):
        picks = pick(logits, params, seeds, positions)
        rows = np.nonzero(picks.is_finite)[0]
        if not len(rows):
            break
        found = picks.token_ids[rows]
        token_ids[rows, child] = found
        where = upload(rows, logits.device), upload(found, logits.device)
        values = logits[where].double().cpu().numpy()[:, None]
        score = _scores(values, found[:, None], params.rows(rows), seeds[rows], positions[rows])
        ahead = np.exp(np.minimum(score[:, 0] - highest[rows], 40.0))
        is_rival = (rivals[rows] == found[:, None]).any(axis=1)
        share = ahead / (mass[rows] + np.where(is_rival, 0.0, ahead))
        confidence[rows, child] = np.minimum(share, _MOST_CONFIDENCE)
        if child + 1 < num_children:
            logits[where] = -torch.inf
    return token_ids, confidence


def rank(
    values: Float64Array,
    words: Int64Array,
    request: Request,
    positions: Int64Array,
    is_coupled: bool = True,
) -> tuple[Int64Array, Float64Array]:
    """A head's words at each row, best first, and how sure it is of each.

    Under the default rule they are ranked by logit / temperature plus the target's noise; under a
    classical rule by logit alone, so that each is a point mass.

    Args:
        values: float64 [n, num_rivals], the largest logits.
        words: int64 like it, the target's ids.
        request: Whose.
        positions: int64 [n], absolute positions of the tokens.
        is_coupled: Under the default rule too they are ranked by logit alone if this is not set.

    Returns:
        Words int64 and shares float64, both like ``values``.
    """
    scores, temperature = values, request.sampling.temperature
    if temperature > 0 and is_coupled and request.speculation.verification == "walk":
        seeds = np.full(len(words), request.seed, dtype=np.int64)
        scores = values / temperature + gumbel_of(seeds, positions, words)
    order = np.argsort(-scores, axis=1, kind="stable")
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = np.minimum(shares / shares.sum(axis=1, keepdims=True), _MOST_CONFIDENCE)
    return np.take_along_axis(words, order, 1), np.take_along_axis(shares, order, 1)


def draw(
    logits: torch.Tensor, request: Request, root_position: int, first: int, num_children: int
) -> tuple[list[int], torch.Tensor]:
    """Tokens drawn without replacement from the processed distribution of one row.

    The noise is that of the drafts' own stream, keyed by the position of the step's root and the
    number of the node: a position may be drafted again in a later step, and then anew.

    Args:
        logits: float32 [V], by the target's token ids.
        request: Whose.
        root_position: Absolute position of the root of the step.
        first: Number of the first node that is drawn here, within the request's draft.
        num_children: How many to draw; fewer where fewer tokens have a chance.

    Returns:
        The tokens in the order they were drawn, and the distribution, float32 [V], before any was.
    """
    law = probs(logits[None], RowParams.of([request.sampling], np.ones(1, dtype=np.int64)))[0]
    left: NDArray[np.float64] = law.double().cpu().numpy().copy()
    at = np.array([root_position], dtype=np.int64)
    coins = units(request.seed, Stream.DRAFT, at, np.arange(first, first + num_children))[0]
    drawn = []
    for coin in coins.tolist():
        mass = np.cumsum(left)
        if not mass[-1] > 0:
            break
        token = int(np.searchsorted(mass, coin * mass[-1], side="right"))
        token = min(token, int(np.nonzero(left)[0][-1]))
        drawn.append(token)
        left[token] = 0.0
    return drawn, law


def _scores(
    values: Float64Array,
    token_ids: Int64Array,
    params: RowParams,
    seeds: Int64Array,
    positions: Int64Array,
) -> Float64Array:
    """Logits / temperature plus noise, float64 like ``values``; greedy rows as they are."""
    is_greedy = params.temperature == 0
    if is_greedy.all():
        return values
    noise = gumbel_of(seeds, positions, token_ids)
    scaled = values / np.where(is_greedy, 1.0, params.temperature)[:, None]
    return np.where(is_greedy[:, None], values, scaled + noise)
