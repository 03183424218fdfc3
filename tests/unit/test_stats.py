"""Counters and what follows from them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.stats import EngineStats, RequestStats
from foredraft.types import StepStats


@st.composite
def some_steps(draw) -> list[tuple[int, int, int]]:
    """(drafted, accepted, emitted) of verify steps, as ``commit`` reports them."""
    steps = []
    for _ in range(draw(st.integers(0, 12))):
        num_drafted = draw(st.integers(0, 8))
        num_accepted = draw(st.integers(0, num_drafted))
        # One more than accepted, unless a stop rule cut the last one off.
        steps.append((num_drafted, num_accepted, num_accepted + draw(st.integers(0, 1))))
    return steps


def stats_of(steps: list[tuple[int, int, int]]) -> RequestStats:
    stats = RequestStats(num_prompt_tokens=5)
    stats.record_prefill(0)
    stats.record_prefill(1)
    for step in steps:
        stats.record_verify(*step)
    return stats


def test_nothing_yet() -> None:
    stats = RequestStats()
    assert stats.acceptance_rate is None
    assert stats.acceptance_length is None
    assert stats.tokens_per_s is None
    assert stats.decode_tokens_per_s is None
    assert stats.acceptance_by_position == []


def test_plain_decoding_drafts_nothing() -> None:
    stats = stats_of([(0, 0, 1)] * 4)
    assert stats.num_tokens == 5 and stats.num_verify_steps == 4 and stats.num_drafts == 0
    assert stats.acceptance_rate is None
    assert stats.acceptance_length == 1
    assert stats.acceptance_by_position == []


def test_worked_example() -> None:
    """Three drafts of 4, 4 and 2 tokens, of which 4, 1 and 0 are accepted; one step without."""
    stats = stats_of([(4, 4, 5), (4, 1, 2), (2, 0, 1), (0, 0, 1)])
    assert stats.num_tokens == 1 + 9
    assert stats.num_verify_steps == 4 and stats.num_drafts == 3
    assert stats.num_draft_tokens == 10 and stats.num_accepted_tokens == 5
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_length == 1 + 5 / 4
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1 / 3, 1 / 3]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(some_steps())
def test_identities(steps: list[tuple[int, int, int]]) -> None:
    stats = stats_of(steps)
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_verify_steps == len(steps)
    assert stats.num_tokens == 1 + sum(emitted for _, _, emitted in steps)
    by_position = stats.acceptance_by_position
    assert all(0 < rate <= 1 for rate in by_position)
    assert by_position == sorted(by_position, reverse=True)
    assert sum(stats.accepted_at) == stats.num_accepted_tokens
    assert stats.acceptance_rate is None or 0 <= stats.acceptance_rate <= 1


@settings(deadline=None, max_examples=100, derandomize=True)
@given(some_steps(), some_steps())
def test_sums_are_what_one_request_would_have_counted(one: list, other: list) -> None:
    total, both = stats_of(one), stats_of(one + other)
    total.add(stats_of(other))
    for field in dataclasses.fields(RequestStats):
        if field.name not in ("num_prompt_tokens", "num_tokens", "num_first_tokens"):
            assert getattr(total, field.name) == getattr(both, field.name), field.name
    assert total.num_tokens == both.num_tokens + 1
    assert total.num_first_tokens == 2 and total.num_prompt_tokens == 10


def test_adding_leaves_the_other_alone() -> None:
    one, other = stats_of([(3, 1, 2)]), stats_of([(3, 3, 4)])
    one.add(other)
    assert one.accepted_at == [2, 1, 1] and other.accepted_at == [1, 1, 1]


def test_times_are_shared_evenly() -> None:
    step = StepStats(0.4, 2.0, 0.8, 1.2, 10, 4, 4, 6, 3, 7)
    assert step.total_s == pytest.approx(4.4)
    stats = RequestStats()
    for _ in range(3):
        stats.record_time(step)
    shares = (stats.draft_s, stats.target_s, stats.verify_s, stats.host_s)
    assert shares == pytest.approx((0.3, 1.5, 0.6, 0.9))


def test_rates_per_second() -> None:
    stats = RequestStats(first_token_s=1.0, elapsed_s=3.0)
    stats.record_prefill(0)
    stats.record_prefill(1)
    assert stats.decode_tokens_per_s is None
    for _ in range(4):
        stats.record_verify(6, 4, 5)
    assert stats.num_tokens == 21
    assert stats.tokens_per_s == 7.0
    assert stats.decode_tokens_per_s == 10.0
    total = RequestStats()
    for _ in range(3):
        total.add(stats)
    assert total.tokens_per_s == 7.0
    assert total.decode_tokens_per_s == 10.0  # the first token of each is left out


def test_speedups_follow_from_forecasts() -> None:
    """Two requests: 6 tokens in 4 s where a plain step takes 3 s; 5 tokens were expected."""
    step = StepStats(0.5, 3.0, 0.2, 0.3, 12, 2, 2, 10, 4, 6, 5.0, 3.5, 3.0)
    stats = RequestStats()
    assert stats.estimated_speedup is None and stats.predicted_speedup is None
    stats.record_forecast(step, 4)
    assert stats.estimated_speedup == pytest.approx(4 * 3.0 / 4.0)
    assert stats.predicted_speedup == pytest.approx(5 / 2 * 3.0 / 3.5)
    stats.record_forecast(dataclasses.replace(step, plain_s=None), 4)
    assert stats.estimated_speedup == pytest.approx(3.0)  # a step without a forecast says nothing


def test_what_an_engine_counts() -> None:
    step = StepStats(0.5, 3.0, 0.2, 0.3, 12, 2, 2, 10, 4, 6, 5.0, 3.5, 3.0)
    live = EngineStats()
    assert live.recent_speedup is None and live.recent_predicted_speedup is None
    for _ in range(300):
        live.record(step)
    assert (live.num_steps, live.num_tokens) == (300, 1800)
    assert live.spec_decode_num_drafts == 300
    assert (live.spec_decode_num_draft_tokens, live.spec_decode_num_accepted_tokens) == (3000, 1200)
    assert live.num_wasted_tokens == 1800
    assert (live.draft_s, live.target_s) == pytest.approx((150, 900))
    assert (live.verify_s, live.host_s) == pytest.approx((60, 90))
    assert live.recent_num_draft_tokens == pytest.approx(5, rel=1e-3)
    assert live.recent_tokens_per_s == pytest.approx(6 / 4)
    assert live.recent_plain_tokens_per_s == pytest.approx(2 / 3)
    assert live.recent_speedup == pytest.approx(6 / 4 / (2 / 3))
    assert live.recent_predicted_speedup == pytest.approx(5 / 3.5 / (2 / 3))
    live.record(dataclasses.replace(step, num_decoding=1))  # a prompt among them: counted only
    assert live.num_steps == 301 and live.recent_tokens_per_s == pytest.approx(6 / 4)
