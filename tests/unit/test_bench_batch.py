"""The serving bench, on a tiny model, beside a vLLM that is played by a module of its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.bench import batch, workloads
from foredraft.bench.vllm_side import SIDES, VllmSide, VllmSides
from foredraft.cli.main import main as command
from foredraft.errors import InvalidRequestError
from tests.folders import make_folder

PLAYED = '''
"""Serves by counting: a token a step for each request, and no suffix decoding."""
import json, pathlib

print("chatter that is no answer")

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens

class Output:
    def __init__(self, num_tokens):
        self.finished = True
        self.outputs = [type("O", (), {"token_ids": [1] * num_tokens})]

class Engine:
    def __init__(self, options):
        self.running, self.options, self.most = {}, options, 0
    def add_request(self, name, prompt, sampling):
        assert name not in self.running and prompt["prompt_token_ids"]
        self.running[name] = [0, sampling.max_tokens]
        self.most = max(self.most, len(self.running))
        pathlib.Path(__file__).with_name("most").write_text(str(self.most))
    def step(self):
        found = []
        for name, counts in list(self.running.items()):
            counts[0] += 1
            if counts[0] == counts[1]:
                found.append(Output(counts[1]))
                del self.running[name]
        return found

class LLM:
    def __init__(self, model, dtype, speculative_config=None, **options):
        assert dtype == "float32" and pathlib.Path(model, "config.json").is_file()
        if speculative_config and speculative_config["method"] == "suffix":
            raise ImportError("no arctic_inference here")
        self.llm_engine = Engine(options)
'''


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "played"
    folder.mkdir()
    (folder / "vllm.py").write_text(PLAYED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompts_of(kind: str, num: int) -> list[list[dict[str, str]]]:
        return [workloads.as_chat(f"{kind} {i}") for i in range(num)]

    monkeypatch.setattr(workloads, "prompts_of", prompts_of)
    for name, value in (
        ("_CONCURRENCY", (1, 16)),
        ("_CONTINUOUS_AT", ()),
        ("_NUM_TOKENS", 6),
        ("_LEAST_REQUESTS", 2),
        ("_TIMES_OVER", 1),
        ("_PREFIX_TOKENS", 64),
        ("_PREFIX_REQUESTS", 2),
        ("_BOUND_TOKENS", 700),
        ("_BOUND_REQUESTS", 2),
    ):
        monkeypatch.setattr(batch, name, value)


@pytest.mark.usefixtures("short")
def test_the_bench_serves_every_side(
    tmp_path: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_folder(tmp_path / "model", max_position_embeddings=1024)
    report = batch.run(str(model), 1, Path(sys.executable))
    said = capsys.readouterr().err
    assert "vllm suffix does not run here, so it is left out (vLLM ended (ImportError" in said
    served = [cell for cell in report["cells"] if cell["what"] == "served"]
    assert [(cell["kind"], cell["concurrency"]) for cell in served] == [
        ("copy", 1),
        ("copy", 16),
        ("chat", 1),
        ("chat", 16),
    ]
    for cell in served:
        sides = {"plain", "auto", "transformers", "vllm", "vllm n-gram"}
        assert cell["speedup"].keys() == sides and cell["speedup"]["plain"] == 1
        assert all(cell["tokens_per_s"][side]["median"] > 0 for side in sides)
        assert cell["latency_s"].keys() == {"plain", "auto"}
    summary = report["summary"]
    assert summary.keys() == {
        "min_auto_vs_plain",
        "plain_b16_vs_transformers",
        "prefix_hit_saving",
        "peak_memory_vs_bound",
    }
    assert summary["min_auto_vs_plain"] == min(cell["speedup"]["auto"] for cell in served)
    assert summary["peak_memory_vs_bound"] <= 1
    assert (vllm / "most").read_text() == "16", "as many at once as were asked for, and no more"
    json.dumps(report)


@pytest.mark.usefixtures("vllm")
def test_the_command_hands_the_environment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def noted(*given: Any, **options: Any) -> dict[str, Any]:
        asked.append((given, options))
        return {"bench": "batch"}

    monkeypatch.setattr(batch, "run", noted)
    model = make_folder(tmp_path / "model")
    arguments = ["bench", "batch", "--model", str(model), "--rounds", "2"]
    for more, expected in (([], None), (["--vllm", sys.executable], Path(sys.executable))):
        with pytest.raises(SystemExit) as left:
            command([*arguments, *more])
        assert not left.value.code
        assert asked.pop() == ((str(model), 2), {"vllm": expected})
        assert json.loads(capsys.readouterr().out) == {"bench": "batch"}


@pytest.fixture
def side(tmp_path: Path) -> Callable[..., VllmSide]:
    model = make_folder(tmp_path / "model")

    def make(python: str = sys.executable, **options: Any) -> VllmSide:
        return VllmSide(Path(python), str(model), "float32", 64, 4, SIDES["vllm"], tmp_path / "log")

    return make


@pytest.mark.usefixtures("vllm")
def test_a_side_serves_again_and_ends(side: Callable[..., VllmSide]) -> None:
    one = side()
    prompts = [np.arange(3, 3 + size) for size in (4, 2, 7)]
    assert one.serve(prompts, 2, 5) > 0 and one.serve(prompts[:1], 1, 3) > 0
    one.close()
    assert one._process.poll() is not None


def test_what_does_not_start_is_said(
    side: Callable[..., VllmSide], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"vLLM ended .ModuleNotFoundError"):
        side()
    with pytest.raises(InvalidRequestError, match=r"which cannot be run .*; name the"):
        side("/no/such/python")
    with pytest.raises(InvalidRequestError, match="vLLM ended"):  # it was asked for
        VllmSides(
            Path(sys.executable), "m", "float32", 64, 4, tmp_path, lambda _: None, lambda _: None
        )
