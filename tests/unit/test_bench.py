"""The benchmarks run, and their figures are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foredraft.bench import adapt, drafters, heads, replay
from foredraft.bench.streams import Stream, find_questions
from foredraft.errors import InvalidRequestError
from foredraft.heads.checkpoint import save_head
from foredraft.heads.shape import shape_for
from foredraft.plan.trace import read_trace
from tests.folders import make_folder
from tests.heads import random_head


def _streams(num: int) -> list[Stream]:
    """Answers that repeat parts of their prompts, and of each other."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 500, 12) for _ in range(4)]
    found = []
    for _ in range(num):
        prompt = np.concatenate([rng.integers(0, 500, 5), phrases[0], phrases[1]])
        output = np.concatenate([phrases[1], rng.integers(0, 500, 8), phrases[2], phrases[0]])
        found.append(Stream("made up", prompt.astype(np.int64), output.astype(np.int64)))
    return found


@pytest.mark.parametrize("method", drafters._METHODS)
def test_a_replay_counts_what_agrees(method: str) -> None:
    texts = _streams(6)
    cold = replay.replayed(method, texts, 500, is_warm=False)
    warm = replay.replayed(method, texts, 500, is_warm=True)
    assert 0 < cold["accepted_per_step"] <= cold["drafted_per_step"]
    assert cold["by_category"] == {"made up": cold["accepted_per_step"]}
    assert cold["us_to_propose"] > 0 and 0 <= cold["us_to_update"] < cold["us_per_step"]
    if method == "suffix":
        assert warm["accepted_per_step"] > 1.5 * cold["accepted_per_step"]
    if method == "prediction":  # nine tokens in ten are foreseen
        assert cold["accepted_per_step"] > 3
    counts, whole, again = replay.replay(replay.drafter_of(method, 500), method, texts, 500)
    assert len(whole) == len(again) == sum(steps for _, steps, _ in counts)
    for stream, (accepted, steps, _) in zip(texts, counts, strict=True):
        # Every token but the first comes of a step, and every step brings one more than accepted.
        assert accepted + steps == len(stream.output_ids) - 1


def _cost(num_requests: int, num_rows: float) -> float:
    return 0.01 * (1 + 0.05 * (num_rows - 1))


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_reckoned_replay_is_worth_what_it_drafts(num_requests: int) -> None:
    """Plain decoding takes a step a token; who repeats itself is served sooner by drafts."""
    texts = _streams(9)
    rates = {
        method: replay.decided(method, texts, num_requests, _cost, 500)
        for method in ("none", "ngram", "suffix", "auto")
    }
    step = _cost(num_requests, float(num_requests))
    assert rates["none"][""] == pytest.approx(num_requests / step)
    assert rates["none"]["made up"] == rates["none"][""]
    assert rates["ngram"][""] > 1.05 * rates["none"][""]
    assert rates["suffix"][""] > 1.5 * rates["none"][""]  # it knows the texts before
    assert rates["auto"][""] > 0.9 * max(rates["ngram"][""], rates["suffix"][""])
    again = replay.decided("auto", texts, num_requests, _cost, 500)
    assert again == rates["auto"]  # not a clock, but arithmetic


