"""Prompt lookup: draft what followed the last time the text ended like this.

The tail of prompt and output is looked up in prompt and output themselves; what came after an
earlier occurrence is the draft. It costs a few microseconds, needs no weights, and pays where the
output repeats its input (summaries, edits, code, retrieval) or itself.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), which
takes the first match with a full continuation. This version takes the longest match, and the most
recent of equally long ones; allows shorter continuations; follows loops round; ties the length of a
draft to the length of its match; and spends what is left of the budget on another continuation.

The cost is once for each draft, not for each drafted token, and does not depend on the length of
the history. Nothing is drawn at random: a draft is a point mass under the classical rules, a
function of committed tokens alone. So it is exact under every rule.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.errors import ConfigError
from foredraft.types import Budgets, DraftBatch, Int64Array, StepPlan

Int32Array = NDArray[np.int32]

_MAX_NGRAM_LEN = 16
_MAX_BRANCHES = 16
_MAX_CANDIDATES = 256
_MAX_DRAFT_LEN_FACTOR = 128

_MAX_MATCH_LEN = 128
"""Matches are measured up to this length, the most draft nodes a request may have: a longer one
would change nothing but the choice between two that are both this long."""

_FIRST_CAPACITY = 256
"""Tokens an index has room for at first."""

_SLOTS_PER_TOKEN = 2
"""Hash slots for each token there is room for: tables are at most half full."""

_NONE = -1
"""No earlier occurrence; an empty slot."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)


def _check_integer(name: str, value: object, low: int, high: int, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{name} is {value!r}; allowed is an integer from {low} to {high}. {advice}"
        )


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Options of the n-gram drafter. None of them can change a text, only how fast it comes.

    Attributes:
        max_ngram_len: Longest n-gram that is indexed, 1 to 16. A match is extended beyond it token
            by token, so this need not be large; each length costs 12 to 24 bytes a token.
        min_ngram_len: Shortest match worth drafting from, 1 to ``max_ngram_len``. Above 1, drafts
            are fewer and better.
        num_branches: Most different continuations in one draft, 1 to 16; 1 drafts chains only.
        num_candidates: How many earlier occurrences are looked at, 1 to 256.
        draft_len_factor: A continuation is drafted for at most this many tokens for each token of
            context that matched, 1 to 128: long matches last, short ones do not. 128 lifts the
            limit.
        min_hits: An n-gram must have come so many times before to be drafted from, 1 to
            ``num_candidates``; one that came less often counts by a shorter end of it that did.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    max_ngram_len: int = 4
    min_ngram_len: int = 1
    num_branches: int = 2
    num_candidates: int = 16
    draft_len_factor: int = 2
    min_hits: int = 1

    def __post_init__(self) -> None:
        """Check every field."""
        advice = "Leave it out for 4."
        _check_integer("max_ngram_len", self.max_ngram_len, 1, _MAX_NGRAM_LEN, advice)
        advice = "It may not exceed max_ngram_len; leave it out for 1."
        _check_integer("min_ngram_len", self.min_ngram_len, 1, self.max_ngram_len, advice)
        advice = "Use 1 for chains only."
        _check_integer("num_branches", self.num_branches, 1, _MAX_BRANCHES, advice)
        advice = "Leave it out for 16."
        _check_integer("num_candidates", self.num_candidates, 1, _MAX_CANDIDATES, advice)
        advice = "Use 128 to draft as far as the budget goes."
        _check_integer("draft_len_factor", self.draft_len_factor, 1, _MAX_DRAFT_LEN_FACTOR, advice)
        advice = "It may not exceed num_candidates; leave it out for 1."
        _check_integer("min_hits", self.min_hits, 1, self.num_candidates, advice)


