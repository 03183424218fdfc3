"""Lookahead decoding: guess ahead in parallel, keep the n-grams that come of it, draft from them.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(arXiv 2402.02057). A window holds guesses for the next ``window`` positions, several levels deep:
level 0 is a chain of guesses, and below each of its tokens hangs a branch of what the target said
would follow, and follow that. Each step the target says one more token for every branch; then a
branch is a whole n-gram, which goes into a pool by its first token, and the window moves on. The
n-grams in the pool that begin with the last committed token are the draft proper.

Window and drafts are one token tree, so that they go through the same mask and the same walk as any
draft, and a window token that happens to be right is accepted like any other. The target's picks at
the window's rows are its own, with the noise of their positions, so it drafts at temperature above
0 as it does at 0. The window is worth having only as a whole: it is verified whole or not at all.

The cost is once for each draft on the host; what it costs the target is its rows,
``(window + num_guesses) * (ngram_len - 1)`` of them. The pool follows the noise of its own request,
so it serves the default rule only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.errors import ConfigError
from foredraft.params import MAX_SPECULATIVE_TOKENS
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)

_LOG = logging.getLogger("foredraft")

Float64Array = NDArray[np.float64]

_NONE = -1
_FIRST_KEYS = 64
_MOST_KEYS = 1 << 14
"""Places for first tokens that a pool has at most; when half are taken, it begins anew. Of a long
text, the end is read."""

_GUESS_CHANCE, _WINDOW_CHANCE = 0.6, 0.2
"""How sure it is of a token of the pool, and of the window: kinds to be told apart, no more."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Options of Lookahead decoding. None of them can change a text, only how fast it comes.

    Attributes:
        window: Positions that are guessed ahead (W), 1 to 32.
        ngram_len: Length of an n-gram (N), 2 to 8: one more than the levels of the window.
        num_guesses: Most n-grams of the pool in a draft, and most that it keeps for a first token
            (G), 1 to 32.

    Raises:
        ConfigError: A value outside what is stated above, or a window and guesses that together
            exceed the most draft nodes of a request.
    """

    window: int = 5
    ngram_len: int = 4
    num_guesses: int = 5

    def __post_init__(self) -> None:
        """Check every field, and the size of the whole."""
        for name, low, high in (("window", 1, 32), ("ngram_len", 2, 8), ("num_guesses", 1, 32)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; allowed is an integer from {low} to {high}. Leave it "
                    "out for the default."
                )
        if self.num_nodes > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"window {self.window}, ngram_len {self.ngram_len} and num_guesses "
                f"{self.num_guesses} make {self.num_nodes} draft nodes; allowed are "
                f"{MAX_SPECULATIVE_TOKENS} in all. Make one of them smaller."
            )

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft: window and guesses."""
        return (self.window + self.num_guesses) * (self.ngram_len - 1)


class _Pool:
    """N-grams by first token, the newest few of each.

    Attributes:
        keys: int64 [capacity], first tokens, or -1; an open-addressing table at most half full.
        grams: int64 [capacity, num_guesses, ngram_len - 1], what follows them, or -1.
        turns: int64 [capacity], how many were added to each.
        num_keys: How many first tokens there are.
    """

    __slots__ = ("grams", "keys", "num_keys", "turns")

    def __init__(self, capacity: int, num_guesses: int, length: int) -> None:
        self.keys: Int64Array = np.full(capacity, _NONE, dtype=np.int64)
        self.grams: Int64Array = np.full((capacity, num_guesses, length), _NONE, dtype=np.int64)
        self.turns: Int64Array = np.zeros(capacity, dtype=np.int64)
        self.num_keys = 0

    def make_room(self, num_new: int) -> None:
        """Make room for so many more first tokens; a pool that would be too large begins anew."""
        capacity = len(self.keys)
        while 2 * (self.num_keys + num_new) > capacity:
            capacity *= 2
        if capacity == len(self.keys):
            return
        grown = _Pool(min(capacity, _MOST_KEYS), *self.grams.shape[1:])
        if capacity <= _MOST_KEYS:
            _move(self.keys, self.grams, self.turns, grown.keys, grown.grams, grown.turns)
            grown.num_keys = self.num_keys
        self.keys, self.grams, self.turns = grown.keys, grown.grams, grown.turns
        self.num_keys = grown.num_keys


