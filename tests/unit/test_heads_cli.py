"""``foredraft heads``: what is found, what is dead, what other engines are given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.cli.main import main
from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import load_head, save_head
from foredraft.heads.export import export_head
from foredraft.heads.inspect import inspect_head
from foredraft.heads.shape import shape_for
from foredraft.train.run import Run, train
from foredraft.train.trainer import TrainConfig
from tests.folders import make_folder
from tests.heads import random_head, sizes

WORDS = [1, 4, 5, 9, 17, 20, 33, 40]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    def run_it(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run_it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that has learnt how the tiny target answers the prompts of the check."""
    from foredraft.cli.heads import _PROMPTS

    folder = tmp_path_factory.mktemp("head")
    data = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) for prompt in _PROMPTS * 3]
    data.write_text("\n".join(lines), encoding="utf-8")
    config = TrainConfig(
        learning_rate=3e-3, num_epochs=60, batch_tokens=2048, num_levels=3, num_held_out=4
    )
    quiet: Any = lambda *args: None  # noqa: E731
    train(
        Run(
            "eagle3",
            str(model),
            data,
            folder / "head",
            config,
            answer_tokens=32,
            draft_vocab_size=160,
        ),
        quiet,
        quiet,
        quiet,
    )
    return folder / "head"


def test_a_head_is_described(run: Command, head: Path, model: Path) -> None:
    code, out, err = run("heads", "inspect", head, "--model", model)
    assert (code, err) == (0, "")
    assert "kind     eagle3" in out and "words    160 of 352" in out
    assert "reads    inputs of layers 1, 1, 2 (as vLLM counts)" in out
    assert "outputs of layers 0, 0, 1 (as SGLang counts)" in out
    found = json.loads(run("heads", "inspect", head, "--model", model, "--json")[1])
    assert found["kind"] == "eagle3" and found["inputs_of"] == [1, 1, 2]
    assert found["num_bytes"] == 2 * found["num_parameters"] > 0


def test_a_head_that_learnt_is_alive_and_a_random_one_is_dead(
    run: Command, head: Path, model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", model, "--max-tokens", 24)
    code, out, _ = run("heads", "check", head, *arguments)
    assert code == 0 and not out.startswith("dead")
    found = json.loads(run("heads", "check", head, *arguments, "--json")[1])
    assert found["verdict"] in ("alive", "weak") and found["num_drafts"] > 8
    survival = found["survival"]
    assert survival == sorted(survival, reverse=True) and survival[0] > 0.1
    config = load_config(model)
    learnt = load_head(head, config)
    save_head(random_head(learnt.shape), tmp_path / "random", "test", config)
    code, out, _ = run("heads", "check", tmp_path / "random", *arguments)
    assert code == 0 and out.startswith("dead") and "made for another, or reads other" in out


def load_config(model: Path) -> Any:
    from foredraft.model.loader import target_config

    return target_config(str(model))


@pytest.mark.parametrize("to", ["vllm", "sglang", "specforge", "speculators"])
def test_every_layout_is_the_same_head(
    run: Command, to: str, head: Path, model: Path, tmp_path: Path
) -> None:
    command = "convert" if to == "speculators" else "export"
    code, out, err = run("heads", command, head, tmp_path / to, "--to", to, "--model", model)
    assert (code, err) == (0, "") and to in out
    config = load_config(model)
    before, after = load_head(head, config), load_head(tmp_path / to, config)
    assert before.shape == after.shape and torch.equal(before.d2t, after.d2t)
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor)
    tensors = load_file(tmp_path / to / "model.safetensors")
    prefix = "layers.0." if to == "speculators" else "midlayer."
    assert f"{prefix}self_attn.q_proj.weight" in tensors and "d2t" in tensors and "t2d" in tensors
    written = json.loads((tmp_path / to / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 1, 2]
    if to == "speculators":
        assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
        assert written["speculators_config"]["verifier"]["name_or_path"] == str(model)
        assert written["transformer_layer_config"]["hidden_size"] == 64
    else:
        assert written["architectures"] == ["LlamaForCausalLMEagle3"]


def refused(run: Command, *arguments: Any) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_what_cannot_be_done_is_said(run: Command, head: Path, model: Path, tmp_path: Path) -> None:
    assert "holds no config.json" in refused(run, "heads", "inspect", tmp_path, "--model", model)
    told = refused(run, "heads", "export", head, head, "--to", "vllm", "--model", model)
    assert "is the folder that is read; name another" in told
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    told = refused(
        run, "heads", "export", head, tmp_path / "full", "--to", "vllm", "--model", model
    )
    assert "is not empty; name a folder that is not there yet" in told
    told = refused(run, "heads", "export", head, tmp_path / "x", "--to", "tgi", "--model", model)
    assert "to is 'tgi'; allowed is one of specforge, sglang, vllm, speculators" in told
    assert not (tmp_path / "x").exists()
    told = refused(run, "heads", "check", head, "--max-tokens", 0, "--model", model)
    assert "max_tokens is 0; allowed is 1 to 4096" in told
    config = sizes(50)
    for kind, to, message in (
        ("mtp", "vllm", "vllm reads no mtp heads by themselves"),
        ("eagle", "speculators", "is written for eagle3; this is eagle"),
        ("medusa", "vllm", "vllm reads no medusa heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_head(random_head(shape_for(config, kind)), to, tmp_path / "y", "m", config)
    export_head(random_head(shape_for(config, "medusa")), "specforge", tmp_path / "z", "m", config)
    assert inspect_head(tmp_path / "z", config).kind == "medusa"


def test_what_looks_wrong_is_said(tmp_path: Path) -> None:
    config = sizes(50, num_layers=30)
    shape = shape_for(config, "eagle3", len(WORDS))
    head = random_head(shape, words=WORDS)
    save_head(head, tmp_path / "good", "test", config)
    assert inspect_head(tmp_path / "good", config).warnings == ()
    other = dataclasses.replace(shape, feature_layers=(27, 16, 3))
    save_head(random_head(other, words=WORDS), tmp_path / "layers", "test", config)
    found = inspect_head(tmp_path / "layers", config)
    assert found.outputs_of == (26, 15, 2)
    assert "reads inputs of layers 27, 16, 3; most heads" in found.warnings[0]
    assert "not in rising order" in found.warnings[1]
    weights = tmp_path / "good" / "model.safetensors"
    tensors = load_file(weights)
    tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
    tensors["norm.weight"][0] = torch.nan
    save_file(tensors, weights)
    found = inspect_head(tmp_path / "good", config)
    assert any("fc.weight is zero throughout" in one for one in found.warnings)
    assert any("norm.weight holds numbers that are not finite" in one for one in found.warnings)
