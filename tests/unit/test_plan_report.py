"""The HTML report: one file, plots in it, readable in light and dark."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from foredraft.errors import MissingExtraError
from foredraft.plan import make_plan
from foredraft.plan.acceptance import estimate_survival
from foredraft.plan.check import Check
from foredraft.plan.report import draw_by_draft_length, report_html, to_svg, write_report
from tests.unit.test_plan_planner import as_request, draw_steps, make_profile

pytest.importorskip("matplotlib")


def _whole() -> str:
    profile = make_profile({1: 0.05, 4: 0.2, 16: 0.9})
    estimate = estimate_survival([as_request(draw_steps([0.8] * 6, 200))])
    plan = make_plan(estimate=estimate, profile=profile)
    return report_html(plan, profile, estimate, [Check(1, 2.0, 1.9), Check(4, 1.5, 1.8)])


def test_a_whole_report_is_one_file_that_loads_nothing() -> None:
    page = _whole()
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "Speedup by number of draft tokens",
        "Speedup by batch size",
        "Verify cost, measured and predicted",
        "Survival, measured and predicted",
        "Speedup, measured and predicted",
    ]
    assert page.count("<svg") == 5
    assert "2 in all" in page and "batch 4" in page
    assert not re.search(r"<script|<link|<img|src=|@import", page)
    # Nothing is fetched: the only addresses are names of XML vocabularies.
    assert set(re.findall(r"https?://([\w.]+)", page)) <= {"www.w3.org", "purl.org",
                                                            "creativecommons.org"}  # fmt: skip


def test_colours_follow_the_page() -> None:
    page = _whole()
    assert "prefers-color-scheme: dark" in page
    for svg in re.findall("<svg.*?</svg>", page, re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000"}
        assert 'role="img"' in svg


def test_a_plan_of_numbers_has_one_plot() -> None:
    assert report_html(make_plan(acceptance=0.8, alpha=0.1)).count("<svg") == 1


def test_text_of_the_user_is_escaped() -> None:
    plan = make_plan(acceptance=0.8, alpha=0.1, method="<b>", draft_cost="once")
    assert "<b>" not in report_html(plan)


def test_a_plot_alone_brings_its_colours_and_is_always_the_same() -> None:
    draw = draw_by_draft_length(make_plan(acceptance=0.8, alpha=0.1))
    svg = to_svg(draw, "A title", is_alone=True)
    ElementTree.fromstring(svg)
    assert "--accent: #" in svg and svg == to_svg(draw, "A title", is_alone=True)


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="the extra 'bench'"):
        write_report(tmp_path / "x.html", make_plan(acceptance=0.8, alpha=0.1))
    assert not (tmp_path / "x.html").exists()


def test_figures_of_the_documentation_are_what_the_code_draws(tmp_path: Path) -> None:
    import matplotlib

    from foredraft.bench.figures import draw_figures

    root = Path(__file__).resolve().parents[2]
    drawn = draw_figures(tmp_path)
    kept = {path.name for path in (root / "docs" / "figures").glob("*.svg")}
    assert {path.name for path in drawn} == kept
    pinned = f"matplotlib=={matplotlib.__version__}\n"
    if pinned not in (root / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another Matplotlib than the pinned one draws other curves")
    for path in drawn:
        assert path.read_bytes() == (root / "docs" / "figures" / path.name).read_bytes()
