"""GGUF files: converted once, whole or not at all, and equal to what Transformers reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.cache import cache_folder
from foredraft.config import EngineConfig
from foredraft.engine.llm import LLM
from foredraft.errors import ModelLoadError
from foredraft.model import gguf as conversion
from foredraft.model.gguf import converted_folder
from foredraft.model.loader import load_target, resolve_source
from foredraft.params import SamplingParams
from tests.folders import CHAT_TEMPLATE, CONTEXT, make_gguf, make_model
from tests.texts import TEXTS

MANIFEST = "foredraft-manifest.json"
F32 = torch.float32


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", make_model())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _convert(file: Path, dtype: torch.dtype = F32) -> tuple[Path, list[str]]:
    said: list[str] = []
    return converted_folder(file, dtype, said.append), said


def _sentence(file: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_target(EngineConfig(model=str(file), dtype="float32"))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    return text


def _left(cache: Path) -> list[str]:
    """What lies beside the copies: nothing but locks, when all is well."""
    return sorted(p.name for p in (cache / "models").iterdir() if p.suffix == ".part")


# ---------------------------------------------------------------------- equal to what is read


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_the_copy_is_what_transformers_reads(
    is_tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_model(tie_word_embeddings=is_tied)
    file = make_gguf(tmp_path / "m.gguf", model)
    where: dict[str, Any] = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F32, **where)
    read_tokenizer = AutoTokenizer.from_pretrained(tmp_path, **where)
    folder, _ = _convert(file, dtype)
    copy = AutoModelForCausalLM.from_pretrained(folder)
    copy_tokenizer = AutoTokenizer.from_pretrained(folder)

    assert copy.dtype == dtype
    expected, got = read.state_dict(), copy.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor.to(dtype), got[name]), name
    head, embedding = copy.lm_head.weight, copy.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) == is_tied
    # And what is read is the model that was written, up to the rounding of its quantisation.
    for name, tensor in model.state_dict().items():
        assert float((got[name].float() - tensor).abs().max()) < 0.02, name

    ours, theirs = copy.config.to_dict(), read.config.to_dict()
    for key in ("dtype", "architectures", "_name_or_path", "quantization_config"):
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs
    content = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in content and content["architectures"] == ["LlamaForCausalLM"]
    assert copy.generation_config.eos_token_id == read.generation_config.eos_token_id == 2

    for text in TEXTS:
        ids = read_tokenizer(text)["input_ids"]
        assert copy_tokenizer(text)["input_ids"] == ids, text
        assert copy_tokenizer.decode(ids) == read_tokenizer.decode(ids)
    assert copy_tokenizer.chat_template == read_tokenizer.chat_template == CHAT_TEMPLATE
    assert copy_tokenizer.all_special_ids == read_tokenizer.all_special_ids
    assert "local_files_only" not in (folder / "tokenizer_config.json").read_text()


def test_it_loads_and_generates_as_transformers_does(file: Path) -> None:
    from transformers import AutoModelForCausalLM

    llm = LLM(file, dtype="float32", kv_cache_gb=0.1)
    target = llm.engine.target
    assert (target.max_model_len, target.eos_ids, target.dtype) == (CONTEXT, {2}, F32)
    output = llm.generate([{"role": "user", "content": "one two"}], SamplingParams(max_tokens=32))
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=F32)
    ids = torch.tensor([output[0].prompt_ids])
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
    )
    assert list(output[0].token_ids) == expected[0, ids.shape[1] :].tolist()


def test_a_copy_for_each_dtype(file: Path, cache: Path) -> None:
    folders = {_convert(file, dtype)[0] for dtype in (F32, torch.bfloat16, torch.float16)}
    assert len(folders) == 3
    assert {f.name.rsplit("-", 1)[1] for f in folders} == {"float32", "bfloat16", "float16"}
    assert load_target(EngineConfig(model=str(file), dtype="float16")).dtype == torch.float16


def test_a_file_of_the_same_name_and_other_content_gets_its_own_copy(
    file: Path, tmp_path: Path
) -> None:
    other = make_gguf(tmp_path / file.name, make_model(seed=1))
    assert _convert(file)[0] != _convert(other)[0]


# -------------------------------------------------------------------------- what the user sees


def test_one_sentence_the_first_time_and_none_after(
    file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, said = _convert(file)
    assert said == [f"Converting tiny.gguf once; the copy is kept in {cache / 'models'}."]
    assert folder.parent == cache / "models" and folder.name.startswith("tiny-")
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert _convert(file) == (folder, [])
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    assert resolve_source(str(file), F32, said.append) == str(folder)
    assert len(said) == 1


def test_transformers_bars_are_hidden_and_given_back(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    resolve_source(str(file), F32, lambda sentence: None)
    assert capfd.readouterr() == ("", "")
    assert reader.tqdm is bar


def test_a_scaling_that_is_lost_is_told_each_time(tmp_path: Path) -> None:
    import gguf

    writer_class = gguf.GGUFWriter

    class Writer(writer_class):  # type: ignore[misc, valid-type]
        def add_tokenizer_model(self, model: str) -> None:
            super().add_tokenizer_model(model)
            self.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        file = make_gguf(tmp_path / "m.gguf", make_model())
    for sentences in (2, 1):
        _, said = _convert(file)
        assert len(said) == sentences
        assert "yarn" in said[-1] and "rotary" in said[-1]


# --------------------------------------------------------------------------------- bad files


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"hello, world", b"{}", bytes(1000)):
        file.write_bytes(content)
        assert f"{file} is not a GGUF file" in _sentence(file)
    assert not cache.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.999])
def test_a_cut_file_is_refused_and_leaves_nothing(
    share: float, file: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: max(4, int(share * len(content)))])
    assert f"{cut} cannot be converted" in _sentence(cut)
    assert _left(cache) == [] and [p for p in (cache / "models").iterdir() if p.is_dir()] == []
    assert capfd.readouterr() == ("", "")


def test_a_file_without_one_of_its_tensors_is_refused(tmp_path: Path, cache: Path) -> None:
    """Transformers would fill the hole with random numbers."""
    model = make_model(num_hidden_layers=1)
    model.config.num_hidden_layers = 2
    sentence = _sentence(make_gguf(tmp_path / "m.gguf", model))
    assert "lacks 9 tensors" in sentence and "model.layers.1" in sentence
    assert [p for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_an_architecture_that_transformers_does_not_read_is_refused(
    file: Path, tmp_path: Path
) -> None:
    content = file.read_bytes().replace(b"llama", b"zorgl")
    (tmp_path / "m.gguf").write_bytes(content)
    sentence = _sentence(tmp_path / "m.gguf")
    assert "zorgl" in sentence and "architecture" in sentence


def test_a_cache_that_cannot_be_written_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "taken" / "cache"))
    sentence = _sentence(file)
    assert "FOREDRAFT_CACHE" in sentence and "Not a directory" in sentence


def test_a_full_disk_is_refused_and_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    sentence = _sentence(file)
    assert "No space left on device" in sentence and str(cache / "models") in sentence
    assert _left(cache) == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() != tmp_path / "foredraft"  # FOREDRAFT_CACHE comes first
    monkeypatch.delenv("FOREDRAFT_CACHE")
    assert cache_folder() == tmp_path / "foredraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "foredraft"


# ------------------------------------------------------------------------------ damaged copies


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a byte of the weights": lambda f: _flip(f / "model.safetensors"),
    "a byte of the tokenizer": lambda f: _flip(f / "tokenizer.json"),
    "the config deleted": lambda f: (f / "config.json").unlink(),
    "the weights deleted": lambda f: (f / "model.safetensors").unlink(),
    "the manifest deleted": lambda f: (f / MANIFEST).unlink(),
    "the manifest cut": lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:60]),
    "the manifest emptied": lambda f: (f / MANIFEST).write_text('{"format": 1, "files": {}}'),
    "the manifest no mapping": lambda f: (f / MANIFEST).write_text('{"format": 1, "files": 3}'),
    "the manifest of another version": lambda f: (f / MANIFEST).write_text(
        (f / MANIFEST).read_text().replace('"format": 1', '"format": 99')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_made_again(damage: str, file: Path, cache: Path) -> None:
    folder, _ = _convert(file)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    DAMAGES[damage](folder)
    again, said = _convert(file)
    assert again == folder
    assert len(said) == 1 and "tiny.gguf is damaged (" in said[0] and "again" in said[0]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert _left(cache) == []
    assert _convert(file) == (folder, [])


# --------------------------------------------------------------- killed, and two at the same time


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from foredraft.model import gguf

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "weights":
    import safetensors.torch
    save = safetensors.torch.save_file
    def half(tensors, path, **options):
        save(tensors, path, **options)
        path.write_bytes(path.read_bytes()[:5000])
        die()
    safetensors.torch.save_file = half
elif sys.argv[2] == "manifest":
    gguf._write_manifest = die
else:
    Path.rename = die
gguf.converted_folder(Path(sys.argv[1]), torch.float32, print)
"""


