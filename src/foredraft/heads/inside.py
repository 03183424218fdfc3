"""MTP modules inside a target's own checkpoint: DeepSeek's, Qwen's and MiMo's names.

Transformers leaves these weights out, so they are read from the files. The module's layer is of the
target's own class (with its experts, its latent attention, its norms); where it lies and what its
parts are called differs:

* DeepSeek V3 and its relatives (GLM, ...): ``model.layers.N.*`` behind the last layer, ``eh_proj``;
* Qwen3-Next and later: ``mtp.*``;
* MiMo: ``model.mtp_layers.0.*``, and its projection reads the hidden state first.

The target's embedding and output layer are shared; copies of them in the files are left out.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.errors import ModelLoadError, said
from foredraft.heads.layer import Attend
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.heads.shape import shape_for

_LOG = logging.getLogger("foredraft")

_ATTENTION_NAME = "foredraft_head"
_ATTEND_ARGUMENT = "foredraft_attend"

_EXPERT = re.compile(r"(?P<where>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Naming:
    """How a family calls the parts of its module.

    Attributes:
        name: Of the family.
        prefix: Of all its tensors; ``{n}`` is the number of the target's layers.
        parts: Its names of our parts.
        layer: What stands before the names of the layer's own tensors.
        left_out: Copies of what the target has.
        hidden_first: The projection reads the hidden state and then the embedding.
    """

    name: str
    prefix: str
    parts: Mapping[str, str]
    layer: str = ""
    left_out: tuple[str, ...] = ()
    hidden_first: bool = False


NAMINGS = (
    Naming(
        "DeepSeek",
        "model.layers.{n}.",
        {
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "eh_proj.weight": "eh_proj.weight",
            "shared_head.norm.weight": "norm.weight",
        },
        left_out=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    Naming(
        "Qwen3-Next",
        "mtp.",
        {
            "pre_fc_norm_embedding.weight": "enorm.weight",
            "pre_fc_norm_hidden.weight": "hnorm.weight",
            "fc.weight": "eh_proj.weight",
            "norm.weight": "norm.weight",
        },
        layer="layers.0.",
    ),
    Naming(
        "MiMo",
        "model.mtp_layers.0.",
        {
            "token_layernorm.weight": "enorm.weight",
            "hidden_layernorm.weight": "hnorm.weight",
            "input_proj.weight": "eh_proj.weight",
            "final_layernorm.weight": "norm.weight",
        },
        hidden_first=True,
    ),
)


class InsideMtp(RecurrentHead):
    """An MTP module whose layer is one of the target's own kind.

    Exact, like every drafter's; cost: the layer and the output layer, a level.

    Args:
        model: The target's Transformers model.
        hidden_first: See ``Naming``.
    """

    def __init__(self, model: Any, hidden_first: bool) -> None:
        """Make it, with random weights."""
        shape = shape_for(model.config, "mtp").replace(hidden_first=hidden_first)
        super().__init__(shape)
        body = model.model
        norm, size = type(body.norm), shape.hidden_size
        eps = float(getattr(model.config, "rms_norm_eps", 1e-6))
        self.enorm, self.hnorm, self.norm = (norm(size, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        _register()
        config = copy.deepcopy(model.config)
        config._attn_implementation = _ATTENTION_NAME
        kinds = getattr(config, "layer_types", None) or []
        last = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=-1)
        index = last if last >= 0 else int(config.num_hidden_layers) - 1
        self.layer = type(body.layers[index])(config, index)
        self._rotary: Callable[..., Any] = body.rotary_emb
        self.eval()

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """See ``RecurrentHead``."""
        found: list[tuple[int, int, int]] = []

        def look(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None = None,
        ) -> torch.Tensor:
            found.append((key.shape[1], key.shape[-1], value.shape[-1]))
            shape = (query.shape[0], query.shape[2], query.shape[1] * value.shape[-1])
            return query.new_zeros(shape)

        like = self.enorm.weight.new_zeros(1, 1, self.shape.hidden_size)
        with torch.no_grad():
            self.level(like, like, self.rotate(torch.zeros(1, 1, dtype=torch.int64)), look)
        return found[0]

    def level(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the layer once; what comes out is not normalised."""
        parts = [self.enorm(embeds), self.hnorm(hidden)]
        if self.shape.hidden_first:
            parts.reverse()
        out = self.layer(
            self.eh_proj(torch.cat(parts, dim=-1)),
            position_embeddings=rotation,
            attention_mask=None,
            **{_ATTEND_ARGUMENT: attend},
        )
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    def logits(self, hidden: torch.Tensor, output: Output | None) -> torch.Tensor:
        """By the target's output layer, after a norm of its own."""
        assert output is not None
        return output(self.norm(hidden))

    def rotate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the target's own rotary embedding."""
        like = self.enorm.weight[:0]  # a projection may be laid out anew, and has no weight then
        cosine, sine = self._rotary(like, positions.to(like.device))
        return cosine, sine


