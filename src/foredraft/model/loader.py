"""From a name to a target that can be verified: find, check, load, probe.

A model is refused, in a sentence, when its state cannot be rolled back by length (recurrent,
hybrid, encoder-decoder), when files are missing or broken, or when its attention does not reach
foredraft's function (``probe.py``). Code that comes with a model is never run.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foredraft import families
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.model import packed_linear
from foredraft.model.diagnosis import (
    cached_file,
    config_error,
    counted,
    hub_error,
    squeezed,
    weights_error,
    why_offline,
)
from foredraft.model.gguf import converted_folder
from foredraft.model.kv_cache import LayerShape
from foredraft.model.large_pages import anonymous_memory, gather_into_large_pages
from foredraft.model.probe import probe
from foredraft.model.source import find_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_LOG = logging.getLogger("foredraft")

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_CHANGING_ROPE = {"dynamic", "longrope"}
_DEFAULT_LENGTH = 2048
"""Context of a model that states none."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


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
        weight_bytes: Of all its weights, packed ones too; 0 where that is not known.
        num_ranks: Over how many ranks its layers are split.
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
    weight_bytes: int = 0
    num_ranks: int = 1


def load_target(
    config: EngineConfig, notify: Callable[[str], None] = _LOG.info, packs: bool = True
) -> Target:
    """Load the model that ``config`` names.

    Args:
        config: Engine options; ``model``, ``dtype``, ``device`` and ``max_model_len`` are read.
        notify: Told, in a sentence, what takes long or is not as the user may think.
        packs: Whether its linear layers may be laid out anew for speed; training reads them.

    Raises:
        ModelLoadError: The model is missing, broken or of a kind that cannot be a target.
    """
    name = config.model
    device = _resolve_device(config.device)
    dtype = _resolve_dtype(config.dtype, device)
    source = resolve_source(name, dtype, notify)
    offline = None if Path(source).is_dir() else why_offline()
    # A local folder never asks the hub for anything; without a network, nor does a hub name.
    options = {
        "trust_remote_code": False,
        "local_files_only": Path(source).is_dir() or offline is not None,
    }
    num_ranks = config.tensor_parallel_size
    if num_ranks > 1:
        _check_ranks(num_ranks)
    memory_before = anonymous_memory()
    with _quiet_transformers():
        if not options["local_files_only"] and cached_file(source, "config.json") is None:
            notify(f"Asking the model hub for {source}; what it sends is kept in its cache.")
        hf_config = _read_config(source, options, offline)
        _refuse_unsuitable(name, hf_config)
        max_model_len = _resolve_length(config, hf_config, notify)
        tokenizer = _load_tokenizer(source, options)
        model = _load_model(name, source, hf_config, options, dtype, notify, num_ranks)
        try:
            if num_ranks == 1:  # else each rank's share lies on its device already
                model = model.to(device)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"{name} in {str(dtype).removeprefix('torch.')} does not fit into the memory of "
                f"{device}; choose a smaller dtype, a smaller model or another device."
            ) from error
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    target = prepare_target(name, model, tokenizer, max_model_len, num_ranks, packs)
    if device.type == "cpu" and num_ranks == 1:
        gather_into_large_pages(weight_bytes, memory_before)
    return target


def target_config(name: str, notify: Callable[[str], None] = _LOG.info) -> PretrainedConfig:
    """The Transformers config of the model that a name stands for; no weights are read.

    Raises:
        ModelLoadError: There is no such model.
    """
    source = resolve_source(name, _resolve_dtype("auto", torch.device("cpu")), notify)
    offline = None if Path(source).is_dir() else why_offline()
    options = {
        "trust_remote_code": False,
        "local_files_only": Path(source).is_dir() or offline is not None,
    }
    with _quiet_transformers():
        return _read_config(source, options, offline)


def prepare_target(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int,
    num_ranks: int = 1,
    packs: bool = True,
) -> Target:
    """Make a loaded Transformers model a target: probe it, take its attention, pack its layers.

    Args:
        name: For messages.
        model: A causal LM of Transformers, on its device and in its dtype. It is taken over.
        tokenizer: Its tokenizer, if any.
        max_model_len: Most tokens of prompt and output together.
        num_ranks: Over how many ranks its layers are split.
        packs: Whether its linear layers may be laid out anew for speed.

    Raises:
        ModelLoadError: Its attention does not go through foredraft's function.
    """
    _refuse_unsuitable(name, model.config)
    model.eval()
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    with _quiet_transformers():  # a refusal is said once, in our own sentence
        layers, vocab_size = probe(name, model)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if packs and num_ranks == 1 and packed_linear.can_pack(model.dtype, model.device):
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
        weight_bytes=weight_bytes,
        num_ranks=num_ranks,
    )