def test_the_summary_of_bench_drafters_is_what_its_keys_say() -> None:
    def replay_cell(method: str, warm: bool, accepted: float, us: float) -> dict[str, object]:
        return {
            "what": "replay",
            "method": method,
            "warm": warm,
            "accepted_per_step": accepted,
            "us_per_step": us,
        }

    def speedups(what: str, **values: float) -> dict[str, object]:
        return {"what": what, "speedup": {"plain": 1.0, "none": 1.0, **values}}

    cells = [
        replay_cell("suffix", False, 1.2, 20.0),
        replay_cell("suffix", True, 12.0, 30.0),
        replay_cell("arctic-inference", False, 1.0, 16.0),
        replay_cell("arctic-inference", True, 11.5, 60.0),
        speedups("embedded model", ngram=1.2, suffix=2.0, recycling=0.99, lookahead=1.1, auto=1.9),
        speedups("embedded model", ngram=1.0, suffix=0.98, recycling=1.0, lookahead=1.0, auto=1.02),
        speedups("reckoned", ngram=1.2, suffix=1.6, auto=1.52),
        speedups("reckoned", ngram=0.9, suffix=0.8, auto=0.98),
        *(
            {"what": "long history", "method": m, "num_tokens": n, "us_per_step": us}
            for m in drafters._METHODS
            for n, us in ((1_000, 10.0), (64_000, 13.0))
        ),
    ]
    summary = drafters._summary(cells, {"speedup": {"prediction": 4.2}})
    assert summary == {
        "suffix_vs_arctic_accepted": pytest.approx(12.0 / 11.5),
        "suffix_vs_arctic_time": pytest.approx(20 / 16),
        "min_auto_vs_plain": 0.98,
        "min_portfolio_vs_plain": 1.02,
        "min_auto_vs_best_method": pytest.approx(0.95),
        "min_reckoned_vs_best_method": pytest.approx(0.95),
        "prediction_speedup": 4.2,
        "ngram_64k_vs_1k_time": pytest.approx(1.3),
        "suffix_64k_vs_1k_time": pytest.approx(1.3),
        "prediction_64k_vs_1k_time": pytest.approx(1.3),
    }
    alone = drafters._summary(
        [cell for cell in cells if cell.get("method") != "arctic-inference"],
        {"speedup": {"prediction": 4.2}},
    )
    assert alone["suffix_vs_arctic_accepted"] is alone["suffix_vs_arctic_time"] is None


def test_questions_that_are_not_there() -> None:
    with pytest.raises(InvalidRequestError, match=r"/no/such\.jsonl.*--data"):
        find_questions(Path("/no/such.jsonl"))


@pytest.mark.slow
def test_bench_adapt_on_the_embedded_model(tmp_path: Path) -> None:
    lines: list[str] = []
    report = adapt.run(
        "default",
        rounds=1,
        batches=(1, 2),
        kinds=("copy",),
        num_tokens=12,
        sim_batches=(1,),
        trace=lines.extend,
    )
    summary = report["summary"]
    assert set(summary) == {
        "min_auto_vs_best_fixed",
        "min_auto_vs_plain",
        "auto_vs_best_fixed_over_mix",
        "sim_regret",
        "sim_recovery_steps",
        "controller_share",
        "max_prediction_error_b1",
        "max_foreseen_error_b1",
        "peak_speedup",
        "ceiling",
    }
    assert summary["peak_speedup"] > 1 and 0 <= summary["sim_regret"] < 0.1
    assert 0 < summary["controller_share"] < 0.2
    json.dumps(report)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert {trace.num_requests for trace in read_trace(path)} == {1, 2}


def test_the_bench_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are what they are called: every side writes the same number of tokens."""
    from foredraft.model.loader import target_config

    model = make_folder(tmp_path / "model")
    config = target_config(str(model))
    folders = {}
    for kind in ("eagle3", "medusa"):
        save_head(random_head(shape_for(config, kind)), tmp_path / kind, "test", config)
        folders[kind] = str(tmp_path / kind)
    data = tmp_path / "question.jsonl"
    lines = [json.dumps({"turns": [f"one two {i} three", "more"]}) for i in range(20)]
    data.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(heads, "_PER_ROUND", 3)
    monkeypatch.setattr(heads, "_NUM_TOKENS", 12)
    with pytest.raises(InvalidRequestError, match="name one with --head METHOD=FOLDER"):
        heads.run(str(model), 1, data)
    report = heads.run(str(model), 1, data, folders)
    assert [(one["batch"], one["temperature"]) for one in report["cells"]] == [
        (1, 0.0),
        (1, 1.0),
        (8, 0.0),
        (8, 1.0),
    ]
    for cell in report["cells"]:
        assert cell["num_questions"] == 3 and cell["speedup"]["none"] == 1
        sides = {"none", "eagle3", "eagle3 chain", "medusa", "medusa chain", "auto"}
        if cell["temperature"]:
            sides |= {"eagle3 likeliest", "eagle3 traversal"}
        assert cell["speedup"].keys() == sides
        for one in cell["accepted"].values():
            assert one["acceptance_length"] >= 1
            assert one["survival"] == sorted(one["survival"], reverse=True)
    summary = report["summary"]
    for kind in folders:
        assert summary[f"{kind}_draft_step_cost"] > 0
        assert 0 <= summary[f"{kind}_first_position_acceptance"] <= 1
        assert summary[f"{kind}_speedup"] > 0 and summary[f"{kind}_acceptance_length"] >= 1
