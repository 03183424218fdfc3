"""What a Hugging Face ``config.json`` says of a model's size: weights, cache, operations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft import families
from foredraft.errors import PlanError

_BITS_BY_TYPE = {
    "bfloat16": 16.0,
    "float16": 16.0,
    "half": 16.0,
    "float32": 32.0,
    "float": 32.0,
    "float64": 64.0,
    "float8_e4m3fn": 8.0,
}
# Two matrices in the feed-forward block instead of a gate beside them.
_UNGATED = {
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nemotron", "opt", "phi", "starcoder2",
}  # fmt: skip
_WINDOWED = ("sliding_attention", "chunked_attention")
_BILLION = 1e9


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer.

    Attributes:
        attention: Weights of its attention.
        dense: Weights of the feed-forward part that every token uses: the block itself, or shared
            experts and the router.
        expert: Weights of one routed expert; 0 without any.
        num_experts: Routed experts.
        num_experts_per_token: How many of these a token uses.
        window: Most tokens that it attends to; ``None`` is all.
    """

    attention: int
    dense: int
    expert: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    window: int | None = None

    def touched(self, num_tokens: float) -> float:
        """Weights that a pass reads: experts as if each token drew its own at random."""
        if not self.num_experts:
            return self.attention + self.dense
        missed: float = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return self.attention + self.dense + self.expert * self.num_experts * (1 - missed)

    def active(self) -> int:
        """Weights that one token multiplies with."""
        return self.attention + self.dense + self.expert * self.num_experts_per_token

    def stored(self) -> int:
        """All of its weights."""
        return self.attention + self.dense + self.expert * self.num_experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model, as the roofline sees it.

    Attributes:
        name: Of its architecture.
        layers: Its layers.
        embedding: Weights of the input embedding.
        head: Weights of the output head, which may be the embedding's own.
        is_tied: Whether it is.
        weight_bits: Bits of a weight of the layers.
        head_bits: Bits of a weight of head and embedding, which are rarely quantised.
        cache_values: Values that a layer keeps of a token.
        cache_bits: Bits of each.
        attention_width: Query heads times head width: what attending to one token multiplies.
        is_fp8: Whether the layers' products run in fp8.
    """

    name: str
    layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    is_tied: bool
    weight_bits: float
    head_bits: float
    cache_values: int
    cache_bits: float
    attention_width: int
    is_fp8: bool

    @property
    def num_weights(self) -> int:
        """All weights, embeddings included."""
        layers = sum(layer.stored() for layer in self.layers)
        return layers + self.embedding + (0 if self.is_tied else self.head)

    @property
    def num_active_weights(self) -> int:
        """Weights that one token multiplies with; looking up an embedding multiplies nothing."""
        return sum(layer.active() for layer in self.layers) + self.head

    @property
    def stored_bytes(self) -> float:
        """Memory that the weights take."""
        layers = sum(layer.stored() for layer in self.layers)
        rest = self.embedding + (0 if self.is_tied else self.head)
        return layers * self.weight_bits / 8 + rest * self.head_bits / 8

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes that all layers keep of one token."""
        return len(self.layers) * self.cache_values * self.cache_bits / 8

    def weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a pass over so many tokens reads."""
        layers = sum(layer.touched(num_tokens) for layer in self.layers)
        return layers * self.weight_bits / 8 + self.head * self.head_bits / 8

    def cache_bytes(self, context: int) -> float:
        """Bytes of cache that one request's attention reads."""
        return self._attended(context) * self.cache_values * self.cache_bits / 8

    def operations(self, num_tokens: float) -> float:
        """Operations of a pass's products with the weights: two a weight and token."""
        return num_tokens * 2 * self.num_active_weights

    def attention_operations(self, num_tokens: float, context: int) -> float:
        """Operations of a pass's attention: four a value attended to."""
        return num_tokens * 4 * self._attended(context) * self.attention_width

    def _attended(self, context: int) -> int:
        """Tokens attended to, summed over the layers."""
        return sum(
            context if layer.window is None else min(context, layer.window) for layer in self.layers
        )

    def describe(self) -> str:
        """Say what it is in a few words."""
        total, active = self.num_weights / _BILLION, self.num_active_weights / _BILLION
        is_moe = any(layer.num_experts for layer in self.layers)
        more = f", {active:.3g} B used by a token" if is_moe else ""
        return f"{self.name}, {total:.3g} B weights{more}, {self.weight_bits:g} bits"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], weight_bits: float | None = None) -> ModelShape:
        """Read the content of a ``config.json``.

        Args:
            config: The content. Of a model for more than text, its text part is read.
            weight_bits: Bits of a weight of the layers, scales included; ``None`` takes what
                ``quantization_config`` or the config's own type says.

        Raises:
            PlanError: A field that is needed is missing or is no sensible number, or the model has
                layers that the roofline does not know.
        """
        if not isinstance(config, Mapping):
            raise PlanError(f"a model config is an object, not {config!r:.40}; give one.")
        if config.get("is_encoder_decoder") is True:
            raise PlanError(
                "the model config is of an encoder-decoder model; the arithmetic is for "
                "decoder-only ones. Give the config.json of one of these."
            )
        outer = config
        inner = config.get("text_config")
        if isinstance(inner, Mapping):
            config = {**config, **inner}
        kind = config.get("model_type")
        if kind in families.RECURRENT:
            raise PlanError(
                f"the model config is of {kind}, some of whose layers keep a state; the arithmetic "
                "is for models of attention layers alone. Give the config.json of one of these."
            )
        if kind in families.ENCODERS and config.get("is_decoder") is not True:
            raise PlanError(
                f"the model config is of {kind}, which writes no text; the arithmetic is for "
                "decoder-only models. Give the config.json of one of these."
            )
        fields = _Fields(config)
        hidden = fields.count("hidden_size", "n_embd", "d_model")
        num_layers = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        num_heads = fields.count("num_attention_heads", "n_head", "n_heads")
        vocabulary = fields.count("vocab_size")
        attention, cache_values, width = _attention(fields, hidden, num_heads)
        windows = _windows(fields, num_layers)
        layers = tuple(
            LayerShape(attention, *_feed_forward(fields, hidden, layer), windows[layer])
            for layer in range(num_layers)
        )
        own_bits = _type_bits(config, outer)
        quantised, is_fp8 = _quantised_bits(config, outer)
        if weight_bits is not None:
            if not 0 < weight_bits <= 64 or isinstance(weight_bits, bool):
                raise PlanError(
                    f"weight_bits is {weight_bits!r}; allowed is a number above 0 up to 64."
                )
            is_fp8 = is_fp8 and weight_bits == 8
        matrix = vocabulary * hidden
        return cls(
            name=str(fields.text("model_type") or "model"),
            layers=layers,
            embedding=matrix,
            head=matrix,
            is_tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings"))),
            weight_bits=float(weight_bits or quantised or own_bits),
            head_bits=own_bits if own_bits >= 16 else 16.0,
            cache_values=cache_values,
            cache_bits=16.0 if own_bits < 16 else own_bits,
            attention_width=width,
            is_fp8=is_fp8,
        )


