"""A plan as one self-contained HTML page with plots. Needs Matplotlib, which only this file knows.

Plots are SVG, with their colours left to a style sheet, so that they follow light and dark mode.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import MissingExtraError, PlanError
from foredraft.plan.acceptance import CONFIDENCE, Survival, SurvivalEstimate
from foredraft.plan.check import Check
from foredraft.plan.profile import Profile
from foredraft.plan.result import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], None]
"""Draws one plot onto axes."""

_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_MOST_POSITIONS = 16
# By name: in light mode, in dark mode. Plots are drawn in the first, and each is a variable in SVG.
_COLOURS = {
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#6e7680", "#9aa3ad"),
    "line": ("#d5d9de", "#3a4048"),
    "paper": ("#fefefe", "#14171b"),
    "accent": ("#c2410c", "#fb923c"),
    "blue1": ("#9ec5f4", "#2f4f75"),
    "blue2": ("#6ea7ea", "#3d6ea8"),
    "blue3": ("#3f87da", "#5590d2"),
    "blue4": ("#2365b5", "#86b4ea"),
    "blue5": ("#123f7a", "#c0dafa"),
}
RAMP = ("blue1", "blue2", "blue3", "blue4", "blue5")
"""Names of the colours for lines that follow each other in a number."""


def write_report(
    path: Path,
    plan: Plan,
    profile: Profile | None = None,
    estimate: SurvivalEstimate | None = None,
    checks: Sequence[Check] = (),
) -> None:
    """Write the report.

    Args:
        path: The HTML file.
        plan: What to report.
        profile: Adds measured against fitted verify cost.
        estimate: Adds recorded survival against a constant acceptance.
        checks: Adds measured against predicted speedup.

    Raises:
        MissingExtraError: Matplotlib is not installed.
        PlanError: The file cannot be written.
    """
    page = report_html(plan, profile, estimate, checks)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written ({type(error).__name__}); choose another file."
        ) from error


def report_html(
    plan: Plan,
    profile: Profile | None = None,
    estimate: SurvivalEstimate | None = None,
    checks: Sequence[Check] = (),
) -> str:
    """Return the page; arguments as for :func:`write_report`."""
    figures = [
        (
            "Speedup by number of draft tokens",
            f"At batch {plan.first.num_requests}, for several acceptances (thin, a dot on the "
            "best) and as planned (thick).",
            draw_by_draft_length(plan),
        )
    ]
    if len(plan.batches) > 1:
        figures.append(
            (
                "Speedup by batch size",
                "With the best number of draft tokens at each, written beside it.",
                draw_by_batch(plan),
            )
        )
    if profile is not None:
        figures.append(
            (
                "Verify cost, measured and predicted",
                "Dots: measured. Lines: 1 + alpha N, with the fitted alpha of each batch size.",
                draw_verify_cost(profile),
            )
        )
    if estimate is not None and estimate.acceptance is not None:
        figures.append(
            (
                "Survival, measured and predicted",
                f"Dots: recorded, with {CONFIDENCE:.0%} intervals. Line: what one constant "
                "acceptance predicts.",
                draw_survival(estimate),
            )
        )
    if checks:
        errors = sorted(abs(check.predicted / check.measured - 1) for check in checks)
        figures.append(
            (
                "Speedup, measured and predicted",
                f"Each dot is a recorded request, {len(checks)} in all; on the line the arithmetic "
                "is right, in the band within 10 %. Half of them lie within "
                f"{errors[len(errors) // 2]:.0%}.",
                draw_checks(checks),
            )
        )
    body = "\n".join(
        f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(text)}</p>\n<figure>{to_svg(draw, title)}"
        "</figure>"
        for title, text, draw in figures
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>foredraft plan</title>
<style>
{_variables()}
:root {{ color-scheme: light dark; }}
body {{ max-width: 46rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
.verdict {{ font-size: 1.15rem; border-left: 4px solid var(--accent); padding-left: 1rem; }}
.faint, figure + p, li {{ color: var(--faint); }}
figure {{ margin: 0; }} svg {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--line); }}
</style>
<h1>Does speculation pay?</h1>
<p class="verdict">{html.escape(plan.verdict)}</p>
<p class="faint">{html.escape(plan.source)}; method {html.escape(plan.method)}; acceptance
{plan.acceptance:.3g}.</p>
<div class="wide">{_table(plan)}</div>
<ul>{notes}</ul>
{body}
</html>
"""


