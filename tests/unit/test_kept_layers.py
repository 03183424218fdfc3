"""Draft models of the target's own layers: what they are, on disk, in the engine, elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.heads.draft_model import (
    KeptLayers,
    is_kept_layers,
    load_draft,
    save_draft,
    spread_layers,
)
from foredraft.heads.output_law import OutputLaw
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.train.features import FeatureReader
from foredraft.train.rerun import draft_losses
from foredraft.train.texts import Text
from foredraft.train.unroll import Options
from tests.tiny import CONTEXT, VOCAB, engine, family_model, family_target, run, run_to_end

METHOD = "draft-model"
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, VOCAB, n).tolist() for n in (50, 1, 23, 9, 37)]
FEW = torch.arange(3, VOCAB, 2)


def raw(family: str = "llama") -> Target:
    return family_target(family, packs=False)


def saved(folder: Path, layers: list[int], words: Any = None, whole: bool = False) -> Path:
    target = raw()
    save_draft(KeptLayers(target, layers, words), folder, target, whole)
    return folder


def drafter(folder: Path, target: Target, **options: Any) -> DraftModelDrafter:
    context = DrafterContext(
        VOCAB, CONTEXT, method=METHOD, max_num_requests=8, target=target, tokenizer=None
    )
    return DraftModelDrafter(DraftModelConfig(str(folder), **options), context)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_packed", [True, False])
def test_with_all_layers_and_words_it_is_the_target(
    is_packed: bool, temperature: float, tmp_path: Path
) -> None:
    target = family_target("llama", packs=is_packed)
    num_layers = int(target.model.config.num_hidden_layers)
    folder = saved(tmp_path / "all", list(range(num_layers)))
    sampling = [
        SamplingParams(temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(5)
    ]
    plain = run(engine(target), PROMPTS, sampling, SpeculationParams("none"))
    the_engine = engine(target, {METHOD: drafter(folder, target)}, max_num_requests=3)
    ended = run_to_end(the_engine, PROMPTS, sampling, SpeculationParams(METHOD, 4))
    assert [one.ids for one in ended] == plain
    rates = [one.stats.num_accepted_tokens / one.stats.num_draft_tokens for one in ended]
    assert min(rates) > 0.8  # its layers were rounded to bfloat16


@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize(
    ("verification", "temperature"), [("walk", 0.0), ("walk", 0.9), ("traversal", 0.9)]
)
def test_it_drafts_its_words_alone(
    verification: str, temperature: float, children: int, tmp_path: Path
) -> None:
    target = family_target("llama")
    folder = saved(tmp_path / "few", [0], FEW)
    own = drafter(folder, target, num_children=children)
    seen: set[int] = set()
    propose = own.propose

    def watch(plan: Any, budgets: Any) -> Any:
        batch = propose(plan, budgets)
        seen.update(batch.token_ids.tolist())
        return batch

    own.propose = watch  # type: ignore[method-assign]
    sampling = [
        SamplingParams(temperature, seed=i, max_tokens=30, ignore_eos=True) for i in range(5)
    ]
    the_engine = engine(target, {METHOD: own}, max_num_requests=3)
    speculation = SpeculationParams(METHOD, 5, verification)
    ended = run_to_end(the_engine, PROMPTS, sampling, speculation)
    assert len(seen) > 5 and seen <= set(FEW.tolist())
    assert all(len(one.ids) == 30 and one.error is None for one in ended)
    if verification == "walk":
        plain = run(engine(target), PROMPTS, sampling, SpeculationParams("none"))
        assert [one.ids for one in ended] == plain


def test_it_costs_its_layers_and_its_words(tmp_path: Path) -> None:
    target = family_target("llama")
    made = drafter(saved(tmp_path / "few", [1], FEW), target).model
    draft = KeptLayers(raw(), [1])
    parts = sum(p.numel() for p in draft.body.layers.parameters())
    size = int(target.model.config.hidden_size)
    assert made.weight_bytes == 4 * (parts + size + len(FEW) * size)
    assert made.model.get_input_embeddings() is target.model.get_input_embeddings()
    file = load_file(tmp_path / "few" / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in file)


def test_written_whole_it_is_a_model_for_any_program(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / "whole", [0, 1], FEW, whole=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPTS[2]])
    draft = copy.deepcopy(KeptLayers(raw(), [0, 1]).model)
    for parameter in draft.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, draft(ids).logits, rtol=1e-4, atol=1e-4)
    assert is_kept_layers(folder) and not is_kept_layers(tmp_path)


def test_survival_is_agreement_on_one_token_after_another() -> None:
    """Against a loop over every place of every text."""
    target = raw()
    draft = KeptLayers(target, [0], FEW)
    texts = [Text(RNG.integers(3, VOCAB, n), 4) for n in (9, 14, 6)]
    batch = FeatureReader(target, (int(target.model.config.num_hidden_layers),), 64).read(texts)
    weight = target.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        found = draft_losses(draft, batch, OutputLaw(weight), Options(3, prompt_share=1.0))
        measured = draft_losses(
            draft, batch, OutputLaw(weight), Options(3, prompt_share=0.0, is_measuring=True)
        )
    losses, accepted, counted = [], [0] * 3, [0] * 3
    for text in texts:
        ids = torch.from_numpy(text.token_ids)[None]
        with torch.no_grad():
            mine = draft.body(input_ids=ids).last_hidden_state[0] @ weight[FEW].T
            theirs = family_model("llama")(ids).logits[0]
        law = torch.softmax(theirs[:, FEW], -1)
        losses += (-(law * torch.log_softmax(mine, -1)).sum(-1)).tolist()
        agrees = FEW[mine.argmax(-1)] == theirs.argmax(-1)
        for begin in range(text.num_prompt - 1, len(agrees)):
            for level in range(3):
                if begin + level < len(agrees):
                    accepted[level] += bool(agrees[begin : begin + level + 1].all())
                    counted[level] += 1
    assert float(found.total) == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert measured.accepted.tolist() == accepted and measured.counted.tolist() == counted


def test_layers_are_spread() -> None:
    assert spread_layers(30, 2) == [0, 29] and spread_layers(30, 1) == [29]
    assert spread_layers(30, 4) == [0, 10, 19, 29] and spread_layers(3, 3) == [0, 1, 2]
    with pytest.raises(ConfigError, match="4 layers are to be kept; allowed is 1 to 3"):
        spread_layers(3, 4)
    with pytest.raises(ConfigError, match=r"are \[0, 7\]; allowed are some of 0 to"):
        KeptLayers(raw(), [0, 7])
    with pytest.raises(ConfigError, match="each once"):
        KeptLayers(raw(), [1, 1])


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3", "gemma3"])
def test_other_families_keep_their_layers(family: str, tmp_path: Path) -> None:
    """With whatever attention they need, and each layer's own kind."""
    target = raw(family)
    num_layers = int(target.model.config.num_hidden_layers)
    draft = KeptLayers(target, list(range(num_layers)))
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        mine, theirs = draft.model(ids).logits, family_model(family)(ids).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    one = KeptLayers(target, [num_layers - 1])
    kinds = getattr(target.model.config, "layer_types", None)
    if kinds:
        assert one.model.config.layer_types == kinds[-1:]


