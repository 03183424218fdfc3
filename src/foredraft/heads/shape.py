"""What a head is: its kind, its sizes, and what of the target it reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaConfig

KINDS = ("eagle", "eagle3", "mtp", "medusa")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and choices of a head: of one layer, run again for every level, or of Medusa's.

    Attributes:
        kind: ``eagle`` (EAGLE-1 and 2), ``eagle3``, ``mtp`` or ``medusa``, which has no layer.
        hidden_size: Of the head.
        intermediate_size: Of its feed-forward layer.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Of each.
        vocab_size: Of the target.
        draft_vocab_size: Words that the head can draft; ``vocab_size`` where it drafts all.
        target_hidden_size: Of the target.
        num_target_layers: Layers of the target.
        feature_layers: Indices into Transformers' ``hidden_states`` (0 is the embedding's output,
            the last is the final, normalised one) that the head reads.
        max_positions: Most positions of its rotary embedding.
        rope: Transformers' ``rope_parameters``.
        rms_norm_eps: Of its norms.
        has_fc_bias: Whether ``fc`` has a bias (EAGLE-1).
        has_attention_bias: Whether query, key and value have one.
        norm_before_residual: EAGLE-3: the residual is the normalised hidden state.
        norm_before_fc: EAGLE-3: features are normalised together before ``fc``.
        fc_norm: EAGLE-3: features are normalised one by one before ``fc``.
        norm_output: EAGLE-3: the next level reads what comes after the last norm (EAGLE-3.1).
        shares_output: EAGLE-3: words by the target's output layer, not by one of its own.
        num_levels: Medusa: heads, each for a token further ahead; 0 for others.
        hidden_first: MTP: the projection reads the hidden state and then the embedding.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int
    feature_layers: tuple[int, ...]
    max_positions: int = 2048
    rope: dict[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-5
    has_fc_bias: bool = False
    has_attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    hidden_first: bool = False
    norm_output: bool = False
    shares_output: bool = False
    num_levels: int = 0

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; allowed is one of {', '.join(KINDS)}.")
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer of 1 or more.")
        if (self.num_levels > 0) != (self.kind == "medusa"):
            raise ConfigError(
                f"num_levels is {self.num_levels} for kind {self.kind!r}; allowed is 1 or more for "
                "'medusa', and 0 for others."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; allowed is a "
                "number of query heads that the key heads divide."
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}; allowed is 1 to {self.vocab_size}, "
                "the target's vocabulary."
            )
        if not self.feature_layers:
            raise ConfigError("feature_layers is empty; name at least one layer of the target.")
        for layer in self.feature_layers:
            if not 0 <= layer <= self.num_target_layers:
                raise ConfigError(
                    f"feature_layers holds {layer}; the target has {self.num_target_layers} layers,"
                    f" so allowed is 0 to {self.num_target_layers}."
                )

    @property
    def num_features(self) -> int:
        """Width of what a head reads of the target for a token."""
        return self.target_hidden_size * len(self.feature_layers)

    @property
    def has_own_words(self) -> bool:
        """Whether the head drafts from a vocabulary of its own."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def has_output(self) -> bool:
        """Whether it has an output layer of its own."""
        return self.kind == "medusa" or (self.kind == "eagle3" and not self.shares_output)

    def replace(self, **changes: Any) -> HeadShape:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    def as_llama(self) -> LlamaConfig:
        """The configuration of its layer, as Transformers' modules take it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=1,
            vocab_size=self.draft_vocab_size,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.rms_norm_eps,
            attention_bias=self.has_attention_bias,
            rope_parameters=dict(self.rope) or {"rope_type": "default", "rope_theta": 10000.0},
        )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice: the outputs of layers 1, n // 2 - 1 and n - 4, counted from 0.

    As indices into ``hidden_states`` one more each. Small targets get what they have.
    """
    found = {2, num_layers // 2, num_layers - 3}
    if num_layers < 6:
        found = {1, max(1, num_layers // 2), num_layers}
    layers = sorted(min(max(layer, 0), num_layers) for layer in found)
    while len(layers) < 3:
        layers.insert(0, layers[0])
    return tuple(layers)


def shape_for(
    config: Any,
    kind: str,
    draft_vocab_size: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
    num_levels: int = 4,
) -> HeadShape:
    """The shape of a new head for a target: sizes of one of the target's own layers.

    Args:
        config: The target's Transformers config.
        kind: ``eagle``, ``eagle3``, ``mtp`` or ``medusa``.
        draft_vocab_size: Words that it drafts; ``None`` takes all.
        feature_layers: As in ``HeadShape``; ``None`` takes the method's own.
        num_levels: Medusa's heads.

    Raises:
        ConfigError: The target's config lacks a size.
    """
    try:
        num_layers = int(config.num_hidden_layers)
        hidden_size, vocab_size = int(config.hidden_size), int(config.vocab_size)
        num_heads = int(config.num_attention_heads)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the target's config does not say its sizes ({error}); heads are made for models "
            "with hidden_size, num_hidden_layers, num_attention_heads and vocab_size."
        ) from error
    if feature_layers is None:
        feature_layers = (num_layers,) if kind != "eagle3" else default_feature_layers(num_layers)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:  # by kind of layer, or none at all
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return HeadShape(
        kind=kind,
        hidden_size=hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", 0) or 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
        target_hidden_size=hidden_size,
        num_target_layers=num_layers,
        feature_layers=feature_layers,
        max_positions=int(getattr(config, "max_position_embeddings", 2048)),
        rope=rope,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        num_levels=num_levels if kind == "medusa" else 0,
    )
