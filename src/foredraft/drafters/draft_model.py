"""A separate draft model: any causal language model, with keys and values of its own.

It writes ahead what the target then verifies. Under the default rule each drafted token is the best
of the draft model's own logits / temperature plus the target's noise at that position, so that both
pick the same token wherever they nearly agree; siblings are the next best (design section 5). Under
a classical rule tokens are drawn, without replacement among siblings, in a shape that is fixed
before the first draw, and travel with the distributions they were drawn from (Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318).

Its cache follows the committed text by comparison alone: what was drafted and came true stays, the
rest is overwritten, and what it has not read yet, however much, is read before it drafts.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from foredraft.config import DTYPES, EngineConfig
from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.drafters.draft_cache import DraftCache
from foredraft.drafters.draft_growth import Growth
from foredraft.drafters.draft_picks import by_target_id, choose, draw
from foredraft.drafters.vocabulary import VOCABULARIES, Text, match_vocabularies
from foredraft.errors import ConfigError
from foredraft.heads.draft_model import (
    is_kept_layers,
    is_whole_for,
    load_draft,
    refuse_without_ends,
)
from foredraft.heads.own_words import SomeWords, output_for
from foredraft.heads.trained import shipped_head
from foredraft.model import packed_linear
from foredraft.model.loader import load_target, prepare_target
from foredraft.sampling.processors import Float64Array
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    StepPlan,
    TargetOutput,
    Verdict,
)
from foredraft.upload import upload

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")

_DEAR = 0.5
"""A draft token that costs this share of a target's step is worth a warning."""


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """Options of a separate draft model. None of them can change a text.

    Attributes:
        model: The draft model: a Hugging Face folder or hub name, or a ``.gguf``; empty takes the
            one that ships for the target, if any.
        dtype: Of its weights, as for the target.
        num_children: Tokens drafted below each node: 1 is a chain, more a tree.
        max_depth: Deepest level of a draft, 1 to 64.
        min_confidence: A draft ends where its chance, by the draft model, falls below this; in
            [0, 1), 0 never ends it.
        vocabulary: How a draft model with another tokenizer is read: by the tokens that both
            ``shared``, by way of ``text``, or ``auto``, as suits it.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    model: str = ""
    dtype: str = "auto"
    num_children: int = 1
    max_depth: int = 16
    min_confidence: float = 0.0
    vocabulary: str = "auto"

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.model, str):
            raise ConfigError(
                f"model is {self.model!r}; allowed is a folder, a hub name or a .gguf file."
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed is one of {', '.join(DTYPES)}.")
        for name, most in (("num_children", 16), ("max_depth", 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer from 1 to {most}.")
        least = self.min_confidence
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least < 1:
            raise ConfigError(f"min_confidence is {least!r}; allowed is a number in [0, 1).")
        if self.vocabulary not in VOCABULARIES:
            raise ConfigError(
                f"vocabulary is {self.vocabulary!r}; allowed is one of {', '.join(VOCABULARIES)}."
            )


class DraftModelDrafter(Drafter):
    """Drafts with another model (module docstring). Exact, like every drafter.

    Cost: a pass of the draft model for each level.
    """

    Config = DraftModelConfig

    def __init__(
        self, config: DraftModelConfig, context: DrafterContext, model: Target | None = None
    ) -> None:
        """Load the draft model.

        Args:
            config: Its options.
            context: Facts about the target.
            model: A draft model that is loaded already; ``None`` loads what ``config`` names.

        Raises:
            ConfigError: No model is named, or it shares no token with the target.
            ModelLoadError: It cannot be loaded.
        """
        self.config = config
        self.context = context
        if model is None:
            model = _load(config, context)
        self.vocabulary = match_vocabularies(
            context.tokenizer,
            context.vocab_size,
            model.tokenizer,
            model.vocab_size,
            config.vocabulary,
            model.name,
        )
        # In its own words a text may be longer; more than that is never read.
        most = context.max_model_len * (1 if self.vocabulary.columns is not None else 2)
        self.model = model = dataclasses.replace(
            model, max_model_len=min(model.max_model_len, most)
        )
        self.needs = Needs(
            draft_probs=self.vocabulary.columns is not None,
            cost="per_token" if config.num_children == 1 else "per_level",
            sees_noise=True,
            learns=False,
        )
        self._cache = DraftCache(model, self.vocabulary, context.max_num_requests)
        columns = self.vocabulary.columns
        self._columns: torch.Tensor | None = None
        if columns is not None and (
            len(columns) != model.vocab_size or (columns != np.arange(len(columns))).any()
        ):
            self._columns = upload(columns, model.device)
        self._warn_if_dear()

    @property
    def num_state_bytes(self) -> int:
        """Bytes of keys and values, for all requests together; the weights are not counted."""
        return self._cache.num_bytes

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Let the draft model write ahead, all requests together, level by level."""
        num_segments = len(plan.segments)
        wanted = np.nonzero(budgets.max_nodes)[0].tolist()
        segments = [plan.segments[index] for index in wanted]
        growths: dict[int, Growth] = {}
        for index, segment, reading in zip(
            wanted, segments, self._cache.read(segments), strict=True
        ):
            if reading is None:
                continue
            limit = min(int(budgets.max_nodes[index]), self._cache.max_len - len(reading.ids))
            depth = min(limit, self.config.max_depth)
            growths[index] = Growth(segment, reading, limit, depth)
        # Neighbours in the cache share an attention call.
        growing = sorted(growths.values(), key=lambda growth: growth.reading.state.slot)
        while growing := [growth for growth in growing if growth.is_open]:
            logits = self._cache.grow([growth.branch() for growth in growing])
            if self.vocabulary.columns is None:
                self._write_on(growing, logits)
            else:
                self._extend(growing, logits)
        drafts = [growths.get(index) for index in range(num_segments)]
        if self.vocabulary.columns is None:
            return self._retold(drafts)
        return _batch(drafts)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Read prompts beside the target, chunk by chunk, of requests that are sure to draft.

        Where it is decided at every step whether a draft pays, the first draft reads the prompt: a
        request that never drafts does not pay for it.
        """
        chunks = [
            segment
            for segment in plan.segments
            if not segment.is_decode
            and segment.request.speculation.method == self.context.method
            and not segment.request.speculation.is_plain
            and not segment.request.speculation.is_auto
        ]
        if chunks:
            self._cache.read(chunks)

    def forget(self, request_id: str) -> None:
        """Give the request's slot back."""
        self._cache.forget(request_id)

    def _extend(self, growing: list[Growth], logits: torch.Tensor) -> None:
        """Add a level to every draft, each by its rule."""
        if self._columns is not None:
            logits = by_target_id(logits, self._columns)
        counts = [len(growth.frontier) for growth in growing]
        ends = np.cumsum(counts).tolist()
        rows = np.nonzero(np.repeat([growth.is_coupled for growth in growing], counts))[0]
        token_ids = np.zeros((len(logits), self.config.num_children), dtype=np.int64)
        confidence = np.zeros(token_ids.shape)
        if len(rows):
            coupled = [growth for growth in growing if growth.is_coupled]
            token_ids[rows], confidence[rows] = choose(
                logits[upload(rows, logits.device)],
                [growth.segment.request for growth in coupled for _ in growth.frontier],
                np.concatenate([growth.positions() for growth in coupled]),
                self.config.num_children,
            )
        columns = self.vocabulary.columns
        assert columns is not None
        for growth, count, end in zip(growing, counts, ends, strict=True):
            own = slice(end - count, end)
            if growth.is_coupled:
                growth.add_best(
                    token_ids[own],
                    confidence[own],
                    columns,
                    self.config.num_children,
                    self.config.min_confidence,
                )
            else:
                num_children = 1 if growth.is_chain_only else self.config.num_children
                drawn, law = draw(
                    logits[end - 1],
                    growth.segment.request,
                    growth.segment.root_position,
                    len(growth.nodes),
                    min(num_children, growth.limit - len(growth.nodes)),
                )
                growth.add_drawn(drawn, law, columns)

    def _write_on(self, growing: list[Growth], logits: torch.Tensor) -> None:
        """Add the draft model's likeliest token to every draft, in its own vocabulary."""
        best = logits.argmax(dim=1).cpu().numpy().astype(np.int64)
        ends = self.model.eos_ids
        for growth, token in zip(growing, best.tolist(), strict=True):
            growth.write(token, is_last=token in ends)

    def _retold(self, drafts: list[Growth | None]) -> DraftBatch:
        """Chains of the target's tokens for what was written in the draft model's."""
        assert isinstance(self.vocabulary, Text)
        trees: list[tuple[Int64Array, Int64Array, Float64Array] | None] = []
        for growth in drafts:
            if growth is None or not len(growth.nodes):
                trees.append(None)
                continue
            token_ids = self.vocabulary.drafted(growth.segment.token_ids, growth.nodes)
            token_ids = token_ids[: growth.limit]
            token_ids = token_ids[: _num_valid(token_ids, self.context.vocab_size)]
            parents = np.arange(len(token_ids), dtype=np.int64)
            trees.append((token_ids, parents, np.full(len(token_ids), np.nan)))
        return DraftBatch.of_trees(trees)

    def _warn_if_dear(self) -> None:
        """Say so where the arithmetic leaves little to gain."""
        if not self.context.weight_bytes:
            return
        share = self.model.weight_bytes / self.context.weight_bytes
        if share < _DEAR:
            return
        _LOG.warning(
            "the draft model %s has %.2f times the weights of the target, so that a draft token "
            "costs about %.2f of a plain step: even if all are accepted, decoding comes to at most "
            "%.1f times plain speed; a smaller draft model is what pays",
            self.model.name,
            share,
            share,
            max(1.0, 1 / share),
        )