def test_where_it_cannot_share_the_targets_ends(tmp_path: Path) -> None:
    target = family_target("llama")
    bare = saved(tmp_path / "bare", [0])
    split = dataclasses.replace(target, num_ranks=2)
    with pytest.raises(ModelLoadError, match="was written without its embedding"):
        drafter(bare, split)
    with pytest.raises(ConfigError, match="shares the embedding of the target, which is"):
        drafter(bare, target, dtype="bfloat16")
    whole = saved(tmp_path / "whole", [0], FEW, whole=True)
    text = json.loads((whole / "config.json").read_text())
    text["target_sizes"]["num_hidden_layers"] = 77  # of another target: a model like any other
    (whole / "config.json").write_text(json.dumps(text))
    made = drafter(whole, target).model
    assert made.model.get_input_embeddings() is not target.model.get_input_embeddings()


def test_a_family_that_is_built_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps its layers elsewhere"):
        KeptLayers(raw("gpt2"), [0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "model.layers.0.mlp.up_proj.weight is missing, left over or of another shape"),
        ("extra", "more is missing, left over"),
        ("shape", "model.norm.weight is missing, left over or of another shape"),
        ("words", "its words are no ids of the target's vocabulary"),
        ("target", "was made from a target of sizes"),
        ("damaged", "cannot be read"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change: str, message: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "draft", [0], FEW)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    if change == "missing":
        del tensors["model.layers.0.mlp.up_proj.weight"]
    elif change == "extra":
        tensors["more"] = torch.zeros(1)
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, weights)
    if change == "words":
        text = json.loads(config.read_text())
        text["foredraft_draft"]["words"][3] = VOCAB
        config.write_text(json.dumps(text))
    if change == "target":
        text = json.loads(config.read_text())
        text["target_sizes"]["hidden_size"] = 7
        config.write_text(json.dumps(text))
    elif change == "damaged":
        weights.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_draft(folder, family_target("llama"))
    assert "\n" not in str(caught.value)


def test_the_one_that_ships_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target("llama")
    with pytest.raises(ConfigError, match="needs a draft model; name one"):
        DraftModelDrafter(
            DraftModelConfig(), DrafterContext(VOCAB, CONTEXT, method=METHOD, target=target)
        )
    saved(tmp_path / "tiny" / METHOD, [0])
    monkeypatch.setattr("foredraft.heads.trained._PLACES", (tmp_path,))
    made = DraftModelDrafter(
        DraftModelConfig(), DrafterContext(VOCAB, CONTEXT, method=METHOD, target=target)
    )
    assert made.model.name == str(tmp_path / "tiny" / METHOD)
