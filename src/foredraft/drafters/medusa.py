"""Medusa: heads that guess several tokens ahead at once, from one hidden state of the target.

Each head has its list of likely words, the same whatever comes before; the draft is the tree of the
likeliest combinations, as many as the budget allows (Cai et al., arXiv 2401.10774, whose trees are
fixed in advance; here the heads' own chances of this very step decide). Under the default rule a
head's list is ranked with the target's noise at its position. No keys and values, no catching up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.drafters.draft_picks import rank
from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import load_medusa
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.trained import shipped_head
from foredraft.model import packed_linear
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    StepPlan,
    TargetOutput,
    Verdict,
)

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_NUM_RIVALS = 32
"""Likeliest words among which a head's are ranked."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Options of Medusa heads. None of them can change a text.

    Attributes:
        path: Folder of the heads; empty takes those that ship for the target, if any.
        num_children: Most tokens drafted below each node: 1 is a chain.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    path: str = ""
    num_children: int = 8

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.path, str):
            raise ConfigError(f"path is {self.path!r}; allowed is the folder of Medusa heads.")
        value = self.num_children
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _NUM_RIVALS:
            raise ConfigError(
                f"num_children is {value!r}; allowed is an integer from 1 to {_NUM_RIVALS}."
            )


class MedusaDrafter(Drafter):
    """Drafts the likeliest combinations of several heads' words (module docstring). Exact.

    Cost: all heads, once a draft.
    """

    Config = MedusaConfig

    def __init__(
        self, config: MedusaConfig, context: DrafterContext, head: MedusaHead | None = None
    ) -> None:
        """Load the heads.

        Args:
            config: Their options.
            context: Facts about the target, and the target itself.
            head: Heads that are loaded already; ``None`` loads what ``config`` names.

        Raises:
            ConfigError: None are named and none ship.
            ModelLoadError: They cannot be loaded, or were made for another target.
        """
        self.config, self.context = config, context
        target: Target | None = context.target
        if target is None:
            raise ConfigError("method 'medusa' needs a target that it can read.")
        if head is None:
            folder = config.path or shipped_head("medusa", target.model.config)
            if folder is None:
                raise ConfigError(
                    f"method 'medusa' needs heads, and none ship for {target.name}; name a "
                    "folder, as in drafter_options={'medusa': {'path': FOLDER}} or "
                    "--drafter-option path=FOLDER, or train some: foredraft train medusa."
                )
            head = load_medusa(Path(folder), target.model.config, target.dtype)
        self._head = head.to(target.device).requires_grad_(False)
        self._target_ids: NDArray[np.int64] = head.target_ids.cpu().numpy()
        if packed_linear.can_pack(target.dtype, target.device):
            packed_linear.pack_linear_layers(self._head)
        (self._layer,) = head.shape.feature_layers
        self._num_levels = head.shape.num_levels
        self.needs = Needs(
            hidden_layers=(self._layer,), cost="per_level", sees_noise=True, learns=False
        )
        self._last: dict[str, tuple[int, torch.Tensor]] = {}

    @property
    def num_state_bytes(self) -> int:
        """Bytes of one hidden state a request."""
        return sum(last.numel() * last.element_size() for _, last in self._last.values())

    @torch.inference_mode()
    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Run all heads once for all requests; take the likeliest combinations of each."""
        wanted = []
        for index in np.nonzero(budgets.max_nodes)[0].tolist():
            segment = plan.segments[index]
            position, _ = self._last.get(segment.request.request_id, (-2, None))
            if position == segment.root_position - 1:
                wanted.append(index)
        trees: list[tuple[Int64Array, Int64Array, NDArray[np.float64]] | None]
        trees = [None] * len(plan.segments)
        if not wanted:
            return DraftBatch.of_trees(trees)
        names = [plan.segments[index].request.request_id for index in wanted]
        logits = self._head(torch.stack([self._last[name][1] for name in names])).float()
        top = logits.topk(min(_NUM_RIVALS, logits.shape[-1]), dim=-1)
        values = top.values.double().cpu().numpy()
        words = self._target_ids[top.indices.cpu().numpy()]
        for row, index in enumerate(wanted):
            segment, limit = plan.segments[index], int(budgets.max_nodes[index])
            positions = segment.root_position + 1 + np.arange(self._num_levels, dtype=np.int64)
            tokens, shares = rank(values[row], words[row], segment.request, positions)
            most = self.config.num_children
            tokens, shares = tokens[:, :most], shares[:, :most]
            is_chain = not segment.request.speculation.allows_trees
            trees[index] = _likeliest(tokens, shares, limit, is_chain)
        return DraftBatch.of_trees(trees)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Keep the hidden state of the last token whose successor is known."""
        for index, segment in enumerate(plan.segments):
            speculation = segment.request.speculation
            if speculation.method != self.context.method or speculation.is_plain:
                continue
            if not segment.wants_pick:
                continue
            path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
            row = int(target.row_offsets[index]) + segment.num_rows - 1
            row += int(path[-1]) if len(path) else 0
            self._last[segment.request.request_id] = (
                segment.root_position + len(path),
                target.hidden_states[self._layer][row].clone(),
            )

    def forget(self, request_id: str) -> None:
        """Drop the request's hidden state."""
        self._last.pop(request_id, None)


def _likeliest(
    tokens: Int64Array, shares: NDArray[np.float64], limit: int, is_chain: bool
) -> tuple[Int64Array, Int64Array, NDArray[np.float64]]:
    """The likeliest nodes of all combinations, best first, so that parents come first.

    Args:
        tokens: int64 [num_levels, num_children], best first.
        shares: float64 like it, the chance of each once its parent is accepted.
        limit: Most nodes.
        is_chain: Take the best of each level alone.
    """
    num_levels, num_children = tokens.shape
    found: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    # Chance, order of coming, parent, the parent's chance, level, rank.
    waiting = [(-float(shares[0, 0]), 0, 0, 1.0, 0, 0)]
    count = 1
    while waiting and len(found) < limit:
        chance, _, parent, above, level, rank = heapq.heappop(waiting)
        found.append(int(tokens[level, rank]))
        parents.append(parent)
        confidence.append(float(shares[level, rank]))
        if rank + 1 < num_children and not is_chain:
            share = float(shares[level, rank + 1])
            heapq.heappush(waiting, (-above * share, count, parent, above, level, rank + 1))
            count += 1
        if level + 1 < num_levels:
            share = float(shares[level + 1, 0])
            entry = (chance * share, count, len(found), -chance, level + 1, 0)
            heapq.heappush(waiting, entry)
            count += 1
    return (
        np.array(found, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(confidence),
    )
