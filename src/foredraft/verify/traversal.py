"""Traversal verification: from the leaves of a drawn tree to its root. Exact in law."""

from __future__ import annotations

from foredraft.types import Int64Array
from foredraft.verify.coins import Coins
from foredraft.verify.residual import Probs, ReadDraft, Residual, read_draft


def traversal(
    token_ids: Int64Array,
    parents: Int64Array,
    target_probs: Probs,
    draft_probs: Probs | None,
    dist_ids: Int64Array | None,
    coins: Coins,
    *,
    with_replacement: bool = False,
) -> tuple[tuple[int, ...], int]:
    """Verify one request's draft from the leaves up, siblings in draft order.

    Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398,
    algorithm 2. Each row carries the weight its path has earned; a leaf is accepted, with its whole
    path, with that probability, and a rejected one is taken out of its parent, which is a leaf
    itself once it has no children left. Exact in law; equal to ``block`` on a chain, coin for coin,
    and never shorter in expectation than ``rejection``. All sums run over the whole vocabulary.

    Args:
        token_ids: int64 [num_nodes].
        parents: int64 [num_nodes], as for ``rejection``.
        target_probs: float32 or float64 [1 + num_nodes, V], as for ``rejection``.
        draft_probs: float32 or float64 [num_dists, V], or ``None``; as for ``rejection``.
        dist_ids: int64 [num_nodes], a row of ``draft_probs``, or -1 for a chosen token; ``None``
            where all were chosen.
        coins: The uniforms. ``accept[k]`` decides on the path to node k.
        with_replacement: Whether siblings of one ``dist_id`` were drawn independently, so that
            they may repeat.

    Returns:
        The accepted nodes from the root down (1-based), and the token after them.

    Raises:
        ValueError: Shapes that do not fit together, an id out of range, or a target row that
            cannot be drawn from.
    """
    draft = read_draft(token_ids, parents, target_probs, draft_probs, dist_ids)
    verdict = _visit(draft, coins, 0, 1.0, with_replacement)
    assert verdict is not None, "the root is always accepted"
    path, token_id = verdict
    return tuple(reversed(path)), token_id


def _visit(
    draft: ReadDraft, coins: Coins, row: int, weight: float, with_replacement: bool
) -> tuple[list[int], int] | None:
    """Return the accepted path below and with ``row``, deepest node first; ``None`` if rejected."""
    residual = Residual(draft, row, weight, with_replacement=with_replacement)
    children = draft.children[row]
    for node in children:
        if not residual.weight > 0.0:
            return None  # Neither this row nor anything below it can be accepted any more.
        verdict = _visit(draft, coins, node, residual.acceptance(node), with_replacement)
        if verdict is not None:
            if row > 0:
                verdict[0].append(row)
            return verdict
        if node == children[-1] and row > 0 and not coins.accept[row] < residual.weight:
            return None  # What rejecting it leaves of the weight is never more: spare the sums.
        residual.reject(node)
    if row > 0 and not coins.accept[row] < residual.weight:
        return None
    uniform = coins.recover if children else coins.bonus
    return [row] if row > 0 else [], residual.draw(uniform)