def load_shape(path: Path, weight_bits: float | None = None) -> ModelShape:
    """Read a ``config.json``, or the one in a folder; see :meth:`ModelShape.from_config`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{file} cannot be read ({type(error).__name__}); give a config.json of a Hugging Face "
            "model, or its folder."
        ) from error
    except ValueError as error:
        raise PlanError(f"{file} is no JSON ({error}); give a config.json.") from error
    return ModelShape.from_config(config, weight_bits)


class _Fields:
    """A config's fields, under any of their names, with an error that says which is missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def text(self, name: str) -> str | None:
        value = self._config.get(name)
        return value if isinstance(value, str) else None

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def optional(self, *names: str) -> int | None:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(
                    f"the model config has {name} = {value!r}; allowed is an integer of 0 or more. "
                    "Correct it."
                )
            return value
        return None

    def count(self, *names: str) -> int:
        value = self.optional(*names)
        if value == 0:
            raise PlanError(
                f"the model config has {names[0]} = 0; allowed is an integer of 1 or more. "
                "Correct it."
            )
        if value is None:
            raise PlanError(
                f"the model config has no {names[0]}, which its size depends on; give the whole "
                "config.json of a decoder-only model."
            )
        return value


def _attention(fields: _Fields, hidden: int, num_heads: int) -> tuple[int, int, int]:
    """Weights, values kept of a token, and width, of one layer's attention."""
    rank = fields.optional("kv_lora_rank")
    if rank:  # multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)
        rope = fields.count("qk_rope_head_dim")
        nope = fields.count("qk_nope_head_dim")
        value = fields.count("v_head_dim")
        query_rank = fields.optional("q_lora_rank")
        out = num_heads * (nope + rope)
        query = hidden * query_rank + query_rank * out if query_rank else hidden * out
        keys = hidden * (rank + rope) + rank * num_heads * (nope + value)
        # A token is attended to in the latent space: rank + rope for scores, rank for values.
        width = num_heads * (2 * rank + rope) // 2
        return query + keys + num_heads * value * hidden, rank + rope, width
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        num_kv_heads: int | None = 1  # Falcon-7B, GPT-BigCode
    else:
        num_kv_heads = fields.optional("num_key_value_heads", "num_kv_heads", "n_head_kv")
    num_kv_heads = num_kv_heads or num_heads
    head_dim = fields.optional("head_dim") or hidden // num_heads
    width = num_heads * head_dim
    key_value = 2 * num_kv_heads * head_dim
    return hidden * (width + key_value) + width * hidden, key_value, width