class _State:
    """What is kept of a request: its window, its pool, and how much of its text the pool knows."""

    __slots__ = ("num_known", "pool", "window")

    def __init__(self, config: LookaheadConfig) -> None:
        length = config.ngram_len - 1
        self.window: Int64Array = np.full((length, config.window), _NONE, dtype=np.int64)
        self.pool = _Pool(_FIRST_KEYS, config.num_guesses, length)
        self.num_known = 0


class LookaheadDrafter(Drafter):
    """Drafts a window of guesses and n-grams that came of it (module docstring)."""

    Config = LookaheadConfig
    needs = Needs(rules=("walk",), is_whole=True)

    def __init__(self, config: LookaheadConfig, context: DrafterContext) -> None:
        """Make a drafter that follows no text yet, and compile it."""
        self._is_warned = False
        self.config = config
        self.context = context
        self._states: dict[str, _State] = {}
        self._load_kernels()

    @property
    def num_state_bytes(self) -> int:
        """Bytes held for all requests."""
        pools = [state.pool for state in self._states.values()]
        return sum(pool.keys.nbytes + pool.grams.nbytes + pool.turns.nbytes for pool in pools)

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose for each segment its pool's n-grams, and the window where the budget holds it."""
        limits = [
            limit if segment.is_decode and segment.wants_pick else 0
            for segment, limit in zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ]
        most = sum(limits)
        ids = np.empty(most, dtype=np.int64)
        parents = np.empty(most, dtype=np.int64)
        chances = np.empty(most)
        offsets = np.zeros(len(limits) + 1, dtype=np.int64)
        end = 0
        for index, (segment, limit) in enumerate(zip(plan.segments, limits, strict=True)):
            if limit > 0:
                self._check_window(segment, limit)
                state = self._state_of(segment.request.request_id, segment.token_ids)
                end += _draft(
                    state.window,
                    state.pool.keys,
                    state.pool.grams,
                    state.pool.turns,
                    int(segment.token_ids[-1]),
                    min(limit, self.config.num_nodes),
                    segment.request.speculation.allows_trees,
                    self.context.vocab_size,
                    ids[end:],
                    parents[end:],
                    chances[end:],
                )
            offsets[index + 1] = end
        return DraftBatch(ids[:end], parents[:end], offsets, confidence=chances[:end])

    def _check_window(self, segment: Segment, limit: int) -> None:
        """Say once that a window does not fit, where it is not the end of a text that leaves none.

        Without it no n-gram is ever found: only those of the text itself are drafted.
        """
        size = self.config.window * (self.config.ngram_len - 1)
        request = segment.request
        left = request.max_tokens - segment.num_output_tokens - 1
        if self._is_warned or limit >= size or left <= limit or segment.room <= limit:
            return
        if request.speculation.allows_trees:
            self._is_warned = True
            _LOG.warning(
                "a lookahead window of %d nodes does not fit into the %d that a request may draft; "
                "it is left out, and only n-grams of the text are drafted. Give %d or more as "
                "num_speculative_tokens, or a smaller window or ngram_len",
                size,
                limit,
                size,
            )

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Take what the target picked at the window's rows: n-grams for the pool, a new level."""
        if verdict.picks is None:
            return
        for index, segment in enumerate(plan.segments):
            state = self._states.get(segment.request.request_id)
            nodes = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
            if state is None or nodes.start == nodes.stop:
                continue
            state.pool.make_room(self.config.window)
            num_emitted = int(verdict.token_offsets[index + 1] - verdict.token_offsets[index])
            rows = slice(int(target.offsets[index]), int(target.offsets[index + 1]))
            state.pool.num_keys += _advance(
                state.window,
                state.pool.keys,
                state.pool.grams,
                state.pool.turns,
                drafts.token_ids[nodes],
                drafts.parents[nodes],
                verdict.picks[rows],
                num_emitted,
            )

    def forget(self, request_id: str) -> None:
        """Drop a request's window and pool."""
        self._states.pop(request_id, None)

    def _state_of(self, request_id: str, token_ids: Int64Array) -> _State:
        """The request's state, its pool up to date with its text, its window filled."""
        state = self._states.get(request_id)
        if state is None or len(token_ids) < state.num_known:
            state = self._states[request_id] = _State(self.config)
        pool = state.pool
        first = max(
            0, state.num_known - self.config.ngram_len + 1, len(token_ids) - _MOST_KEYS // 4
        )
        pool.make_room(len(token_ids) - first)
        pool.num_keys += _add_text(token_ids[first:].copy(), pool.keys, pool.grams, pool.turns)
        state.num_known = len(token_ids)
        _fill(state.window, token_ids.copy(), self.context.vocab_size)
        return state

    def _load_kernels(self) -> None:
        """Compile or load what a step runs, so that no step pays for it."""
        state = _State(self.config)
        pool = state.pool
        text = np.array([0, 0, 0], dtype=np.int64)
        _add_text(text, pool.keys, pool.grams, pool.turns)
        _fill(state.window, text, 1)
        ids, parents = np.empty(2, dtype=np.int64), np.empty(2, dtype=np.int64)
        table = (state.window, pool.keys, pool.grams, pool.turns)
        _draft(*table, 0, 1, True, 1, ids, parents, np.empty(2))
        _advance(*table, ids[:0], parents[:0], ids[:1], 1)
        pool.make_room(_FIRST_KEYS)


