"""The benchmarks run, and their figures are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foredraft.bench import adapt, drafters
from foredraft.bench.streams import Stream, find_questions
from foredraft.errors import InvalidRequestError
from foredraft.plan.trace import read_trace


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
    cold = drafters._replayed(method, texts, 500, is_warm=False)
    warm = drafters._replayed(method, texts, 500, is_warm=True)
    assert 0 < cold["accepted_per_step"] <= cold["drafted_per_step"]
    assert cold["by_category"] == {"made up": cold["accepted_per_step"]}
    if method == "suffix":
        assert warm["accepted_per_step"] > 1.5 * cold["accepted_per_step"]
    counts = drafters._replay(drafters._drafter(method, 500), texts, [])
    for stream, (accepted, steps, _) in zip(texts, counts, strict=True):
        # Every token but the first comes of a step, and every step brings one more than accepted.
        assert accepted + steps == len(stream.output_ids) - 1


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
