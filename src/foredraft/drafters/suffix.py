"""Suffix decoding: draft what followed the longest match in this text and in past responses.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). As there: one tree over prompt and
output of each request and one over past responses, counts on their nodes, the longest match first,
drafts that are longer where more matched, and trees by estimated probability. Here the estimate
weighs what followed shorter matches too (``suffix_tree``), responses are kept apart by scope, and
old ones make room for new.

The cost is once for each draft. Nothing is drawn at random: a draft is a point mass, a function of
committed tokens. Under a classical rule only those of the request itself may be used, for a past
response of the same seed knows how the coins will fall; under the default rule, all.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.drafters.suffix_store import SuffixStore
from foredraft.drafters.suffix_tree import SuffixTree
from foredraft.errors import ConfigError, StoreError
from foredraft.types import Budgets, DraftBatch, Int64Array, Request, StepPlan

_LOG = logging.getLogger("foredraft")

_MAX_DEPTH = 256
_MAX_BRANCHES = 16
_MAX_SHARED_TOKENS = 1 << 28


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Options of the suffix drafter. None of them can change a text, only how fast it comes.

    Attributes:
        max_depth: Longest match that is looked for, 2 to 256.
        num_branches: Most children of a node, 1 to 16; 1 drafts chains only.
        draft_len_factor: A continuation is at most this many tokens long for each one that
            matched, above 0 and up to 128.
        max_shared_tokens: Most tokens of past responses that are kept, over all scopes; 0 keeps
            none. Some 60 to 160 bytes each, and some 3 KB a scope, which counts as 64 tokens.
        corpus: Text files that are learnt at the start as if they were responses, in the scope of
            requests that name none.
        store: A file of past responses: read at the start if it is there, written by ``close``,
            unless ``max_shared_tokens`` is 0. What another process wrote meanwhile is lost.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    max_depth: int = 64
    num_branches: int = 4
    draft_len_factor: float = 2.0
    max_shared_tokens: int = 500_000
    corpus: tuple[str, ...] = ()
    store: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for name, low, high in (
            ("max_depth", 2, _MAX_DEPTH),
            ("num_branches", 1, _MAX_BRANCHES),
            ("max_shared_tokens", 0, _MAX_SHARED_TOKENS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; allowed is an integer from {low} to {high}. Leave it "
                    "out for the default."
                )
        factor = self.draft_len_factor
        if (
            isinstance(factor, bool)
            or not isinstance(factor, (int, float))
            or not 0 < factor <= 128
        ):
            raise ConfigError(
                f"draft_len_factor is {factor!r}; allowed is a number above 0 and up to 128. Use "
                "128 to draft as far as the budget goes."
            )
        corpus = (self.corpus,) if isinstance(self.corpus, str) else self.corpus
        if not isinstance(corpus, (tuple, list)) or not all(isinstance(p, str) for p in corpus):
            raise ConfigError(f"corpus is {self.corpus!r}; allowed are paths of text files.")
        object.__setattr__(self, "corpus", tuple(corpus))
        if self.store is not None and (not isinstance(self.store, str) or not self.store):
            raise ConfigError(f"store is {self.store!r}; allowed is the path of a file.")


class _Text:
    """What is kept of a request: its tree, and how much of its text is in it."""

    __slots__ = ("num_known", "tree")

    def __init__(self, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.num_known = 0


class SuffixDrafter(Drafter):
    """Drafts from the request's own text and from past responses of its scope (module docstring).

    Exact under every rule: all tokens are chosen, none drawn (``draft_probs`` is ``None``).
    """

    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, context: DrafterContext) -> None:
        """Read the store and the corpus.

        Raises:
            ConfigError: A corpus file is not text, or the store is of another tokenizer.
        """
        self.config = config
        self.context = context
        self.shared = SuffixStore(config.max_depth, config.max_shared_tokens)
        self._texts: dict[str, _Text] = {}
        _load_kernels()
        self._other = _Draft.of_size(0)
        if config.store is not None or config.corpus:
            if context.tokenizer is None:
                raise ConfigError(
                    "a suffix store or corpus needs the model's tokenizer, and this model's folder "
                    "holds none; leave them out."
                )
            self._tokenizer_id = _tokenizer_id(context.tokenizer)
        if config.store is not None:
            self._load(Path(config.store))
        for name in config.corpus:
            self._read_corpus(Path(name))

    @property
    def num_state_bytes(self) -> int:
        """Bytes held for all requests and all past responses."""
        return self.shared.num_bytes + sum(text.tree.num_bytes for text in self._texts.values())

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose for each segment the likeliest continuations by its own text and its scope's.

        The draft of the longest match leads, and those of the others fill what the budget leaves.
        """
        limits = [
            limit if segment.is_decode and segment.wants_pick else 0
            for segment, limit in zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ]
        if not any(limits):
            return DraftBatch.empty(len(limits))
        most = sum(limits)
        ids = np.empty(most, dtype=np.int64)
        parents = np.empty(most, dtype=np.int64)
        chances = np.empty(most)
        offsets = np.zeros(len(limits) + 1, dtype=np.int64)
        end = 0
        for index, (segment, limit) in enumerate(zip(plan.segments, limits, strict=True)):
            if limit > 0:
                own = _Draft(ids[end:], parents[end:], chances[end:])
                self._draft(segment.request, segment.token_ids, limit, own)
                end += own.num_nodes
            offsets[index + 1] = end
        return DraftBatch(ids[:end], parents[:end], offsets, confidence=chances[:end])

    def finish(self, request: Request, token_ids: Int64Array) -> None:
        """Keep the response for other requests of its scope."""
        response = token_ids[len(request.prompt_ids) :]
        self.shared.add(request.speculation.suffix_scope, response)

    def forget(self, request_id: str) -> None:
        """Free the tree of a request that has ended."""
        self._texts.pop(request_id, None)

    def close(self) -> None:
        """Save the store, if there is a file for it.

        Raises:
            StoreError: It cannot be written.
        """
        if self.config.store is not None and self.config.max_shared_tokens > 0:
            self.shared.save(Path(self.config.store), self._tokenizer_id)

    def _draft(self, request: Request, token_ids: Int64Array, limit: int, own: _Draft) -> None:
        """Write the draft of one request."""
        text = self._texts.get(request.request_id)
        if text is None or len(token_ids) < text.num_known:
            text = self._texts[request.request_id] = _Text(self.config.max_depth)
        new = token_ids[text.num_known :]
        if text.num_known == 0:  # a prompt may hold ids that the model does not have
            new = _known(new, self.context.vocab_size)
        text.tree.extend(new)
        text.num_known = len(token_ids)
        speculation = request.speculation
        num_branches = self.config.num_branches if speculation.allows_trees else 1
        options = (limit, num_branches, self.config.draft_len_factor)
        own.grow_from(text.tree, token_ids, True, *options)
        if speculation.verification != "walk":
            return
        for tree in self.shared.trees(speculation.suffix_scope):
            if len(self._other.ids) < limit:
                self._other = _Draft.of_size(limit)
            self._other.grow_from(tree, token_ids, False, *options)
            if self._other.num_nodes:
                own.join(self._other, limit, num_branches)

    def _load(self, path: Path) -> None:
        """Read the store; a damaged one is set aside, and drafting goes on without it."""
        if not path.exists():
            return
        try:
            self.shared.load(path, self._tokenizer_id)
        except StoreError as error:
            aside = _free_name(path)
            path.replace(aside)
            _LOG.warning("%s It is set aside as %s; drafting begins without it.", error, aside)
        except OSError as error:
            raise ConfigError(
                f"the suffix store {path} cannot be read ({error}); name another file."
            ) from error

    def _read_corpus(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the corpus file {path} cannot be read as text ({type(error).__name__}); allowed "
                "are UTF-8 text files."
            ) from error
        ids = self.context.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        known = np.array([t for t in ids if t < self.context.vocab_size], dtype=np.int64)
        if len(known) > self.shared.longest:
            _LOG.warning(
                "the corpus file %s has %d tokens, of which the last %d are kept; raise "
                "max_shared_tokens, which is %d, to more than twice its size",
                path,
                len(known),
                self.shared.longest,
                self.config.max_shared_tokens,
            )
        self.shared.add_once("", known)