@numba.njit(inline="always")
def _slot(keys: Int64Array, key: int) -> int:
    """Where a first token is in the table, or where it would be."""
    mixed = np.uint64(key) * _MIX
    slot = np.int64((mixed >> np.uint64(32)) & np.uint64(keys.size - 1))
    while keys[slot] != _NONE and keys[slot] != key:
        slot = (slot + 1) & (keys.size - 1)
    return slot  # type: ignore[return-value]


@numba.njit(cache=True)
def _move(
    keys: Int64Array,
    grams: Int64Array,
    turns: Int64Array,
    new_keys: Int64Array,
    new_grams: Int64Array,
    new_turns: Int64Array,
) -> None:
    """Put every entry into a larger table."""
    for old in range(keys.size):
        if keys[old] != _NONE:
            slot = _slot(new_keys, keys[old])
            new_keys[slot] = keys[old]
            new_grams[slot] = grams[old]
            new_turns[slot] = turns[old]


@numba.njit(cache=True)
def _add(key: int, gram: Int64Array, keys: Int64Array, grams: Int64Array, turns: Int64Array) -> int:
    """Keep an n-gram in the place of the oldest; return whether its first token is new.

    One that is there already becomes the newest.
    """
    slot = _slot(keys, key)
    is_new = keys[slot] == _NONE
    keys[slot] = key
    size = grams.shape[1]
    place = turns[slot] % size
    for other in range(size):
        if (grams[slot, other] == gram).all():
            # The newest one takes its place, and it the newest one's.
            newest = (turns[slot] - 1) % size
            for index in range(gram.size):
                grams[slot, other, index] = grams[slot, newest, index]
                grams[slot, newest, index] = gram[index]
            return 0
    grams[slot, place] = gram
    turns[slot] += 1
    return 1 if is_new else 0


@numba.njit(cache=True)
def _add_text(text: Int64Array, keys: Int64Array, grams: Int64Array, turns: Int64Array) -> int:
    """Add every n-gram of a text; return how many first tokens are new."""
    length = grams.shape[2]
    num_new = 0
    for begin in range(text.size - length):
        num_new += _add(text[begin], text[begin + 1 : begin + 1 + length], keys, grams, turns)
    return num_new


@numba.njit(cache=True)
def _fill(window: Int64Array, text: Int64Array, vocab_size: int) -> None:
    """Put tokens of the text where the window has none yet: any guess will do to begin with."""
    place = text.size
    for level in range(window.shape[0]):
        for column in range(window.shape[1]):
            if window[level, column] == _NONE:
                place = (place * 31 + 7) % text.size
                token_id = text[place]
                window[level, column] = token_id if token_id < vocab_size else 0


