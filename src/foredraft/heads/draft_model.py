"""A draft model made of some of the target's own layers, with the target's two ends.

The embedding and the output layer stay the target's: only the kept layers and the last norm are
its own, so that it is small on disk and in memory. It drafts some words alone, like a head
(``own_words``). Written with its embedding it is a model like any other, for any program.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigError, ModelLoadError, said
from foredraft.heads.trained import target_sizes

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_MARK = "foredraft_draft"


class KeptLayers:
    """Some of a target's layers as a model of their own.

    Args:
        target: A ``Target``, loaded with its layers as they are.
        layers: Which to keep, from 0, in order.
        words: int64 [num_words], what it drafts, in order; ``None`` for all.

    Attributes:
        model: Transformers' model; its embedding and output layer are the target's own, and need
            no gradients.
        layers: As given.
        d2t: int64 [num_words], its words, as offsets.

    Raises:
        ConfigError: There are no such layers, or the target is built otherwise.
    """

    def __init__(
        self, target: Any, layers: Sequence[int], words: torch.Tensor | None = None
    ) -> None:
        """Copy them."""
        num_layers = int(target.model.config.num_hidden_layers)
        wrong = [layer for layer in layers if not 0 <= layer < num_layers]
        if wrong or not layers or list(layers) != sorted(set(layers)):
            raise ConfigError(
                f"the layers to keep are {list(layers)}; allowed are some of 0 to "
                f"{num_layers - 1}, in order, each once."
            )
        self.layers = tuple(layers)
        theirs = _layers_of(target)
        try:
            config = _config_for(target.model.config, self.layers)
            self.model = _empty(config, target.dtype).to(target.device)
            with torch.no_grad():
                for mine, layer in zip(self.body.layers, layers, strict=True):
                    _refuse_other(mine, theirs.layers[layer])
                    mine.load_state_dict(theirs.layers[layer].state_dict())
                self.body.norm.load_state_dict(theirs.norm.state_dict())
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"layers {list(layers)} of {target.name} cannot be a model of their own "
                f"({said(error)}); keep others, or use a smaller model of its family."
            ) from error
        self.model.set_input_embeddings(target.model.get_input_embeddings())
        self.model.set_output_embeddings(target.model.get_output_embeddings())
        self.model.requires_grad_(False)
        for part in (self.body.layers, self.body.norm):
            part.requires_grad_(True)
        vocab_size = target.vocab_size
        ids = torch.arange(vocab_size) if words is None else words
        self.d2t = (ids - torch.arange(len(ids))).to(target.device)
        self.has_own_words = len(ids) < vocab_size

    @property
    def body(self) -> Any:
        """The model without its output layer."""
        return self.model.model

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [num_words], its words."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def spread_layers(num_layers: int, count: int) -> list[int]:
    """``count`` of a target's layers, the first and the last among them, evenly spread."""
    if not 1 <= count <= num_layers:
        raise ConfigError(f"{count} layers are to be kept; allowed is 1 to {num_layers}.")
    if count == 1:
        return [num_layers - 1]
    return [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]


def save_draft(draft: KeptLayers, folder: Path, target: Any, with_embedding: bool) -> None:
    """Write it: bfloat16 weights, the config last, each by way of a new file.

    Args:
        draft: To write.
        folder: Made if need be.
        target: What it was made from.
        with_embedding: With its two ends and the tokenizer, as a model that any program loads.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous().clone()
        for name, tensor in draft.model.state_dict().items()
        if with_embedding or not _is_end(name)
    }
    config = copy.deepcopy(draft.model.config)
    if with_embedding and config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / f"{_WEIGHTS}.new", metadata={"format": "pt"})
    (folder / f"{_WEIGHTS}.new").replace(folder / _WEIGHTS)
    if with_embedding:
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(folder)
        target.model.generation_config.save_pretrained(folder)
    said_of = json.loads(config.to_json_string(use_diff=False))
    said_of |= {
        "architectures": [type(draft.model).__name__],
        "dtype": "bfloat16",
        "target_name": target.name,
        "target_sizes": target_sizes(target.model.config),
        _MARK: {
            "kept_layers": list(draft.layers),
            "has_embedding": with_embedding,
            "words": draft.target_ids.tolist() if draft.has_own_words else None,
        },
    }
    for name in ("_name_or_path", "_attn_implementation"):
        said_of.pop(name, None)
    text = json.dumps(said_of, indent=2, sort_keys=True)
    (folder / f"{_CONFIG}.new").write_text(text + "\n", encoding="utf-8")
    (folder / f"{_CONFIG}.new").replace(folder / _CONFIG)


def is_kept_layers(folder: str | Path) -> bool:
    """Whether a folder holds a draft model that was made here."""
    return _config_of(folder) is not None


def is_whole_for(folder: str | Path, target: Any) -> bool:
    """Whether it was made from another target, and has an embedding of its own."""
    found = _config_of(folder) or {}
    is_of_target = found.get("target_sizes") == target_sizes(target)
    return bool(found.get(_MARK, {}).get("has_embedding")) and not is_of_target


def refuse_without_ends(folder: str | Path) -> None:
    """Refuse to run one without its embedding where it cannot take the target's."""
    found = _config_of(folder)
    if found is not None and not found[_MARK].get("has_embedding"):
        raise ModelLoadError(
            f"the draft model {folder} was written without its embedding, and takes that of a "
            "target on one device in one process; write it with, or split no layers."
        )