def _load(config: DraftModelConfig, context: DrafterContext) -> Target:
    """The model that is named, or the one that ships for the target."""
    target: Target | None = context.target
    folder = config.model
    if not folder and target is not None:
        folder = shipped_head("draft-model", target.model.config) or ""
    if not folder:
        raise ConfigError(
            "method 'draft-model' needs a draft model; name one, as in "
            "drafter_options={'draft-model': {'model': FOLDER}} or --draft-model FOLDER."
        )
    is_beside = target is not None and target.num_ranks == 1 and is_kept_layers(folder)
    if target is None or not is_beside or is_whole_for(folder, target.model.config):
        refuse_without_ends(folder)
        return load_target(EngineConfig(folder, config.dtype, context.device))
    wanted = getattr(torch, config.dtype, target.dtype)
    if wanted != target.dtype:
        raise ConfigError(
            f"dtype is {config.dtype!r}, and the draft model {folder} shares the embedding of the "
            f"target, which is in {str(target.dtype).removeprefix('torch.')}; leave it out."
        )
    return _beside(folder, target)


def _beside(folder: str, target: Target) -> Target:
    """A draft model of the target's own layers, between the target's two ends."""
    model, ids = load_draft(folder, target)
    num_words = target.vocab_size if ids is None else len(ids)
    size = num_words * int(model.config.hidden_size) + sum(
        parameter.numel()
        for part in (model.model.layers, model.model.norm)
        for parameter in part.parameters()
    )
    output = model.get_output_embeddings()
    length = int(getattr(model.config, "max_position_embeddings", 0) or target.max_model_len)
    made = prepare_target(folder, model, target.tokenizer, length)
    if ids is not None:
        like = target.model.get_input_embeddings().weight[:1].T
        own = torch.nn.Sequential(output_for(output, ids, like))
        if packed_linear.can_pack(target.dtype, target.device):
            packed_linear.pack_linear_layers(own)
        output = SomeWords(own, ids, target.vocab_size)
    model.set_output_embeddings(output)  # the target's own, where it was packed a second time
    return dataclasses.replace(made, weight_bytes=size * target.dtype.itemsize)


def _num_valid(token_ids: Int64Array, vocab_size: int) -> int:
    """How many tokens come before the first one outside the vocabulary."""
    is_outside = (token_ids < 0) | (token_ids >= vocab_size)
    return int(np.argmax(is_outside)) if is_outside.any() else len(token_ids)


def _batch(drafts: list[Growth | None]) -> DraftBatch:
    """All drafts, with what a classical rule must know of them."""
    laws = [law for growth in drafts if growth is not None for law in growth.laws]
    dist_ids, first = [], 0
    for growth in drafts:
        if growth is None:
            continue
        own = growth.dist_ids
        dist_ids.append(np.where(own < 0, -1, own + first))
        first += len(growth.laws)
    batch = DraftBatch.of_trees(
        [
            None if growth is None else (growth.token_ids, growth.parents, growth.confidence)
            for growth in drafts
        ]
    )
    if not laws:
        return batch
    return dataclasses.replace(
        batch, draft_probs=torch.stack(laws), dist_ids=np.concatenate(dist_ids)
    )
