"""Heads against a plain reading of their papers: the same numbers in training and in drafting."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.config import make_config
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.head_cache import HeadCache, Rows
from foredraft.drafters.heads import HeadConfig
from foredraft.drafters.portfolio import PortfolioConfig, PortfolioDrafter
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.heads.checkpoint import load_head, save_head
from foredraft.heads.output_law import OutputLaw
from foredraft.heads.own_words import output_for
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.shape import HeadShape, default_feature_layers, shape_for
from foredraft.heads.trained import shipped_head
from foredraft.model import packed_linear
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PORTFOLIO_MEMBERS, drafter_class
from foredraft.train.features import Batch, FeatureReader
from foredraft.train.texts import Text
from foredraft.train.unroll import Options, losses
from tests.heads import (
    HEAD_METHODS,
    NOISE_SEED,
    RECURRENT,
    SIZE,
    learnt_drafter,
    learnt_head,
    random_head,
    ranked,
    sizes,
    tiny_texts,
    with_words,
)
from tests.tiny import CONTEXT, VOCAB, engine, family_target, run, run_to_end, warnings_logged

WORDS = [1, 4, 5, 9, 17, 20, 33, 40]
FEW = tuple(range(5, VOCAB, 3))


def shapes() -> list[HeadShape]:
    config = sizes(50)
    eagle3 = shape_for(config, "eagle3", len(WORDS))
    return [
        shape_for(config, "eagle"),
        dataclasses.replace(shape_for(config, "eagle"), has_fc_bias=True),
        shape_for(config, "mtp"),
        dataclasses.replace(shape_for(config, "mtp"), hidden_first=True),
        shape_for(config, "eagle", len(WORDS)),
        shape_for(config, "mtp", len(WORDS)),
        eagle3,
        dataclasses.replace(eagle3, norm_before_residual=True),
        dataclasses.replace(eagle3, norm_before_fc=True),
        dataclasses.replace(eagle3, fc_norm=True, has_attention_bias=True),
        dataclasses.replace(eagle3, head_dim=8, num_kv_heads=1, draft_vocab_size=50),
        dataclasses.replace(eagle3, norm_output=True, fc_norm=True),
        dataclasses.replace(eagle3, shares_output=True, draft_vocab_size=50),
    ]


def names() -> list[str]:
    return [
        "eagle",
        "bias",
        "mtp",
        "hidden first",
        "eagle words",
        "mtp words",
        "eagle3",
        "residual",
        "norm",
        "norms",
        "wide",
        "fed back normed",
        "target's output",
    ]


SHAPES = pytest.mark.parametrize("shape", shapes(), ids=names())


# ------------------------------------------------------------------------ the plain reading


class Plain:
    """A head written out for one text, a row at a time, from the tables of its checkpoint."""

    def __init__(self, head: RecurrentHead, output: torch.Tensor) -> None:
        self.shape, self.output = head.shape, output
        self.t = {name: tensor.double() for name, tensor in head.state_dict().items()}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.t[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = self.t[f"{name}.weight"] @ x
        bias = self.t.get(f"{name}.bias")
        return out if bias is None else out + bias

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate heads [h, d]: the first half of a head with its second."""
        half = x.shape[-1] // 2
        out = x.clone()
        for i in range(half):
            angle = position * 10000.0 ** (-2 * i / x.shape[-1])
            a, b = x[:, i], x[:, half + i]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, half + i] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attention(self, layer: str, x: torch.Tensor, position: int, seen: list[int]) -> Any:
        """The row sees the kept rows ``seen``, and itself; it is kept as the next row."""
        shape = self.shape
        query = self.linear(f"{layer}.self_attn.q_proj", x).view(shape.num_heads, -1)
        key = self.linear(f"{layer}.self_attn.k_proj", x).view(shape.num_kv_heads, -1)
        value = self.linear(f"{layer}.self_attn.v_proj", x).view(shape.num_kv_heads, -1)
        query, key = self.turn(query, position), self.turn(key, position)
        self.keys.append(key)
        self.values.append(value)
        rows = [*seen, len(self.keys) - 1]
        outs = []
        for head in range(shape.num_heads):
            own = head // (shape.num_heads // shape.num_kv_heads)
            scores = torch.stack([self.keys[row][own] @ query[head] for row in rows])
            weights = torch.softmax(scores / math.sqrt(shape.head_dim), dim=0)
            outs.append(sum(w * self.values[r][own] for w, r in zip(weights, rows, strict=True)))
        return self.linear(f"{layer}.self_attn.o_proj", torch.cat(outs))

    def mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(self.linear(f"{layer}.mlp.gate_proj", x))
        return self.linear(f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", x))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.shape.kind != "eagle3":
            return features
        if self.shape.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.shape.fc_norm:
            parts = features.split(self.shape.target_hidden_size)
            features = torch.cat([self.norm(f"fc_norm.{i}", p) for i, p in enumerate(parts)])
        return self.linear("fc", features)

    def row(self, hidden: Any, embed: Any, position: int, seen: list[int]) -> torch.Tensor:
        """What one row gives to the next level."""
        kind = self.shape.kind
        if kind == "eagle3":
            normed = self.norm("midlayer.hidden_norm", hidden)
            both = torch.cat([self.norm("midlayer.input_layernorm", embed), normed])
            out = self.attention("midlayer", both, position, seen)
            hidden = (normed if self.shape.norm_before_residual else hidden) + out
            layer = "midlayer"
        elif kind == "eagle":
            layer = "layers.0"
            hidden = self.linear("fc", torch.cat([embed, hidden]))
            hidden = hidden + self.attention(layer, hidden, position, seen)
        else:
            layer = "layer"
            parts = [self.norm("enorm", embed), self.norm("hnorm", hidden)]
            parts = parts[::-1] if self.shape.hidden_first else parts
            hidden = self.linear("eh_proj", torch.cat(parts))
            normed = self.norm("layer.input_layernorm", hidden)
            hidden = hidden + self.attention(layer, normed, position, seen)
        out = hidden + self.mlp(layer, self.norm(f"{layer}.post_attention_layernorm", hidden))
        return self.norm("norm", out) if self.shape.norm_output else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.shape.kind == "eagle3":
            normed = hidden if self.shape.norm_output else self.norm("norm", hidden)
            return (self.output if self.shape.shares_output else self.t["lm_head.weight"]) @ normed
        return self.output @ (self.norm("norm", hidden) if self.shape.kind == "mtp" else hidden)


def a_text(length: int, shape: HeadShape, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.vocab_size, (length,), generator=generator)
    features = torch.randn(length, shape.num_features, generator=generator)
    embed = torch.nn.Embedding(shape.vocab_size, SIZE)
    torch.manual_seed(seed)
    torch.nn.init.normal_(embed.weight)
    output = torch.randn(shape.vocab_size, SIZE, generator=generator)
    return ids, features, embed, output


@SHAPES
@torch.no_grad()
def test_rows_of_a_text_and_of_a_tree(shape: HeadShape) -> None:
    """The cache runs rows in parts of any size, and trees behind them, as they are written out."""
    words = WORDS if shape.has_own_words else None
    head = random_head(shape, words=words)
    length = 9
    ids, features, embed, output = a_text(length, shape)
    plain = Plain(head, output.double())
    table = embed.weight.detach().double()
    expected = []
    for i in range(length - 1):
        hidden = plain.fuse(features[i].double())
        expected.append(plain.row(hidden, table[ids[i + 1]], i, list(range(i))))
    cache = HeadCache(head, embed, 3, 64)
    other, state = cache.allocate(), cache.allocate()
    fused = head.fuse(features).detach()
    found: list[torch.Tensor] = []
    for first, end in ((0, 1), (1, 5), (5, 8)):
        rows = Rows(
            state,
            fused[first:end],
            ids[first + 1 : end + 1].numpy(),
            np.arange(first, end),
            first,
            first,
        )
        # Beside it another request, of other lengths, which must not matter.
        size = 2 + first
        noise = Rows(other, torch.randn(size, SIZE), ids[:size].numpy(), np.arange(size), 0, 0)
        found += list(cache.run([noise, rows])[1])
    for row, want in zip(found, expected, strict=True):
        torch.testing.assert_close(row.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            head.logits(row, lambda h: h @ output.T).double(),
            plain.logits(want),
            rtol=1e-4,
            atol=1e-4,
        )
    # A tree: two children of the last row, then two children of the second of them.
    first_tokens, second_tokens = [3, 7], [11, 12]
    base = length - 1
    level1 = cache.run(
        [
            Rows(
                state,
                torch.stack([found[-1]] * 2),
                np.array(first_tokens),
                np.full(2, base),
                base,
                base,
                np.eye(2, dtype=np.bool_),
            )
        ]
    )[0]
    level2 = cache.run(
        [
            Rows(
                state,
                torch.stack([level1[1]] * 2),
                np.array(second_tokens),
                np.full(2, base + 1),
                base + 2,
                base,
                np.array([[False, True, True, False], [False, True, False, True]]),
            )
        ]
    )[0]
    true_rows = list(range(base))
    want1 = [plain.row(expected[-1], table[t], base, true_rows) for t in first_tokens]
    want2 = [plain.row(want1[1], table[t], base + 1, [*true_rows, base + 1]) for t in second_tokens]
    for got, want in zip([*level1, *level2], [*want1, *want2], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_measuring", [False, True])
@SHAPES
def test_training_unrolls_what_drafting_does(shape: HeadShape, is_measuring: bool) -> None:
    """Every row of every level of the training-time test is the draft that begins there."""
    words = WORDS if shape.has_own_words else None
    head = random_head(shape, words=words)
    lengths, most, levels = (7, 9), 9, 3
    parts = [a_text(most, shape, seed) for seed in (1, 2)]
    embed, output = parts[0][2], parts[0][3]
    final = torch.randn(2, most, SIZE)
    is_real = torch.tensor([[i < length for i in range(most)] for length in lengths])
    is_answer = torch.tensor([[4 <= i < length for i in range(most)] for length in lengths])
    batch = Batch(
        torch.stack([part[0] for part in parts]),
        is_real,
        is_answer,
        torch.stack([part[1] for part in parts]),
        final,
    )
    table = embed.weight.detach().double()
    own = output.double()[head.target_ids] if shape.has_own_words else output.double()
    total = weights = 0.0
    record: list[tuple[int, float, float]] = []
    survivors, counts = [0] * levels, [0] * levels
    for text, length in enumerate(lengths):
        ids, features = batch.token_ids[text], batch.features[text].double()
        for i in range(length - 1):
            plain = Plain(head, own)
            hidden = None
            for j in range(i + 1):
                row = plain.row(plain.fuse(features[j]), table[ids[j + 1]], j, list(range(j)))
                hidden = row
            survives = True
            for level in range(levels):
                if i + 1 + level >= length:
                    break
                if level:
                    seen = [*range(i + 1), *range(i + 1, i + level)]
                    hidden = plain.row(hidden, table[ids[i + 1 + level]], i + level, seen)
                student = plain.logits(hidden)
                teacher = own @ final[text, i + 1 + level].double()
                law = torch.softmax(teacher, 0)
                loss = -(law * torch.log_softmax(student, 0)).sum()
                is_counted = i + 2 + level >= 4
                record.append((level, float(loss), float(is_counted or not is_measuring)))
                if is_measuring:
                    best = int((output.double() @ final[text, i + 1 + level].double()).argmax())
                    survives &= int(head.target_ids[student.argmax()]) == best
                else:
                    survives &= bool(student.argmax() == teacher.argmax())
                is_told = i + 2 >= 4  # its first token is an answer's
                survivors[level] += survives and is_told
                counts[level] += is_told
    for level in range(levels):
        own_rows = [(loss, w) for at, loss, w in record if at == level]
        mean = sum(loss * w for loss, w in own_rows) / sum(w for _, w in own_rows)
        total += 0.7**level * mean
        weights += 0.7**level
    share = 0.0 if is_measuring else 1.0
    options = Options(levels, decay=0.7, prompt_share=share, is_measuring=is_measuring)
    with torch.no_grad():
        found = losses(head, batch, embed, OutputLaw(output), options)
    assert float(found.total) == pytest.approx(total / weights, rel=1e-4)
    assert found.accepted.tolist() == survivors and found.counted.tolist() == counts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("method", "words"),
    [*((method, ()) for method in RECURRENT), ("eagle", FEW), ("mtp", FEW)],
    ids=[*RECURRENT, "eagle words", "mtp words"],
)
def test_chains_in_the_engine_are_the_heads_own(
    method: str, words: tuple[int, ...], temperature: float
) -> None:
    """What is drafted, in a batch, with prompts in chunks, is what the head says of the text.

    At a temperature with the noise that the target will add at that very position.
    """
    target = family_target("llama")
    drafter = learnt_drafter(method, target, num_children=1, words=words)
    proposed: list[tuple[np.ndarray, list[int]]] = []
    propose = drafter.propose

    def watch(plan: Any, budgets: Any) -> Any:
        batch = propose(plan, budgets)
        for index, segment in enumerate(plan.segments):
            nodes = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
            if budgets.max_nodes[index]:
                proposed.append((segment.token_ids.copy(), nodes.tolist()))
        return batch

    drafter.propose = watch  # type: ignore[method-assign]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (18, 5, 11, 24)]
    the_engine = engine(target, {method: drafter}, max_num_requests=3, max_num_batched_tokens=16)
    sampling = SamplingParams(
        max_tokens=16, ignore_eos=True, temperature=temperature, seed=NOISE_SEED
    )
    run(the_engine, prompts, sampling, SpeculationParams(method, 4))
    head = with_words(learnt_head(method), words) if words else learnt_head(method)
    raw = family_target("llama", packs=False).model
    output = raw.get_output_embeddings().weight.detach().double()
    output = output[head.target_ids] if words else output
    table = raw.get_input_embeddings().weight.detach().double()
    assert sum(len(nodes) == 4 for _, nodes in proposed) > 20
    model = family_target("llama")
    for ids, nodes in proposed[::11]:
        features = all_hidden(model, ids, head.shape)
        plain = Plain(head, output)
        hidden = None
        for i in range(len(ids) - 1):
            fused = plain.fuse(features[i].double())
            hidden = plain.row(fused, table[ids[i + 1]], i, list(range(i)))
        expected: list[int] = []
        for depth in range(4):
            expected.append(ranked(plain.logits(hidden), head, temperature, len(ids) + depth))
            seen = list(range(len(plain.keys)))
            hidden = plain.row(hidden, table[expected[-1]], len(ids) - 1 + depth, seen)
        assert nodes == expected[: len(nodes)], (len(ids), nodes, expected)


def all_hidden(target: Any, ids: np.ndarray, shape: HeadShape) -> torch.Tensor:
    """The target's features of every token of a text."""
    batch = FeatureReader(target, shape.feature_layers, len(ids)).read([Text(ids, 1)])
    return batch.features[0]


def test_noise_finds_what_the_likeliest_words_miss() -> None:
    """At temperature 1 a coupled head is accepted more, and texts are the same either way."""
    target = family_target("llama")
    prompts = [text.token_ids[: text.num_prompt].tolist() for text in tiny_texts()[1:24:2]]
    sampling = [SamplingParams(1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(12)]
    plain = run(engine(target), prompts, sampling, SpeculationParams("none"))
    accepted = []
    for is_coupled in (True, False):
        drafter = learnt_drafter("eagle3", target, num_children=1, is_coupled=is_coupled)
        assert drafter.needs.sees_noise == is_coupled
        made = engine(target, {"eagle3": drafter})
        ended = run_to_end(made, prompts, sampling, SpeculationParams("eagle3", 4))
        assert [one.ids for one in ended] == plain
        accepted.append(sum(one.stats.num_accepted_tokens for one in ended))
    assert accepted[0] > 1.1 * accepted[1]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_output_layer_for_some_words(has_bias: bool, is_packed: bool) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(300, 50, bias=has_bias)).requires_grad_(False)
    x = torch.randn(4, 300)
    want = whole(x)[:, WORDS]
    if is_packed:
        packed_linear.pack_linear_layers(whole)
    found = output_for(whole, torch.tensor(WORDS), torch.empty(300, 0))
    if has_bias:  # however coarse the numbers are
        coarse = torch.nn.Linear(300, 50).bfloat16().requires_grad_(False)
        coarse.bias.normal_(0, 2)
        rows = output_for(coarse, torch.tensor(WORDS), torch.empty(300, 0, dtype=torch.bfloat16))
        torch.testing.assert_close(rows.weight, coarse.weight[WORDS], rtol=2e-2, atol=1e-4)
    assert (found.bias is not None) == has_bias
    torch.testing.assert_close(found(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_a_learnt_head_helps(method: str) -> None:
    """It saves steps on texts that it has learnt (those of a random target resemble no other)."""
    target = family_target("llama")
    texts = tiny_texts()[:12:2]
    prompts = [text.token_ids[: text.num_prompt].tolist() for text in texts]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    lengths = []
    for options in ({"num_children": 1}, {}):
        drafter = learnt_drafter(method, target, **options)
        ended = run_to_end(
            engine(target, {method: drafter}), prompts, sampling, SpeculationParams(method, 8)
        )
        steps = sum(one.stats.num_verify_steps for one in ended)
        lengths.append(sum(one.stats.num_tokens for one in ended) / steps)
    least = 1.1 if method == "medusa" else 1.5  # heads that know nothing of each other
    assert lengths[0] > least and lengths[1] >= 0.95 * lengths[0]


@pytest.mark.parametrize("method", RECURRENT)
def test_a_prefix_hit_loses_no_features(method: str) -> None:
    """Requests that begin alike begin with the rows of the one before them."""
    target = family_target("llama")
    rng = np.random.default_rng(12)
    prompt = np.resize(rng.integers(3, VOCAB, 9), 100).tolist()
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    others = [[*prompt, *rng.integers(3, VOCAB, 3).tolist()] for _ in range(8)]
    found, texts = [], []
    for reuse, forgets in ((False, False), (True, False), (True, True)):
        drafter = learnt_drafter(method, target, num_children=1)
        the_engine = engine(target, {method: drafter}, reuse_prefixes=reuse, max_num_requests=2)
        way = SpeculationParams(method, 4)
        run(the_engine, [prompt], sampling, way)
        assert len(drafter._ended) == 1 and drafter._ended[0].num_rows >= 100
        accepted, written = 0, []
        for other in others:
            if forgets:
                drafter._ended.clear()
            ended = run_to_end(the_engine, [other], sampling, way)[0]
            assert (ended.stats.num_reused_tokens >= 96) == reuse
            (state,) = drafter._ended[-1:]
            assert (state.first == 0) != forgets
            accepted += ended.stats.num_accepted_tokens
            written.append(ended.ids)
        found.append(accepted)
        texts.append(written)
    assert texts[0] == texts[1] == texts[2]
    assert found[1] >= 0.8 * found[0] > 0


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True}], ids=str)
def test_every_kind_of_fusing_drafts_in_the_engine(
    flags: dict[str, bool], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights as they are, too, as on other devices; a drafter that fails only warns."""
    target = family_target("llama", packs=is_packed)
    if not is_packed:
        monkeypatch.setattr("foredraft.model.packed_linear.can_pack", lambda dtype, device: False)
    shape = dataclasses.replace(shape_for(target.model.config, "eagle3"), **flags)
    context = DrafterContext(VOCAB, 256, method="eagle3", target=target)
    drafter = drafter_class("eagle3")(HeadConfig(), context, random_head(shape))
    prompts = [np.arange(3, 30).tolist(), [5, 6, 7]]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = run(engine(target), prompts, sampling, SpeculationParams("none"))
    with warnings_logged() as said:
        ended = run_to_end(
            engine(target, {"eagle3": drafter}), prompts, sampling, SpeculationParams("eagle3", 5)
        )
    assert not said and [one.ids for one in ended] == plain
    assert all(one.stats.num_draft_tokens > 20 for one in ended)


def test_a_head_among_free_members_of_a_portfolio() -> None:
    """``auto`` hands it hidden states, and joins what it drafts with the others."""
    target = family_target("llama")
    shape = shape_for(target.model.config, "eagle3")
    prompts = [text.token_ids[: text.num_prompt].tolist() for text in tiny_texts()[:6:2]]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = run(engine(target), prompts, sampling, SpeculationParams("none"))
    with tempfile.TemporaryDirectory() as folder:
        save_head(learnt_head("eagle3"), folder, "tiny", target.model.config)
        options = {"members": ("ngram", "eagle3"), "options": {"eagle3": {"path": folder}}}
        the_engine = engine(target, drafter_options={"auto": options})
        ended = run_to_end(the_engine, prompts, sampling, SpeculationParams("auto", 8))
    assert set(shape.feature_layers) == set(the_engine.runner.hidden_layers)
    assert [one.ids for one in ended] == plain
    members: set[str] = set()
    for one in ended:
        members |= {name for name, (drafted, _) in one.stats.members.items() if drafted}
    assert "eagle3" in members


def test_a_head_that_ships_is_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target("llama")
    context = DrafterContext(VOCAB, CONTEXT, method="auto", target=target)
    bare = PortfolioDrafter(PortfolioConfig(), context)
    assert tuple(bare.members) == PORTFOLIO_MEMBERS
    save_head(learnt_head("eagle3"), tmp_path / "tiny" / "eagle3", "tiny", target.model.config)
    monkeypatch.setattr("foredraft.heads.trained._PLACES", (tmp_path,))
    record = tmp_path / "tiny" / "eagle3" / "run.json"
    for survival in (0.5, "much"):  # a weak one, or one of which nothing is known, costs more
        record.write_text(json.dumps({"held_out_survival": [survival]}))
        assert tuple(PortfolioDrafter(PortfolioConfig(), context).members) == PORTFOLIO_MEMBERS
    with pytest.raises(ConfigError, match="options are given for eagle3, and no such head"):
        PortfolioDrafter(PortfolioConfig(options={"eagle3": {"max_depth": 3}}), context)
    record.write_text(json.dumps({"held_out_survival": [0.7, 0.5]}))
    made = PortfolioDrafter(PortfolioConfig(options={"eagle3": {"max_depth": 3}}), context)
    assert tuple(made.members) == (*PORTFOLIO_MEMBERS, "eagle3")
    assert made.members["eagle3"].config.max_depth == 3  # type: ignore[attr-defined]
    named = PortfolioDrafter(PortfolioConfig(members=("ngram",)), context)
    assert tuple(named.members) == ("ngram",)
    split = dataclasses.replace(context, target=dataclasses.replace(target, num_ranks=2))
    assert tuple(PortfolioDrafter(PortfolioConfig(), split).members) == PORTFOLIO_MEMBERS


def test_a_split_target_is_refused() -> None:
    target = dataclasses.replace(family_target("llama"), num_ranks=2)
    context = DrafterContext(VOCAB, 256, method="eagle3", target=target)
    head = random_head(shape_for(target.model.config, "eagle3"))
    with pytest.raises(ConfigError, match="reads the target's embedding, which is split over 2"):
        drafter_class("eagle3")(HeadConfig(), context, head)


def test_ended_texts_make_room() -> None:
    """Slots are given to those that run; none is lost, however many requests come."""
    target = family_target("llama")
    drafter = learnt_drafter("eagle3", target, max_num_requests=2)
    the_engine = engine(target, {"eagle3": drafter}, max_num_requests=2, reuse_prefixes=True)
    rng = np.random.default_rng(13)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    shared = rng.integers(3, VOCAB, 40).tolist()
    for number in range(12):
        prompts = [[*shared[: 4 * number], *rng.integers(3, VOCAB, 5).tolist()] for _ in range(2)]
        run(the_engine, prompts, sampling, SpeculationParams("eagle3", 4))
        taken = 4 - drafter._cache.num_free_slots
        assert taken == len(drafter._ended) + len(drafter._states) <= 4
    assert not drafter._states and drafter.num_state_bytes > 0


# ---------------------------------------------------------------------------------- on disk


@SHAPES
def test_a_head_that_was_written_is_read_again(shape: HeadShape, tmp_path: Path) -> None:
    head = random_head(shape, words=WORDS if shape.has_own_words else None)
    head = head.to(torch.bfloat16)
    save_head(head, tmp_path / "head", "test", sizes(50))
    again = load_head(tmp_path / "head", sizes(50), torch.bfloat16)
    assert again.shape == shape
    assert again.target_ids.tolist() == head.target_ids.tolist()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert not list((tmp_path / "head").glob("*.new"))


def saved(tmp_path: Path, kind: str = "eagle3") -> tuple[Path, dict[str, Any]]:
    config = sizes(50)
    shape = shape_for(config, kind, len(WORDS) if kind == "eagle3" else None)
    head = random_head(shape, words=WORDS if kind == "eagle3" else None)
    save_head(head, tmp_path / "head", "test", config)
    return tmp_path / "head", json.loads((tmp_path / "head" / "config.json").read_text())


def change(folder: Path, **tensors: Any) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, folder / "model.safetensors")


BAD_TENSORS = {
    "missing": ({"norm__weight": None}, "lacks norm.weight"),
    "extra": ({"other__weight": torch.zeros(2)}, "has also other.weight"),
    "misshapen": ({"norm__weight": torch.zeros(3)}, r"norm.weight is \[3\].* has to be \[16\]"),
    "no words": ({"d2t": None}, "has no tensor d2t"),
    "words outside": ({"d2t": torch.full((8,), 49)}, "d2t leads to token 56"),
    "words below": ({"d2t": torch.full((8,), -1)}, "d2t leads to token -1"),
    "words twice": ({"d2t": torch.tensor([0, 0, 0, 0, 0, 0, 0, -1])}, "two words to one token"),
    "words misshapen": ({"d2t": torch.zeros(3, dtype=torch.int64)}, r"d2t is \[3\]"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_head_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    tensors, message = BAD_TENSORS[case]
    change(folder, **tensors)
    with pytest.raises(ModelLoadError, match=message):
        load_head(folder, sizes(50))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "eagle")
    with pytest.raises(ModelLoadError, match="made for a vocabulary of 50; this target has 60"):
        load_head(folder, sizes(60))
    other = sizes(50)
    other.hidden_size = 32
    with pytest.raises(ModelLoadError, match="reads hidden states of 16; this target's are of 32"):
        load_head(folder, other)
    folder, config = saved(tmp_path)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 9]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="feature_layers holds 9; the target has 2 layers"):
        load_head(folder, sizes(50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "holds what a head's config cannot"),
        ({"hidden_size": "many"}, "holds what a head's config cannot"),
        ({"draft_vocab_size": "all"}, "holds what a head's config cannot"),
        ({"eagle_aux_hidden_state_layer_ids": [1, None]}, "holds what a head's config cannot"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "holds what a head's config cannot"),
        ({"transformer_layer_config": 3}, "holds what a head's config cannot"),
        ({"transformer_layer_config": {}}, "does not say hidden_size, intermediate_size, num_"),
        ({"rope_parameters": [1]}, "holds what a head's config cannot"),
        ({"eagle_config": 7, "eagle_aux_hidden_state_layer_ids": None}, "holds what a head's"),
        ({"num_attention_heads": 0}, "num_heads is 0|holds what"),
        ({"foredraft_kind": "other"}, "kind is 'other'"),
        ({"num_attention_heads": 3}, "that the key heads divide"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, config = saved(tmp_path)
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ModelLoadError, ConfigError), match=message):
        load_head(folder, sizes(50))


def test_a_folder_that_holds_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json; a head is a folder"):
        load_head(tmp_path, sizes(50))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load_head(tmp_path, sizes(50))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"holds no model\.safetensors"):
        load_head(tmp_path, sizes(50))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_head(tmp_path, sizes(50))


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("harm",))


def test_a_pickle_is_read_for_weights_alone(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert load_head(folder, sizes(50)).shape.kind == "eagle3"
    torch.save({**tensors, "harm": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="holds more than weights, or is damaged"):
        load_head(folder, sizes(50))


@pytest.mark.parametrize("convention", ["inputs", "outputs", "neither"])
def test_both_conventions_name_the_same_layers(convention: str, tmp_path: Path) -> None:
    target = sizes(50, num_layers=30)
    shape = shape_for(target, "eagle3")
    assert shape.feature_layers == (2, 15, 27) == default_feature_layers(30)
    save_head(random_head(shape), tmp_path, "test", target)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    if convention != "inputs":
        del config["eagle_aux_hidden_state_layer_ids"]
    if convention == "neither":
        del config["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_head(tmp_path, target).shape.feature_layers == (2, 15, 27)


def test_the_layout_of_other_engines_is_read(tmp_path: Path) -> None:
    """``layers.0.*`` with sizes one level down, as speculators write it."""
    folder, config = saved(tmp_path)
    from safetensors.torch import load_file, save_file

    before = load_head(folder, sizes(50))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    tensors["embed_tokens.weight"] = torch.zeros(50, SIZE)
    save_file(tensors, folder / "model.safetensors")
    inner = {
        name: config.pop(name)
        for name in list(config)
        if name not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    }
    inner.pop("foredraft_kind")
    config["transformer_layer_config"] = inner
    config["speculators_model_type"] = "eagle3"
    (folder / "config.json").write_text(json.dumps(config))
    again = load_head(folder, sizes(50))
    for name, tensor in before.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("is_full", [False, True])
def test_model_optimizers_layout_is_read(is_full: bool, tmp_path: Path) -> None:
    """``layers.0.*``, flags and outputs of layers one level down, no words where it has all."""
    shape = shape_for(sizes(50, num_layers=8), "eagle3", 50 if is_full else len(WORDS))
    shape = dataclasses.replace(shape, norm_before_fc=True, shares_output=is_full)
    head = random_head(shape, words=None if is_full else WORDS)
    folder = tmp_path / "head"
    save_head(head, folder, "target", sizes(50, num_layers=8))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    tensors.pop("t2d", None)
    save_file(tensors, folder / "model.safetensors")
    nested = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.feature_layers],
        "norm_before_fc": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "parallel_draft_step": 1,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50,
        "draft_vocab_size": 50 if is_full else len(WORDS),
        "eagle_config": nested,
    }
    (folder / "config.json").write_text(json.dumps(config))
    again = load_head(folder, sizes(50, num_layers=8))
    assert again.shape.feature_layers == shape.feature_layers and again.shape.norm_before_fc
    assert again.shape.shares_output == is_full
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())
    assert again.target_ids.tolist() == head.target_ids.tolist()
    for name, value in (("use_last_layernorm", False), ("parallel_draft_step", 3)):
        changed = {**config, "eagle_config": {**nested, name: value}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match=f"says {name} {value}, a variant of EAGLE-3"):
            load_head(folder, sizes(50, num_layers=8))


# -------------------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("path", 3, "path is 3"),
        ("num_children", 0, "num_children is 0; allowed is an integer from 1 to 16"),
        ("width", 65, "width is 65; allowed is an integer from 1 to 64"),
        ("max_depth", True, "max_depth is True"),
        ("is_coupled", 1, "is_coupled is 1; allowed is True or False"),
        ("min_confidence", 1.0, r"min_confidence is 1.0; allowed is a number in \[0, 1\)"),
    ],
)
def test_options_are_checked(name: str, value: object, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        make_config(HeadConfig, {name: value}, "method 'eagle3'")


def test_a_head_must_be_named_or_ship() -> None:
    target = family_target("llama")
    assert shipped_head("eagle3", target.model.config) is None
    context = DrafterContext(VOCAB, 256, method="eagle3", target=target)
    cls = drafter_class("eagle3")
    with pytest.raises(ConfigError, match="needs a head, and none ships for llama; name one"):
        cls(HeadConfig(), context)
    with pytest.raises(ConfigError, match="needs a target"):
        cls(HeadConfig(), dataclasses.replace(context, target=None))
    head = random_head(shape_for(target.model.config, "eagle"))
    with pytest.raises(ConfigError, match="is a head of kind 'eagle'; use it with method 'eagle'"):
        cls(HeadConfig(), context, head)


def test_shapes_are_checked() -> None:
    shape = shapes()[0]
    for changes, message in (
        ({"kind": "other"}, "kind is 'other'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_kv_heads": 3}, "that the key heads divide"),
        ({"draft_vocab_size": 51}, "draft_vocab_size is 51; allowed is 1 to 50"),
        ({"feature_layers": ()}, "feature_layers is empty"),
        ({"feature_layers": (3,)}, "feature_layers holds 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(shape, **changes)
    with pytest.raises(ConfigError, match="does not say its sizes"):
        shape_for(SimpleNamespace(hidden_size=4), "eagle")
