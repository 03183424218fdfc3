"""Block verification: the best rule that sees one drawn chain only. Exact in law."""

from __future__ import annotations

from foredraft.types import Int64Array
from foredraft.verify.coins import Coins
from foredraft.verify.residual import Probs, Residual, read_draft


def block(
    token_ids: Int64Array,
    parents: Int64Array,
    target_probs: Probs,
    draft_probs: Probs | None,
    dist_ids: Int64Array | None,
    coins: Coins,
) -> tuple[tuple[int, ...], int]:
    """Verify one request's chain as a whole: the longest accepted prefix wins.

    Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm
    2. Exact in law, and never shorter in expectation than ``rejection``; equal to it for chosen
    tokens and for one-hot laws. Each prefix has a coin of its own and all of them count: the scan
    runs from the longest prefix down, so the first one accepted is the longest, and the rows of
    shorter ones are not read.

    Args:
        token_ids: int64 [num_nodes].
        parents: int64 [num_nodes], which must be 0, 1, 2, ...: a chain.
        target_probs: float32 or float64 [1 + num_nodes, V], as for ``rejection``.
        draft_probs: float32 or float64 [num_dists, V], or ``None``; as for ``rejection``.
        dist_ids: int64 [num_nodes], a row of ``draft_probs``, or -1 for a chosen token; ``None``
            where all were chosen.
        coins: The uniforms. ``accept[k]`` decides on the prefix of k tokens.

    Returns:
        The accepted nodes from the root down (1-based), and the token after them.

    Raises:
        ValueError: The draft is not a chain, shapes do not fit together, an id is out of range, or
            a target row cannot be drawn from.
    """
    if parents.tolist() != list(range(len(parents))):
        raise ValueError(
            f"block verification got the parents {parents.tolist()}; allowed is a chain, whose "
            "parents are 0, 1, 2, ... Use 'traversal' or 'rejection' for a tree."
        )
    draft = read_draft(token_ids, parents, target_probs, draft_probs, dist_ids)
    residuals = [Residual(draft, 0)]
    for node in range(1, len(parents) + 1):
        weight = residuals[-1].acceptance(node)
        if not weight > 0.0:
            break  # Nothing from here on can be accepted.
        residuals.append(Residual(draft, node, weight))
    for row in range(len(residuals) - 1, -1, -1):
        residual = residuals[row]
        is_leaf = row == len(parents)
        if row > 0 and not coins.accept[row] < residual.weight:
            continue  # What rejecting the next token leaves of the weight is never more.
        if not is_leaf:
            residual.reject(row + 1)
        if row == 0 or coins.accept[row] < residual.weight:
            uniform = coins.bonus if is_leaf else coins.recover
            return tuple(range(1, row + 1)), residual.draw(uniform)
    raise AssertionError("the root is always accepted")
