"""Heads on disk: the public layouts read strictly, and written.

A folder holds ``config.json`` and ``model.safetensors``. Which layout it is follows from the names
of its tensors: SafeAILab's and SpecForge's EAGLE-3 (``midlayer.*``), the speculators library's and
vLLM's (``layers.0.*``), SafeAILab's EAGLE-1 (``fc``, ``layers.0.*``), foredraft's own MTP. Medusa's
(``0.0.linear.weight``) lie in ``medusa_lm_head.safetensors``. A tensor that is missing, left over
or of another shape is an error that names it.

Which of the target's layers EAGLE-3 reads is written down in two conventions: as inputs of layers
(vLLM's top-level ``eagle_aux_hidden_state_layer_ids``, equal to indices into ``hidden_states``) or
as outputs (the one inside ``eagle_config``: one less). Both are written, both are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foredraft.errors import ForedraftError, ModelLoadError, said
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.mtp import MtpHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.shape import HeadShape, default_feature_layers, shape_for
from foredraft.heads.trained import target_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASSES: dict[str, type[RecurrentHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MtpHead,
}
_WEIGHTS = "model.safetensors"
_MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
_CONFIG = "config.json"
_PICKLES = ("pytorch_model.bin",)
_EAGLE3_MARK = "midlayer.hidden_norm.weight"
_LEFT_OUT = ("embed_tokens.weight", "t2d")
"""Tensors that a reader has no need of: the target's embedding, and what ``d2t`` says already."""


def make_head(shape: HeadShape) -> RecurrentHead:
    """A head of a shape, with random weights."""
    return _CLASSES[shape.kind](shape)


