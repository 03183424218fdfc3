"""Certain tokens in front of a draft: a chain that comes first, and what else was drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foredraft.types import DraftBatch, Int64Array

_SURE = 0.99
"""Confidence of a token that leaves no choice; it may still be written in other pieces."""


def graft(
    drafts: DraftBatch, chains: Mapping[int, Sequence[int]], limits: Int64Array, voter: str
) -> DraftBatch:
    """Put a chain of tokens into the drafts of some segments, one node where both agree.

    Args:
        drafts: Chosen tokens, under the default rule in the segments that get a chain.
        chains: Tokens that follow the root, by segment.
        limits: int64 [num_segments], most nodes of each; of the old ones the last are left out.
        voter: Who proposes the chains, for ``DraftBatch.votes``.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    origins: list[int] = []
    is_chained: list[bool] = []
    offsets = [0]
    for index, limit in enumerate(limits.tolist()):
        first, end = int(drafts.offsets[index]), int(drafts.offsets[index + 1])
        if index not in chains:
            token_ids += drafts.token_ids[first:end].tolist()
            parents += drafts.parents[first:end].tolist()
            origins += range(first, end)
            is_chained += [False] * (end - first)
            offsets.append(len(token_ids))
            continue
        begin = len(token_ids)
        chain = list(chains[index])[:limit]
        places = {(row, token): row + 1 for row, token in enumerate(chain)}
        token_ids += chain
        parents += range(len(chain))
        origins += [-1] * len(chain)
        is_chained += [True] * len(chain)
        rows = {0: 0}
        for number in range(first, end):
            parent = rows.get(int(drafts.parents[number]))
            if parent is None:
                continue
            token = int(drafts.token_ids[number])
            place = places.get((parent, token))
            if place is None and len(token_ids) - begin < limit:
                token_ids.append(token)
                parents.append(parent)
                origins.append(number)
                is_chained.append(False)
                place = places[parent, token] = len(token_ids) - begin
            elif place is not None:
                origins[begin + place - 1] = number
            if place is not None:
                rows[number - first + 1] = place
        offsets.append(len(token_ids))
    source = np.array(origins, dtype=np.int64)
    from_chain = np.array(is_chained, dtype=np.bool_)
    num_nodes = len(token_ids)
    is_old = source >= 0

    def carried(values: np.ndarray, otherwise: float) -> np.ndarray:
        out = np.full((*values.shape[:-1], num_nodes), otherwise, dtype=values.dtype)
        out[..., is_old] = values[..., source[is_old]]
        return out

    confidence = drafts.confidence
    if confidence is None:
        confidence = np.full(len(drafts.token_ids), np.nan)
    confidence = np.where(from_chain, _SURE, carried(confidence, np.nan))
    own = np.where(from_chain, _SURE, -1.0)[None]
    votes = own if drafts.votes is None else np.concatenate([carried(drafts.votes, -1.0), own])
    return DraftBatch(
        np.array(token_ids, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(offsets, dtype=np.int64),
        drafts.draft_probs,
        None if drafts.dist_ids is None else carried(drafts.dist_ids, -1),
        drafts.is_with_replacement,
        confidence,
        votes,
        (*drafts.voters, voter),
    )
