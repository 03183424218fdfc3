"""Recursive rejection: the classical rule on chains and trees. Exact in law."""

from __future__ import annotations

from foredraft.types import Int64Array
from foredraft.verify.coins import Coins
from foredraft.verify.residual import Probs, Residual, read_draft


def rejection(
    token_ids: Int64Array,
    parents: Int64Array,
    target_probs: Probs,
    draft_probs: Probs | None,
    dist_ids: Int64Array | None,
    coins: Coins,
    *,
    with_replacement: bool = False,
) -> tuple[tuple[int, ...], int]:
    """Verify one request's draft from the root down, child by child in draft order.

    A child is accepted with probability ``min(1, target / draft)``; a rejected one leaves the
    normalised positive part of ``target - draft``, against which its next sibling is tried. At an
    accepted child all starts anew. What is left at the last accepted row draws the token that ends
    the path. On a chain this is the rule of Leviathan et al., arXiv 2211.17192, algorithm 1, and
    Chen et al., arXiv 2302.01318, algorithm 2; on a tree that of SpecInfer (Miao et al., arXiv
    2305.09781, section 4.3), with siblings drawn without replacement as in Sequoia (Chen et al.,
    arXiv 2402.12374, section 3.2).

    Exact in law for drawn tokens, for chosen ones (accepted with the target's probability) and for
    any mixture of both below one parent. What the draft owes for that is in
    ``foredraft.verify.reference``. Tables are read row by row, a whole row only once a token below
    it was rejected.

    Args:
        token_ids: int64 [num_nodes].
        parents: int64 [num_nodes], the parent's row: 0 is the root, k the k-th node. A parent
            comes before its children; siblings are in the order they were drafted in.
        target_probs: float32 or float64 [1 + num_nodes, V], the target's law after the path to
            each row, after every processor. Every row is finite and sums to 1.
        draft_probs: float32 or float64 [num_dists, V], the very laws the tokens were drawn from;
            ``None`` where all were chosen.
        dist_ids: int64 [num_nodes], the row of ``draft_probs`` each token was drawn from, as it
            was before any sibling was drawn; -1 for a token that was chosen, not drawn. ``None``
            where all were chosen.
        coins: The uniforms. ``accept[k]`` decides on node k.
        with_replacement: Whether siblings of one ``dist_id`` were drawn independently, so that
            they may repeat.

    Returns:
        The accepted nodes from the root down (1-based), and the token after them.

    Raises:
        ValueError: Shapes that do not fit together, an id out of range, or a target row that
            cannot be drawn from.
    """
    draft = read_draft(token_ids, parents, target_probs, draft_probs, dist_ids)
    path: list[int] = []
    row = 0
    while True:
        residual = Residual(draft, row, with_replacement=with_replacement)
        for node in draft.children[row]:
            if coins.accept[node] < residual.acceptance(node):
                path.append(node)
                row = node
                break
            residual.reject(node)
        else:
            uniform = coins.recover if draft.children[row] else coins.bonus
            return tuple(path), residual.draw(uniform)
