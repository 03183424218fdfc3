"""Who runs when: priorities, deadlines, being put out and going on, common beginnings."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from foredraft.engine.engine import Engine
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import VOCAB, ScriptDrafter, engine, family_target, run

PLAIN = SpeculationParams("none")
_RNG = np.random.default_rng(4)
LONG = _RNG.integers(3, VOCAB, 100).tolist()
PROMPTS = [_RNG.integers(3, VOCAB, length).tolist() for length in (1, 30, 8, 17, 60, 3)]


def sampling(index: int = 0, temperature: float = 1.0, **more: Any) -> SamplingParams:
    options = {"max_tokens": 30, "ignore_eos": True, **more}
    return SamplingParams(temperature=temperature, seed=10 + index, **options)


@pytest.fixture(scope="module")
def target() -> Any:
    return family_target("llama")


@pytest.fixture(scope="module")
def texts(target: Any) -> list[list[int]]:
    return [run(engine(target), [p], sampling(i), PLAIN)[0] for i, p in enumerate(PROMPTS)]


def gigabytes(target: Any, num_rows: float) -> float:
    return (num_rows + 0.5) * engine(target).cache.bytes_per_row / 2**30


def finish_order(the_engine: Engine) -> list[str]:
    order = []
    while the_engine.has_work:
        order += [d.request_id for d in the_engine.step() if d.finish_reason is not None]
    return order


# --------------------------------------------------------------------------- memory and preemption


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("num_rows", [95, 120, 200])
@pytest.mark.parametrize("reuse", [False, True])
def test_texts_survive_being_put_out(
    target: Any, texts: list[list[int]], num_rows: int, width: int, reuse: bool
) -> None:
    """Memory for fewer than come: some are put out, all write what they would have alone."""
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    the_engine = engine(
        target,
        {"half": ScriptDrafter("half", whole, width, seed=2, ragged=True)},
        kv_cache_gb=gigabytes(target, num_rows),
        reuse_prefixes=reuse,
    )
    names = [
        the_engine.add(prompt, sampling(i), SpeculationParams("half", 6))
        for i, prompt in enumerate(PROMPTS)
    ]
    states = [the_engine.request_state(name) for name in names]
    bound = num_rows * the_engine.cache.bytes_per_row
    while the_engine.has_work:
        the_engine.step()
        assert the_engine.cache.bytes_in_use <= bound
    assert [state.output_ids.tolist() for state in states] == texts
    if num_rows < 200:
        assert the_engine.scheduler.num_preemptions > 0
        assert sum(state.stats.num_preemptions for state in states) > 0
    the_engine.scheduler.drop_prefixes()
    assert the_engine.cache.bytes_in_use == 0
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling", "auto", "lookahead"])
def test_every_method_goes_on_after_being_put_out(
    target: Any, texts: list[list[int]], method: str
) -> None:
    the_engine = engine(target, kv_cache_gb=gigabytes(target, 110))
    samplings = [sampling(i) for i in range(len(PROMPTS))]
    assert run(the_engine, PROMPTS, samplings, SpeculationParams(method, 6)) == texts
    assert the_engine.scheduler.num_preemptions > 0


# --------------------------------------------------------------------------- priorities, deadlines


def test_the_urgent_go_first_and_take_places(target: Any, texts: list[list[int]]) -> None:
    the_engine = engine(target, max_num_requests=2)
    for index in range(4):
        the_engine.add(PROMPTS[index], sampling(index), PLAIN, request_id=f"calm-{index}")
    for _ in range(5):
        the_engine.step()
    states = {name: the_engine.request_state(name) for name in the_engine.scheduler.request_ids}
    the_engine.add(PROMPTS[4], sampling(4), PLAIN, request_id="urgent", priority=-1)
    states["urgent"] = the_engine.request_state("urgent")
    order = finish_order(the_engine)
    assert order.index("urgent") == 1  # beside calm-0, which kept its place
    assert order[0] == "calm-0"
    assert the_engine.scheduler.num_preemptions == 1
    for index in range(4):
        assert states[f"calm-{index}"].output_ids.tolist() == texts[index]
    assert states["urgent"].output_ids.tolist() == texts[4]


def test_those_that_left_while_they_waited_are_forgotten(target: Any) -> None:
    the_engine = engine(target, max_num_requests=1)
    first = the_engine.add([3, 4], sampling(), PLAIN)
    for _ in range(20):
        names = [the_engine.add([5, 6], sampling(), PLAIN) for _ in range(50)]
        for name in names[1:]:
            the_engine.abort(name)
    assert len(the_engine.scheduler._queue) < 200
    order = finish_order(the_engine)
    assert order[0] == first and len(order) == 21
    assert order[1:] == sorted(order[1:], key=lambda name: int(name.split("-")[1]))


def test_first_come_first_served_among_equals(target: Any) -> None:
    the_engine = engine(target, max_num_requests=1)
    names = [the_engine.add(p, sampling(i, max_tokens=3), PLAIN) for i, p in enumerate(PROMPTS)]
    assert finish_order(the_engine) == names


def test_deadlines_end_requests_with_what_they_have(target: Any, texts: list[list[int]]) -> None:
    the_engine = engine(target, max_num_requests=2)
    late = the_engine.add(PROMPTS[0], sampling(0), PLAIN, deadline_s=1e-6)
    state = the_engine.request_state(late)
    other = the_engine.add(PROMPTS[1], sampling(1), PLAIN)
    kept = the_engine.request_state(other)
    time.sleep(0.01)
    deltas = the_engine.step()
    assert [(d.request_id, d.finish_reason) for d in deltas if d.finish_reason] == [
        (late, "deadline")
    ]
    assert len(state.output_ids) == 0
    soon = the_engine.add(PROMPTS[2], sampling(2), PLAIN, deadline_s=60.0)
    running = the_engine.request_state(soon)
    for _ in range(6):
        the_engine.step()
    running.deadline = 0.0  # its time is up in the middle
    finish_order(the_engine)
    written = running.output_ids.tolist()
    assert 0 < len(written) < 30 and written == texts[2][: len(written)]
    assert kept.output_ids.tolist() == texts[1]


@pytest.mark.parametrize(
    "options", [{"priority": 1.5}, {"priority": True}, {"deadline_s": 0}, {"deadline_s": "soon"}]
)
def test_bad_priorities_and_deadlines(target: Any, options: dict[str, Any]) -> None:
    from foredraft.errors import InvalidRequestError

    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        engine(target).add([3], **options)


def test_a_short_prompt_does_not_wait_for_a_long_one(target: Any) -> None:
    the_engine = engine(target, max_num_batched_tokens=20)
    the_engine.add(LONG, sampling(0), PLAIN, request_id="long")
    the_engine.add(PROMPTS[2], sampling(1), PLAIN, request_id="short")
    spoke = []
    for _ in range(3):
        spoke += [delta.request_id for delta in the_engine.step()]
    assert "short" in spoke and "long" not in spoke


def test_a_paused_request_rests_and_gives_way(target: Any, texts: list[list[int]]) -> None:
    the_engine = engine(target, max_num_requests=1)
    first = the_engine.add(PROMPTS[0], sampling(0), PLAIN)
    state = the_engine.request_state(first)
    for _ in range(4):
        the_engine.step()
    the_engine.pause(first)
    before = len(state.output_ids)
    assert the_engine.step() == [] and the_engine.is_stalled
    second = the_engine.add(PROMPTS[1], sampling(1), PLAIN)
    other = the_engine.request_state(second)
    while second in the_engine.scheduler:
        the_engine.step()
    assert other.output_ids.tolist() == texts[1] and len(state.output_ids) == before
    the_engine.resume(first)
    finish_order(the_engine)
    assert state.output_ids.tolist() == texts[0]


# ------------------------------------------------------------------------------- common beginnings


@pytest.mark.parametrize("method", ["none", "half", "ngram", "suffix", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_warm_store_changes_nothing_but_the_work(
    target: Any, method: str, temperature: float
) -> None:
    """Prompts that share beginnings, come again, and go on where another ended."""
    prompts = [LONG, LONG[:70] + PROMPTS[1], LONG + PROMPTS[2], LONG[:40], LONG]
    samplings = [sampling(i, temperature) for i in range(len(prompts))]
    cold = [run(engine(target), [p], s, PLAIN)[0] for p, s in zip(prompts, samplings, strict=True)]
    goes_on = LONG + cold[0] + PROMPTS[3]
    prompts.append(goes_on)
    samplings.append(sampling(7, temperature))
    cold.append(run(engine(target), [goes_on], samplings[-1], PLAIN)[0])
    whole = [p + t for p, t in zip(prompts, cold, strict=True)]
    the_engine = engine(
        target, {"half": ScriptDrafter("half", whole, 2, seed=3)}, reuse_prefixes=True
    )
    number = 0 if method == "none" else 6
    speculation = SpeculationParams(method, number)
    for _ in range(2):
        for prompt, one, expected in zip(prompts, samplings, cold, strict=True):
            name = the_engine.add(prompt, one, speculation)
            state = the_engine.request_state(name)
            finish_order(the_engine)
            assert state.output_ids.tolist() == expected
    assert state.stats.num_reused_tokens == len(goes_on) - 1
    together = run(the_engine, prompts, samplings, speculation, [0, 0, 1, 3, 3, 9])
    assert together == cold


def test_equal_prompts_are_computed_once(target: Any) -> None:
    """Whoever comes second waits for the first, and begins from it."""
    the_engine = engine(target, max_num_batched_tokens=32, reuse_prefixes=True)
    names = [the_engine.add(LONG, sampling(i), PLAIN) for i in range(4)]
    states = [the_engine.request_state(name) for name in names]
    num_rows = 0
    while the_engine.has_work:
        the_engine.step()
        if the_engine.last_step is not None:
            num_rows += the_engine.last_step.num_rows - the_engine.last_step.num_decoding
    assert num_rows == len(LONG) + 3
    assert [s.stats.num_reused_tokens for s in states] == [0] + [len(LONG) - 1] * 3


def test_reuse_can_be_turned_off_for_a_request(target: Any) -> None:
    the_engine = engine(target, reuse_prefixes=True)
    run(the_engine, [LONG], sampling(0, reuse_prefix=False), PLAIN)
    assert the_engine.scheduler.prefixes.num_retained == 0
    run(the_engine, [LONG], sampling(0), PLAIN)
    assert the_engine.scheduler.prefixes.num_retained == 1
    name = the_engine.add(LONG, sampling(1, reuse_prefix=False), PLAIN)
    state = the_engine.request_state(name)
    finish_order(the_engine)
    assert state.stats.num_reused_tokens == 0


def test_what_was_used_longest_ago_goes_first(target: Any) -> None:
    """Two texts fit beside a third; the one that nobody asked for since is given up."""
    one, two, three = (_RNG.integers(3, VOCAB, 64).tolist() for _ in range(3))
    the_engine = engine(target, kv_cache_gb=gigabytes(target, 230), reuse_prefixes=True)
    short = sampling(0, max_tokens=2)
    for prompt in (one, two, one, three, three[:40] + two[:60]):
        run(the_engine, [prompt], short, PLAIN)
    states = []
    for prompt in (one, two):
        states.append(the_engine.request_state(the_engine.add(prompt, short, PLAIN)))
        finish_order(the_engine)
    assert states[0].stats.num_reused_tokens == 63
    assert states[1].stats.num_reused_tokens == 0


def test_a_request_that_failed_leaves_nothing_to_begin_from(target: Any) -> None:
    def broken(input_ids: Any, scores: Any) -> Any:
        raise ValueError("no")

    the_engine = engine(target, reuse_prefixes=True)
    run(the_engine, [LONG], sampling(0, logits_processors=(broken,)), PLAIN)
    assert the_engine.scheduler.prefixes.num_retained == 0
    assert the_engine.cache.bytes_in_use == 0


# ---------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("speculation", [PLAIN, SpeculationParams("half", 6)], ids=["none", "half"])
@pytest.mark.parametrize("limit", [3, 1])
def test_running_out_of_memory_in_a_step_changes_no_text(
    target: Any, texts: list[list[int]], limit: int, speculation: SpeculationParams
) -> None:
    """Passes of more than so many rows fail; with fewer drafts, requests and rows all goes on."""
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    the_engine = engine(target, {"half": ScriptDrafter("half", whole, 2)}, reuse_prefixes=True)
    real, failed = the_engine.runner.forward, []

    def scarce(plan: Any, drafts: Any) -> Any:
        num_rows = sum(segment.num_rows for segment in plan.segments) + len(drafts.token_ids)
        if num_rows > limit and len(failed) < 40:
            failed.append(num_rows)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return real(plan, drafts)

    the_engine.runner.forward = scarce  # type: ignore[method-assign]
    samplings = [sampling(i) for i in range(len(PROMPTS))]
    assert run(the_engine, PROMPTS, samplings, speculation) == texts
    assert failed
    the_engine.scheduler.drop_prefixes()
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots


def test_a_request_that_cannot_even_run_alone_ends_alone(
    target: Any, texts: list[list[int]]
) -> None:
    the_engine = engine(target)
    real = the_engine.runner.forward

    def scarce(plan: Any, drafts: Any) -> Any:
        if any(len(segment.request.prompt_ids) == len(PROMPTS[4]) for segment in plan.segments):
            raise MemoryError("no more")
        return real(plan, drafts)

    the_engine.runner.forward = scarce  # type: ignore[method-assign]
    names = [the_engine.add(p, sampling(i), PLAIN) for i, p in enumerate(PROMPTS)]
    states = {name: the_engine.request_state(name) for name in names}
    ended = {}
    while the_engine.has_work:
        for delta in the_engine.step():
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta
    assert ended[names[4]].finish_reason == "error"
    assert "memory ran out" in str(ended[names[4]].error)
    for index, name in enumerate(names):
        if index != 4:
            assert states[name].output_ids.tolist() == texts[index]
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots
