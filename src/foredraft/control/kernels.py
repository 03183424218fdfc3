"""What deciding compiles or loads, so that no step pays for it."""

from __future__ import annotations

import numpy as np

from foredraft.control.allocate import Padding, allocate
from foredraft.control.cost_table import CostTable
from foredraft.control.estimator import AcceptanceTable, read_nodes, survival_of
from foredraft.control.view import NO_CONFIDENCE, outcomes, renumber
from foredraft.plan.profile import PassTime


def load_kernels() -> None:
    """Run each of them once."""
    parents, offsets = np.array([0, 1]), np.array([0, 2])
    yes = np.ones(1, dtype=np.bool_)
    _, above, bins = read_nodes(parents, offsets, NO_CONFIDENCE, yes)
    table = AcceptanceTable()
    table.observe("", bins, np.ones(2), np.ones(2))
    survival = survival_of(above, table.acceptance(bins, ""))
    costs = CostTable([PassTime(1, rows, 0, 1.0, 0.0) for rows in (1, 2)])
    padding = Padding(np.zeros(2, dtype=np.int64), 1, 0.0)
    chosen = allocate(survival, costs.seconds(1, np.arange(1.0, 4.0), 0.0), 1.0, 0.0, padding)
    costs.observe(1, 2, 0.0, 1.0)
    costs.steps_since_plain(1)
    outcomes(offsets, above, np.array([1, 2]), offsets)
    renumber(parents, offsets, chosen.is_kept)
