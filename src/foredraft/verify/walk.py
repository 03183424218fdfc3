"""The default rule: walk the draft along the target's own picks. Exact, token for token.

At every row the target has picked its own token, without looking at the draft. From the root, go to
the child whose token equals the pick, while there is one; emit every pick on the way, the last one
too. Whatever was drafted, pruned, reordered or made up, the emitted tokens are those that plain
decoding would have emitted: a draft only decides how many of them come out of one target pass.

This is "sample and match" with noise keyed by position: Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978, section 4; design
section 5.
"""

from __future__ import annotations

import numba
import numpy as np

from foredraft.sampling.pick import Picks
from foredraft.types import DraftBatch, Int64Array, Verdict


def walk(drafts: DraftBatch, picks: Picks, row_offsets: Int64Array) -> Verdict:
    """Walk every segment's tree along the target's picks.

    Args:
        drafts: The trees of all segments.
        picks: The target's pick at each logit row: a segment's root, then its nodes.
        row_offsets: int64 [num_segments + 1], where each segment's logit rows begin and end; a
            segment without rows (a prompt chunk) emits nothing.

    Returns:
        The verdict. A segment whose path leads to a non-finite row is marked, and emits the
        accepted tokens up to there without a further one, as plain decoding does.
    """
    num_segments = len(row_offsets) - 1
    num_nodes = len(drafts.token_ids)
    path = np.empty(num_nodes, dtype=np.int64)
    path_offsets = np.zeros(num_segments + 1, dtype=np.int64)
    token_ids = np.empty(num_nodes + num_segments, dtype=np.int64)
    token_offsets = np.zeros(num_segments + 1, dtype=np.int64)
    is_finite = np.ones(num_segments, dtype=np.bool_)
    _walk(
        drafts.token_ids,
        drafts.parents,
        drafts.offsets,
        picks.token_ids,
        picks.is_finite,
        row_offsets,
        path,
        path_offsets,
        token_ids,
        token_offsets,
        is_finite,
    )
    return Verdict(
        path[: path_offsets[-1]],
        path_offsets,
        token_ids[: token_offsets[-1]],
        token_offsets,
        is_finite,
    )


@numba.njit(cache=True)
def _walk(  # type: ignore[no-untyped-def]
    draft_ids,
    parents,
    offsets,
    picks,
    pick_is_finite,
    row_offsets,
    path,
    path_offsets,
    token_ids,
    token_offsets,
    is_finite,
):
    num_path = 0
    num_tokens = 0
    for segment in range(row_offsets.size - 1):
        first_row = row_offsets[segment]
        if row_offsets[segment + 1] > first_row:
            first_node = offsets[segment]
            row = 0
            while True:
                if not pick_is_finite[first_row + row]:
                    is_finite[segment] = False
                    break
                token = picks[first_row + row]
                token_ids[num_tokens] = token
                num_tokens += 1
                child = 0
                # Children come after their parent, so the scan starts behind the current row.
                for node in range(first_node + row, offsets[segment + 1]):
                    if parents[node] == row and draft_ids[node] == token:
                        child = node - first_node + 1
                        break
                if child == 0:
                    break
                path[num_path] = child
                num_path += 1
                row = child
        path_offsets[segment + 1] = num_path
        token_offsets[segment + 1] = num_tokens