def to_svg(draw: Draw, title: str, is_alone: bool = False) -> str:
    """Draw a plot as an SVG element.

    Args:
        draw: The plot.
        title: What a screen reader says of it.
        is_alone: Whether it is a file of its own and must bring its colours.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "plots need the package matplotlib, which is not installed; install the extra 'bench': "
            "pip install 'foredraft[bench]'."
        ) from error
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "axes.edgecolor": light("line"),
        "axes.labelcolor": light("faint"),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": light("line"),
        "grid.linewidth": 0.6,
        "text.color": light("ink"),
        "xtick.color": light("faint"),
        "ytick.color": light("faint"),
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 3.9), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    for name, (drawn, _) in _COLOURS.items():
        svg = svg.replace(drawn, f"var(--{name})")
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    svg = svg.replace("<svg", label, 1)
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    if is_alone:
        start = svg.index(">") + 1
        svg = f"{svg[:start]}\n<style>{_variables()}</style>{svg[start:]}"
    return "\n".join(line.rstrip() for line in svg.splitlines())


def draw_by_draft_length(
    plan: Plan, acceptances: Sequence[float] = _ACCEPTANCES, has_plan: bool = True
) -> Draw:
    """Plot speedup against N at the first batch size, for several acceptances and as planned."""
    costs = [cell.step_cost for cell in plan.first.cells]
    own = [cell.speedup for cell in plan.first.cells]

    def draw(axes: Axes) -> None:
        for acceptance, colour in zip(acceptances, RAMP, strict=False):
            survival = Survival(plan.survival.draft_share, (), acceptance)
            expected = [1.0]
            for alive in survival.by_position(len(costs) - 1):
                expected.append(expected[-1] + alive)
            speedups = [e / c for e, c in zip(expected, costs, strict=True)]
            _curve(axes, speedups, colour, f"{acceptance:g}", 1.4)
        if has_plan:
            best = _curve(axes, own, "accent", "", 2.6)
            axes.annotate(
                "planned",
                (best, own[best]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=light("ink"),
            )
        plain_line(axes)
        axes.set_xlim(0, (len(costs) - 1) * 1.06)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("draft tokens a step, N (lines: acceptance)")
        axes.set_ylabel("speedup")

    return draw


def draw_by_batch(plan: Plan) -> Draw:
    """Plot the best speedup against batch size."""
    rows = sorted(plan.batches, key=lambda row: row.num_requests)

    def draw(axes: Axes) -> None:
        sizes = [row.num_requests for row in rows]
        best = [row.best for row in rows]
        if all(cell.low is not None for cell in best):
            axes.fill_between(
                sizes,
                [cell.low or 0.0 for cell in best],
                [cell.high or 0.0 for cell in best],
                color=light("accent"),
                alpha=0.18,
                linewidth=0,
            )
        axes.plot(sizes, [cell.speedup for cell in best], color=light("accent"), marker="o")
        for size, cell in zip(sizes, best, strict=True):
            axes.annotate(
                str(cell.num_speculative_tokens or "off"),
                (size, cell.speedup),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                color=light("ink"),
                fontsize=9,
            )
        plain_line(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(0, 1.15 * max(cell.high or cell.speedup for cell in best))
        axes.minorticks_off()
        axes.set_xlabel("batch size")
        axes.set_ylabel("speedup with the best N")

    return draw


def draw_verify_cost(profile: Profile) -> Draw:
    """Plot measured verify cost against the fitted line, for up to five batch sizes."""
    batches = profile.batches()[: len(RAMP)]

    def draw(axes: Axes) -> None:
        colours = RAMP[-len(batches) :]
        for num_requests, colour in zip(batches, colours, strict=True):
            context = profile.contexts(num_requests)[0]
            lengths = sorted(
                cell.num_rows / num_requests - 1
                for cell in profile.passes
                if cell.num_requests == num_requests and cell.context == context
            )
            alpha = profile.alpha(num_requests, context)
            costs = [profile.verify_cost(n, num_requests, context) for n in lengths]
            axes.plot(lengths, costs, "o", color=light(colour), markersize=5)
            axes.plot(
                [0, lengths[-1]], [1, 1 + alpha * lengths[-1]], color=light(colour), linewidth=1.2
            )
            axes.annotate(
                f"batch {num_requests}: alpha {alpha:.3f}",
                (lengths[-1], 1 + alpha * lengths[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=light("ink"),
            )
        axes.margins(x=0.02)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("draft tokens a request, N")
        axes.set_ylabel("verify cost, in plain decode steps")

    return draw


def draw_checks(checks: Sequence[Check]) -> Draw:
    """Plot measured against predicted speedup of recorded requests, by batch size."""
    batches = sorted({check.num_requests for check in checks})

    def draw(axes: Axes) -> None:
        most = 1.08 * max(max(check.predicted, check.measured) for check in checks)
        ends = [0.0, most]
        axes.fill_between(
            ends,
            [0.9 * end for end in ends],
            [1.1 * end for end in ends],
            color=light("line"),
            alpha=0.5,
            linewidth=0,
        )
        axes.plot(ends, ends, color=light("faint"), linewidth=1)
        for place, num_requests in enumerate(batches):
            own = [check for check in checks if check.num_requests == num_requests]
            colour = "accent" if len(batches) == 1 else RAMP[place * len(RAMP) // len(batches)]
            axes.plot(
                [check.predicted for check in own],
                [check.measured for check in own],
                "o",
                color=light(colour),
                markersize=5,
                label=f"batch {num_requests}",
            )
        axes.legend(frameon=False, loc="upper left", fontsize=9)
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.set_xlabel("predicted speedup")
        axes.set_ylabel("measured speedup")

    return draw


def draw_survival(estimate: SurvivalEstimate) -> Draw:
    """Plot recorded survival by position against what a constant acceptance predicts."""
    most = max(1, min(len(estimate.survival.conditional), _MOST_POSITIONS))

    def draw(axes: Axes) -> None:
        positions = list(range(1, most + 1))
        recorded = estimate.survival.by_position(most)
        bounds = [estimate.interval(position) for position in positions]
        share = estimate.survival.draft_share
        acceptance = estimate.acceptance or 0.0
        constant = [share * acceptance**position for position in positions]
        axes.plot(positions, constant, color=light("blue3"))
        axes.annotate(
            f"constant {acceptance:.2f}",
            (positions[-1], constant[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=light("ink"),
        )
        below = [max(0.0, a - low) for a, (low, _) in zip(recorded, bounds, strict=True)]
        above = [max(0.0, high - a) for a, (_, high) in zip(recorded, bounds, strict=True)]
        axes.errorbar(
            positions,
            recorded,
            yerr=[below, above],
            fmt="o",
            color=light("accent"),
            elinewidth=1.2,
            markersize=5,
        )
        axes.set_ylim(0, 1)
        axes.set_xticks(positions)
        axes.set_xlabel("position in the draft, k")
        axes.set_ylabel("first k all accepted")

    return draw


def _curve(axes: Axes, speedups: Sequence[float], colour: str, label: str, width: float) -> int:
    """Draw a line with a dot on its best N, which is returned."""
    best = speedups.index(max(speedups))
    axes.plot(range(len(speedups)), speedups, color=light(colour), linewidth=width)
    axes.plot([best], [speedups[best]], "o", color=light(colour), markersize=6)
    axes.annotate(
        label,
        (len(speedups) - 1, speedups[-1]),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=light("ink"),
        annotation_clip=False,
    )
    return best


def plain_line(axes: Axes) -> None:
    """Draw a dashed line where plain decoding is, at a speedup of 1."""
    axes.axhline(1.0, color=light("faint"), linewidth=1, linestyle=(0, (4, 3)))


def _table(plan: Plan) -> str:
    head = "".join(
        f"<th>{title}</th>"
        for title in ("batch", "alpha", "best N", "speedup", "interval", "ceiling")
    )
    rows = []
    for row in plan.batches:
        best = row.best
        interval = "" if best.low is None else f"{best.low:.2f} to {best.high:.2f}"
        cells = (
            str(row.num_requests),
            f"{row.alpha:.3g}",
            str(best.num_speculative_tokens or "off"),
            f"{best.speedup:.2f}",
            interval,
            f"{row.ceiling:.3g}",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _variables() -> str:
    """The colours as style sheet variables, light and dark."""
    bright = " ".join(f"--{name}: {value[0]};" for name, value in _COLOURS.items())
    dark = " ".join(f"--{name}: {value[1]};" for name, value in _COLOURS.items())
    return f":root {{ {bright} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def light(name: str) -> str:
    """Return a colour of the plots by name, as it is drawn in light mode."""
    return _COLOURS[name][0]