class _Draft:
    """A draft that is being put together.

    Attributes:
        ids: int64 [limit] or more, tokens.
        parents: int64 [limit] or more, 0 is the root, ``k`` the k-th node.
        chances: float64 [limit] or more, of each node once its parent is accepted.
        num_nodes: How many there are.
        matched: Tokens that matched.
        escape: Chance that what comes is none of what followed the longest match.
    """

    __slots__ = ("chances", "escape", "ids", "matched", "num_nodes", "parents")

    def __init__(self, ids: Int64Array, parents: Int64Array, chances: NDArray[np.float64]) -> None:
        self.ids, self.parents, self.chances = ids, parents, chances
        self.num_nodes = self.matched = 0
        self.escape = 1.0

    @staticmethod
    def of_size(limit: int) -> _Draft:
        """One with memory of its own."""
        ids, parents = (np.empty(limit, dtype=np.int64) for _ in range(2))
        return _Draft(ids, parents, np.empty(limit))

    def grow_from(
        self,
        tree: SuffixTree,
        token_ids: Int64Array,
        is_own: bool,
        limit: int,
        num_branches: int,
        len_factor: float,
    ) -> None:
        """Begin anew, from one tree."""
        out = (self.ids, self.parents, self.chances)
        self.num_nodes, self.matched, self.escape = tree.draft(
            token_ids, is_own, limit, num_branches, len_factor, out
        )

    def join(self, other: _Draft, limit: int, num_branches: int) -> None:
        """Add another draft's nodes, as far as they are new and there is room.

        The one whose match is longer leads: if that is the other, its nodes come first.
        """
        if other.matched > self.matched:
            size = max(self.num_nodes, other.num_nodes)
            for name in ("ids", "parents", "chances"):
                ours, theirs = getattr(self, name), getattr(other, name)
                ours[:size], theirs[:size] = theirs[:size].copy(), ours[:size].copy()
            for name in ("num_nodes", "matched", "escape"):
                ours, theirs = getattr(self, name), getattr(other, name)
                setattr(self, name, theirs)
                setattr(other, name, ours)
        self.num_nodes = _fill_up(
            self.ids,
            self.parents,
            self.chances,
            self.num_nodes,
            other.ids,
            other.parents,
            other.chances,
            other.num_nodes,
            self.escape,
            limit,
            num_branches,
        )