def _check_ranks(num_ranks: int) -> None:
    """Refuse a number of ranks that this program was not started with."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks != started:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, and this program runs in {started} "
            f"process{'es' * (started > 1)}; start it with torchrun --nproc-per-node {num_ranks}, "
            "or change the number."
        )


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device is {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices; use "
            "'cpu'."
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


def resolve_source(name: str, dtype: torch.dtype, notify: Callable[[str], None]) -> str:
    """Return what ``from_pretrained`` understands for ``name``: a local folder or a hub name."""
    source = find_source(name)
    if source.kind != "gguf":
        return source.location
    with _quiet_transformers():
        return str(converted_folder(Path(source.location), dtype, notify))


def _read_config(source: str, options: dict[str, Any], offline: str | None) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, **options)
    except Exception as error:  # hub, JSON and registry errors have no common base
        file = cached_file(source, "config.json")
        if file is None:
            raise hub_error(source, offline, error) from error
        raise config_error(file, error) from error


def _refuse_unsuitable(name: str, config: PretrainedConfig) -> None:
    text_config = config.get_text_config()
    model_type = getattr(text_config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{name} is an encoder-decoder model ({model_type}); foredraft verifies decoder-only "
            "causal language models. Choose one of these."
        )
    layer_types = set(getattr(text_config, "layer_types", None) or _ATTENTION_LAYERS)
    others = sorted(layer_types - _ATTENTION_LAYERS)
    if model_type in families.RECURRENT or others:
        kind = f"layers of kind {', '.join(others)}" if others else "recurrent layers"
        raise ModelLoadError(
            f"{name} ({model_type}) has {kind}; foredraft can roll back full and sliding-window "
            "attention, and nothing else, after a rejected draft. Choose a model all of whose "
            "layers are such."
        )


def _changing_rope(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Rotary parameters (one set, or one a kind of layer) whose scaling depends on the length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    every = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return [p for p in every if p.get("rope_type") in _CHANGING_ROPE]


def _resolve_length(
    config: EngineConfig, hf_config: PretrainedConfig, notify: Callable[[str], None]
) -> int:
    text_config = hf_config.get_text_config()
    longest = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    reason = "this model allows"
    for rope in _changing_rope(text_config):
        # These scale positions by the longest position of a call, so that rows of one request would
        # depend on its neighbours. Up to the original length they do not scale at all.
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if original and int(original) < longest:
            longest = int(original)
            reason = (
                f"this model's {rope['rope_type']} rotary scaling changes with the length of the "
                "text beyond its original context, so foredraft allows"
            )
    if config.max_model_len is None:
        if reason != "this model allows":
            notify(f"Context: {reason} up to {longest} tokens.")
        return longest or _DEFAULT_LENGTH
    if longest and config.max_model_len > longest:
        raise ModelLoadError(
            f"max_model_len is {config.max_model_len}; {reason} up to {longest}. Leave it out, or "
            "choose a model with a longer context."
        )
    return config.max_model_len


def _load_tokenizer(source: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    problem: Exception | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # noqa: BLE001 - a folder without one raises any of several kinds
        problem = error
    # Without files, some classes make an empty tokenizer instead of an error.
    files = [f for f in _TOKENIZER_FILES if cached_file(source, f) is not None]
    if not files:
        _LOG.info("no tokenizer in %s; prompts must be token ids", source)
        return None
    if tokenizer is None:
        raise ModelLoadError(
            f"the tokenizer of {source} ({', '.join(files)}) cannot be read "
            f"({type(problem).__name__}: {squeezed(problem) if problem else ''}); download it "
            "again, or remove these files and pass prompts as token ids."
        ) from problem
    return tokenizer


def _load_model(
    name: str,
    source: str,
    hf_config: PretrainedConfig,
    options: dict[str, Any],
    dtype: torch.dtype,
    notify: Callable[[str], None],
    num_ranks: int = 1,
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if num_ranks > 1:
        from transformers.distributed import DistributedConfig

        options = {**options, "distributed_config": DistributedConfig(tp_size=num_ranks)}
        if not getattr(hf_config.get_text_config(), "base_model_tp_plan", None):
            raise ModelLoadError(
                f"{name} ({hf_config.model_type}) has no plan to split its layers in Transformers; "
                "run it with tensor_parallel_size=1."
            )
        text_config = hf_config.get_text_config()
        num_heads = getattr(text_config, "num_key_value_heads", text_config.num_attention_heads)
        if num_heads % num_ranks:
            raise ModelLoadError(
                f"{name} has {num_heads} key heads in a layer, and tensor_parallel_size is "
                f"{num_ranks}; choose a divisor of {num_heads}."
            )
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **options,
        )
    except ImportError as error:
        raise ModelLoadError(
            f"{name} needs a package that is not installed ({squeezed(error)}); install it, or "
            "choose another model."
        ) from error
    except Exception as error:  # safetensors, torch and hub errors have no common base
        raise weights_error(name, source, hf_config, error) from error
    mismatched = sorted(report.get("mismatched_keys", ()))
    missing = sorted(set(report.get("missing_keys", ())) - {key for key, *_ in mismatched})
    unexpected = sorted(report.get("unexpected_keys", ()))
    if missing:
        raise ModelLoadError(
            f"the weights of {name} lack {counted(missing, 'tensor')} (the first is {missing[0]}); "
            "download the model again."
        )
    if mismatched:
        key, theirs, ours = mismatched[0]
        raise ModelLoadError(
            f"the weights of {name} do not fit its config.json: {counted(mismatched, 'tensor')} of "
            f"another shape (the first, {key}, is {list(theirs)} instead of {list(ours)}). "
            "Download the model again."
        )
    if unexpected:
        notify(
            f"No layer of {name} uses {counted(unexpected, 'tensor')} of its weights (the first is "
            f"{unexpected[0]})."
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


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep Transformers' bars and hints out of sight; errors still come as exceptions."""
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
