"""Counters: built from what happened, the same for every method, and never out of bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foredraft.params import SamplingParams, SpeculationParams
from foredraft.stats import RequestStats
from tests.tiny import (
    Ended,
    ScriptDrafter,
    engine,
    family_target,
    run,
    run_to_end,
    table_target,
    table_text,
)

VOCAB = 40
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB))
PROMPT = [3, 1, 4]
SAMPLING = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
TEXT = table_text(TABLE, PROMPT, SAMPLING, 60)


def ended_with(
    kind: str, num: int, width: int = 1, texts: list[list[int]] | None = None, **options: object
) -> Ended:
    drafter = ScriptDrafter(kind, texts or [PROMPT + TEXT], width, vocab_size=VOCAB)
    sampling = dataclasses.replace(SAMPLING, **options)
    the_engine = engine(table_target(TABLE), {"script": drafter})
    return run_to_end(the_engine, [PROMPT], sampling, SpeculationParams("script", num))[0]


def counted(num_right: int, num: int, max_tokens: int) -> RequestStats:
    """What a script with ``num_right`` right tokens a draft of ``num`` must come to."""
    stats = RequestStats(num_prompt_tokens=len(PROMPT))
    stats.record_prefill(1)
    while stats.num_tokens < max_tokens:
        num_drafted = min(num, max_tokens - stats.num_tokens - 1)
        num_accepted = min(num_right, num_drafted)
        stats.record_verify(num_drafted, num_accepted, num_accepted + 1)
    return stats


def counts(stats: RequestStats) -> dict[str, object]:
    return {
        field.name: getattr(stats, field.name)
        for field in dataclasses.fields(stats)
        if not field.name.endswith("_s")
    }


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_every_counter_of_a_known_draft(num: int) -> None:
    """Chains with a right tokens and then wrong ones: all counters, to the last step."""
    for num_right in range(num + 1):
        for max_tokens in (2, 9, 10, 11, 30):
            ended = ended_with(f"first:{num_right}", num, max_tokens=max_tokens)
            expected = counted(num_right, num, max_tokens)
            assert counts(ended.stats) == counts(expected)
            if num_right == num:
                assert ended.stats.acceptance_rate in (1, None)
            if num_right == 0:
                assert ended.stats.acceptance_rate in (0, None)
                assert ended.stats.acceptance_by_position == []


def test_rates_worked_out_by_hand() -> None:
    """Four right ones of eight: five full steps of 5 tokens, then room for 7 and for 2 drafts."""
    stats = ended_with("first:4", 8, max_tokens=34).stats
    assert stats.num_verify_steps == stats.num_drafts == 7
    assert stats.acceptance_rate == (4 * 6 + 2) / (8 * 5 + 7 + 2)
    assert stats.acceptance_length == 1 + 26 / 7
    assert stats.acceptance_by_position == [1.0, 1.0, 6 / 7, 6 / 7]


def test_right_drafts_of_a_drafter_that_runs_out() -> None:
    """Only what was proposed counts as drafted; steps without a draft are no drafts."""
    known = [PROMPT + TEXT[:12]]
    stats = ended_with("right", 5, texts=known).stats
    assert stats.acceptance_rate == 1
    assert stats.num_draft_tokens == stats.num_accepted_tokens == 10
    # 1, then 6 (5 drafted), then 6, from where on nothing is known: 17 plain steps.
    assert stats.num_drafts == 2
    assert stats.num_verify_steps == 2 + 17
    assert stats.num_tokens == 30
    assert stats.acceptance_length == 1 + 10 / 19
    assert stats.acceptance_by_position == [1.0] * 5


def test_tokens_cut_off_by_a_stop_are_not_accepted() -> None:
    """Eight right tokens are drafted; the text ends at the third of them."""
    stop = TEXT[3]
    assert stop not in TEXT[:3]
    stats = ended_with("right", 8, stop_token_ids=(stop,)).stats
    assert stats.num_tokens == 4
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 3)
    assert stats.accepted_at == [1, 1, 1]
    assert stats.acceptance_rate == 3 / 8


def test_trees_count_nodes_as_drafted_and_paths_as_accepted() -> None:
    stats = ended_with("right", 9, width=3).stats
    assert stats.num_draft_tokens <= 9 * stats.num_drafts
    assert stats.num_accepted_tokens <= 3 * stats.num_drafts
    assert stats.num_tokens == 30 == 1 + stats.num_verify_steps + stats.num_accepted_tokens


def test_plain_decoding_counts_the_same_way() -> None:
    the_engine = engine(table_target(TABLE))
    plain = run_to_end(the_engine, [PROMPT], SAMPLING, SpeculationParams("none"))[0].stats
    zero = run_to_end(the_engine, [PROMPT], SAMPLING, SpeculationParams("ngram", 0))[0].stats
    for stats in (plain, zero):
        assert counts(stats) == counts(counted(0, 0, 30))
        assert stats.num_verify_steps == 29 and stats.num_drafts == 0
        assert stats.acceptance_rate is None and stats.acceptance_length == 1


def test_three_endings_in_one_engine() -> None:
    """One stops inside a block, one at its limit, one whose drafts run out: the sums agree."""
    stop = TEXT[7]
    assert stop not in TEXT[:7]
    drafters = {
        "right": ScriptDrafter("right", [PROMPT + TEXT], vocab_size=VOCAB),
        "half": ScriptDrafter("half", [PROMPT + TEXT], 2, vocab_size=VOCAB, ragged=True),
        "short": ScriptDrafter("right", [PROMPT + TEXT[:9]], vocab_size=VOCAB),
    }
    the_engine = engine(table_target(TABLE), drafters)
    samplings = [dataclasses.replace(SAMPLING, stop_token_ids=(stop,)), SAMPLING, SAMPLING]
    names = [
        the_engine.add(PROMPT, sampling, SpeculationParams(method, 6))
        for method, sampling in zip(drafters, samplings, strict=True)
    ]
    states = [the_engine.request_state(name) for name in names]
    emitted = accepted = drafted = rows = 0
    prompt_rows = 3 * len(PROMPT)
    while the_engine.has_work:
        for delta in the_engine.step():
            emitted += len(delta.token_ids)
            assert delta.num_accepted <= len(delta.token_ids)
        step = the_engine.last_step
        assert step is not None
        accepted += step.num_accepted_tokens
        drafted += step.num_draft_tokens
        rows += step.num_rows
        assert step.num_accepted_tokens <= step.num_draft_tokens
        assert (
            step.total_s > 0 and min(step.draft_s, step.target_s, step.verify_s, step.host_s) >= 0
        )
    total = RequestStats()
    for state in states:
        stats = state.stats
        assert stats.num_tokens == len(state.output_ids)
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
        by_position = stats.acceptance_by_position
        assert by_position == sorted(by_position, reverse=True)
        assert sum(stats.accepted_at) == stats.num_accepted_tokens
        total.add(stats)
    assert total.num_tokens == emitted == 8 + 30 + 30
    assert (total.num_accepted_tokens, total.num_draft_tokens) == (accepted, drafted)
    assert rows == prompt_rows + total.num_verify_steps + total.num_draft_tokens


def test_nothing_to_report_yet() -> None:
    the_engine = engine(table_target(TABLE))
    assert the_engine.last_step is None
    assert the_engine.step() == [] and the_engine.last_step is None
    name = the_engine.add(PROMPT, SAMPLING, SpeculationParams("ngram"))
    stats = the_engine.request_state(name).stats
    assert stats.num_tokens == 0 and stats.num_prompt_tokens == len(PROMPT)
    for rate in (
        stats.acceptance_rate,
        stats.acceptance_length,
        stats.tokens_per_s,
        stats.decode_tokens_per_s,
    ):
        assert rate is None
    assert stats.acceptance_by_position == []
    the_engine.abort(name)
    assert stats.num_tokens == 0


def test_aborting_in_mid_flight_spoils_no_counter() -> None:
    """Ten requests are dropped at different steps; counters only ever rise, and stay consistent."""
    drafter = ScriptDrafter("half", [PROMPT + TEXT], 2, vocab_size=VOCAB)
    the_engine = engine(table_target(TABLE), {"script": drafter}, max_num_requests=4)
    speculation = SpeculationParams("script", 6)
    names = [the_engine.add(PROMPT, SAMPLING, speculation) for _ in range(12)]
    states = {name: the_engine.request_state(name) for name in names}
    before = {name: counts(states[name].stats) for name in names}
    dropped = []
    for step in range(200):
        if not the_engine.has_work:
            break
        the_engine.step()
        if step % 2 and len(dropped) < 10:
            left = [name for name in names if name in the_engine.scheduler]
            if left:
                name = left[(7 * step) % len(left)]
                assert the_engine.abort(name) and not the_engine.abort(name)
                dropped.append(name)
        for name in names:
            now = counts(states[name].stats)
            for field, value in now.items():
                if isinstance(value, int):
                    assert value >= before[name][field]
            before[name] = now
            stats = states[name].stats
            assert stats.num_tokens == len(states[name].output_ids)
            assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert len(dropped) == 10 and set(drafter.forgotten) == set(names)
    assert len(drafter.forgotten) == len(names)
    for name in set(names) - set(dropped):
        assert states[name].output_ids.tolist() == TEXT[:30]
    assert the_engine.cache.bytes_in_use == 0
    assert not the_engine.abort("nobody")


def test_a_model_that_is_its_own_drafter_is_accepted_throughout() -> None:
    """With a real cache, at both temperatures, in a batch of different lengths."""
    target = family_target("llama")
    prompts = [[5], [9, 8, 7], list(range(3, 40))]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature, seed=4, max_tokens=25, ignore_eos=True)
        plain = SpeculationParams("none")
        texts = [p + run(engine(target), [p], sampling, plain)[0] for p in prompts]
        the_engine = engine(target, {"right": ScriptDrafter("right", texts)})
        for ended in run_to_end(the_engine, prompts, sampling, SpeculationParams("right", 5)):
            assert ended.stats.acceptance_rate == 1
            assert ended.stats.num_verify_steps == 4
            assert ended.stats.acceptance_length == 1 + 20 / 4


def test_times_add_up() -> None:
    the_engine = engine(table_target(TABLE))
    names = [the_engine.add(PROMPT, SAMPLING, SpeculationParams("ngram")) for _ in range(3)]
    states = [the_engine.request_state(name) for name in names]
    spent = 0.0
    while the_engine.has_work:
        the_engine.step()
        assert the_engine.last_step is not None
        spent += the_engine.last_step.total_s
    shares = [
        s.stats.draft_s + s.stats.target_s + s.stats.verify_s + s.stats.host_s for s in states
    ]
    assert sum(shares) == pytest.approx(spent)
    for state in states:
        assert 0 < state.stats.first_token_s <= state.stats.elapsed_s
        assert state.stats.tokens_per_s == 30 / state.stats.elapsed_s


def test_a_step_says_whether_its_draft_was_cut() -> None:
    """By the number that was asked for, that is; a draft that ends before it had no more."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    for num in (1, 100):
        the_engine = engine(family_target("llama"))
        (one,) = run_to_end(the_engine, [[5, 6, 7] * 9], sampling, SpeculationParams("ngram", num))
        steps = [step for step in one.stats.steps[:-2] if step[0]]
        assert steps
        if num == 1:
            assert all(is_cut for _, _, is_cut in steps)
        else:
            assert not all(is_cut for _, _, is_cut in steps)