def _load_kernels() -> None:
    """Compile or load what drafting runs, so that no step pays for it."""
    tree, text = SuffixTree(4), np.array([1, 2, 1], dtype=np.int64)
    tree.extend(text)
    view = text.view()
    view.flags.writeable = False
    for ids in (text, view):
        tree.extend(ids)
        for is_own in (False, True):
            one = _Draft.of_size(2)
            one.grow_from(tree, ids, is_own, 2, 2, 1.0)
            one.join(one, 2, 2)


@numba.njit(cache=True)
def _fill_up(
    ids: Int64Array,
    parents: Int64Array,
    chances: NDArray[np.float64],
    num_nodes: int,
    other_ids: Int64Array,
    other_parents: Int64Array,
    other_chances: NDArray[np.float64],
    num_others: int,
    escape: float,
    limit: int,
    num_branches: int,
) -> int:
    """Add what is new of another draft; at the root its chances count as far as ours escape."""
    places = np.full(num_others + 1, -1, dtype=np.int64)
    places[0] = 0
    for node in range(num_others):
        parent = places[other_parents[node]]
        if parent < 0:
            continue
        num_siblings, same = 0, -1
        for index in range(num_nodes):
            if parents[index] == parent:
                num_siblings += 1
                if ids[index] == other_ids[node]:
                    same = index
        if same >= 0:
            places[node + 1] = same + 1
        elif num_siblings < num_branches and num_nodes < limit:
            ids[num_nodes], parents[num_nodes] = other_ids[node], parent
            chances[num_nodes] = other_chances[node] * (escape if num_siblings else 1.0)
            num_nodes += 1
            places[node + 1] = num_nodes
    return num_nodes


def _free_name(path: Path) -> Path:
    """Where a damaged file is set aside: beside its place, over nothing that is there."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged{number}")
    return aside


def _known(token_ids: Int64Array, vocab_size: int) -> Int64Array:
    """The tokens, those outside the vocabulary replaced by separators."""
    if len(token_ids) and int(token_ids.max()) >= vocab_size:
        return np.where(token_ids < vocab_size, token_ids, -1)
    return token_ids


def _tokenizer_id(tokenizer: object) -> str:
    """Names a tokenizer by its vocabulary."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()))  # type: ignore[attr-defined]
    return hashlib.sha256(vocab.encode()).hexdigest()
