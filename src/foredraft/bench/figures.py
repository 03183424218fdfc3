"""Draws the figures of the documentation: ``python -m foredraft.bench.figures docs/figures``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.plan.acceptance import constant_survival
from foredraft.plan.cost import StepCost, speedups
from foredraft.plan.planner import make_plan
from foredraft.plan.report import (
    RAMP,
    draw_by_batch,
    draw_by_draft_length,
    light,
    plain_line,
    to_svg,
)
from foredraft.plan.result import Plan
from foredraft.plan.roofline import Roofline, find_hardware
from foredraft.plan.shape import ModelShape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""The fields of its config.json that sizes depend on."""

_T_DRAFT = 0.05
_ALPHAS = (0.15, 0.10, 0.05)
_LONGEST = 400  # draft tokens; at this length the ceiling is near


def by_draft_length() -> Callable[[Axes], None]:
    """Speedup against N for several acceptances, at the figures of the page's table."""
    plan = make_plan(acceptance=0.8, alpha=0.10, t_draft=_T_DRAFT, max_num_speculative_tokens=24)
    return draw_by_draft_length(plan, has_plan=False)


def roofline_plan(context: int = 0) -> Plan:
    """Llama-3-8B on one H100 with a draft model of a twentieth of its time a token."""
    roofline = Roofline(ModelShape.from_config(LLAMA_3_8B), find_hardware("H100-SXM"))
    return make_plan(
        acceptance=0.7,
        roofline=roofline,
        context=context,
        t_draft=0.05,
        method="draft-model",
        max_num_speculative_tokens=16,
    )


def by_batch() -> Callable[[Axes], None]:
    """Speedup against batch size, from the roofline."""
    return draw_by_batch(roofline_plan())


def by_acceptance() -> Callable[[Axes], None]:
    """Speedup with the best N against acceptance, under the ceilings of three alphas."""

    def draw(axes: Axes) -> None:
        acceptances = [step / 200 for step in range(100, 201)]
        for alpha, colour in zip(_ALPHAS, (RAMP[1], RAMP[2], RAMP[4]), strict=True):
            cost = StepCost(alpha, _T_DRAFT, "once")
            best = [max(speedups(constant_survival(p, _LONGEST), cost)) for p in acceptances]
            axes.plot(acceptances, best, color=light(colour))
            axes.axhline(cost.ceiling(), color=light(colour), linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"alpha {alpha:.2f}: ceiling {cost.ceiling():.3g}",
                (0.5, cost.ceiling()),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=9,
                color=light("ink"),
            )
        plain_line(axes)
        axes.set_xlim(0.5, 1.0)
        axes.set_ylim(0, 22)
        axes.set_xlabel("acceptance")
        axes.set_ylabel("speedup with the best N")

    return draw


FIGURES: Mapping[str, tuple[str, Callable[[], Callable[[Axes], None]]]] = {
    "speedup-by-draft-length.svg": ("Speedup by number of draft tokens", by_draft_length),
    "speedup-by-batch.svg": ("Speedup by batch size, from a roofline", by_batch),
    "speedup-by-acceptance.svg": ("Speedup by acceptance, and its ceilings", by_acceptance),
}
"""Title and maker of each file."""


def draw_figures(folder: Path) -> list[Path]:
    """Draw all figures into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (title, make) in FIGURES.items():
        path = folder / name
        path.write_text(to_svg(make(), title, is_alone=True) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for path in draw_figures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")):
        sys.stdout.write(f"{path}\n")
