"""The randomness of a classical rule, as an argument: uniforms, drawn by the caller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Coins:
    """Every uniform a rule may use for one request in one step, each in [0, 1).

    The three fields must come from streams that are independent of each other and of the noise the
    draft was drawn with. Reusing the noise that drew a rejected token for the token that replaces
    it shifts the law by some percent, which only a large test shows.

    Attributes:
        accept: float64 [1 + num_nodes], one for each row of the tree. ``rejection``: row k decides
            whether node k is accepted; row 0 is not used. ``block`` and ``traversal``: row k
            decides whether the path that ends in node k is accepted; row 0, the root, is always
            accepted.
        recover: Draws the recovered token, from what is left of the target's law at a row below
            which every draft token was rejected.
        bonus: Draws the bonus token, from the target's law at a leaf.
    """

    accept: NDArray[np.float64]
    recover: float
    bonus: float