@pytest.mark.parametrize("moment", ["weights", "rename"])
def test_a_killed_conversion_is_never_used_and_cleaned_up(
    moment: str, file: Path, cache: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(file), moment], capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert len(_left(cache)) == 1  # half-made, under a name that nobody loads
    assert [p for p in (cache / "models").iterdir() if p.is_dir() and p.suffix != ".part"] == []
    # A conversion of something else removes it as well.
    folder, said = _convert(file, torch.bfloat16)
    assert _left(cache) == []
    folder, said = _convert(file)
    assert len(said) == 1 and "once" in said[0]
    assert _convert(file) == (folder, [])


_SLOW = """
import sys, time
from pathlib import Path
import torch
from foredraft.model import gguf

convert = gguf._convert
def slowly(*args):
    print("converting", flush=True)
    time.sleep(2)
    convert(*args)
gguf._convert = slowly
print(gguf.converted_folder(Path(sys.argv[1]), torch.float32, print))
"""


def test_two_processes_at_once_make_one_copy(file: Path, cache: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert "once" in first.stdout.readline()
    assert first.stdout.readline() == "converting\n"
    # While it is at work, its half-made copy is left alone by whoever cleans up, and waited for.
    other, _ = _convert(file, torch.bfloat16)
    assert len(_left(cache)) == 1
    folder, said = _convert(file)
    assert said == ["Another process converts tiny.gguf; waiting for it."]
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 0 and out.strip() == str(folder)
    assert _convert(file) == (folder, []) and _left(cache) == [] and other.is_dir()


def test_a_whole_copy_in_a_read_only_cache_is_used(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = _convert(file)

    def refuse(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(conversion, "FileLock", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    assert _convert(file) == (folder, [])
