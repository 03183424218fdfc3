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
    """Let a head begin by passing the feature on."""
    projection = head.fc if isinstance(head, EagleHead) else head.eh_proj
    size = head.shape.hidden_size
    if not isinstance(projection, torch.nn.Linear) or projection.in_features != 2 * size:
        return
    projection.weight.mul_(0.1)
    hidden = slice(0, size) if head.shape.hidden_first else slice(size, 2 * size)
    projection.weight[:, hidden] += torch.eye(size)
    for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
        part.weight.zero_()
    norm = getattr(target.model.model, "norm", None)
    if isinstance(head, MtpHead) and getattr(norm, "weight", None) is not None:
        _copy_norm(head.norm, norm)  # its size is that of features; their directions pass as are
        head.norm.weight.fill_(float(head.norm.weight.square().mean().sqrt()))


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
