"""A tiny pass at load time: does the model's attention really run through foredraft's function?

Nothing is guessed from names. A short prompt is run by Transformers' own attention in one piece,
and by foredraft's in two; the results must agree. That refuses whatever keeps state of its own
(recurrent and convolution layers), sees later tokens (encoders), ignores the positions it is given,
or does not call the function at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foredraft.errors import ModelLoadError
from foredraft.model import attention
from foredraft.model.attention import AttentionOptions
from foredraft.model.kv_cache import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH = 7
_SPLIT = 4
_MOST_OFF = {torch.bfloat16: 0.05, torch.float16: 0.05}
_MOST_OFF_ELSE = 1e-3


@torch.inference_mode()
def probe(name: str, model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """Hand the attention over and check that a tiny pass through it is the model's own.

    Args:
        name: For messages.
        model: On its device and in its dtype; its attention is foredraft's afterwards.

    Returns:
        The shape of each layer, and the width of the logits.

    Raises:
        ModelLoadError: It is not.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = (torch.arange(_LENGTH, device=model.device)[None] * 7919 + 11) % vocab_size
    own = _own_logits(name, model, ids)
    if not bool(torch.isfinite(own).all()):
        advice = "download it again"
        if model.dtype == torch.float16:
            advice = (
                "float16 is too small a range for some models: use bfloat16 or float32, or "
                + advice
            )
        raise ModelLoadError(
            f"{name} gives logits that are not finite for any prompt, so its weights are damaged "
            f"or do not suit {str(model.dtype).removeprefix('torch.')}; {advice}."
        )
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    the_pass = _ProbePass()
    ours = torch.cat([_piece(name, model, ids, b, e, the_pass) for b, e in _PIECES])
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if sorted(the_pass.shapes) != list(range(num_layers)):
        what = f"{len(the_pass.shapes)} of its {num_layers} layers reach it"
        raise _refusal(name, model, what)
    off = _off(ours, own)
    allowed = _MOST_OFF.get(model.dtype, _MOST_OFF_ELSE)
    if not off <= allowed:
        model.set_attn_implementation("eager")
        if _off(_own_logits(name, model, ids[:, :_SPLIT]), own[:_SPLIT]) > allowed:
            raise ModelLoadError(
                f"{name} ({model.config.model_type}) lets a token see the tokens after it, as "
                "encoders do; foredraft verifies decoder-only causal language models. Choose one "
                "of these."
            )
        raise _refusal(name, model, f"its result is {off:.1e} off Transformers' own")
    return tuple(the_pass.shapes[layer] for layer in range(num_layers)), ours.shape[-1]


_PIECES = ((0, _SPLIT), (_SPLIT, _LENGTH))


def _own_logits(name: str, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Float32 (or wider) logits [T, V] of one pass in one piece."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    try:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    except Exception as error:  # modelling code raises what it likes
        raise ModelLoadError(
            f"{name} ({model.config.model_type}) cannot run even {ids.shape[1]} tokens of text "
            f"({type(error).__name__}: {error}); its config.json and its weights do not fit each "
            "other, or it is no plain text model. Choose another."
        ) from error
    return logits.float() if logits.dtype != torch.float64 else logits


def _piece(
    name: str, model: PreTrainedModel, ids: torch.Tensor, begin: int, end: int, the_pass: _ProbePass
) -> torch.Tensor:
    positions = torch.arange(begin, end, device=ids.device)[None]
    try:
        out = model(
            input_ids=ids[:, begin:end],
            position_ids=positions,
            use_cache=False,
            **{attention.PASS_ARGUMENT: the_pass},
        )
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        if not the_pass.shapes:
            what = "the batch does not reach its attention layers"
        raise _refusal(name, model, what) from error
    logits: torch.Tensor = out.logits[0]
    return logits.float() if logits.dtype != torch.float64 else logits


def _off(ours: torch.Tensor, own: torch.Tensor) -> float:
    return float((ours - own).norm() / own.norm().clamp_min(1e-20))


def _refusal(name: str, model: PreTrainedModel, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} ({model.config.model_type}) does not run through foredraft's attention ({what}); "
        "choose a model of another family, such as llama, mistral, qwen2, qwen3, gemma3, phi3 or "
        "olmo2."
    )


class _ProbePass:
    """A pass over one short prompt in some pieces; keeps all KV and notes the shapes."""

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
        # As the engine's pass returns it, and as some modelling code expects it: laid out in order.
        return out.view(1, query.shape[1], num_rows, -1).transpose(1, 2).contiguous()
