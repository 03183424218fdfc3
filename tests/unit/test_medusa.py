"""Medusa heads: the paper's sums, trees of the likeliest combinations, files of others."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.medusa import MedusaConfig, MedusaDrafter, _likeliest
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.heads.checkpoint import load_medusa, save_head
from foredraft.heads.output_law import OutputLaw
from foredraft.heads.shape import shape_for
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.train.features import Batch
from foredraft.train.parallel import medusa_losses
from foredraft.train.unroll import Options
from tests.heads import NOISE_SEED, SIZE, learnt_drafter, learnt_head, random_head, ranked, sizes
from tests.tiny import VOCAB, engine, family_target, run

WORDS = [1, 4, 5, 9, 17, 20, 33, 40]


def a_head(num_levels: int = 3, words: list[int] | None = None) -> Any:
    config = sizes(50)
    shape = shape_for(config, "medusa", None if words is None else len(words))
    return random_head(dataclasses.replace(shape, num_levels=num_levels), words=words)


def test_heads_are_the_papers_sums() -> None:
    head = a_head()
    state = {name: tensor.double() for name, tensor in head.state_dict().items()}
    x = torch.randn(5, SIZE)
    found = head(x)
    assert found.shape == (5, 3, 50)
    for level in range(3):
        inner = x.double() @ state[f"{level}.0.linear.weight"].T + state[f"{level}.0.linear.bias"]
        hidden = x.double() + inner * torch.sigmoid(inner)
        expected = hidden @ state[f"{level}.1.weight"].T
        torch.testing.assert_close(found[:, level].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 2, 5, 13, 40])
def test_the_likeliest_combinations_are_found(limit: int) -> None:
    """Against all of them, written out and sorted; ties go to who was found first."""
    rng = np.random.default_rng(limit)
    tokens = np.array([rng.permutation(20)[:4] for _ in range(3)])
    shares = -np.sort(-rng.dirichlet(np.ones(5), 3)[:, :4], axis=1)
    ids, parents, confidence = _likeliest(tokens, shares, limit, is_chain=False)
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    chance = {p: float(np.prod([shares[d, r] for d, r in enumerate(p)])) for p in paths}
    best = sorted(chance.values(), reverse=True)[:limit]
    chances = [1.0]
    seen = set()
    for node, parent in enumerate(parents.tolist(), 1):
        assert parent < node
        chances.append(chances[parent] * confidence[node - 1])
        assert (parent, int(ids[node - 1])) not in seen
        seen.add((parent, int(ids[node - 1])))
    np.testing.assert_allclose(sorted(chances[1:], reverse=True), best)
    ids, parents, _ = _likeliest(tokens, shares, limit, is_chain=True)
    assert parents.tolist() == list(range(len(ids))) and len(ids) == min(limit, 3)
    assert ids.tolist() == tokens[: len(ids), 0].tolist()


@pytest.mark.parametrize("words", [None, WORDS], ids=["all words", "own words"])
def test_each_head_learns_what_the_target_says_further_ahead(words: list[int] | None) -> None:
    head = a_head(words=words)
    lengths, most = (6, 9), 9
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2, most), generator=generator)
    features, final = (torch.randn(2, most, SIZE, generator=generator) for _ in range(2))
    is_real = torch.tensor([[i < length for i in range(most)] for length in lengths])
    is_answer = torch.tensor([[4 <= i < length for i in range(most)] for length in lengths])
    output = torch.randn(50, SIZE, generator=generator)
    own = output[head.target_ids] if words else output
    total = weights = 0.0
    survivors, counts = [0] * 3, [0] * 3
    head.requires_grad_(False)
    rows: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    for text, length in enumerate(lengths):
        for i in range(length - 1):
            survives = True
            for level in range(3):
                if i + 1 + level >= length:
                    break
                student = head(features[text, i][None])[0, level].double()
                teacher = (own @ final[text, i + 1 + level]).double()
                loss = -(torch.softmax(teacher, 0) * torch.log_softmax(student, 0)).sum()
                is_counted = i + 2 >= 4  # its first token is an answer's
                rows[level].append((float(loss), 1.0))
                survives &= bool(student.argmax() == teacher.argmax())
                survivors[level] += survives and is_counted
                counts[level] += is_counted
    for level in range(3):
        value = sum(loss * w for loss, w in rows[level]) / sum(w for _, w in rows[level])
        total += 0.7**level * value
        weights += 0.7**level
    batch = Batch(ids, is_real, is_answer, features, final)
    with torch.no_grad():
        found = medusa_losses(head, batch, OutputLaw(output), Options(decay=0.7, prompt_share=1.0))
    assert float(found.total) == pytest.approx(total / weights, rel=1e-4)
    assert found.accepted.tolist() == survivors and found.counted.tolist() == counts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_in_the_engine_are_the_heads_own(temperature: float) -> None:
    """At a temperature with the noise that the target will add at that very position."""
    target = family_target("llama")
    drafter = learnt_drafter("medusa", target, num_children=1)
    proposed: list[tuple[np.ndarray, list[int]]] = []
    propose = drafter.propose

    def watch(plan: Any, budgets: Any) -> Any:
        batch = propose(plan, budgets)
        for index, segment in enumerate(plan.segments):
            nodes = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
            parents = batch.parents[batch.offsets[index] : batch.offsets[index + 1]]
            if budgets.max_nodes[index]:
                assert parents.tolist() == list(range(len(nodes)))
                proposed.append((segment.token_ids.copy(), nodes.tolist()))
        return batch

    drafter.propose = watch
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (30, 5, 17, 41)]
    made = engine(target, {"medusa": drafter}, max_num_requests=3, max_num_batched_tokens=16)
    sampling = SamplingParams(
        max_tokens=16, ignore_eos=True, temperature=temperature, seed=NOISE_SEED
    )
    run(made, prompts, sampling, SpeculationParams("medusa", 4))
    head = learnt_head("medusa")
    assert sum(len(nodes) == 4 for _, nodes in proposed) > 20
    from tests.unit.test_heads import all_hidden

    for ids, nodes in proposed[::3]:
        features = all_hidden(family_target("llama"), ids, head.shape)
        levels = head(features[len(ids) - 2][None])[0]
        expected = [
            ranked(logits, head, temperature, len(ids) + level)
            for level, logits in enumerate(levels)
        ]
        assert nodes == expected[: len(nodes)]


@pytest.mark.parametrize("words", [None, WORDS], ids=["all words", "own words"])
def test_heads_that_were_written_are_read_again(words: list[int] | None, tmp_path: Path) -> None:
    head = a_head(words=words).to(torch.bfloat16)
    save_head(head, tmp_path, "test", sizes(50))
    assert (tmp_path / "medusa_lm_head.safetensors").is_file()
    again = load_medusa(tmp_path, sizes(50), torch.bfloat16)
    assert again.shape == head.shape and again.target_ids.tolist() == head.target_ids.tolist()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    # As a pickle of weights, under the name that the paper's code gives it.
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert load_medusa(tmp_path, sizes(50)).shape == head.shape


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_head(a_head(), tmp_path, "test", sizes(50))
    file = tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    with pytest.raises(ModelLoadError, match="drafts 50 of 60 words and has no tensor d2t"):
        load_medusa(tmp_path, sizes(60))
    other = sizes(50)
    other.hidden_size = 32
    with pytest.raises(ModelLoadError, match=r"is \[16, 16\].* has to be \[32, 32\]"):
        load_medusa(tmp_path, other)
    save_file({k: v for k, v in tensors.items() if k != "1.0.linear.bias"}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 1\.0\.linear\.bias"):
        load_medusa(tmp_path, sizes(50))
    save_file({"other": torch.zeros(2)}, file)
    with pytest.raises(ModelLoadError, match="holds no Medusa heads"):
        load_medusa(tmp_path, sizes(50))


def test_options_are_checked() -> None:
    for name, value, shown in (
        ("path", 3, "path is 3"),
        ("num_children", 0, "num_children is 0; allowed is an integer from 1 to 32"),
    ):
        with pytest.raises(ConfigError, match=shown):
            MedusaConfig(**{name: value})  # type: ignore[arg-type]
    target = family_target("llama")
    context = DrafterContext(VOCAB, 256, method="medusa", target=target)
    with pytest.raises(ConfigError, match="needs heads, and none ship for llama; name a folder"):
        MedusaDrafter(MedusaConfig(), context)
    with pytest.raises(ConfigError, match="needs a target"):
        MedusaDrafter(MedusaConfig(), dataclasses.replace(context, target=None))
    with pytest.raises(ConfigError, match="num_levels is 0 for kind 'medusa'"):
        dataclasses.replace(shape_for(sizes(50), "medusa"), num_levels=0)