@numba.njit(cache=True)
def _child(
    parent: int, token_id: int, size: int, out_ids: Int64Array, out_parents: Int64Array
) -> int:
    """Row of a node's child with a token, or 0."""
    for node in range(size):
        if out_parents[node] == parent and out_ids[node] == token_id:
            return node + 1
    return 0


@numba.njit(cache=True)
def _draft(
    window: Int64Array,
    keys: Int64Array,
    grams: Int64Array,
    turns: Int64Array,
    root: int,
    limit: int,
    allows_trees: bool,
    vocab_size: int,
    out_ids: Int64Array,
    out_parents: Int64Array,
    out_chances: Float64Array,
) -> int:
    """Write the tree: the root's n-grams, newest first, then the window if it fits whole."""
    num_levels, num_columns = window.shape
    num_guesses = grams.shape[1] if allows_trees else 1
    size = 0
    has_window = allows_trees and limit >= num_levels * num_columns
    room = limit - num_levels * num_columns if has_window else limit
    slot = _slot(keys, root)
    if keys[slot] == root:
        for back in range(min(num_guesses, turns[slot])):
            gram = grams[slot, (turns[slot] - 1 - back) % grams.shape[1]]
            parent = 0
            for token_id in gram:
                if token_id < 0 or token_id >= vocab_size:
                    break
                row = _child(parent, token_id, size, out_ids, out_parents)
                if row == 0:
                    if size == room:
                        break
                    out_ids[size], out_parents[size] = token_id, parent
                    out_chances[size] = _GUESS_CHANCE
                    size += 1
                    row = size
                parent = row
    if not has_window:
        return size
    trunk = 0
    for column in range(num_columns):
        parent = trunk
        for level in range(num_levels):
            token_id = window[level, column]
            if token_id < 0 or token_id >= vocab_size:
                token_id = 0
            row = _child(parent, token_id, size, out_ids, out_parents)
            if row == 0:
                out_ids[size], out_parents[size] = token_id, parent
                out_chances[size] = _WINDOW_CHANCE
                size += 1
                row = size
            parent = row
            if level == 0:
                trunk = row
    return size


@numba.njit(cache=True)
def _advance(
    window: Int64Array,
    keys: Int64Array,
    grams: Int64Array,
    turns: Int64Array,
    token_ids: Int64Array,
    parents: Int64Array,
    picks: Int64Array,
    num_emitted: int,
) -> int:
    """Complete the branches that were verified, pool them, move the window on.

    ``picks`` is int64 [1 + num_nodes], the target's own token at the root and at every node. Where
    the window was not verified nothing changes but that it moves. Returns how many first tokens of
    n-grams are new.
    """
    num_levels, num_columns = window.shape
    num_new = 0
    next_level = np.full(num_columns, _NONE, dtype=np.int64)
    trunk = 0
    is_whole = True
    for column in range(num_columns):
        trunk = _child(trunk, window[0, column], token_ids.size, token_ids, parents)
        row = trunk
        for level in range(1, num_levels):
            if row == 0:
                break
            row = _child(row, window[level, column], token_ids.size, token_ids, parents)
        if row == 0:
            is_whole = False
            break
        next_level[column] = picks[row]
    if is_whole:
        gram = np.empty(num_levels, dtype=np.int64)
        for column in range(num_columns):
            for level in range(1, num_levels):
                gram[level - 1] = window[level, column]
            gram[num_levels - 1] = next_level[column]
            num_new += _add(window[0, column], gram, keys, grams, turns)
        for level in range(num_levels - 1):
            window[level] = window[level + 1]
        window[num_levels - 1] = next_level
        num_emitted -= 1  # each level is one position further already
    for _ in range(max(0, num_emitted)):
        for level in range(num_levels):
            for column in range(num_columns - 1):
                window[level, column] = window[level, column + 1]
            window[level, num_columns - 1] = _NONE
    return num_new
