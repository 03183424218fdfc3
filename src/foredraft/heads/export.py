"""Heads for other engines: their layouts, from one head.

``specforge`` is what SafeAILab, SpecForge, SGLang and vLLM read (``midlayer.*`` and a flat config);
``speculators`` is that of the speculators library, which vLLM reads too (``layers.0.*``, the sizes
one level down, what the proposals are).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import config_of, make_head, save_head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.recurrent import RecurrentHead

LAYOUTS = {
    "specforge": "specforge",
    "sglang": "specforge",
    "vllm": "specforge",
    "speculators": "speculators",
}
"""What is asked for, and the layout that it reads."""

_OF_THE_LAYER = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "vocab_size",
    "attention_bias",
    "tie_word_embeddings",
)


def export_head(
    head: RecurrentHead | MedusaHead, to: str, folder: str | Path, name: str, target: Any
) -> None:
    """Write a head for another engine.

    Args:
        head: To write.
        to: A key of ``LAYOUTS``.
        folder: Made if need be; an empty one, or none.
        name: Of the model it was made for.
        target: That model's config.

    Raises:
        ConfigError: There is no such layout, it has no place for this kind of head, or the folder
            holds something.
    """
    layout = LAYOUTS.get(to)
    if layout is None:
        raise ConfigError(f"to is {to!r}; allowed is one of {', '.join(LAYOUTS)}.")
    kind = head.shape.kind
    if kind == "mtp" or (kind == "medusa" and to != "specforge"):
        raise ConfigError(
            f"{to} reads no {kind} heads by themselves; allowed are eagle and eagle3"
            f"{', and medusa for its own layout' if to == 'specforge' else ''}."
        )
    if layout == "speculators" and kind != "eagle3":
        raise ConfigError(f"the speculators layout is written for eagle3; this is {kind}.")
    if head.shape.kind == "eagle3" and not head.shape.has_output and layout == "speculators":
        raise ConfigError(
            "the speculators layout has an output layer in the head, and this one drafts by the "
            "target's; export it to vllm or sglang."
        )
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a folder that is not there yet.")
    save_head(_with_all_words(head), folder, name, target)
    if layout == "speculators":
        _as_speculators(folder, head, name, target)


def _with_all_words(head: RecurrentHead | MedusaHead) -> RecurrentHead | MedusaHead:
    """An EAGLE head as others have it: by the target's whole output layer."""
    if head.shape.kind != "eagle" or not head.shape.has_own_words:
        return head
    whole = make_head(head.shape.replace(draft_vocab_size=head.shape.vocab_size))
    whole.load_state_dict(head.state_dict())
    return whole


def _as_speculators(folder: Path, head: RecurrentHead | MedusaHead, name: str, target: Any) -> None:
    """Rename tensors and rewrite the config of a head that was just written."""
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    tensors = {
        tensor.replace("midlayer.", "layers.0.", 1): value
        for tensor, value in load_file(weights).items()
    }
    if "d2t" not in tensors:  # it is always there in this layout
        count = head.shape.draft_vocab_size
        tensors["d2t"] = torch.zeros(count, dtype=torch.int64)
        tensors["t2d"] = torch.ones(count, dtype=torch.bool)
    save_file(tensors, f"{weights}.new", metadata={"format": "pt"})
    Path(f"{weights}.new").replace(weights)
    flat = config_of(head.shape, name, target)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": name,
                "architectures": list(getattr(target, "architectures", None) or []),
            },
        },
        "transformer_layer_config": {key: flat[key] for key in _OF_THE_LAYER},
        "draft_vocab_size": head.shape.draft_vocab_size,
        "target_hidden_size": head.shape.target_hidden_size,
        "norm_before_residual": head.shape.norm_before_residual,
        "norm_before_fc": head.shape.norm_before_fc,
        "fc_norm": head.shape.fc_norm,
        "norm_output": head.shape.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(head.shape.feature_layers),
        "embed_requires_grad": False,
        "torch_dtype": "bfloat16",
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
