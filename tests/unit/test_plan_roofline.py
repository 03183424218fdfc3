"""Sizes from config.json against published counts, and step times against what is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.errors import PlanError
from foredraft.plan.roofline import HARDWARE, Hardware, Roofline, find_hardware
from foredraft.plan.shape import ModelShape, load_shape

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 32000, "torch_dtype": "bfloat16", "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": 4096,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "tie_word_embeddings": True}  # fmt: skip
SMOLLM = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


def _roofline(config: dict[str, Any] = LLAMA, gpu: str = "H100-SXM") -> Roofline:
    return Roofline(ModelShape.from_config(config), find_hardware(gpu))


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA, 8.03),
        (MIXTRAL, 46.7),
        (QWEN_MOE, 30.5),
        (DEEPSEEK, 671.0),
        (SMOLLM, 0.1345),
        (GPT2, 0.1235),  # positions are not counted
    ],
)
def test_published_sizes(config: dict[str, Any], billions: float) -> None:
    shape = ModelShape.from_config(config)
    assert shape.num_weights / 1e9 == pytest.approx(billions, rel=0.005)


def test_active_weights_of_mixtures() -> None:
    # Published with the input embedding, which multiplies nothing.
    for config, published in ((MIXTRAL, 12.9), (QWEN_MOE, 3.35), (DEEPSEEK, 37.6)):
        shape = ModelShape.from_config(config)
        assert (shape.num_active_weights + shape.embedding) / 1e9 == pytest.approx(
            published, rel=0.01
        )


def test_cache_sizes() -> None:
    assert ModelShape.from_config(LLAMA).cache_bytes(1) == 128 * 1024  # 128 KiB a token
    assert ModelShape.from_config(DEEPSEEK).cache_bytes(1) == 61 * 576 * 2


def test_llama_on_an_h100() -> None:
    roofline = _roofline()
    weights = roofline.shape.stored_bytes / 3.35e12
    assert weights == pytest.approx(4.8e-3, rel=0.01)
    # The input embedding is looked up, not read whole.
    assert 4.4e-3 < roofline.seconds(1, 1, 0) < weights
    assert roofline.ridge_tokens() == pytest.approx(295, rel=0.01)
    # A long context costs its cache: 128 KiB a token.
    more = roofline.seconds(1, 1, 32768) - roofline.seconds(1, 1, 0)
    assert more == pytest.approx(32768 * 131072 / 3.35e12, rel=0.01)


@pytest.mark.parametrize(("gpu", "ridge"), [("H200", 206), ("A100-80GB", 153), ("H100-SXM", 295)])
def test_ridges(gpu: str, ridge: float) -> None:
    assert _roofline(gpu=gpu).ridge_tokens() == pytest.approx(ridge, rel=0.01)
    hardware = find_hardware(gpu)
    assert hardware.tflops * 1e3 / hardware.bandwidth_gb_s == pytest.approx(ridge, rel=0.01)


def test_quantised_to_fp8_keeps_the_ridge() -> None:
    quantised = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert _roofline(quantised).ridge_tokens() == pytest.approx(295, rel=0.1)
    assert ModelShape.from_config(quantised).weight_bits == 8


def test_alpha_is_nothing_below_the_ridge_and_batch_over_ridge_beyond() -> None:
    roofline = _roofline()
    assert roofline.alpha(4, 1, 0) < 1e-4
    assert roofline.alpha(4, 256, 0) == pytest.approx(256 / 296, rel=0.05)
    assert roofline.last_alpha(512, 0) == pytest.approx(1, rel=0.01)


def test_caches_are_read_besides_the_products_not_under_them() -> None:
    # 512 tokens' products are bound by operations; the caches of 512 requests take their time too.
    roofline, batch, context = _roofline(), 512, 1024
    products = batch * 2 * roofline.shape.num_active_weights / 989e12
    caches = batch * context * 128 * 1024 / 3.35e12
    measured = roofline.seconds(batch, batch, context)
    assert measured == pytest.approx(products + caches, rel=0.01)
    # A draft token each costs the products again, and no second read of the caches.
    alpha = roofline.alpha(1, batch, context)
    assert alpha == pytest.approx(products / (products + caches), rel=0.01)


def test_attention_is_not_computed_in_fp8() -> None:
    shape = ModelShape.from_config({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    roofline = Roofline(shape, Hardware("wide", 1e9, 100, 200))
    products = 2 * shape.num_active_weights / 200e12
    attention = 32 * 4 * 4096 * 100_000 / 100e12
    assert roofline.seconds(1, 1, 100_000) == pytest.approx(products + attention, rel=0.01)


def test_experts_touched_grow_with_tokens() -> None:
    layer = ModelShape.from_config(MIXTRAL).layers[0]
    one = layer.touched(1)
    assert one == pytest.approx(layer.active())
    assert one < layer.touched(2) < layer.touched(50) <= layer.stored()
    # At batch 1 the second token doubles what is read but for chance and attention.
    assert 0.3 < _roofline(MIXTRAL).alpha(1, 1, 0) < 1
    assert _roofline(MIXTRAL).alpha(4, 64, 0) < 0.05


def test_deepseek_has_dense_layers_first() -> None:
    layers = ModelShape.from_config(DEEPSEEK).layers
    assert [bool(layer.num_experts) for layer in layers[:5]] == [False] * 3 + [True] * 2


def test_windows() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    mixed = ModelShape.from_config({**LLAMA, "sliding_window": 512, "layer_types": kinds})
    assert [layer.window for layer in mixed.layers[:2]] == [512, None]
    assert mixed.cache_bytes(4096) == 16 * (512 + 4096) * 2048 * 2
    assert mixed.cache_bytes(100) == ModelShape.from_config(LLAMA).cache_bytes(100)
    every = ModelShape.from_config({**LLAMA, "sliding_window": 512})
    assert {layer.window for layer in every.layers} == {512}
    off = ModelShape.from_config(QWEN_MOE)
    assert {layer.window for layer in off.layers} == {None}
    gemma = ModelShape.from_config({**LLAMA, "sliding_window": 512, "sliding_window_pattern": 4})
    assert [layer.window for layer in gemma.layers[:4]] == [512, 512, 512, None]
    last = {**LLAMA, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 30}
    assert [layer.window for layer in ModelShape.from_config(last).layers[29:]] == [None, 9, 9]


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "awq", "w_bit": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, 4),
        ({"quant_method": "mxfp4"}, 4.25),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            4,
        ),
    ],
)
def test_quantisation(how: dict[str, Any], bits: float) -> None:
    config = {**LLAMA, "quantization_config": how}
    assert ModelShape.from_config(config).weight_bits == bits
    assert ModelShape.from_config(config, weight_bits=5.5).weight_bits == 5.5
    # Head and embedding stay in 16 bits.
    assert ModelShape.from_config(config).stored_bytes > 8.03e9 * bits / 8


def test_text_part_of_a_larger_model() -> None:
    inner = ModelShape.from_config({"model_type": "gemma3", "text_config": LLAMA})
    assert inner.num_weights == ModelShape.from_config(LLAMA).num_weights


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
             "intermediate_size"]
)  # fmt: skip
def test_a_missing_field_is_named(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(PlanError, match=f"the model config has no {name}"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size = '4096'"),
        ({"hidden_size": 0}, "hidden_size = 0; allowed is an integer of 1 or more"),
        ({"is_encoder_decoder": True}, "is of an encoder-decoder model"),
        ({"model_type": "jamba"}, "of jamba, some of whose layers keep a state"),
        ({"model_type": "mamba"}, "of mamba, some of whose layers keep a state"),
        ({"model_type": "bert"}, "of bert, which writes no text"),
        ({"num_local_experts": 8}, "has no num_experts_per_tok"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok = 3 of 2"),
        ({"layer_types": ["linear_attention"] * 32}, "layer of kind 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "but no sliding_window"),
        ({"torch_dtype": "int3"}, "the type 'int3'"),
        ({"quantization_config": {"quant_method": "odd"}}, "give them with --weight-bits"),
        ({"kv_lora_rank": 512}, "has no qk_rope_head_dim"),
    ],
)
def test_strange_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ModelShape.from_config({**LLAMA, **change})


@pytest.mark.parametrize("bits", [0, -4, 65])
def test_weight_bits_are_sensible(bits: float) -> None:
    with pytest.raises(PlanError, match="weight_bits is"):
        ModelShape.from_config(LLAMA, weight_bits=bits)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(PlanError, match="is no JSON"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_shape(tmp_path) == load_shape(tmp_path / "config.json")


def test_hardware_by_any_spelling() -> None:
    assert find_hardware("h100") is find_hardware("NVIDIA H100 SXM") is HARDWARE["H100-SXM"]
    assert find_hardware("rtx4090") is HARDWARE["RTX-4090"]
    assert all(gpu.source.startswith("https://") for gpu in HARDWARE.values())
    with pytest.raises(PlanError, match="hardware is 'abacus'; known are T4, L4"):
        find_hardware("abacus")
    for name, figures in (("bandwidth_gb_s", (0, 1)), ("tflops", (1, float("nan")))):
        with pytest.raises(PlanError, match=f"{name} is"):
            Hardware("mine", *figures)
    with pytest.raises(PlanError, match="overhead_s is -1"):
        Hardware("mine", 1, 1, overhead_s=-1)


def test_overhead_makes_drafts_cheaper() -> None:
    shape = ModelShape.from_config(LLAMA)
    bare = Roofline(shape, Hardware("bare", 3350, 989))
    slow = Roofline(shape, Hardware("slow", 3350, 989, overhead_s=0.01))
    assert slow.alpha(4, 256, 0) < bare.alpha(4, 256, 0)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([LLAMA, MIXTRAL, DEEPSEEK]),
    st.sampled_from(sorted(HARDWARE)),
    st.integers(1, 300),
    st.integers(0, 40),
    st.integers(0, 8192),
)
def test_more_tokens_and_context_are_never_faster(
    config: dict[str, Any], gpu: str, batch: int, n: int, context: int
) -> None:
    roofline = _roofline(config, gpu)
    rows = batch * (1 + n)
    seconds = roofline.seconds(batch, rows, context)
    assert seconds <= roofline.seconds(batch, rows + batch, context) * (1 + 1e-12)
    assert seconds <= roofline.seconds(batch, rows, context + 100)
    assert roofline.verify_cost(0, batch, context) == 1
    # A pass of n + 1 tokens is no dearer than n + 1 passes.
    assert roofline.verify_cost(n, batch, context) <= (n + 1) * (1 + 1e-9)