def naming_of(folder: str | Path) -> Naming | None:
    """How the module in a checkpoint is named; ``None`` where there is none."""
    names = set(_places(Path(folder)))
    if not names:
        return None
    num_layers = _num_layers(Path(folder))
    for naming in NAMINGS:
        prefix = naming.prefix.format(n=num_layers)
        if all(prefix + part in names for part in naming.parts):
            return naming
    return None


def is_checkpoint_with_mtp(folder: str | Path) -> bool:
    """Whether a folder is a target's checkpoint that holds such a module."""
    try:
        return naming_of(folder) is not None
    except ModelLoadError:  # said where the folder is read for what it is
        return False


def load_inside(folder: str | Path, model: Any, dtype: torch.dtype) -> InsideMtp:
    """Read the module that a target's checkpoint holds.

    Args:
        folder: Of the target.
        model: The target's Transformers model.
        dtype: To read it in.

    Raises:
        ModelLoadError: There is none, or a tensor is missing, left over or of another shape.
    """
    folder = Path(folder)
    naming = naming_of(folder)
    if naming is None:
        raise ModelLoadError(
            f"{folder} holds no MTP module that is known; such checkpoints have "
            "model.layers.N.eh_proj behind the last layer (DeepSeek), mtp.fc (Qwen3-Next) or "
            "model.mtp_layers.0.input_proj (MiMo)."
        )
    num_layers = _num_layers(folder)
    prefix = naming.prefix.format(n=num_layers)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _read(folder, prefix):
        name = name.removeprefix(prefix)
        if name in naming.left_out:
            continue
        if name in naming.parts:
            found[naming.parts[name]] = tensor
        else:
            found["layer." + name.removeprefix(naming.layer)] = tensor
    try:
        head = InsideMtp(model, naming.hidden_first)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the layer of the MTP module in {folder} cannot be made of {type(model).__name__}'s "
            f"({said(error)})."
        ) from error
    wanted = head.state_dict()
    found = _fused(found, wanted)
    wrong = sorted(
        name
        for name in set(wanted) | set(found)
        if name not in wanted or name not in found or wanted[name].shape != found[name].shape
    )
    if wrong:
        name = wrong[0]
        kind = "is missing" if name not in found else "is left over"
        if name in found and name in wanted:
            kind = f"is {list(found[name].shape)} instead of {list(wanted[name].shape)}"
        raise ModelLoadError(f"the MTP module in {folder}: {name} {kind} ({naming.name}'s names).")
    head.load_state_dict(found)
    again = _more_modules(folder, naming, num_layers)
    if again:
        _LOG.warning("%s holds %d MTP modules; the first drafts every level", folder, again + 1)
    # What the target's class keeps in float32 (routers, say) stays so here.
    kept = {
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    }
    for name, tensor in (*head.named_parameters(), *head.layer.named_buffers(prefix="layer")):
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(dtype)
    return head.eval()


def _fused(
    tensors: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Experts of a checkpoint, one by one, as Transformers' classes hold them: all in one."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None or name in wanted:
            found[name] = tensor
        else:
            place = match["where"], match["part"]
            parts.setdefault(place, {})[int(match["number"])] = tensor
    for where in sorted({where for where, _ in parts}):
        count = len(wanted.get(f"{where}.gate_up_proj", ()))
        both, downs = [], []
        for number in range(count):
            gate, up, down = (
                parts.get((where, f"{part}_proj"), {}).pop(number, None)
                for part in ("gate", "up", "down")
            )
            if gate is None or up is None or down is None:
                raise ModelLoadError(
                    f"the MTP module lacks a part of expert {number} of {count} in {where}."
                )
            both.append(torch.cat([gate, up]))
            downs.append(down)
        if count:
            found[f"{where}.gate_up_proj"] = torch.stack(both)
            found[f"{where}.down_proj"] = torch.stack(downs)
    for (where, part), experts in parts.items():  # more than there are, or of other names
        found |= {f"{where}.{number}.{part}.weight": t for number, t in experts.items()}
    return found


def _more_modules(folder: Path, naming: Naming, num_layers: int) -> int:
    """Modules beyond the first."""
    names = set(_places(folder))
    part = next(iter(naming.parts))
    count = 0
    while True:
        count += 1
        prefix = {
            "DeepSeek": f"model.layers.{num_layers + count}.",
            "MiMo": f"model.mtp_layers.{count}.",
        }.get(naming.name)
        if prefix is None or prefix + part not in names:
            return count - 1


def _num_layers(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{folder / 'config.json'} cannot be read ({said(error)}).") from error


def _places(folder: Path) -> dict[str, Path]:
    """The file of every tensor of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / str(file) for name, file in table.items()}
        whole = folder / "model.safetensors"
        if not whole.is_file():
            return {}
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ModelLoadError(f"the weights in {folder} cannot be read ({said(error)}).") from error


def _read(folder: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = {}
    for name, path in _places(folder).items():
        if name.startswith(prefix):
            by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path} cannot be read ({said(error)}).") from error


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What the target's layer calls: the attention that was handed to ``level``."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("MTP layers with soft caps or sinks")
    attend: Attend = kwargs[_ATTEND_ARGUMENT]
    out = attend(query, key, value, scaling)
    return out.view(*out.shape[:2], query.shape[1], -1), None


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION_NAME, _attention)