class _Index:
    """Where every n-gram of one history was last seen, and where it was seen before that.

    Row ``length - min_ngram_len`` of ``heads`` is an open-addressing hash table from an n-gram of
    that length to the position of its last token in its most recent occurrence. It holds positions
    only: n-grams are compared token by token in the history, so collisions cannot matter. From
    there ``previous`` leads from each occurrence to the one before it.

    Memory: with ``n`` indexed lengths, ``4 * n`` bytes in ``previous`` and ``8 * n`` in ``heads``
    for each token there is room for. Room starts at 256 tokens and is doubled when it is used up,
    so that is 12n to 24n bytes a token of any longer history: 48 to 96 at the default of four.

    Attributes:
        num_indexed: Tokens of the history that are indexed.
        capacity: Tokens there is room for, a power of two.
        heads: int32 [num_lengths, 2 * capacity], positions, or -1.
        previous: int32 [capacity, num_lengths], positions, or -1.
    """

    __slots__ = ("capacity", "heads", "num_indexed", "previous")

    def __init__(self, num_lengths: int, num_tokens: int) -> None:
        """Make an empty index with room for ``num_tokens``."""
        self.num_indexed = 0
        self.capacity = _capacity_for(num_tokens)
        self.heads: Int32Array = np.full(
            (num_lengths, _SLOTS_PER_TOKEN * self.capacity), _NONE, dtype=np.int32
        )
        self.previous: Int32Array = np.empty((self.capacity, num_lengths), dtype=np.int32)

    def grow(self, token_ids: Int64Array, min_ngram_len: int, multiplier: np.uint64) -> None:
        """Make room for all of ``token_ids`` (int64 [num_tokens]), keeping what is indexed."""
        capacity = _capacity_for(len(token_ids))
        num_lengths = len(self.heads)
        heads = np.full((num_lengths, _SLOTS_PER_TOKEN * capacity), _NONE, dtype=np.int32)
        previous = np.empty((capacity, num_lengths), dtype=np.int32)
        previous[: self.num_indexed] = self.previous[: self.num_indexed]
        _move_heads(token_ids, self.heads, heads, min_ngram_len, multiplier)
        self.capacity, self.heads, self.previous = capacity, heads, previous

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.heads.nbytes + self.previous.nbytes


def _capacity_for(num_tokens: int) -> int:
    capacity = _FIRST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


