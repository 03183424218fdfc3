"""Plans written for other engines: only names that these engines have."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from typing import Any

import pytest

from foredraft.errors import PlanError
from foredraft.plan import make_plan
from foredraft.plan.engines import ENGINES, METHODS, EngineConfig, emit
from foredraft.plan.result import Plan
from foredraft.plan.roofline import Roofline, find_hardware
from foredraft.plan.shape import ModelShape
from tests.unit.test_plan_planner import make_profile
from tests.unit.test_plan_roofline import LLAMA

# What each engine can be told, by method; the rest gets a sentence.
ABLE = {
    "vllm": {"ngram", "suffix", "draft-model", "eagle", "eagle3", "mtp"},
    "sglang": {"ngram", "draft-model", "eagle", "eagle3", "mtp"},
    "tensorrt-llm": {"ngram", "suffix", "draft-model", "eagle3", "mtp"},
    "llama.cpp": {"ngram", "draft-model", "eagle3", "mtp"},
    "tgi": {"ngram", "medusa"},
    "ollama": {"draft-model", "mtp"},
}
VLLM_FIELDS = {
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
    "num_speculative_tokens_per_batch_size",
}  # fmt: skip
FLAGS = {
    "sglang": {
        "-m", "--model-path", "--speculative-algorithm", "--speculative-draft-model-path",
        "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
        "--speculative-adaptive", "--speculative-adaptive-config",
    },
    "llama.cpp": {
        "-m", "--spec-type", "--spec-draft-model", "--spec-draft-n-max",
        "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m",
    },
    "tgi": {"--model-id", "--speculate"},
}  # fmt: skip


def _plan(method: str, **options: Any) -> Plan:
    options = {"acceptance": 0.8, "alpha": 0.1, "t_draft": 0.01} | options
    return make_plan(method=method, **options)


def _by_batch(method: str) -> Plan:
    """Fewer draft tokens at larger batch, none at 16 any more."""
    profile = make_profile({1: 0.05, 4: 0.2, 16: 0.9})
    return make_plan(method=method, acceptance=0.7, profile=profile, t_draft=0.01)


def _vllm(config: EngineConfig) -> dict[str, Any]:
    words = shlex.split(config.text)
    assert words[:4] == ["vllm", "serve", "MODEL", "--speculative-config"]
    content: dict[str, Any] = json.loads(words[4])
    assert set(content) <= VLLM_FIELDS
    return content


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [_plan, _by_batch])
def test_every_engine_is_told_or_says_why_not(engine: str, method: str, make: Any) -> None:
    plan = make(method)
    config = emit(plan, engine)
    text = config.render()
    assert plan.verdict in text
    if method not in ABLE[engine]:
        assert not config.text and "cannot do this: " in text
        return
    assert config.text and "cannot do this" not in text
    best = plan.first.best.num_speculative_tokens
    if (engine, method) == ("sglang", "ngram"):
        best += 1  # counted with the root
    assert re.search(rf"\b{best}\b", config.text)
    words = [word for word in shlex.split(config.text) if word.startswith("-")]
    assert set(words) <= FLAGS.get(engine, set(words))
    assert ("DRAFT_MODEL" in config.text) == ("put the draft model" in text)


def test_vllm() -> None:
    assert _vllm(emit(_plan("ngram"), "vllm")) == {
        "method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }  # fmt: skip
    draft = _vllm(emit(_plan("draft-model"), "vllm", "small one"))
    assert (draft["method"], draft["model"]) == ("draft_model", "small one")
    assert _vllm(emit(_plan("mtp"), "vllm")).keys() == {"method", "num_speculative_tokens"}


def test_vllm_by_batch_starts_at_one_without_gaps_and_ends_without_a_draft() -> None:
    plan = _by_batch("ngram")
    content = _vllm(emit(plan, "vllm"))
    table = content["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1 and table[-1][2] == 0
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(table))
    assert table[-1][0] == plan.break_even_batch
    assert content["num_speculative_tokens"] == max(n for _, _, n in table)


def test_vllm_knows_these_fields() -> None:
    vllm = pytest.importorskip("vllm.config", reason="vllm is not installed")
    assert set(vllm.SpeculativeConfig.__dataclass_fields__) >= VLLM_FIELDS


def test_sglang_by_batch() -> None:
    config = emit(_by_batch("eagle3"), "sglang", "head")
    tiers = json.loads(config.files["adaptive.json"])
    first = tiers["1"]["candidate_steps"][0]
    assert f"--speculative-num-steps {first} " in config.text
    assert f"--speculative-num-draft-tokens {first + 1} " in config.text
    assert list(tiers.values())[-1] == {"candidate_steps": [0]}
    assert "adaptive.json" in config.text and "# adaptive.json" in config.render()
    assert "cannot change the number by batch size" in emit(_by_batch("ngram"), "sglang").render()
    draft = emit(_by_batch("draft-model"), "sglang", "small")
    assert "adaptive" not in draft.text and "with EAGLE only" in draft.render()


def test_tensorrt_by_batch() -> None:
    text = emit(_by_batch("eagle3"), "tensorrt-llm", "head").text
    schedule = dict(re.findall(r"^    (\d+): (\d+)$", text, re.MULTILINE))
    assert len(schedule) > 1 and "0" not in schedule.values()
    assert "max_concurrency" not in text  # the two exclude each other
    assert 'speculative_model: "head"' in text
    assert "decoding_type: Eagle3" in text


def test_ollama_is_a_modelfile() -> None:
    lines = emit(_plan("mtp"), "ollama", "./mtp.gguf").text.splitlines()
    assert [line.split()[0] for line in lines] == ["FROM", "DRAFT", "PARAMETER"]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_off_is_without_any_option(engine: str) -> None:
    config = emit(_plan("ngram", acceptance=0.1), engine)
    assert not config.text and "without any speculative option" in config.render()


def test_bad_input() -> None:
    plan = _plan("ngram")
    with pytest.raises(PlanError, match="engine is 'abacus'; allowed is one of vllm"):
        emit(plan, "abacus")
    with pytest.raises(PlanError, match="method ngram has none"):
        emit(plan, "vllm", "draft")
    own = make_plan(method="mine", acceptance=0.8, alpha=0.1, draft_cost="once")
    with pytest.raises(PlanError, match="other engines have no name"):
        emit(own, "vllm")


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_a_schedule_goes_as_far_as_the_verdict(engine: str) -> None:
    """Not to the largest batch that was looked at alone: beyond it drafting would be off."""
    roofline = Roofline(ModelShape.from_config(LLAMA), find_hardware("H100-SXM"))
    plan = make_plan(acceptance=0.7, roofline=roofline, method="eagle3", t_draft=0.04)
    assert plan.break_even_batch is None and plan.most_known_batch is not None
    assert plan.most_known_batch > max(row.num_requests for row in plan.batches)
    assert str(plan.most_known_batch) in emit(plan, engine).text


def test_a_module_of_its_own_is_named_to_tensorrt() -> None:
    plan = _plan("mtp", draft_cost="per_token")
    assert "org/HEAD" in emit(plan, "tensorrt-llm", "org/HEAD").text
    assert "speculative_model" not in emit(plan, "tensorrt-llm").text
