"""Plans from numbers, from a roofline and from what was measured; traces and what they say."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.environment import cpu_name, versions
from foredraft.errors import PlanError, ProfileError
from foredraft.plan import make_plan
from foredraft.plan.acceptance import Survival, SurvivalEstimate, estimate_survival
from foredraft.plan.check import check_traces
from foredraft.plan.engines import emit
from foredraft.plan.profile import DraftTime, PassTime, Profile
from foredraft.plan.roofline import Roofline, find_hardware
from foredraft.plan.shape import ModelShape
from foredraft.plan.trace import RequestTrace, append_trace, read_trace, trace_line
from tests.unit.test_plan_roofline import LLAMA, MIXTRAL


def make_profile(alphas: dict[int, float], stability: float = 0.02, **drafts: DraftTime) -> Profile:
    """A profile in which a pass of ``b * (1 + n)`` rows takes ``1 + alpha * n``."""
    passes = tuple(
        PassTime(batch, batch * (1 + n), 256, 1 + alpha * n, stability)
        for batch, alpha in alphas.items()
        for n in (0, 1, 2, 4, 8, 16)
    )
    return Profile(
        model="tiny", model_hash="0" * 64, dtype="float32", device="cpu", machine={}, versions={},
        passes=passes, paddings=(), drafts=drafts or {"ngram": DraftTime(0.01, "once")},
        host_seconds=0.0, stability=stability, created_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def draw_steps(rates: list[float], num_steps: int, seed: int = 0) -> list[tuple[int, int]]:
    """Steps of full length whose k-th token is accepted with the k-th rate."""
    generator = random.Random(seed)
    steps = []
    for _ in range(num_steps):
        accepted = 0
        while accepted < len(rates) and generator.random() < rates[accepted]:
            accepted += 1
        steps.append((len(rates), accepted))
    return steps


def as_request(steps: list[tuple[int, int]]) -> RequestTrace:
    return RequestTrace("ngram", 1, 0.0, 100, tuple(steps))


# ------------------------------------------------------------------------------------- estimation


def test_survival_is_the_product_of_tested_rates() -> None:
    # Position 1 is tested 4 times, accepted 3; position 2 is tested twice (one step drafted one
    # token only), accepted once; position 3 once, and accepted.
    estimate = estimate_survival([as_request([(3, 3), (3, 1), (1, 1), (3, 0), (0, 0)])])
    assert estimate.num_trials == (4, 2, 1)
    assert estimate.survival.draft_share == pytest.approx(4 / 5)
    assert estimate.survival.conditional == pytest.approx((3 / 4, 1 / 2, 1))
    assert estimate.acceptance == pytest.approx(5 / 7)
    assert estimate.survival.by_position(4) == pytest.approx(
        (0.8 * 3 / 4, 0.8 * 3 / 8, 0.8 * 3 / 8, 0.8 * 3 / 8 * 5 / 7)
    )


def test_censoring_does_not_bias() -> None:
    """Short drafts say nothing of late positions; counting them as failures would."""
    long = draw_steps([0.8] * 8, 20_000)
    short = draw_steps([0.8] * 2, 20_000, seed=1)
    estimate = estimate_survival([as_request(long + short)], num_replicates=50)
    for position, alive in enumerate(estimate.survival.by_position(8), start=1):
        assert alive == pytest.approx(0.8**position, abs=0.015)


def test_intervals_hold_the_truth_about_nine_times_in_ten() -> None:
    """40 data sets; of 90 % intervals, 29 or fewer would be a one in 2000 event."""
    held = 0
    for seed in range(40):
        requests = [as_request(draw_steps([0.7] * 3, 30, seed * 100 + r)) for r in range(12)]
        low, high = estimate_survival(requests, 200).interval(2)
        held += low <= 0.49 <= high
    assert held >= 30


def test_the_same_seed_gives_the_same_interval() -> None:
    requests = [as_request(draw_steps([0.7] * 3, 30))]
    assert estimate_survival(requests).interval(1) == estimate_survival(requests).interval(1)
    estimate = estimate_survival(requests)
    low, high = estimate.acceptance_interval() or (0, 0)
    assert low < (estimate.acceptance or 0) < high


def test_nothing_recorded_and_nothing_drafted() -> None:
    with pytest.raises(PlanError, match="the trace holds no step"):
        estimate_survival([as_request([])])
    estimate = estimate_survival([as_request([(0, 0)] * 5)])
    assert estimate.acceptance is None and estimate.acceptance_interval() is None
    plan = make_plan(estimate=estimate, alpha=0.1)
    assert plan.first.best.num_speculative_tokens == 0
    assert plan.verdict.startswith("Leave it off")


def test_a_draft_that_ends_by_itself_has_no_more_to_give() -> None:
    """What lies behind the end of a draft is unknown if it was cut, and nothing if it was not."""
    steps = [(6, 6, False)] * 10 + [(6, 2, False)] * 10 + [(0, 0, False)] * 20
    survival = estimate_survival([as_request(steps)]).survival
    # Per step, the tokens that were recorded: 1 and 6, 1 and 2, 1.
    assert 1 + sum(survival.by_position(40)) == pytest.approx(1 + (10 * 6 + 10 * 2) / 40)
    cut = estimate_survival([as_request([(d, a, True) for d, a, _ in steps[:20]])]).survival
    assert sum(cut.by_position(40)) > sum(survival.by_position(40)) / 0.5
    # A step in which no draft was allowed says nothing of what there would have been.
    more = estimate_survival([as_request([*steps, *[(0, 0, True)] * 50])]).survival
    assert more.by_position(9) == survival.by_position(9)


def test_acceptance_zero_never_pays_however_noisy_a_profile() -> None:
    profile = make_profile({1: 0.05})
    noisy = replace(
        profile,
        passes=tuple(
            replace(cell, seconds=cell.seconds * (0.9 if 1 < cell.num_rows < 5 else 1.0))
            for cell in profile.passes
        ),
    )
    plan = make_plan(acceptance=0.0, profile=noisy)
    assert plan.first.best.num_speculative_tokens == 0
    assert plan.verdict.startswith("Leave it off")


def test_a_mixture_that_loses_at_batch_1_and_wins_beyond() -> None:
    """Each row touches new experts at first; break-even is where nothing pays any more."""
    roofline = Roofline(ModelShape.from_config(MIXTRAL), find_hardware("H200"))
    one = make_plan(acceptance=0.5, roofline=roofline, batches=[1, 64])
    assert one.first.best.num_speculative_tokens == 0
    assert one.batches[1].best.num_speculative_tokens > 0
    assert one.break_even_batch is None or one.break_even_batch > 64
    assert "It pays at larger batches" in one.verdict
    config = emit(one, "tensorrt-llm")
    assert "1: 0" in config.text and "max_concurrency: 0" not in config.text


# -------------------------------------------------------------------------------------- the trace


def test_a_trace_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    append_trace(path, [trace_line("ngram", 1, 0.0, 12, [[4, 2], (0, 0), (6, 6, False)])])
    append_trace(path, [trace_line("suffix", 2, 0.7, 3, [], 0.25, 0.125)])
    steps = ((4, 2, True), (0, 0, False), (6, 6, False))
    assert read_trace(path, "ngram") == [RequestTrace("ngram", 1, 0.0, 12, steps)]
    assert read_trace(path, "suffix") == [RequestTrace("suffix", 2, 0.7, 3, (), 0.25, 0.125)]
    append_trace(path, [trace_line("auto", 1, 0.0, 1, [], is_auto=True, model="m")])
    (auto,) = read_trace(path, "auto")
    assert auto.is_auto and auto.model == "m"
    with pytest.raises(ProfileError, match="methods auto, ngram, suffix; choose one with --method"):
        read_trace(path)
    with pytest.raises(ProfileError, match="none of the method eagle"):
        read_trace(path, "eagle")


LINE: dict[str, Any] = {
    "method": "ngram", "num_requests": 1, "temperature": 0.0, "num_tokens": 5, "steps": [[4, 4]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no request of a trace"),
        ("[1]", "not an object"),
        (json.dumps({k: v for k, v in LINE.items() if k != "steps"}), "lacks 'steps'"),
        (json.dumps(LINE | {"steps": [[3, 4]]}), "accepted 4 of 3 draft tokens"),
        (json.dumps(LINE | {"steps": [[3]]}), r"a step is \[3\]"),
        (json.dumps(LINE | {"steps": [[3, -1]]}), "not an integer of 0 or more"),
        (json.dumps(LINE | {"steps": [[3, True]]}), "not an integer of 0 or more"),
        (json.dumps(LINE | {"steps": 3}), "steps is not a list"),
        (json.dumps(LINE | {"num_requests": 0}), "num_requests is 0"),
        (json.dumps(LINE | {"temperature": "hot"}), "temperature is 'hot'"),
        (json.dumps(LINE | {"temperature": math.nan}), "temperature is nan"),
        (json.dumps(LINE | {"method": 3}), "method is 3"),
        (json.dumps(LINE | {"decode_s": 0}), "decode_s is 0, not a time above 0"),
        (json.dumps(LINE | {"plain_step_s": "1"}), "plain_step_s is '1', not a number"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n", encoding="utf-8")
    with pytest.raises(ProfileError, match=message):
        read_trace(path)


def test_missing_and_empty_traces(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read as a trace"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ProfileError, match="holds no request"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(ProfileError, match="a request cannot be traced: a step accepted 2 of 1"):
        trace_line("ngram", 1, 0.0, 3, [[1, 2]])


def test_a_trace_that_auto_made_is_said_to_flatter() -> None:
    """Whatever its steps look like: the trace says so itself."""
    steps = ((0, 0, False), (2, 2, False), (8, 8, False))
    for is_auto in (True, False):
        request = RequestTrace("ngram", 1, 0.0, 14, steps, is_auto=is_auto)
        plan = make_plan(estimate=estimate_survival([request] * 9), alpha=0.05)
        assert any("flatters long drafts" in note for note in plan.notes) == is_auto


def test_a_profile_from_elsewhere_is_said_so() -> None:
    """Of another machine, other versions, or of another model than the trace."""
    here = replace(make_profile({1: 0.05}), machine={"cpu": cpu_name()}, versions=versions())
    request = RequestTrace("ngram", 1, 0.0, 14, ((4, 2, True),), model="tiny")
    estimate = estimate_survival([request] * 9)

    def notes(profile: Profile, recorded: SurvivalEstimate = estimate) -> str:
        return " ".join(make_plan(estimate=recorded, profile=profile).notes)

    assert "the profile was measured" not in notes(here)
    assert "recorded with" not in notes(here)
    other = replace(here, machine={"cpu": "Other CPU"})
    assert "measured on another machine (Other CPU; this one is" in notes(other)
    old = replace(here, versions={**versions(), "torch": "1.0"})
    assert "was measured with torch 1.0 (here" in notes(old)
    recorded = estimate_survival([replace(request, model="large")] * 9)
    assert "recorded with large, and the profile is of tiny" in notes(here, recorded)


def test_the_arithmetic_is_held_against_the_clock() -> None:
    """Two steps of 1 + 0.05 * 4 plain ones each, and a draft of 0.01 each, for 2 + 3 tokens."""
    profile = make_profile({1: 0.05, 4: 0.2})
    steps = ((4, 1, True), (4, 2, False))
    timed = RequestTrace("ngram", 1, 0.0, 6, steps, decode_s=2.0)
    (found,) = check_traces([timed], profile)
    assert found.predicted == pytest.approx(5 / (2 * (1.2 + 0.01)))
    assert found.measured == pytest.approx(5 * 1.0 / 2.0)
    beside = RequestTrace("ngram", 1, 0.0, 6, steps, decode_s=2.0, plain_step_s=0.8)
    assert check_traces([beside], profile)[0].measured == pytest.approx(5 * 0.8 / 2.0)
    untimed = RequestTrace("ngram", 1, 0.0, 6, steps)
    unknown = RequestTrace("odd", 1, 0.0, 6, steps, decode_s=2.0)
    large = RequestTrace("ngram", 64, 0.0, 6, steps, decode_s=2.0)
    assert check_traces([untimed, unknown, large], profile) == []


# --------------------------------------------------------------------------------------- planning


def test_from_numbers_alone() -> None:
    plan = make_plan(acceptance=0.8, alpha=0.1)
    assert plan.first.best.num_speculative_tokens == 6
    assert plan.first.ceiling == pytest.approx(10)
    assert (plan.break_even_batch, plan.most_known_batch) == (None, None)
    assert plan.verdict == "Speculate with 6 draft tokens: 2.47 times plain decoding expected."
    assert plan.first.enough.num_speculative_tokens == 5
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


def test_leave_it_off() -> None:
    plan = make_plan(acceptance=0.3, alpha=0.4)
    assert plan.first.best.num_speculative_tokens == 0
    assert plan.first.best.speedup == 1
    assert plan.verdict.startswith("Leave it off: no draft is expected to beat plain decoding")
    assert "It would pay from an acceptance of 0.40." in plan.verdict
    assert "Not even an acceptance of 1" in make_plan(acceptance=0.3, alpha=1.2).verdict


def test_hardly_paying() -> None:
    assert make_plan(acceptance=0.21, alpha=0.2).verdict.startswith("It hardly pays, with 1 draft")


def test_a_wide_interval_says_measure_more() -> None:
    estimate = estimate_survival([as_request([(1, 1), (1, 0), (1, 1), (1, 0), (1, 0)])])
    plan = make_plan(estimate=estimate, alpha=0.3)
    assert "spans 1: measure more" in plan.verdict
    sure = estimate_survival([as_request(draw_steps([0.8] * 6, 2000))])
    verdict = make_plan(estimate=sure, alpha=0.05).verdict
    assert "measure more" not in verdict and "times plain decoding expected (" in verdict


def test_a_constant_trace_plans_like_its_number() -> None:
    estimate = estimate_survival([as_request(draw_steps([0.8] * 12, 20_000))], 50)
    measured = make_plan(estimate=estimate, alpha=0.1, max_num_speculative_tokens=12)
    given = make_plan(acceptance=0.8, alpha=0.1, max_num_speculative_tokens=12)
    for one, other in zip(measured.first.cells, given.first.cells, strict=True):
        assert one.speedup == pytest.approx(other.speedup, rel=0.02)
        assert one.low is not None and one.high is not None
        assert one.low <= one.speedup <= one.high


def test_steps_without_a_draft_count() -> None:
    """Half of the steps find nothing: the gain halves, and so does the verify cost."""
    full = estimate_survival([as_request([(4, 4), (4, 2)] * 50)], 50)
    half = estimate_survival([as_request([(4, 4), (4, 2), (0, 0), (0, 0)] * 50)], 50)
    one = make_plan(estimate=full, alpha=0.1, max_num_speculative_tokens=4).first.cells[4]
    two = make_plan(estimate=half, alpha=0.1, max_num_speculative_tokens=4).first.cells[4]
    assert two.expected_tokens - 1 == pytest.approx((one.expected_tokens - 1) / 2)
    assert two.step_cost - 1 == pytest.approx((one.step_cost - 1) / 2)


def test_from_a_roofline() -> None:
    roofline = Roofline(ModelShape.from_config(LLAMA), find_hardware("H100-SXM"))
    plan = make_plan(acceptance=0.7, roofline=roofline, context=0)
    by_batch = {row.num_requests: row for row in plan.batches}
    assert by_batch[1].best.speedup > by_batch[64].best.speedup > by_batch[256].best.speedup
    assert plan.break_even_batch is not None and 200 < plan.break_even_batch <= 296
    edge = plan.break_even_batch
    for batch, pays in ((edge - 1, True), (edge, False)):
        row = make_plan(acceptance=0.7, roofline=roofline, context=0, batches=[batch]).first
        assert (row.best.num_speculative_tokens > 0) is pays
    assert f"Leave it off from batch {edge} on." in plan.verdict
    # A long context is read once a request, so drafts stay cheap.
    long = make_plan(acceptance=0.7, roofline=roofline, context=8192, batches=[32])
    assert long.first.best.speedup > by_batch[32].best.speedup


def test_a_mixture_loses_at_small_batch_first() -> None:
    roofline = Roofline(ModelShape.from_config(MIXTRAL), find_hardware("H200"))
    plan = make_plan(acceptance=0.7, roofline=roofline, batches=[1, 16])
    assert plan.batches[0].best.speedup < 1.2 < plan.batches[1].best.speedup
    assert any("experts" in note for note in plan.notes)
    small = Roofline(ModelShape.from_config(MIXTRAL), find_hardware("L4"))
    notes = make_plan(acceptance=0.7, roofline=small, batches=[1]).notes
    assert any("0 requests fit" in note for note in notes)
    verdict = make_plan(acceptance=0.7, roofline=small, batches=[1, 16]).verdict
    assert "But the model does not fit into the memory of one L4." in verdict
    assert "every batch known" not in verdict
    dense = Roofline(ModelShape.from_config(LLAMA), find_hardware("H100-SXM"))
    verdict = make_plan(acceptance=0.7, roofline=dense, batches=[4000]).verdict
    assert "requests of this context fit into the memory of one H100-SXM." in verdict
    assert "fit into" not in make_plan(acceptance=0.7, roofline=dense, batches=[1]).verdict


def test_from_a_profile() -> None:
    profile = make_profile({1: 0.05, 4: 0.2, 16: 0.9})
    plan = make_plan(acceptance=0.7, profile=profile)
    assert [row.num_requests for row in plan.batches] == [1, 4, 16]
    assert [row.alpha for row in plan.batches] == pytest.approx([0.05, 0.2, 0.9])
    same = make_plan(acceptance=0.7, alpha=0.05, t_draft=0.01)
    assert plan.first.best.num_speculative_tokens == same.first.best.num_speculative_tokens
    assert plan.first.best.speedup == pytest.approx(same.first.best.speedup)
    # What repeats of both passes of a ratio differ by widens the interval.
    low, high = plan.first.best.low, plan.first.best.high
    assert low == pytest.approx(plan.first.best.speedup / 1.04)
    assert high == pytest.approx(plan.first.best.speedup * 1.04)
    assert plan.break_even_batch is not None and 4 < plan.break_even_batch <= 16
    assert plan.most_known_batch == 16
    between = make_plan(acceptance=0.7, profile=profile, batches=[10])
    assert between.first.alpha == pytest.approx(0.55)


def test_what_a_profile_does_not_know_is_refused() -> None:
    profile = make_profile({1: 0.05, 4: 0.2})
    with pytest.raises(PlanError, match="measured from 1 to 4 requests"):
        make_plan(acceptance=0.7, profile=profile, batches=[8])
    with pytest.raises(ProfileError, match="no draft time of 'eagle'"):
        make_plan(acceptance=0.7, profile=profile, method="eagle")
    own = make_plan(acceptance=0.7, profile=profile, method="eagle", t_draft=0.1)
    assert (own.draft_cost, own.first.t_draft) == ("per_token", 0.1)


def test_break_even_is_none_where_it_always_pays() -> None:
    plan = make_plan(acceptance=0.8, profile=make_profile({1: 0.01, 8: 0.02}))
    assert plan.break_even_batch is None
    assert "Some draft pays at every batch known, 1 to 8." in plan.verdict


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1), st.floats(0, 1.2), st.floats(0, 0.5), st.integers(1, 24))
def test_plans_agree_with_the_closed_form(
    acceptance: float, alpha: float, t_draft: float, most: int
) -> None:
    plan = make_plan(
        acceptance=acceptance, alpha=alpha, t_draft=t_draft, max_num_speculative_tokens=most
    )
    for n, cell in enumerate(plan.first.cells):
        expected = sum(acceptance**k for k in range(n + 1))
        assert cell.expected_tokens == pytest.approx(expected)
        assert cell.speedup == pytest.approx(expected / ((t_draft if n else 0) + 1 + alpha * n))
    assert plan.first.best.speedup >= 1
    assert plan.first.best.speedup <= plan.first.ceiling * (1 + 1e-9)
    assert plan.first.enough.num_speculative_tokens <= plan.first.best.num_speculative_tokens


@settings(deadline=None, max_examples=15)
@given(st.floats(0, 1), st.integers(1, 200), st.floats(0, 0.3))
def test_no_roofline_plan_exceeds_its_ceiling(
    acceptance: float, batch: int, t_draft: float
) -> None:
    roofline = Roofline(ModelShape.from_config(LLAMA), find_hardware("L4"))
    for draft_cost in ("once", "per_token"):
        row = make_plan(
            acceptance=acceptance, roofline=roofline, batches=[batch], t_draft=t_draft,
            draft_cost=draft_cost, max_num_speculative_tokens=24,
        ).first  # fmt: skip
        assert row.best.speedup <= row.ceiling * (1 + 1e-9)


def test_tiers_have_no_gaps_and_end_at_break_even() -> None:
    roofline = Roofline(ModelShape.from_config(LLAMA), find_hardware("H100-SXM"))
    plan = make_plan(acceptance=0.7, roofline=roofline, context=0, max_num_speculative_tokens=8)
    tiers = plan.tiers()
    assert tiers[0][0] == 1 and tiers[-1][1] == 256
    for (_, end, _), (start, _, _) in itertools.pairwise(tiers):
        assert start == end + 1
    assert tiers[-1][0] == plan.break_even_batch and tiers[-1][2] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "acceptance must come from one place"),
        ({"acceptance": 0.8}, "costs must come from one place, but none is given"),
        ({"acceptance": 1.2, "alpha": 0.1}, "acceptance is 1.2; allowed is a probability"),
        ({"acceptance": math.nan, "alpha": 0.1}, "acceptance is nan"),
        ({"acceptance": 0.8, "alpha": -0.1}, "alpha is -0.1; allowed is a number of 0 or more"),
        ({"acceptance": 0.8, "alpha": math.inf}, "alpha is inf"),
        ({"acceptance": 0.8, "alpha": 0.1, "t_draft": -1}, "t_draft is -1"),
        ({"acceptance": 0.8, "alpha": 0.1, "batches": [0]}, "batch is 0; allowed is an integer"),
        ({"acceptance": 0.8, "alpha": 0.1, "batches": [1, 2]}, "it holds for one batch size"),
        ({"acceptance": 0.8, "alpha": 0.1, "batches": [2, 2]}, "give each size once"),
        ({"acceptance": 0.8, "alpha": 0.1, "context": 5}, "context is given, but alpha"),
        ({"acceptance": 0.8, "alpha": 0.1, "max_num_speculative_tokens": 0}, "is 0"),
        ({"acceptance": 0.8, "alpha": 0.1, "max_num_speculative_tokens": 5000}, "up to 1024"),
        ({"acceptance": 0.8, "alpha": 0.1, "method": "eagle"}, "t_draft is not given"),
        ({"acceptance": 0.8, "alpha": 0.1, "method": "magic"}, "known are ngram, suffix"),
        ({"acceptance": 0.8, "alpha": 0.1, "draft_cost": "twice"}, "draft_cost is 'twice'"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(**options)


def test_contradictions_with_a_profile() -> None:
    profile = make_profile({1: 0.05})
    with pytest.raises(PlanError, match="given are alpha and a profile"):
        make_plan(acceptance=0.7, alpha=0.1, profile=profile)
    with pytest.raises(PlanError, match="the draft time is the profile's"):
        make_plan(acceptance=0.7, profile=profile, draft_cost="once")


def test_survival_beyond_what_was_recorded() -> None:
    survival = Survival(0.5, (0.9,), 0.8)
    assert survival.by_position(3) == pytest.approx((0.45, 0.36, 0.288))
    assert replace(survival, draft_share=1.0).by_position(1) == pytest.approx((0.9,))
