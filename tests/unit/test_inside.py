"""MTP modules inside a target's checkpoint: names, order, experts, latent attention, the engine.

The oracle runs the target's own layer class, by Transformers' own attention, over a whole text.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.config import EngineConfig, make_config
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.head_cache import HeadCache, Rows
from foredraft.drafters.heads import MtpDrafter
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.heads.inside import InsideMtp, load_inside, naming_of
from foredraft.heads.inspect import inspect_head
from foredraft.model.loader import Target, load_target, prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.train.features import FeatureReader
from foredraft.train.texts import Text
from tests.tiny import CONTEXT, VOCAB, engine, run, run_to_end, warnings_logged

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 2,
    "pad_token_id": None,
    "bos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def config_of(style: str) -> Any:
    import transformers as tf

    if style == "deepseek":
        return tf.DeepseekV3Config(
            **SIZES,
            **EXPERTS,
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
            num_nextn_predict_layers=1,
        )
    if style == "qwen3-next":
        return tf.Qwen3NextConfig(
            **SIZES,
            **EXPERTS,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    if style == "qwen3":  # a dense target with Qwen's names
        return tf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    return tf.Qwen2Config(**SIZES, num_key_value_heads=2)  # MiMo's own is Qwen2 beside its module


NAMES = {
    "deepseek": ("model.layers.2.", "DeepSeek"),
    "qwen3-next": ("mtp.", "Qwen3-Next"),
    "qwen3": ("mtp.", "Qwen3-Next"),
    "mimo": ("model.mtp_layers.0.", "MiMo"),
}
PARTS = {
    "deepseek": {
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "norm.weight": "shared_head.norm.weight",
    },
    "qwen3-next": {
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    "mimo": {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
}
PARTS["qwen3"] = PARTS["qwen3-next"]
STYLES = tuple(NAMES)
DRAFTING = ("deepseek", "qwen3", "mimo")  # Qwen3-Next itself is recurrent: no target for us yet


def model_of(style: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config_of(style), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def checkpoint(style: str, folder: Path) -> Path:
    """A target's folder with a random module under the names that its family gives them."""
    model = model_of(style)
    model.save_pretrained(folder)
    head = random_module(model, style)
    prefix, _ = NAMES[style]
    layer = "layers.0." if prefix == "mtp." else ""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in head.state_dict().items():
        if name in PARTS[style]:
            tensors[prefix + PARTS[style][name]] = tensor
            continue
        name = prefix + layer + name.removeprefix("layer.")
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                where = f"{name.removesuffix('gate_up_proj')}{number}"
                tensors[f"{where}.gate_proj.weight"] = gate.clone()
                tensors[f"{where}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            for number, down in enumerate(tensor):
                where = f"{name.removesuffix('down_proj')}{number}"
                tensors[f"{where}.down_proj.weight"] = down.clone()
        else:
            tensors[name] = tensor
    if style == "deepseek":
        tensors[prefix + "embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
        tensors[prefix + "shared_head.head.weight"] = torch.zeros(VOCAB, 64)
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def random_module(model: Any, style: str) -> InsideMtp:
    torch.manual_seed(5)
    head = InsideMtp(model, style == "mimo")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
        for _, buffer in head.layer.named_buffers():
            buffer.uniform_(0, 0.1)
    return head.eval()


class Oracle:
    """The module over a whole text, by Transformers' own attention."""

    def __init__(self, head: InsideMtp, model: Any) -> None:
        self.head = copy.deepcopy(head)
        layer = self.head.layer
        for module in layer.modules():
            if hasattr(module, "config"):
                module.config = copy.deepcopy(module.config)
                module.config._attn_implementation = "eager"
        self.rotary = model.model.rotary_emb

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """[n, size] each, row ``i`` at position ``i``."""
        parts = [self.head.enorm(embeds), self.head.hnorm(hidden)]
        if self.head.shape.hidden_first:
            parts.reverse()
        size = len(hidden)
        x = self.head.eh_proj(torch.cat(parts, dim=-1))[None]
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        rotation = self.rotary(x, torch.arange(size)[None])
        out = self.head.layer(x, position_embeddings=rotation, attention_mask=mask)
        return (out[0] if isinstance(out, tuple) else out).view(size, -1)


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_a_module_is_read_and_runs_as_transformers_runs_its_layer(
    style: str, tmp_path: Path
) -> None:
    folder = checkpoint(style, tmp_path / "model")
    naming = naming_of(folder)
    assert naming is not None and naming.name == NAMES[style][1]
    model = model_of(style)
    head = load_inside(folder, model, torch.float32)
    wanted = random_module(model, style).state_dict()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    head.layer.self_attn.scaling = 0.4  # not the usual one, as with long contexts
    torch.manual_seed(9)
    length = 12
    hidden, ids = torch.randn(length, 64), torch.randint(3, VOCAB, (length + 1,))
    embed = model.get_input_embeddings()
    expected = Oracle(head, model)(hidden, embed(ids[1:]))
    cache = HeadCache(head, embed, 3, 64)
    other, state = cache.allocate(), cache.allocate()
    found: list[torch.Tensor] = []
    for first, end in ((0, 1), (1, 6), (6, 10)):
        rows = Rows(
            state,
            hidden[first:end],
            ids[first + 1 : end + 1].numpy(),
            np.arange(first, end),
            first,
            first,
        )
        size = 2 + first  # beside it another request, of other lengths
        noise = Rows(other, torch.randn(size, 64), ids[:size].numpy(), np.arange(size), 0, 0)
        found += list(cache.run([noise, rows])[1])
    torch.testing.assert_close(torch.stack(found), expected[:10], rtol=1e-4, atol=1e-5)
    # Two siblings behind it: each as if the text went on with it alone.
    both = cache.run(
        [Rows(state, hidden[10:12], ids[11:13].numpy(), np.full(2, 10), 10, 10, np.eye(2) > 0)]
    )[0]
    for row in range(2):
        alone = torch.cat([hidden[:10], hidden[10 + row : 11 + row]])
        tokens = torch.cat([ids[1:11], ids[11 + row : 12 + row]])
        want = Oracle(head, model)(alone, embed(tokens))[-1]
        torch.testing.assert_close(both[row], want, rtol=1e-4, atol=1e-5)


def drafter_of(target: Target, path: str = "", **options: Any) -> MtpDrafter:
    context = DrafterContext(VOCAB, CONTEXT, method="mtp", max_num_requests=8, target=target)
    config = make_config(MtpDrafter.Config, {"path": path, **options}, "mtp")
    return MtpDrafter(config, context)


@pytest.mark.parametrize("style", DRAFTING)
@torch.no_grad()
def test_the_targets_own_module_drafts(style: str, tmp_path: Path) -> None:
    """Found without a path; what it drafts is what the oracle says; texts are the target's."""
    folder = checkpoint(style, tmp_path / "model")
    with warnings_logged() as said:
        target = load_target(EngineConfig(str(folder), "float32", "cpu"), lambda text: None)
        own = drafter_of(target, num_children=1)
    proposed: list[tuple[np.ndarray, list[int]]] = []
    propose = own.propose

    def watch(plan: Any, budgets: Any) -> Any:
        batch = propose(plan, budgets)
        for index, segment in enumerate(plan.segments):
            nodes = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
            if budgets.max_nodes[index]:
                proposed.append((segment.token_ids.copy(), nodes.tolist()))
        return batch

    own.propose = watch  # type: ignore[method-assign]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (18, 5, 11)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = run(engine(target), prompts, sampling, SpeculationParams("none"))
    with warnings_logged() as more:
        made = engine(target, {"mtp": own}, max_num_requests=2, max_num_batched_tokens=16)
        ended = run_to_end(made, prompts, sampling, SpeculationParams("mtp", 3))
    assert [one.ids for one in ended] == plain and not said and not more
    model = model_of(style)
    head = load_inside(folder, model, torch.float32)
    raw = prepare_target("raw", model_of(style), None, CONTEXT, packs=False)
    reader = FeatureReader(raw, own.needs.hidden_layers, CONTEXT)
    oracle, embed = Oracle(head, model), model.get_input_embeddings()
    assert sum(len(nodes) == 3 for _, nodes in proposed) > 8
    for ids, nodes in proposed[::5]:
        hidden = reader.read([Text(ids, 1)]).features[0][: len(ids) - 1]
        tokens = torch.from_numpy(ids[1:])
        expected: list[int] = []
        for _ in range(3):
            last = oracle(hidden, embed(tokens))[-1]
            logits = model.get_output_embeddings()(head.norm(last))
            expected.append(int(logits.argmax()))
            hidden = torch.cat([hidden, last[None]])
            tokens = torch.cat([tokens, torch.tensor(expected[-1:])])
        assert nodes == expected[: len(nodes)]
    # By a path, too.
    assert drafter_of(target, str(folder)).needs == drafter_of(target).needs


def test_a_target_without_one_says_so(tmp_path: Path) -> None:
    model_of("mimo").save_pretrained(tmp_path / "bare")
    target = load_target(EngineConfig(str(tmp_path / "bare"), "float32", "cpu"))
    with pytest.raises(ConfigError, match="needs a head, and none ships"):
        drafter_of(target)
    with pytest.raises(ModelLoadError, match="holds no MTP module that is known"):
        load_inside(tmp_path / "bare", target.model, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"layer.mlp.gate.weight is missing \(DeepSeek's names\)"),
        ("expert", r"lacks a part of expert 3 of 4 in layer.mlp.experts"),
        ("extra", r"layer.mlp.gate.scale is left over"),
        ("shape", r"enorm.weight is \[3\] instead of \[64\]"),
    ],
)
def test_a_module_that_is_incomplete_is_one_sentence(
    change: str, message: str, tmp_path: Path
) -> None:
    folder = checkpoint("deepseek", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.2."
    if change == "missing":
        del tensors[prefix + "mlp.gate.weight"]
    elif change == "expert":
        del tensors[prefix + "mlp.experts.3.down_proj.weight"]
    elif change == "extra":
        tensors[prefix + "mlp.gate.scale"] = torch.zeros(1)
    else:
        tensors[prefix + "enorm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_inside(folder, model_of("deepseek"), torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("style", STYLES)
def test_it_is_looked_at_by_its_files_alone(style: str, tmp_path: Path) -> None:
    folder = checkpoint(style, tmp_path / "model")
    found = inspect_head(folder, config_of(style))
    assert found.kind == "mtp" and found.inputs_of == (2,) and not found.warnings
    assert ("hidden_first" in found.flags) == (style == "mimo")
    parameters = random_module(model_of(style), style).parameters()
    assert found.num_parameters == sum(p.numel() for p in parameters)


def test_more_modules_than_one_are_said(tmp_path: Path) -> None:
    folder = checkpoint("mimo", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    more = {n.replace("layers.0", "layers.1"): t.clone() for n, t in tensors.items() if "mtp_" in n}
    save_file(tensors | more, folder / "model.safetensors")
    with warnings_logged() as said:
        load_inside(folder, model_of("mimo"), torch.float32)
    assert len(said) == 1 and "holds 2 MTP modules; the first drafts every level" in said[0]


@torch.no_grad()
def test_routers_stay_in_float32(tmp_path: Path) -> None:
    """As the target's class keeps them: rounded, they would choose other experts."""
    folder = checkpoint("deepseek", tmp_path / "model")
    head = load_inside(folder, model_of("deepseek"), torch.bfloat16)
    wanted = random_module(model_of("deepseek"), "deepseek").state_dict()
    for name, tensor in head.state_dict().items():
        is_router = "mlp.gate." in name
        assert tensor.dtype == (torch.float32 if is_router else torch.bfloat16), name
        if is_router:
            assert torch.equal(tensor, wanted[name])
    cache = HeadCache(head, model_of("deepseek").get_input_embeddings().bfloat16(), 1, 16)
    hidden = torch.randn(4, 64, dtype=torch.bfloat16)
    rows = Rows(cache.allocate(), hidden, np.arange(5, 9), np.arange(4), 0, 0)
    assert torch.isfinite(cache.run([rows])[0].float()).all()
