"""What a head is, by its files alone: kind, sizes, the layers it will read, what looks wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ModelLoadError
from foredraft.heads.checkpoint import load_head, load_medusa
from foredraft.heads.inside import is_checkpoint_with_mtp, load_inside
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.shape import default_feature_layers


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Attributes:
        kind: As in ``HeadShape``.
        num_parameters: Of the head.
        num_bytes: Of its weights in bfloat16.
        draft_vocab_size: Words that it drafts.
        vocab_size: Of the target.
        inputs_of: Layers that it reads, as inputs of layers counted from 0 (vLLM's convention; also
            indices into Transformers' ``hidden_states``).
        outputs_of: The same, as outputs of layers (SGLang's and SpecForge's convention).
        flags: Choices of the layer that are not the default.
        warnings: What looks wrong, a sentence each.
    """

    kind: str
    num_parameters: int
    num_bytes: int
    draft_vocab_size: int
    vocab_size: int
    inputs_of: tuple[int, ...]
    outputs_of: tuple[int, ...]
    flags: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def read_any(folder: str | Path, target: Any) -> RecurrentHead | MedusaHead:
    """Read a head of whatever kind; errors as ``load_head``."""
    folder = Path(folder)
    names = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
    if any((folder / name).is_file() for name in names):
        return load_medusa(folder, target)
    if is_checkpoint_with_mtp(folder):
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):  # its classes alone are wanted
            model = AutoModelForCausalLM.from_config(target)
        return load_inside(folder, model, torch.float32)
    return load_head(folder, target)


def inspect_head(folder: str | Path, target: Any) -> Finding:
    """Look at a head.

    Args:
        folder: Of the head.
        target: The config of the target it is to be used with.

    Raises:
        ModelLoadError: It cannot be read, or does not fit the target.
    """
    head = read_any(folder, target)
    shape = head.shape
    flags = [
        name
        for name in (
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "shares_output",
            "hidden_first",
        )
        if getattr(shape, name)
    ]
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    return Finding(
        kind=shape.kind,
        num_parameters=num_parameters,
        num_bytes=2 * num_parameters,
        draft_vocab_size=shape.draft_vocab_size,
        vocab_size=shape.vocab_size,
        inputs_of=shape.feature_layers,
        outputs_of=tuple(layer - 1 for layer in shape.feature_layers),
        flags=tuple(flags),
        warnings=tuple(_warnings(head)),
    )


def _warnings(head: RecurrentHead | MedusaHead) -> list[str]:
    shape = head.shape
    found = []
    if shape.kind == "eagle3":
        usual = default_feature_layers(shape.num_target_layers)
        if shape.feature_layers != usual:
            found.append(
                f"it reads inputs of layers {_listed(shape.feature_layers)}; most heads for a "
                f"target of {shape.num_target_layers} layers read {_listed(usual)}. A count that "
                "is off by one is never seen but in acceptance: run 'foredraft heads check'."
            )
        if tuple(sorted(set(shape.feature_layers))) != shape.feature_layers:
            found.append(
                f"the layers {_listed(shape.feature_layers)} are not in rising order, each once; "
                "heads are trained on low, middle and high features in this order."
            )
    for name, parameter in head.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            found.append(f"{name} holds numbers that are not finite; the head is damaged.")
        elif name.endswith("weight") and parameter.dim() == 2 and not bool(parameter.any()):
            if shape.kind == "medusa" and ".0.linear." in name:
                continue  # they begin so
            found.append(f"{name} is zero throughout; the head was not trained, or is damaged.")
    if shape.kind != "medusa" and not shape.rope:
        found.append("its config says no rotary base; 10000 is taken.")
    return found


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def refuse_same(first: Path, second: Path) -> None:
    """Refuse to write a head over itself."""
    if first.resolve() == second.resolve():
        raise ModelLoadError(f"{second} is the folder that is read; name another to write to.")