def load_medusa(
    folder: str | Path, target: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> MedusaHead:
    """Read Medusa heads that were made for a target; arguments and errors as ``load_head``."""
    folder = Path(folder)
    _, tensors = _read(folder, (_MEDUSA_WEIGHTS, _WEIGHTS))
    levels = {name.split(".")[0] for name in tensors if name.endswith(".1.weight")}
    if not levels or "0.1.weight" not in tensors:
        raise ModelLoadError(
            f"{folder} holds no Medusa heads; these have tensors 0.0.linear.weight, "
            "0.0.linear.bias, 0.1.weight, 1.0.linear.weight and so on."
        )
    shape = shape_for(target, "medusa", int(tensors["0.1.weight"].shape[0]), num_levels=len(levels))
    head = MedusaHead(shape)
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    _check(folder, head.state_dict(), tensors)
    head.load_state_dict(tensors)
    _take_words(folder, head, d2t)
    return head.to(dtype).eval()


def load_head(
    folder: str | Path, target: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> RecurrentHead:
    """Read a head that was made for a target.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``.
        target: The target's config.
        dtype: To read it in.

    Raises:
        ModelLoadError: There is no head, or it does not fit: the message names what does not.
    """
    folder = Path(folder)
    config, tensors = _read(folder)
    if _EAGLE3_MARK.replace("midlayer", "layers.0") in tensors:  # other engines' name
        tensors = {_renamed(name): tensor for name, tensor in tensors.items()}
    shape = _shape(folder, config, tensors, target)
    head = make_head(shape)
    d2t = tensors.pop("d2t", None)
    for name in _LEFT_OUT:
        tensors.pop(name, None)
    _check(folder, head.state_dict(), tensors)
    head.load_state_dict(tensors)
    _take_words(folder, head, d2t)
    return head.to(dtype).eval()


def _take_words(folder: Path, head: RecurrentHead | MedusaHead, d2t: torch.Tensor | None) -> None:
    shape = head.shape
    if not shape.has_own_words:
        return
    if d2t is None:
        raise ModelLoadError(
            f"{folder} drafts {shape.draft_vocab_size} of {shape.vocab_size} words and has no "
            "tensor d2t, which says which; it is incomplete."
        )
    head.d2t.copy_(_checked_words(folder, d2t, shape))


def save_head(head: RecurrentHead | MedusaHead, folder: str | Path, name: str, target: Any) -> None:
    """Write a head: bfloat16 weights, in SpecForge's and SafeAILab's layout.

    The weights come before the config, each by way of a new file, so that what is half written is
    no head.

    Args:
        head: To write.
        folder: Made if need be.
        name: Of the model it was made for.
        target: That model's config.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.shape.has_own_words:
        is_drafted = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
        is_drafted[head.target_ids.cpu()] = True
        tensors |= {"d2t": head.d2t.cpu().clone(), "t2d": is_drafted}
    weights = _MEDUSA_WEIGHTS if head.shape.kind == "medusa" else _WEIGHTS
    save_file(tensors, folder / f"{weights}.new", metadata={"format": "pt"})
    (folder / f"{weights}.new").replace(folder / weights)
    text = json.dumps(config_of(head.shape, name, target), indent=2, sort_keys=True)
    (folder / f"{_CONFIG}.new").write_text(text + "\n", encoding="utf-8")
    (folder / f"{_CONFIG}.new").replace(folder / _CONFIG)


def config_of(shape: HeadShape, name: str, target: Any) -> dict[str, Any]:
    """What ``config.json`` says of a head, in the fields that other engines read."""
    names = {
        "eagle": "LlamaForCausalLMEagle",
        "eagle3": "LlamaForCausalLMEagle3",
        "mtp": "ForedraftMtp",
        "medusa": "MedusaModel",
    }
    found: dict[str, Any] = {
        "architectures": [names[shape.kind]],
        "model_type": "llama",
        "foredraft_kind": shape.kind,
        "target_name": name,
        "target_sizes": target_sizes(target),
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope.get("rope_theta", 10000.0),
        "rope_parameters": shape.rope,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "attention_bias": shape.has_attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if shape.kind == "eagle":
        found["bias"] = shape.has_fc_bias
    if shape.kind == "medusa":
        found |= {
            "medusa_num_heads": shape.num_levels,
            "medusa_num_layers": 1,
            "base_model_name_or_path": name,
        }
    if shape.kind == "mtp":
        found["hidden_first"] = shape.hidden_first
    if shape.kind == "eagle3":
        found |= {
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": shape.norm_before_fc,
            "fc_norm": shape.fc_norm,
            "norm_output": shape.norm_output,
            "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in shape.feature_layers],
            },
        }
    return found


def _read(
    folder: Path, names: tuple[str, ...] = (_WEIGHTS,)
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / _CONFIG).is_file():
        raise ModelLoadError(
            f"{folder} holds no {_CONFIG}; a head is a folder with {_CONFIG} and {_WEIGHTS}."
        )
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder / _CONFIG} cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{folder / _CONFIG} is no JSON object.")
    for weights in names:
        if not (folder / weights).is_file():
            continue
        try:
            return config, load_file(folder / weights)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{folder / weights} cannot be read ({error}).") from error
    pickles = ("medusa_lm_head.pt", "pytorch_model.bin") if len(names) > 1 else _PICKLES
    pickled = next((folder / name for name in pickles if (folder / name).is_file()), None)
    if pickled is None:
        raise ModelLoadError(f"{folder} holds no {names[0]}; the head's weights are missing.")
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle raises what it likes
        raise ModelLoadError(
            f"{pickled} holds more than weights, or is damaged ({type(error).__name__}), and a "
            f"pickle can run anything; convert it to {names[0]} where you trust it."
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        raise ModelLoadError(f"{pickled} is no table of tensors; convert it to {names[0]}.")
    return config, tensors


def _renamed(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _shape(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: PretrainedConfig,
) -> HeadShape:
    """The shape that a config and its tensors state, checked against the target."""
    try:
        return _stated_shape(folder, config, tensors, target)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, ForedraftError):
            raise
        raise ModelLoadError(
            f"{folder / _CONFIG} holds what a head's config cannot ({said(error)}); mend it."
        ) from error


def _stated_shape(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: PretrainedConfig,
) -> HeadShape:
    sizes = config.get("transformer_layer_config", config)
    kind = config.get("foredraft_kind")
    if kind is None:
        if _EAGLE3_MARK in tensors:
            kind = "eagle3"
        elif "fc.weight" in tensors and "layers.0.mlp.gate_proj.weight" in tensors:
            kind = "eagle"
        else:
            raise ModelLoadError(
                f"{folder} holds no head that is known; EAGLE-3 has midlayer.* or layers.0.* and "
                "d2t, EAGLE has fc.* and layers.0.*."
            )
    nested = config.get("eagle_config") or {}
    if kind == "eagle3":
        _refuse_variants(folder, config, nested)
    num_layers = int(target.num_hidden_layers)
    layers = _feature_layers(config, num_layers) if kind == "eagle3" else (num_layers,)
    missing = {"hidden_size", "num_attention_heads", "intermediate_size"} - set(sizes)
    if missing:
        raise ModelLoadError(f"{folder / _CONFIG} does not say {', '.join(sorted(missing))}.")
    hidden_size, num_heads = int(sizes["hidden_size"]), int(sizes["num_attention_heads"])
    intermediate_size = int(sizes["intermediate_size"])
    rope = dict(sizes.get("rope_parameters") or sizes.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", float(sizes.get("rope_theta", 10000.0)))
    vocab_size = int(target.vocab_size)
    drafted = config.get("draft_vocab_size") or vocab_size
    shape = HeadShape(
        kind=kind,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=int(sizes.get("num_key_value_heads") or num_heads),
        head_dim=int(sizes.get("head_dim") or hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=int(drafted),
        target_hidden_size=int(config.get("target_hidden_size") or hidden_size),
        num_target_layers=num_layers,
        feature_layers=layers,
        max_positions=int(sizes.get("max_position_embeddings", 2048)),
        rope=rope,
        rms_norm_eps=float(sizes.get("rms_norm_eps", 1e-5)),
        has_fc_bias="fc.bias" in tensors,
        has_attention_bias=bool(sizes.get("attention_bias", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", nested.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        hidden_first=bool(config.get("hidden_first", False)),
        shares_output=kind == "eagle3" and "lm_head.weight" not in tensors,
    )
    own_vocabulary = config.get("vocab_size", sizes.get("vocab_size"))
    if kind != "eagle3" and own_vocabulary is not None and int(own_vocabulary) != vocab_size:
        raise ModelLoadError(
            f"{folder} was made for a vocabulary of {own_vocabulary}; this target has {vocab_size}."
        )
    if shape.target_hidden_size != int(target.hidden_size):
        raise ModelLoadError(
            f"{folder} reads hidden states of {shape.target_hidden_size}; this target's are of "
            f"{target.hidden_size}, so it was made for another."
        )
    return shape


def _refuse_variants(folder: Path, config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Refuse what would be read and drafted with, and be wrong."""
    usual = {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_aux_hidden_state": True,
        "parallel_draft_step": 1,
    }
    for name, value in usual.items():
        said_of = config.get(name, nested.get(name, value))
        if said_of != value:
            raise ModelLoadError(
                f"{folder / _CONFIG} says {name} {said_of!r}, a variant of EAGLE-3 that is not "
                f"known here; allowed is {value!r}."
            )


def _feature_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Indices into ``hidden_states``: as inputs of layers, or as outputs, or the default."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    nested = config.get("eagle_config") or {}
    if layers is None and nested.get("eagle_aux_hidden_state_layer_ids") is not None:
        layers = [int(layer) + 1 for layer in nested["eagle_aux_hidden_state_layer_ids"]]
    if layers is None:
        return default_feature_layers(num_layers)
    return tuple(int(layer) for layer in layers)


def _check(
    folder: Path, wanted: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Every tensor is there, of its shape, and no other."""
    missing = sorted(set(wanted) - set(tensors))
    extra = sorted(set(tensors) - set(wanted))
    if missing or extra:
        parts = [
            f"{what} {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
            for what, names in (("lacks", missing), ("has also", extra))
            if names
        ]
        raise ModelLoadError(f"{folder} {' and '.join(parts)}; it is no head of its kind.")
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape:
            raise ModelLoadError(
                f"{folder}: {name} is {list(tensors[name].shape)}, and by its config and the "
                f"target it has to be {list(tensor.shape)}."
            )


def _checked_words(folder: Path, d2t: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """Offsets of words, which lead to the target's vocabulary, each to a word of its own."""
    if d2t.shape != (shape.draft_vocab_size,):
        raise ModelLoadError(
            f"{folder}: d2t is {list(d2t.shape)}, and has to be [{shape.draft_vocab_size}]."
        )
    ids = d2t.long() + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ModelLoadError(
            f"{folder}: d2t leads to token {wrong}; the target's vocabulary is 0 to "
            f"{shape.vocab_size - 1}."
        )
    if len(ids.unique()) != len(ids):
        raise ModelLoadError(f"{folder}: d2t leads from two words to one token.")
    return d2t.long()
