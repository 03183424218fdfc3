"""Two ranks write what one writes: torchrun, gloo, and Transformers' own plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, EngineConfig, SamplingParams, SpeculationParams
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError, ModelLoadError
from tests.folders import make_folder
from tests.tiny import family_target

PROMPTS = ["one two three one two three one two", "the", "boats and trees and boats and trees and"]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "prompt_logprobs": 1},
]
METHODS = ["none", "ngram", "suffix"]

PROGRAM = """
import json, sys
from tests.contract.test_tensor_parallel import texts
folder, layout, out = sys.argv[1:]
found = texts(folder, tensor_parallel_size=2, kv_layout=layout)
with open(out, "x") as file:  # of the first rank alone: nobody else comes this far
    json.dump(found, file)
"""


def texts(folder: str, **options: Any) -> list[list[int]]:
    """What every method writes for every prompt and sampling, in memory that makes them wait."""
    llm = LLM(folder, dtype="float32", device="cpu", max_num_requests=3, **options)
    found = []
    for method in METHODS:
        for _ in range(2):  # the second time from kept beginnings
            outputs = llm.generate(
                PROMPTS * 3,
                [SamplingParams(max_tokens=20, **SAMPLINGS[i // 3]) for i in range(9)],
                SpeculationParams(method, 0 if method == "none" else 5),
                progress=False,
            )
            found += [list(output.token_ids) for output in outputs]
    llm.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("split") / "model")


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "blocks"])
def test_two_ranks_write_what_one_writes(folder: Path, layout: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(program), str(folder), layout, str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == texts(str(folder))


def test_a_number_of_ranks_that_was_not_started_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2") as caught:
        Engine(EngineConfig(str(folder), tensor_parallel_size=2))
    assert "\n" not in str(caught.value)


def test_heads_that_cannot_be_split_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ModelLoadError, match=r"has 2 key heads in a layer.*a divisor of 2"):
        Engine(EngineConfig(str(folder), tensor_parallel_size=3))


def test_a_loaded_target_is_not_split_anew() -> None:
    with pytest.raises(ConfigError, match="is 2, and the loaded target is split over 1"):
        Engine(EngineConfig(tensor_parallel_size=2), family_target("llama"))
