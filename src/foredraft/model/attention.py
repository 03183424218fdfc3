"""The attention function that Transformers' own modelling code calls, and the attention it does.

The function is registered once under a name and does nothing but hand its arguments to the pass it
was given: a keyword argument of the model call, so nothing is planted on a module and nothing is
global. The pass (``packing.PackedPass``) knows which rows belong to whom.

``attend`` is the reference back-end: PyTorch's scaled dot product attention, with the query heads
that share a key head folded into the query rows, so that keys are never repeated. Layers with
soft-capped scores or attention sinks take the written-out form, which SDPA does not offer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

ATTENTION_NAME = "foredraft"
"""The name under which Transformers finds the function."""

PASS_ARGUMENT = "foredraft_pass"
"""The keyword argument of the model call that carries the pass."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention.

    Attributes:
        scaling: Factor on the scores.
        sliding_window: A token sees those fewer than this many positions back; ``None`` sees all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; ``None`` leaves them.
        sinks: [num_heads] a logit a head that takes part in the softmax and gives nothing.
    """

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class Pass(Protocol):
    """What the attention function hands its arguments to."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the new keys and values, attend, return [1, num_rows, num_heads, value_dim]."""
        ...


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in every layer; see the module's text.

    Shapes: query [1, num_heads, T, key_dim], key and value [1, num_kv_heads, T, dim].
    """
    the_pass: Pass | None = kwargs.get(PASS_ARGUMENT)
    if the_pass is None:
        raise RuntimeError(
            "this model's attention runs inside foredraft only; load another copy with "
            "Transformers to call it directly"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    return the_pass.attend(int(module.layer_idx), query, key, value, options), None  # type: ignore[arg-type]


def register() -> None:
    """Make the function known to Transformers (safe to repeat)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_function)


def attend_folded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of few rows a request to many keys.

    Args:
        query: [B, num_kv_heads, group * n, key_dim], the heads of a group folded into the rows.
        key: [B, num_kv_heads, L, key_dim].
        value: [B, num_kv_heads, L, value_dim].
        mask: Additive [B, 1, group * n, L] in the query's dtype.
        options: What the layer asks.

    Returns:
        [B, num_kv_heads, group * n, value_dim].
    """
    if options.softcap is None and options.sinks is None:
        if query.shape[2] == 1:
            # A product with a single row takes a kernel that adds in another order, and a plain
            # step
            # would then differ from a verify pass in its last bits: give it a second row.
            query, mask = query.expand(-1, -1, 2, -1), mask.expand(-1, -1, 2, -1)
            return _sdpa(query, key, value, mask, options)[:, :, :1]
        return _sdpa(query, key, value, mask, options)
    scores = torch.matmul(query, key.transpose(-1, -2)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + mask
    scores = scores.float() if scores.dtype != torch.float64 else scores
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        num_kv_heads, num_rows = query.shape[1], query.shape[2]
        group = options.sinks.numel() // num_kv_heads
        sinks = options.sinks.to(scores.dtype).view(1, num_kv_heads, group, 1)
        sinks = sinks.expand(query.shape[0], -1, -1, num_rows // group)
        sinks = sinks.reshape(query.shape[0], num_kv_heads, num_rows, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options.scaling
    )


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention of a whole prompt's rows to themselves, causal and without a window.

    Shapes: query [1, num_heads, n, key_dim], key and value [1, num_kv_heads, n, dim]; returns
    [1, num_heads, n, value_dim]. Soft-capped layers and layers with sinks are not for here.
    """
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True
    )
