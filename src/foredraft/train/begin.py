"""What a head begins from: the words that answers use, and the target's own last layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.mtp import MtpHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.model.loader import Target
from foredraft.train.texts import Text

_TOKEN_SHARE = 0.5
"""Size of what a head that passes the feature on begins with of the token beside it."""


def choose_words(texts: Iterable[Text], num_words: int, vocab_size: int) -> torch.Tensor:
    """The words that answers use most, as offsets (``d2t``), int64 [num_words].

    Where fewer are used, the lowest ids fill up.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.token_ids[text.num_prompt :].tolist())
    for text in texts:  # prompts break ties and fill up
        counts.update(dict.fromkeys(text.token_ids[: text.num_prompt].tolist(), 0))
    ids = [token for token, _ in counts.most_common(num_words)]
    have = set(ids)
    ids += [token for token in range(vocab_size) if token not in have][: num_words - len(ids)]
    chosen = torch.tensor(sorted(ids), dtype=torch.int64)
    return chosen - torch.arange(len(chosen))


@torch.no_grad()
def begin_from_target(head: RecurrentHead | MedusaHead, target: Target) -> None:
    """Give a head the target's last layer, and what else of it fits, to begin with.

    An EAGLE-3 head gets its norm and its output rows, too. EAGLE and MTP heads read features after
    the last norm, which are of another scale than what the layer reads in the target: they begin by
    passing the feature on, and the layer adds nothing at first. Medusa heads get the output rows.
    What does not fit is left as it is.
    """
    if isinstance(head, MedusaHead):
        rows = target.model.get_output_embeddings().weight[head.target_ids]
        for one in head:
            _copy(one[1].weight, rows)  # type: ignore[index]
        return
    layer = _last_layer(target.model)
    if layer is None:
        return
    own: Any = getattr(head, "midlayer", None) or getattr(head, "layer", None)
    own = own if own is not None else head.layers[0]  # type: ignore[index]
    size = head.shape.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(layer.self_attn, name).weight
        mine = getattr(own.self_attn, name).weight
        if mine.shape[0] != theirs.shape[0]:
            continue
        if isinstance(head, Eagle3Head):  # embedding first, then the hidden state
            mine[:, :size] *= 0.1
            mine[:, size:] = theirs
        else:
            mine.copy_(theirs)
    _copy(own.self_attn.o_proj.weight, layer.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(own.mlp, name).weight, getattr(layer.mlp, name).weight)
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    if before_mlp is None and not hasattr(layer, "post_feedforward_layernorm"):
        before_mlp = getattr(layer, "post_attention_layernorm", None)
    _copy_norm(own.post_attention_layernorm, before_mlp)
    if isinstance(head, MtpHead):
        _copy_norm(own.input_layernorm, getattr(layer, "input_layernorm", None))
    if isinstance(head, Eagle3Head):
        _copy_norm(own.hidden_norm, getattr(layer, "input_layernorm", None))
        _copy_norm(head.norm, getattr(target.model.model, "norm", None))
        if head.shape.has_output:
            rows = target.model.get_output_embeddings().weight[head.target_ids]
            _copy(head.lm_head.weight, rows)
        # The highest feature passes through, the others join little by little.
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -size:] += torch.eye(size)
    else:
        _pass_on(head, own, target)


def _pass_on(head: RecurrentHead, layer: Any, target: Target) -> None:
    """Let a head begin by passing the feature on, the token beside it half as loud."""
    is_eagle = isinstance(head, EagleHead)
    projection = head.fc if is_eagle else head.eh_proj
    size = head.shape.hidden_size
    if not isinstance(projection, torch.nn.Linear) or projection.in_features != 2 * size:
        return
    parts = slice(0, size), slice(size, 2 * size)
    hidden, token = parts if head.shape.hidden_first else parts[::-1]
    norm: Any = getattr(target.model.model, "norm", None)
    feature_size = None if getattr(norm, "weight", None) is None else _size(norm.weight)
    loud = _TOKEN_SHARE
    if is_eagle and feature_size:  # nothing brings both to one size; MTP has a norm for each
        embed = target.model.get_input_embeddings()
        some = torch.arange(0, embed.num_embeddings, max(1, embed.num_embeddings // 1024))
        loud *= feature_size / max(1e-6, _size(embed(some.to(embed.weight.device))))
    projection.weight[:, token] *= loud / (size**0.5 * _size(projection.weight[:, token]))
    projection.weight[:, hidden] *= 0.1
    projection.weight[:, hidden] += torch.eye(size)
    for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
        part.weight.zero_()
    if is_eagle and feature_size:  # what the target's projections read comes from a norm of its own
        before: Any = getattr(_last_layer(target.model), "input_layernorm", None)
        if getattr(before, "weight", None) is not None:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight.mul_(_size(before.weight) / feature_size)
    if isinstance(head, MtpHead) and feature_size:
        _copy_norm(head.norm, norm)  # its size is that of features; their directions pass as are
        head.norm.weight.fill_(_size(head.norm.weight))


def _size(weight: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(weight.float().square().mean().sqrt())


def _last_layer(model: Any) -> Any:
    try:
        layer = model.model.layers[-1]
        _ = layer.self_attn.q_proj.weight, layer.mlp.gate_proj.weight
    except (AttributeError, IndexError, TypeError):
        return None
    return layer


def _copy_norm(mine: Any, theirs: Any) -> None:
    """The factors of a norm, where it has one a channel; Gemma's classes add 1 to theirs."""
    weight = getattr(theirs, "weight", None)
    if weight is None or mine.weight.shape != weight.shape:
        return
    adds_one = type(theirs).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))
    mine.weight.copy_(weight + 1 if adds_one else weight)


def _copy(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    if mine.shape == theirs.shape:
        mine.copy_(theirs)
