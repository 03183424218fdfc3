"""The arithmetic of speculation, in plain Python: when it pays, and how much to draft.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.plan.acceptance import (
        Survival,
        SurvivalEstimate,
        chain_expected_tokens,
        constant_survival,
        estimate_survival,
        survival_expected_tokens,
        tree_expected_tokens,
    )
    from foredraft.plan.cost import (
        StepCost,
        best_num_speculative_tokens,
        least_acceptance,
        one_more_pays,
        speedup,
        speedups,
    )
    from foredraft.plan.engines import emit
    from foredraft.plan.planner import make_plan
    from foredraft.plan.profile import Profile, load_profile
    from foredraft.plan.result import BatchPlan, Plan, PlanCell
    from foredraft.plan.roofline import HARDWARE, Hardware, Roofline, find_hardware
    from foredraft.plan.shape import ModelShape, load_shape
    from foredraft.plan.trace import RequestTrace, append_trace, read_trace, trace_line

_WHERE = {
    "acceptance": (
        "Survival",
        "SurvivalEstimate",
        "chain_expected_tokens",
        "constant_survival",
        "estimate_survival",
        "survival_expected_tokens",
        "tree_expected_tokens",
    ),
    "cost": (
        "StepCost",
        "best_num_speculative_tokens",
        "least_acceptance",
        "one_more_pays",
        "speedup",
        "speedups",
    ),
    "engines": ("emit",),
    "planner": ("make_plan",),
    "result": ("BatchPlan", "Plan", "PlanCell"),
    "profile": ("Profile", "load_profile"),
    "roofline": ("HARDWARE", "Hardware", "Roofline", "find_hardware"),
    "shape": ("ModelShape", "load_shape"),
    "trace": ("RequestTrace", "append_trace", "read_trace", "trace_line"),
}

__all__ = [
    "HARDWARE",
    "BatchPlan",
    "Hardware",
    "ModelShape",
    "Plan",
    "PlanCell",
    "Profile",
    "RequestTrace",
    "Roofline",
    "StepCost",
    "Survival",
    "SurvivalEstimate",
    "append_trace",
    "best_num_speculative_tokens",
    "chain_expected_tokens",
    "constant_survival",
    "emit",
    "estimate_survival",
    "find_hardware",
    "least_acceptance",
    "load_profile",
    "load_shape",
    "make_plan",
    "one_more_pays",
    "read_trace",
    "speedup",
    "speedups",
    "survival_expected_tokens",
    "trace_line",
    "tree_expected_tokens",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"foredraft.plan.{module}"), name)
    raise AttributeError(f"module 'foredraft.plan' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