def _feed_forward(fields: _Fields, hidden: int, layer: int) -> tuple[int, int, int, int]:
    """Weights that all tokens use, of one expert, number of experts, experts a token uses."""
    matrices = 2 if fields.text("model_type") in _UNGATED else 3
    num_experts = fields.optional("num_local_experts", "num_experts", "n_routed_experts")
    if not num_experts or not _has_experts(fields, layer):
        own = fields.optional("intermediate_size_mlp") if num_experts else None
        width = own or fields.optional("intermediate_size", "n_inner", "ffn_dim")
        if not width and fields.text("model_type") in _UNGATED:
            width = 4 * hidden
        if not width:
            raise PlanError(
                "the model config has no intermediate_size, which its size depends on; give the "
                "whole config.json of a decoder-only model."
            )
        return matrices * hidden * width, 0, 0, 0
    per_token = fields.count("num_experts_per_tok", "experts_per_token", "moe_top_k")
    if per_token > num_experts:
        raise PlanError(
            f"the model config has num_experts_per_tok = {per_token} of {num_experts} experts; at "
            "most all of them can be used. Correct it."
        )
    width = fields.optional("moe_intermediate_size", "expert_intermediate_size")
    width = width or fields.count("intermediate_size")
    shared = fields.optional("shared_expert_intermediate_size")
    if shared is None:
        shared = (fields.optional("n_shared_experts", "num_shared_experts") or 0) * width
    if fields.text("model_type") == "llama4_text":
        shared = width
    router = hidden * num_experts
    return matrices * hidden * shared + router, matrices * hidden * width, num_experts, per_token


def _has_experts(fields: _Fields, layer: int) -> bool:
    if layer < (fields.optional("first_k_dense_replace") or 0):
        return False
    only_dense = fields.get("mlp_only_layers")
    if isinstance(only_dense, list) and layer in only_dense:
        return False
    step = fields.optional(
        "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period"
    )
    if step:
        return (layer + 1) % step == 0
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, int) and frequency > 1:
        return layer % frequency == 0
    return True


def _windows(fields: _Fields, num_layers: int) -> list[int | None]:
    """Most tokens that each layer attends to."""
    window = fields.optional("sliding_window")
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) < num_layers:
            raise PlanError(
                f"the model config has {len(kinds)} layer_types for {num_layers} layers; give one "
                "a layer."
            )
        return [_window_of(kind, fields, window) for kind in kinds[:num_layers]]
    if not window or fields.get("use_sliding_window") is False:
        return [None] * num_layers
    pattern = fields.optional("sliding_window_pattern")
    if pattern is None and fields.text("model_type") in ("gemma2", "cohere2"):
        pattern = 2 if fields.text("model_type") == "gemma2" else 4
    if pattern is None and (fields.text("model_type") or "").startswith("gemma3"):
        pattern = 6
    if pattern:
        return [None if (layer + 1) % pattern == 0 else window for layer in range(num_layers)]
    first = fields.optional("max_window_layers") if fields.get("use_sliding_window") else None
    return [window if layer >= (first or 0) else None for layer in range(num_layers)]


def _window_of(kind: Any, fields: _Fields, window: int | None) -> int | None:
    if kind in ("full_attention", "attention"):
        return None
    if kind in _WINDOWED:
        name = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
        size = window if kind == "sliding_attention" else fields.optional(name)
        if not size:
            raise PlanError(
                f"the model config has layers of kind {kind}, but no {name}; give the whole "
                "config.json."
            )
        return size
    raise PlanError(
        f"the model config has a layer of kind {kind!r}; the roofline knows full_attention, "
        f"{' and '.join(_WINDOWED)}. Measure this model with 'foredraft profile' instead."
    )


def _type_bits(config: Mapping[str, Any], outer: Mapping[str, Any]) -> float:
    kind = config.get("dtype") or config.get("torch_dtype") or outer.get("torch_dtype")
    if kind is None:
        return 16.0
    bits = _BITS_BY_TYPE.get(str(kind).removeprefix("torch."))
    if bits is None:
        raise PlanError(
            f"the model config has the type {kind!r}; known are {', '.join(_BITS_BY_TYPE)}. Give "
            "one of these."
        )
    return bits


def _quantised_bits(
    config: Mapping[str, Any], outer: Mapping[str, Any]
) -> tuple[float | None, bool]:
    """Bits of a quantised weight, and whether products run in fp8."""
    how = config.get("quantization_config") or outer.get("quantization_config")
    if not isinstance(how, Mapping):
        return None, False
    method = str(how.get("quant_method") or how.get("quant_algo") or "").lower()
    groups = how.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        found = [
            (weights.get("num_bits"), weights.get("type"), group.get("input_activations"))
            for group in groups.values()
            if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping)
        ]
        bits = [float(b) for b, _, _ in found if isinstance(b, int | float)]
        if bits:
            is_fp8 = all(kind == "float" and b == 8 and given for b, kind, given in found)
            return max(bits), is_fp8
    for name in ("bits", "w_bit", "weight_bits"):
        value = how.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value), False
    if how.get("load_in_4bit") or how.get("_load_in_4bit"):
        return 4.0, False
    if how.get("load_in_8bit") or how.get("_load_in_8bit"):
        return 8.0, False
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, True
    if method == "mxfp4":
        return 4.25, False  # a scale of 8 bits for 32 values
    raise PlanError(
        f"the model config is quantised with {method or 'an unnamed method'!r}, but does not say "
        "to how many bits; give them with --weight-bits."
    )
