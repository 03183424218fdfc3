"""Drafters that read the target's hidden states: EAGLE, EAGLE-3 and MTP heads.

A head pairs the feature of a token with the token after it and guesses the one after that; fed its
own output, it goes on (``heads.recurrent``). Here it grows a tree: every level runs the best nodes
of the one before, and of all nodes the likeliest are kept (EAGLE-2, arXiv 2406.16858). What is kept
is closed under parents, on ties too. With one child a node it is a chain (EAGLE-1).

Under the default rule children are the best of the head's logits / temperature plus the target's
noise at that position, so that both pick the same token wherever they nearly agree. Under a
classical rule they are the head's likeliest words, chosen from committed tokens alone: point
masses. So no rule needs the head's probabilities.

After every step the rows that were made from the head's own outputs are made again from what the
target really computed along the accepted path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.drafters.draft_picks import rank
from foredraft.drafters.head_cache import HeadCache, HeadState, Rows
from foredraft.errors import ConfigError, ModelLoadError
from foredraft.heads.checkpoint import load_head
from foredraft.heads.inside import is_checkpoint_with_mtp, load_inside
from foredraft.heads.output_law import LogitShape
from foredraft.heads.own_words import output_for
from foredraft.heads.recurrent import Output, RecurrentHead
from foredraft.heads.trained import shipped_head
from foredraft.model import packed_linear
from foredraft.model.diagnosis import cached_file
from foredraft.model.loader import resolve_source
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)
from foredraft.upload import upload

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")

_MOST_ROWS = 512
"""Rows of a pass that reads a text."""

_MOST_PENDING = 4096
"""Features of a request that are kept unread; what lies before so many is forgotten."""

_NUM_RIVALS = 32
"""Likeliest words among which children are chosen, and their confidence is weighed."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Options of a head. None of them can change a text.

    Attributes:
        path: Folder of the head; empty takes the one that ships for the target, if any, and for
            ``mtp`` the module in the target's own checkpoint.
        num_children: Tokens drafted below each node: 1 is a chain, more a tree.
        width: Nodes of a level below which the tree goes on.
        max_depth: Deepest level of a draft, 1 to 64.
        min_confidence: A branch whose chance, by the head, falls below this does not go on; in
            [0, 1), 0 never ends it.
        is_coupled: Draft what the target's noise makes likeliest, and not the likeliest words.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    path: str = ""
    num_children: int = 4
    width: int = 4
    max_depth: int = 8
    min_confidence: float = 0.0
    is_coupled: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.path, str):
            raise ConfigError(f"path is {self.path!r}; allowed is the folder of a head.")
        for name, most in (("num_children", 16), ("width", 64), ("max_depth", 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer from 1 to {most}.")
        least = self.min_confidence
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least < 1:
            raise ConfigError(f"min_confidence is {least!r}; allowed is a number in [0, 1).")
        if not isinstance(self.is_coupled, bool):
            raise ConfigError(f"is_coupled is {self.is_coupled!r}; allowed is True or False.")


class HeadDrafter(Drafter):
    """Drafts with a head that reads the target's hidden states (module docstring). Exact.

    Cost: the layer and the output layer, once a level.
    """

    Config = HeadConfig
    kind = ""

    def __init__(
        self, config: HeadConfig, context: DrafterContext, head: RecurrentHead | None = None
    ) -> None:
        """Load the head.

        Args:
            config: Its options.
            context: Facts about the target, and the target itself.
            head: A head that is loaded already; ``None`` loads what ``config`` names.

        Raises:
            ConfigError: No head is named and none ships, or it is one of another method.
            ModelLoadError: It cannot be loaded, or was made for another target.
        """
        self.config, self.context = config, context
        target: Target | None = context.target
        if target is None:
            raise ConfigError(f"method {self.kind!r} needs a target that it can read.")
        if head is None:
            folder = config.path or shipped_head(self.kind, target.model.config)
            if folder is None and self.kind == "mtp":
                head = _module_inside(target.name, target)
        if head is None:
            if folder is None:
                raise ConfigError(
                    f"method {self.kind!r} needs a head, and none ships for {target.name}; name "
                    f"one, as in drafter_options={{'{self.kind}': {{'path': FOLDER}}}} or "
                    f"--drafter-option path=FOLDER, or train one: foredraft train {self.kind}."
                )
            head = _loaded(Path(folder), target)
        if head.shape.kind != self.kind:
            raise ConfigError(
                f"{config.path} is a head of kind {head.shape.kind!r}; use it with method "
                f"{head.shape.kind!r}."
            )
        if target.num_ranks > 1:
            raise ConfigError(
                f"method {self.kind!r} reads the target's embedding, which is split over "
                f"{target.num_ranks} ranks; use medusa or a method without a head."
            )
        head = head.to(target.device).requires_grad_(False)
        self.target_ids: NDArray[np.int64] | None = (
            head.target_ids.cpu().numpy() if head.shape.has_own_words else None
        )
        if packed_linear.can_pack(target.dtype, target.device):
            packed_linear.pack_linear_layers(head)
        self.needs = Needs(
            hidden_layers=head.shape.feature_layers,
            cost="per_token" if config.num_children == 1 else "per_level",
            sees_noise=config.is_coupled,
            learns=False,
        )
        self._layers = head.shape.feature_layers
        embed = target.model.get_input_embeddings()
        output = target.model.get_output_embeddings()
        if head.shape.has_own_words and not head.shape.has_output:
            own = nn.Sequential(output_for(output, head.target_ids, embed.weight[:1].T))
            if packed_linear.can_pack(target.dtype, target.device):
                packed_linear.pack_linear_layers(own)
            output = own
        self._output: Output | None = LogitShape.of(target.model.config).behind(output)
        capacity = context.max_model_len + config.width * config.max_depth
        self._cache = HeadCache(head, embed, 2 * context.max_num_requests, capacity)
        self._states: dict[str, HeadState] = {}
        self._ended: list[HeadState] = []  # the one used longest ago first

    @property
    def num_state_bytes(self) -> int:
        """Bytes of keys and values, and of features that are not read yet."""
        waiting = sum(
            features.numel() * features.element_size()
            for state in self._states.values()
            for features in state.features
        )
        return self._cache.num_bytes + waiting

    @torch.inference_mode()
    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Grow a tree for each request, all of them together, level by level."""
        growths: dict[int, _Growth] = {}
        for index in np.nonzero(budgets.max_nodes)[0].tolist():
            segment = plan.segments[index]
            state = self._states.get(segment.request.request_id)
            length = segment.root_position + 1
            if state is None or state.next_position != length - 1:
                continue
            if not state.num_pending and state.last is None:
                continue
            limit = int(budgets.max_nodes[index])
            growths[index] = _Growth(segment, state, limit, self.config)
        growing = list(growths.values())
        if growing:
            self._read([(growth.state, growth.segment.token_ids) for growth in growing])
            self._add_level(growing, [growth.root_hidden() for growth in growing])
        while growing := [growth for growth in growing if growth.is_open]:
            parts = [growth.rows() for growth in growing]
            self._add_level(growing, self._cache.run(parts))
        return DraftBatch.of_trees(
            [
                growths[index].tree() if index in growths else None
                for index in range(len(plan.segments))
            ]
        )

    @torch.inference_mode()
    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Take the features of what was committed; read prompts of those that are sure to draft."""
        sure = []
        for index, segment in enumerate(plan.segments):
            if not self._is_own(segment):
                continue
            first = int(target.row_offsets[index])
            rows = np.arange(segment.num_rows)
            if segment.wants_pick:
                path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
                rows = np.concatenate([rows, segment.num_rows - 1 + path])
            where = upload(first + rows, self._cache.device)
            features = torch.cat(
                [target.hidden_states[layer][where] for layer in self._layers], dim=-1
            )
            state = self._state(segment)
            if state is None:
                continue
            if state.next_position != segment.start:
                state.begin(segment.start)
            state.features.append(features)
            state.num_pending += len(rows)
            if state.num_pending > _MOST_PENDING:
                self._forget_first(state)
            if not segment.is_decode and not segment.request.speculation.is_auto:
                sure.append((state, segment.token_ids))
        if sure:
            self._read(sure)

    def forget(self, request_id: str) -> None:
        """Keep what was read of the request for others that begin alike."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        state.keep(state.num_rows)
        if state.num_rows:
            self._ended.append(state)
        else:
            self._cache.free(state)

    def _is_own(self, segment: Segment) -> bool:
        speculation = segment.request.speculation
        return speculation.method == self.context.method and not speculation.is_plain

    def _state(self, segment: Segment) -> HeadState | None:
        """The request's state; a new one begins where an ended text began alike."""
        name = segment.request.request_id
        if name in self._states:
            return self._states[name]
        source, num_rows = self._longest(segment)
        if not self._cache.num_free_slots:
            spare = [state for state in self._ended if state is not source] or self._ended
            if not spare:
                return None
            self._ended.remove(spare[0])
            if spare[0] is source:  # it goes on in its own slot
                spare[0].keep(num_rows)
                self._states[name] = spare[0]
                return spare[0]
            self._cache.free(spare[0])
        state = self._cache.allocate()
        if source is not None:
            self._cache.copy(source, state, num_rows)
        self._states[name] = state
        return state

    def _longest(self, segment: Segment) -> tuple[HeadState | None, int]:
        """What was kept of the text before a segment's rows, if anything was, and how many rows."""
        best, most = None, 0
        ids = segment.token_ids[: segment.start + 1]
        for state in [*self._ended, *self._states.values()]:
            both = min(len(state.token_ids), len(ids))
            differs = state.token_ids[:both] != ids[:both]
            num_same = int(np.argmax(differs)) if differs.any() else both
            # Row r pairs the feature of token first + r with the token after it. Where the texts
            # part right there, the last row keeps the other text's token: one row that is seen and
            # not drafted from, and its feature is nowhere to be had.
            num_rows = min(num_same, segment.start, state.first + state.num_rows) - state.first
            if num_rows > most and state.first + num_rows == segment.start:
                best, most = state, num_rows
        if best in self._ended:
            self._ended.remove(best)
            self._ended.append(best)
        return best, most

    def _forget_first(self, state: HeadState) -> None:
        """Drop rows and features but the last that came."""
        features = state.features[-1][-_MOST_PENDING:]
        end = state.next_position
        state.begin(end - len(features))
        state.features.append(features)
        state.num_pending = len(features)

    def _read(self, wanted: Sequence[tuple[HeadState, Int64Array]]) -> None:
        """Read the features that wait, as far as the token after each is known."""
        while True:
            room = _MOST_ROWS
            parts: list[Rows] = []
            for state, token_ids in wanted:
                position = state.first + state.num_rows
                num_rows = min(room, state.num_pending, len(token_ids) - 1 - position)
                if num_rows <= 0:
                    continue
                room -= num_rows
                features = (
                    torch.cat(state.features) if len(state.features) > 1 else state.features[0]
                )
                state.features = [features[num_rows:]] if num_rows < len(features) else []
                state.num_pending -= num_rows
                parts.append(
                    Rows(
                        state,
                        self._cache.head.fuse(features[:num_rows].to(self._cache.dtype)),
                        token_ids[position + 1 : position + 1 + num_rows],
                        np.arange(position, position + num_rows),
                        state.num_rows,
                        state.num_rows,
                    )
                )
            if not parts:
                return
            for part, found in zip(parts, self._cache.run(parts), strict=True):
                state = part.state
                state.num_rows += len(part.token_ids)
                state.last = found[-1]
            for state, token_ids in wanted:
                state.token_ids = token_ids[: state.first + state.num_rows + 1]

    def _add_level(self, growing: Sequence[_Growth], hidden: Sequence[torch.Tensor]) -> None:
        """Choose children below the rows that were run, and let each draft keep its best."""
        logits = self._cache.head.logits(torch.cat(list(hidden)), self._output)
        top = logits.float().topk(min(_NUM_RIVALS, logits.shape[-1]), dim=-1)
        values = top.values.double().cpu().numpy()
        words = top.indices.cpu().numpy()
        words = words if self.target_ids is None else self.target_ids[words]
        end = 0
        for growth, found in zip(growing, hidden, strict=True):
            own = slice(end, end + len(found))
            end += len(found)
            growth.add(values[own], words[own], found)


class EagleDrafter(HeadDrafter):
    """EAGLE-1 and 2 (``heads.eagle``). Exact; cost: the layer and the target's output, a level."""

    kind = "eagle"


class Eagle3Drafter(HeadDrafter):
    """EAGLE-3 (``heads.eagle3``). Exact; cost: the layer and its own words, once a level."""

    kind = "eagle3"


class MtpDrafter(HeadDrafter):
    """Multi-token prediction (``heads.mtp``). Exact; cost: the layer and the output, a level."""

    kind = "mtp"


def _loaded(folder: Path, target: Target) -> RecurrentHead:
    """A head of a folder of its own, or a module inside a target's checkpoint."""
    if is_checkpoint_with_mtp(folder):
        return load_inside(folder, target.model, target.dtype)
    return load_head(folder, target.model.config, target.dtype)


def _module_inside(name: str, target: Target) -> RecurrentHead | None:
    """The module that the target's own checkpoint holds, if it does."""
    try:
        source = resolve_source(name, target.dtype, _LOG.info)
    except ModelLoadError:  # a target that was not loaded by a name
        return None
    config = cached_file(source, "config.json")
    if config is None or not is_checkpoint_with_mtp(config.parent):
        return None
    return load_inside(config.parent, target.model, target.dtype)


class _Growth:
    """One request's draft while it grows.

    Args:
        segment: Whose.
        state: What the head has read of it.
        limit: Most nodes.
        config: Children, width and depth.
    """

    def __init__(self, segment: Segment, state: HeadState, limit: int, config: HeadConfig) -> None:
        """Begin at the root."""
        self.segment, self.state = segment, state
        self._limit, self._least = limit, config.min_confidence
        self._is_coupled = config.is_coupled
        is_chain = not segment.request.speculation.allows_trees
        self._num_children = 1 if is_chain else config.num_children
        self._width = 1 if is_chain else config.width
        self._max_depth = min(config.max_depth, limit)
        # All candidates so far; parents count from 1, 0 is the root.
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._confidence: list[float] = []
        self._survival: list[float] = [1.0]  # of the root, then of each candidate
        self._hidden: dict[int, torch.Tensor] = {}  # what the head gave at a candidate's parent
        self._depth = 0
        self._frontier: list[int] = [0]
        self._run: list[int] = []  # candidates whose rows lie in the slot, in order
        self._ancestors: dict[int, list[int]] = {0: []}

    def root_hidden(self) -> torch.Tensor:
        """What the head gave at the end of the text, [1, hidden_size]."""
        assert self.state.last is not None
        return self.state.last[None]

    @property
    def is_open(self) -> bool:
        """Whether it may grow on, and something would come of it."""
        return bool(self._frontier) and self._depth < self._max_depth

    def rows(self) -> Rows:
        """What the head must run next: a row for each node of the frontier."""
        first = self.state.num_rows
        old = len(self._run)
        self._run += self._frontier
        place = {node: row for row, node in enumerate(self._run)}
        seen = np.zeros((len(self._frontier), len(self._run)), dtype=np.bool_)
        for row, node in enumerate(self._frontier):
            path = [*self._ancestors[self._parents[node - 1]], node]
            self._ancestors[node] = path
            seen[row, [place[one] for one in path]] = True
        # The pair of the last token's feature and a drafted token after it stands one further.
        position = self.state.first + self.state.num_rows - 1 + self._depth
        return Rows(
            self.state,
            torch.stack([self._hidden[node] for node in self._frontier]),
            np.array([self._token_ids[node - 1] for node in self._frontier], dtype=np.int64),
            np.full(len(self._frontier), position, dtype=np.int64),
            first + old,
            first,
            seen,
        )

    def add(self, values: NDArray[np.float64], words: Int64Array, hidden: torch.Tensor) -> None:
        """Add children below the frontier, and choose where to go on.

        Args:
            values: [frontier, num_rivals], the head's largest logits.
            words: int64 like it, the target's ids.
            hidden: [frontier, hidden_size].
        """
        self._depth += 1
        at = self.segment.root_position + self._depth
        positions = np.full(len(values), at, dtype=np.int64)
        request = self.segment.request
        words, shares = rank(values, words, request, positions, self._is_coupled)
        first = len(self._token_ids) + 1
        for row, node in enumerate(self._frontier):
            for column in range(min(self._num_children, words.shape[1])):
                self._token_ids.append(int(words[row, column]))
                self._parents.append(node)
                self._confidence.append(float(shares[row, column]))
                self._survival.append(self._survival[node] * float(shares[row, column]))
                self._hidden[len(self._token_ids)] = hidden[row]
        new = range(first, len(self._token_ids) + 1)
        likely = sorted(new, key=lambda node: -self._survival[node])[: self._width]
        worst = self._worst_kept()
        self._frontier = [
            node
            for node in likely
            if self._survival[node] > max(worst, 0.0) and self._survival[node] >= self._least
        ]

    def tree(self) -> tuple[Int64Array, Int64Array, NDArray[np.float64]] | None:
        """The likeliest nodes: token ids, parents and confidence."""
        survival = np.array(self._survival[1:])
        # A stable order: where chances are equal, parents come before their children.
        kept = np.sort(np.argsort(-survival, kind="stable")[: self._limit])
        if not len(kept):
            return None
        places = np.zeros(len(survival) + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, len(kept) + 1)
        return (
            np.array(self._token_ids, dtype=np.int64)[kept],
            places[np.array(self._parents, dtype=np.int64)[kept]],
            np.array(self._confidence)[kept],
        )

    def _worst_kept(self) -> float:
        """The chance that a node must have to be among the likeliest; 0 where there is room."""
        if len(self._token_ids) < self._limit:
            return 0.0
        return sorted(self._survival[1:], reverse=True)[self._limit - 1]
