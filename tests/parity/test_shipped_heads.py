"""Heads that ship: found by name, small enough, with a record; texts are plain decoding's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams, SpeculationParams
from foredraft.heads import trained

TRAINED = Path(__file__).parents[2] / "trained"
FOLDERS = sorted(path.parent for path in TRAINED.glob("*/*/config.json"))
KINDS = sorted(folder.name for folder in FOLDERS)
PROMPTS = [
    [{"role": "user", "content": text}]
    for text in (
        "Name three fruits.",
        "Why is the sky blue? Answer in two sentences, and then say what colour it has at dusk.",
        "Write a poem about a lighthouse.",
        "What is two and two?",
        "Translate into French: the cat sleeps on the old chair by the window, and the dog waits.",
    )
]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("default", dtype="float32", device="cpu", max_num_requests=3) as made:
        yield made


def test_what_ships_is_small_and_says_where_it_comes_from() -> None:
    assert "eagle3" in KINDS
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in FOLDERS]
    assert max(sizes) <= 24e6 and sum(sizes) <= 64e6
    for folder in FOLDERS:
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}
        record = json.loads((folder / "run.json").read_text())
        assert record["command"].startswith("foredraft train") and len(record["data_sha256"]) == 64
        assert record["held_out_survival"][0] > 0.3
        assert (folder.parent / "README.md").is_file()  # what was trained on what, and licences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_plain_decodings(kind: str, temperature: float, llm: LLM) -> None:
    """By name alone, trees and chains, five requests of which three run at once."""
    samplings = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=20 + 3 * index)
        for index in range(len(PROMPTS))
    ]
    prompts: list[Any] = list(PROMPTS)
    plain = llm.generate(prompts, samplings, SpeculationParams("none"), progress=False)
    for number, rule in ((8, "walk"), (3, "block")) if temperature else ((8, "walk"), (3, "walk")):
        drafted = llm.generate(
            prompts, samplings, SpeculationParams(kind, number, rule), progress=False
        )
        if rule == "walk":
            assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
        assert sum(o.stats.num_accepted_tokens for o in drafted) > 10


def test_it_is_found_by_name(llm: LLM) -> None:
    assert trained.shipped_head("eagle3", llm.engine.target.model.config) == str(
        next(folder for folder in FOLDERS if folder.name == "eagle3")
    )
    output = llm.generate(
        PROMPTS[2], SamplingParams(max_tokens=60), SpeculationParams("auto"), progress=False
    )[0]
    plain = llm.generate(
        PROMPTS[2], SamplingParams(max_tokens=60), SpeculationParams("none"), progress=False
    )[0]
    assert output.token_ids == plain.token_ids