def _config_of(folder: str | Path) -> dict[str, Any] | None:
    try:
        config = json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(config, dict) and isinstance(config.get(_MARK), dict)
    return config if is_ours else None


def load_draft(folder: str | Path, target: Any) -> tuple[Any, torch.Tensor | None]:
    """Read a draft model that was made from a target, whose two ends it takes.

    Returns:
        Transformers' model, and its words, int64 [num_words]; ``None`` where it drafts all.

    Raises:
        ModelLoadError: It is incomplete, or was made from another target.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig

    folder = Path(folder)
    try:
        found = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"the draft model {folder} cannot be read ({said(error)}).") from error
    mine, theirs = found.get("target_sizes"), target_sizes(target.model.config)
    if mine != theirs:
        raise ModelLoadError(
            f"{folder} was made from a target of sizes {mine}; this one's are {theirs}."
        )
    words = found[_MARK].get("words")
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_end(name)}
    model = _empty(config, target.dtype)
    wanted = {n: t for n, t in model.state_dict().items() if not _is_end(n)}
    wrong = sorted(
        name
        for name in set(wanted) | set(tensors)
        if name not in wanted or name not in tensors or wanted[name].shape != tensors[name].shape
    )
    if wrong:
        raise ModelLoadError(
            f"{folder}: {wrong[0]} is missing, left over or of another shape than its config says."
        )
    model.load_state_dict(tensors, strict=False)
    model = model.to(target.device)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.set_output_embeddings(target.model.get_output_embeddings())
    model.requires_grad_(False)
    if words is None:
        return model, None
    is_fit = isinstance(words, list) and all(type(word) is int for word in words) and words
    if not is_fit or min(words) < 0 or max(words) >= target.vocab_size:
        raise ModelLoadError(f"{folder}: its words are no ids of the target's vocabulary.")
    return model, torch.tensor(words, dtype=torch.int64, device=target.device)


def _config_for(config: Any, layers: tuple[int, ...]) -> Any:
    """The target's config with the kept layers alone: in its lists, too, that have one a layer."""
    made = copy.deepcopy(config)
    num_layers = int(config.num_hidden_layers)
    made.num_hidden_layers = len(layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:
            setattr(made, name, [value[layer] for layer in layers])
    if getattr(config, "first_k_dense_replace", None) is not None:
        made.first_k_dense_replace = sum(layer < config.first_k_dense_replace for layer in layers)
    if getattr(config, "mlp_only_layers", None):
        made.mlp_only_layers = [
            place for place, layer in enumerate(layers) if layer in config.mlp_only_layers
        ]
    return made


def _empty(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError:  # a family whose scores it cannot shape
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval()


def _refuse_other(mine: Any, theirs: Any) -> None:
    """Refuse a layer that is built otherwise at its new place."""
    pairs = list(zip(mine.modules(), theirs.modules(), strict=True))
    for one, other in pairs:
        for name in ("use_rope", "is_sliding", "sliding_window", "attention_type"):
            if getattr(one, name, None) != getattr(other, name, None):
                raise ValueError(f"{name} goes by a layer's place")


def _layers_of(target: Any) -> Any:
    body: Any = getattr(target.model, "model", None)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "norm"):
        raise ConfigError(
            f"{target.name} keeps its layers elsewhere than Llama's family does, so none can be "
            "kept as a draft model; use a smaller model of its family."
        )
    return body


def _is_end(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "lm_head."))
