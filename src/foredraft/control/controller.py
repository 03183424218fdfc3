"""How much each request drafts in a step."""

from __future__ import annotations

import numpy as np

from foredraft.registry import PLAIN
from foredraft.types import Budgets, StepPlan


class FixedController:
    """Gives each request the ``num_speculative_tokens`` it asked for, as far as there is room.

    A step emits at most one token more than it drafts, so a request with ``r`` tokens left drafts
    at most ``r - 1``. Prompt chunks and plain requests draft nothing.
    """

    def budget(self, plan: StepPlan) -> Budgets:
        """Return the most draft nodes of each segment."""
        nodes = np.zeros(len(plan.segments), dtype=np.int64)
        for index, segment in enumerate(plan.segments):
            request = segment.request
            if segment.is_decode and request.speculation.method != PLAIN:
                room = request.max_tokens - segment.num_output_tokens - 1
                nodes[index] = max(0, min(request.speculation.num_speculative_tokens, room))
        return Budgets(nodes)