class NgramDrafter(Drafter):
    """Drafts by looking the tail of a request's text up in the text (module docstring).

    An occurrence is indexed once, after its last token was committed; a step costs what it adds. A
    request costs nothing until it is first given a budget, and is then indexed from
    ``Segment.token_ids`` as they are.

    Exact under every rule: all tokens are chosen, none drawn (``draft_probs`` is ``None``).
    """

    Config = NgramConfig

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        """Make a drafter without any state, and compile it (seconds once, then cached on disk).

        Args:
            config: The options.
            context: Facts about the target.
        """
        self.config = config
        self.context = context
        self._indexes: dict[str, _Index] = {}
        # Slots depend on a number no client knows, so a prompt cannot be made to collide.
        self._multiplier = np.uint64(secrets.randbits(64) | 1)
        history = _read_only(np.zeros(2, dtype=np.int64))
        index = self._new_index(history)
        self._draft(history, index, 1, 1, *(np.empty(1, np.int64) for _ in range(3)))
        index.grow(history, config.min_ngram_len, self._multiplier)

    @property
    def num_state_bytes(self) -> int:
        """Bytes held for all requests: 12 to 24 a token for each indexed n-gram length."""
        return sum(index.num_bytes for index in self._indexes.values())

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose the likeliest continuations found in each segment's own history.

        The longest match leads; of equally long ones the most recent does. Its continuation takes
        as much of the budget as ``draft_len_factor`` allows, and other continuations, in the same
        order, share the rest: each hangs where it first differs. A segment without a match gets
        nothing, and so does a segment that is not a decode step.

        Args:
            plan: Who runs; ``token_ids`` is read up to its end, which is the root.
            budgets: Most nodes for each segment.

        Returns:
            The trees; best continuation first, so that any first nodes of a tree are a tree too.
        """
        limits = [
            limit if segment.is_decode and segment.wants_pick else 0
            for segment, limit in zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ]
        most = sum(limits)
        if most == 0:
            return DraftBatch.empty(len(limits))
        token_ids = np.empty(most, dtype=np.int64)
        parents = np.empty(most, dtype=np.int64)
        match_lens = np.empty(most, dtype=np.int64)
        offsets = np.zeros(len(limits) + 1, dtype=np.int64)
        end = 0
        for number, (segment, limit) in enumerate(zip(plan.segments, limits, strict=True)):
            if limit > 0:
                request = segment.request
                num_branches = self.config.num_branches if request.speculation.allows_trees else 1
                history = _read_only(segment.token_ids)
                index = self._index_of(request.request_id, history)
                end += self._draft(
                    history,
                    index,
                    limit,
                    num_branches,
                    token_ids[end:],
                    parents[end:],
                    match_lens[end:],
                )
            offsets[number + 1] = end
        # Once the tokens before it are accepted, they have lengthened the match.
        confidence = 1 - 1 / (1.0 + match_lens[:end])
        return DraftBatch(token_ids[:end], parents[:end], offsets, confidence=confidence)

    def forget(self, request_id: str) -> None:
        """Free the index of a request that has ended."""
        self._indexes.pop(request_id, None)

    def _new_index(self, history: Int64Array) -> _Index:
        num_lengths = self.config.max_ngram_len - self.config.min_ngram_len + 1
        return _Index(num_lengths, len(history))

    def _index_of(self, request_id: str, history: Int64Array) -> _Index:
        """Return the request's index with room for ``history``; a new one where it is unknown.

        A history that became shorter is another text under the same id: it is indexed afresh.
        """
        index = self._indexes.get(request_id)
        if index is None or len(history) < index.num_indexed:
            index = self._indexes[request_id] = self._new_index(history)
        elif len(history) > index.capacity:
            index.grow(history, self.config.min_ngram_len, self._multiplier)
        return index

    def _draft(
        self,
        history: Int64Array,
        index: _Index,
        limit: int,
        num_branches: int,
        out_token_ids: Int64Array,
        out_parents: Int64Array,
        out_match_lens: Int64Array,
    ) -> int:
        """Index what is new, write a tree of at most ``limit`` nodes, return how many it has."""
        num_nodes: int = _index_and_draft(
            history,
            index.num_indexed,
            index.heads,
            index.previous,
            self.config.min_ngram_len,
            self._multiplier,
            self.config.num_candidates,
            num_branches,
            self.config.draft_len_factor,
            self.config.min_hits,
            limit,
            self.context.vocab_size,
            out_token_ids,
            out_parents,
            out_match_lens,
        )
        index.num_indexed = len(history)
        return num_nodes


def _read_only(token_ids: Int64Array) -> Int64Array:
    """Return int64, contiguous, read-only: the one kind of array the compiled code is built for."""
    view = np.ascontiguousarray(token_ids, dtype=np.int64)
    if view.flags.writeable:
        view = view.view()
        view.flags.writeable = False
    return view


@numba.njit(inline="always")
def _extend_key(key: np.uint64, token_id: int, multiplier: np.uint64) -> np.uint64:
    """Key of an n-gram with one more token in front: a polynomial in ``multiplier``, uint64."""
    return (key + np.uint64(token_id) + _ONE) * multiplier


@numba.njit(inline="always")
def _first_slot(key: np.uint64, num_slots: int) -> np.int64:
    """Where to look first for a key; ``num_slots`` is a power of two."""
    mixed = (key ^ (key >> _SHIFT)) * _MIX
    return np.int64((mixed ^ (mixed >> _SHIFT)) & np.uint64(num_slots - 1))


@numba.njit(cache=True)
def _move_heads(
    token_ids: Int64Array,
    old: Int32Array,
    new: Int32Array,
    min_ngram_len: int,
    multiplier: np.uint64,
) -> None:
    """Put every entry of the tables ``old`` into the empty, larger tables ``new``."""
    num_slots = new.shape[1]
    for row in range(old.shape[0]):
        for position in old[row]:
            if position == _NONE:
                continue
            key = np.uint64(0)
            for back in range(min_ngram_len + row):
                key = _extend_key(key, token_ids[position - back], multiplier)
            slot = _first_slot(key, num_slots)
            while new[row, slot] != _NONE:
                slot = (slot + 1) & (num_slots - 1)
            new[row, slot] = position


@numba.njit(cache=True)
def _add_occurrences(
    token_ids: Int64Array,
    begin: int,
    heads: Int32Array,
    previous: Int32Array,
    min_ngram_len: int,
    multiplier: np.uint64,
) -> None:
    """Index the n-grams that end at positions ``begin`` and later."""
    num_lengths, num_slots = heads.shape
    for position in range(begin, token_ids.size):
        key = np.uint64(0)
        for length in range(1, min_ngram_len + num_lengths):
            row = length - min_ngram_len
            if length > position + 1:
                if row >= 0:
                    previous[position, row] = _NONE
                continue
            key = _extend_key(key, token_ids[position - length + 1], multiplier)
            if row < 0:
                continue
            slot = _first_slot(key, num_slots)
            while True:
                head = heads[row, slot]
                if head == _NONE:
                    break
                same = 0
                while same < length and token_ids[head - same] == token_ids[position - same]:
                    same += 1
                if same == length:
                    break
                slot = (slot + 1) & (num_slots - 1)
            previous[position, row] = head
            heads[row, slot] = position


@numba.njit(cache=True)
def _find_candidates(
    token_ids: Int64Array,
    previous: Int32Array,
    min_ngram_len: int,
    num_candidates: int,
    out_ends: Int64Array,
    out_lens: Int64Array,
) -> int:
    """Write earlier occurrences of the tail, best first: where they end, how long they match.

    Longest indexed length first, and of one length the most recent first. Only occurrences of the
    greatest indexed length can match further back; those are sorted by how far they do.
    """
    tail = token_ids.size - 1
    num_lengths = previous.shape[1]
    count = 0
    for row in range(num_lengths - 1, -1, -1):
        length = min_ngram_len + row
        is_longest = row == num_lengths - 1
        end = previous[tail, row]
        while end != _NONE and count < num_candidates:
            matched = length
            while (
                matched < _MAX_MATCH_LEN
                and matched <= end
                and token_ids[end - matched] == token_ids[tail - matched]
            ):
                matched += 1
                if not is_longest:
                    break
            if is_longest or matched == length:  # else it was met at a greater length
                slot = count
                while slot > 0 and out_lens[slot - 1] < matched:
                    out_ends[slot] = out_ends[slot - 1]
                    out_lens[slot] = out_lens[slot - 1]
                    slot -= 1
                out_ends[slot] = end
                out_lens[slot] = matched
                count += 1
            end = previous[end, row]
    return count


@numba.njit(cache=True)
def _add_path(
    token_ids: Int64Array,
    end: int,
    matched: int,
    max_depth: int,
    limit: int,
    vocab_size: int,
    num_nodes: int,
    out_token_ids: Int64Array,
    out_parents: Int64Array,
    out_match_lens: Int64Array,
) -> int:
    """Merge what follows position ``end`` into the tree; return its new number of nodes.

    The continuation ends with the history, unless the match reaches back over a whole period of
    what it would draft: then the text is a loop and goes on round it.
    """
    period = token_ids.size - 1 - end
    if matched < period and max_depth > period:
        max_depth = period
    parent = 0
    for depth in range(max_depth):
        token_id = token_ids[end + 1 + depth % period]
        if token_id < 0 or token_id >= vocab_size:
            break
        child = parent + 1  # rows; a child comes after its parent
        while child <= num_nodes and (
            out_parents[child - 1] != parent or out_token_ids[child - 1] != token_id
        ):
            child += 1
        if child > num_nodes:
            if num_nodes == limit:
                break
            out_token_ids[num_nodes] = token_id
            out_parents[num_nodes] = parent
            out_match_lens[num_nodes] = matched + depth
            num_nodes += 1
        parent = child
    return num_nodes


@numba.njit(cache=True, nogil=True)
def _index_and_draft(
    token_ids: Int64Array,
    num_indexed: int,
    heads: Int32Array,
    previous: Int32Array,
    min_ngram_len: int,
    multiplier: np.uint64,
    num_candidates: int,
    num_branches: int,
    draft_len_factor: int,
    min_hits: int,
    limit: int,
    vocab_size: int,
    out_token_ids: Int64Array,
    out_parents: Int64Array,
    out_match_lens: Int64Array,
) -> int:
    """Bring the index up to date, then write a tree of at most ``limit`` nodes; return its size.

    The tail is indexed too, so the way from it to its earlier occurrences is already laid, and it
    cannot match itself.
    """
    if token_ids.size == 0:
        return 0
    _add_occurrences(token_ids, num_indexed, heads, previous, min_ngram_len, multiplier)
    ends = np.empty(num_candidates, dtype=np.int64)
    lens = np.empty(num_candidates, dtype=np.int64)
    count = _find_candidates(token_ids, previous, min_ngram_len, num_candidates, ends, lens)
    num_nodes = 0
    if count < min_hits:
        return 0
    # A longer match than this came too seldom; by its end it came often enough.
    lens[:count] = np.minimum(lens[:count], lens[min_hits - 1])
    for candidate in range(count):
        before = num_nodes
        num_nodes = _add_path(
            token_ids,
            ends[candidate],
            lens[candidate],
            min(limit, draft_len_factor * lens[candidate]),
            limit,
            vocab_size,
            num_nodes,
            out_token_ids,
            out_parents,
            out_match_lens,
        )
        if num_nodes > before:
            num_branches -= 1
        if num_branches == 0 or num_nodes == limit:
            break
    return num_nodes
