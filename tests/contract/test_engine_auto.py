"""``num_speculative_tokens="auto"``: the text is plain decoding's; drafts are made where they pay.

The cost table is given, not measured, so that what is decided does not depend on the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft import LLM
from foredraft.control.cost_table import CostTable
from foredraft.engine.engine import Engine
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.profile import PassTime
from tests.folders import make_folder
from tests.tiny import (
    Ended,
    ScriptDrafter,
    engine,
    family_target,
    run_to_end,
    table_target,
    table_text,
)

PROMPTS = [[5, 9, 11], [3] * 40, [7, 8, 7, 8, 7], [100, 4], list(range(20, 60)), [12]]
ROUNDS = 60


def samplings(temperature: float) -> list[SamplingParams]:
    """Ragged: every request ends elsewhere."""
    return [
        SamplingParams(temperature, seed=seed, max_tokens=12 + 7 * seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]


def cheap(the_engine: Engine, alpha: float = 0.02) -> Engine:
    """Rows beyond the first cost little: drafting pays where it is accepted at all."""
    the_engine.controller.cost_table = CostTable(
        PassTime(batch, batch * rows, 0, 0.01 * (1 + alpha * (rows - 1)), 0.0)
        for batch in (1, 2, 4, 8)
        for rows in (1, 2, 4, 8, 16, 32)
    )
    # What this machine takes must not change what the tests decide.
    the_engine.controller.cost_table.observe = lambda *args: None  # type: ignore[method-assign]
    return the_engine


@pytest.fixture(scope="module")
def target() -> Any:
    return family_target("llama")


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[float, list[list[int]]]:
    """What plain decoding writes, by temperature."""
    return {
        temperature: [
            one.ids
            for one in run_to_end(
                engine(target), PROMPTS, samplings(temperature), SpeculationParams("none")
            )
        ]
        for temperature in (0.0, 1.0)
    }


def whole(texts: list[list[int]]) -> list[list[int]]:
    return [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]


def drafted(ended: list[Ended]) -> int:
    return sum(one.stats.num_draft_tokens for one in ended)


def accepted(ended: list[Ended]) -> int:
    return sum(one.stats.num_accepted_tokens for one in ended)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["right", "half", "wrong", "random"])
def test_scripted_drafts_do_not_reach_the_text(
    target: Any, plain: dict[float, list[list[int]]], kind: str, width: int, temperature: float
) -> None:
    """Three run at once, prompts come in chunks, drafts are ragged trees that get trimmed."""
    texts = whole(plain[temperature])
    drafter = ScriptDrafter(kind, texts, width, seed=3, ragged=kind != "right")
    the_engine = cheap(engine(target, {"s": drafter}, max_num_requests=3, max_num_batched_tokens=9))
    speculation = SpeculationParams("s", "auto")
    for _ in range(2):  # the second time the controller knows the drafter
        ended = run_to_end(the_engine, PROMPTS, samplings(temperature), speculation)
        assert [one.ids for one in ended] == plain[temperature]
    if kind in ("right", "wrong"):  # of the others, trees that are cut may lose what was right
        assert (accepted(ended) > 0) == (kind == "right")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ngram", "synthetic"])
def test_methods_do_not_reach_the_text(
    target: Any, plain: dict[float, list[list[int]]], method: str, temperature: float
) -> None:
    the_engine = cheap(engine(target, max_num_requests=4, max_num_batched_tokens=16))
    for index in range(3):
        ended = run_to_end(
            the_engine, PROMPTS, samplings(temperature), SpeculationParams(method, "auto")
        )
        assert [one.ids for one in ended] == plain[temperature]
        if method == "synthetic":  # it drafts what it has seen before
            assert (accepted(ended) > 0) == (index > 0)
    assert drafted(ended) > 0


def test_auto_with_the_table_that_is_measured(
    target: Any, plain: dict[float, list[list[int]]]
) -> None:
    """Whatever this machine says, and whatever is decided then."""
    the_engine = engine(target, max_num_requests=3)
    assert the_engine.controller.cost_table is None
    ended = run_to_end(the_engine, PROMPTS, samplings(1.0), SpeculationParams("ngram"))
    assert [one.ids for one in ended] == plain[1.0]
    assert the_engine.controller.cost_table is not None


def test_in_one_batch_with_others(target: Any, plain: dict[float, list[list[int]]]) -> None:
    drafters = {"s": ScriptDrafter("half", whole(plain[1.0]), 2, seed=1)}
    the_engine = cheap(engine(target, drafters, max_num_requests=6, max_num_batched_tokens=9))
    speculations = [
        SpeculationParams("s", "auto"),
        SpeculationParams("s", 5),
        SpeculationParams("none"),
        SpeculationParams("ngram", "auto"),
        SpeculationParams("s", 0),
        SpeculationParams("ngram", 3),
    ]
    for turn in range(len(speculations)):
        turned = speculations[turn:] + speculations[:turn]
        ended = run_to_end(the_engine, PROMPTS, samplings(1.0), turned)
        assert [one.ids for one in ended] == plain[1.0]


@pytest.mark.parametrize("kind", ["right", "half", "wrong"])
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_greedy_is_plain_under_classical_rules(
    target: Any, plain: dict[float, list[list[int]]], rule: str, kind: str
) -> None:
    drafter = ScriptDrafter(kind, whole(plain[0.0]), 2, seed=2)
    the_engine = cheap(engine(target, {"s": drafter}, max_num_requests=3))
    for method in ("s", "ngram"):
        ended = run_to_end(
            the_engine, PROMPTS, samplings(0.0), SpeculationParams(method, "auto", rule)
        )
        assert [one.ids for one in ended] == plain[0.0]
        if method == "s":
            assert (accepted(ended) > 0) == (kind != "wrong")


TABLE = np.random.default_rng(0).normal(0, 1.5, (12, 12))
LONG = SamplingParams(1.0, seed=4, max_tokens=200)


def long_run(kind: str, alpha: float, num_runs: int) -> Ended:
    """The last of some runs of one long text."""
    text = table_text(TABLE, [3, 1], LONG, 200)
    drafter = ScriptDrafter(kind, [[3, 1, *text]], vocab_size=12)
    the_engine = cheap(engine(table_target(TABLE), {"s": drafter}), alpha)
    for _ in range(num_runs):
        ended = run_to_end(the_engine, [[3, 1]], LONG, SpeculationParams("s", "auto"))
        assert ended[0].ids == text
    return ended[0]


@pytest.mark.parametrize("num_runs", [1, 3])
def test_drafts_that_are_right_are_made(num_runs: int) -> None:
    """200 tokens in a few dozen steps."""
    stats = long_run("right", 0.02, num_runs).stats
    assert stats.num_accepted_tokens > 150
    assert stats.num_verify_steps < 200 / 4


def test_where_drafts_are_wrong_nothing_is_drafted_but_probes() -> None:
    stats = long_run("wrong", 0.1, 3).stats
    assert stats.num_accepted_tokens == 0 and stats.num_verify_steps == 199
    assert stats.num_draft_tokens <= 20


def test_where_rows_are_dear_right_drafts_are_not_made_either() -> None:
    """Each row costs a whole step."""
    stats = long_run("half", 1.0, 3).stats
    assert stats.num_draft_tokens < 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_among_free_members_in_a_ragged_batch(
    temperature: float, tmp_path: Path
) -> None:
    """Another model's drafts grafted onto free ones: the texts are those of plain decoding."""
    target = make_folder(tmp_path / "target")
    other = make_folder(tmp_path / "other", seed=1)
    members = ("ngram", "suffix", "draft-model")
    options = {"auto": {"members": members, "options": {"draft-model": {"model": str(other)}}}}
    prompts = ["one two three one two three one", "the", "boats and trees and boats and trees"]
    samplings = [
        SamplingParams(temperature, seed=index, max_tokens=16 + 5 * index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    with LLM(str(target), dtype="float32", drafter_options=options, max_num_requests=2) as llm:
        plain = llm.generate(prompts, samplings, SpeculationParams("none"))
        for number in (1, 6, "auto"):
            drafted = llm.generate(prompts, samplings, SpeculationParams("auto", number))
            assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
            proposed = {name for o in drafted for name in o.stats.members}
            assert number == "auto" or "draft-model" in proposed
