"""Token recycling: draft from the successors that the target itself ranked highest the last time.

Source: Token Recycling (Luo et al. 2024, arXiv 2408.08696). Every verify pass says, for each token
it holds, which tokens the target would rather see next; a table keeps the best few for each token
of the vocabulary, and a tree of those successors' successors is the draft. Nothing is trained or
looked up, so it drafts from the first answer on, also where nothing repeats.

The paper fills one fixed tree. Here the tree grows to the places (depth and rank) that were
accepted most, counted as it goes, so it needs no tuning and follows the text.

The cost is once for each draft. The table is shared by all requests of the engine, and other texts
of the same seed have a part in it, so it serves the default rule only; there it is exact, like
every drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext, Needs
from foredraft.errors import ConfigError
from foredraft.types import Budgets, DraftBatch, Int64Array, StepPlan, TargetOutput, Verdict
from foredraft.upload import upload

Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]

_NONE = -1
_MAX_SUCCESSORS = 32
_NUM_DEPTHS = 16
"""Depths whose places are counted apart; deeper nodes count as this deep."""

_PRIOR_TRIALS = 4.0
_PRIOR_DECAY = 0.5
"""A place is taken to be accepted with 0.5 for the first rank, half of that for each next one."""

_MEMORY = 256.0
"""Trials after which a place has forgotten most of what was before."""

_STRETCH = 64
"""Logits whose largest is found in one go."""

_MAX_ROWS = 256
"""Rows of a step that are learnt from at most."""


@dataclass(frozen=True, slots=True)
class RecyclingConfig:
    """Options of token recycling. None of them can change a text, only how fast it comes.

    Attributes:
        num_successors: Successors kept for each token, 1 to 32; 4 bytes each, for each token of the
            vocabulary.
        max_depth: Deepest node of a draft, 1 to 128.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    num_successors: int = 8
    max_depth: int = 8

    def __post_init__(self) -> None:
        """Check every field."""
        for name, high in (("num_successors", _MAX_SUCCESSORS), ("max_depth", 128)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; allowed is an integer from 1 to {high}. Leave it out "
                    "for the default."
                )


class RecyclingDrafter(Drafter):
    """Drafts trees of last seen successors (module docstring). For the default rule only."""

    Config = RecyclingConfig
    needs = Needs(rules=("walk",))

    def __init__(self, config: RecyclingConfig, context: DrafterContext) -> None:
        """Make an empty table, and compile what fills and reads it."""
        self.config = config
        self.context = context
        size = (context.vocab_size, min(config.num_successors, context.vocab_size))
        self._successors: Int32Array = np.full(size, _NONE, dtype=np.int32)
        self._trials: Float64Array = np.zeros((_NUM_DEPTHS, size[1]))
        self._hits: Float64Array = np.zeros((_NUM_DEPTHS, size[1]))
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Compile or load what a step runs, so that no step pays for it."""
        self._draft(0, 1, 1)
        none, ends = np.empty(0, dtype=np.int64), np.zeros(2, dtype=np.int64)
        root = np.zeros(1, dtype=np.int64)
        _count(ends, none, none, ends, none, root, self._successors, self._trials, self._hits)
        rows = _rows_to_learn(ends, ends, none, ends, none, root, 1)
        _keep_best(np.empty((0, 1), dtype=np.float32), *rows, self._successors)

    @property
    def num_state_bytes(self) -> int:
        """Bytes held, for all requests together."""
        return self._successors.nbytes

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose for each segment the likeliest tree of successors of its last token."""
        trees: list[Any] = [None] * len(plan.segments)
        for index, (segment, limit) in enumerate(
            zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ):
            root = int(segment.token_ids[-1])
            is_due = limit > 0 and segment.is_decode and segment.wants_pick
            if is_due and root < self.context.vocab_size:
                allows_trees = segment.request.speculation.allows_trees
                num_ranks = self._successors.shape[1] if allows_trees else 1
                trees[index] = self._draft(root, limit, num_ranks)
        return DraftBatch.of_trees(trees)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Keep the best successors at every row with logits; learn which places were accepted."""
        roots = np.array([segment.token_ids[-1] for segment in plan.segments], dtype=np.int64)
        tree = (drafts.offsets, drafts.token_ids, drafts.parents)
        path = (verdict.path_offsets, verdict.path)
        _count(*tree, *path, roots, self._successors, self._trials, self._hits)
        rows, owners = _rows_to_learn(
            target.offsets, *tree[:2], *path, roots, self.context.vocab_size
        )
        if not len(rows):
            return
        if target.logits.device.type == "cpu":
            _keep_best(target.logits.numpy(), rows, owners, self._successors)
            return
        chosen = target.logits[upload(rows, target.logits.device)]
        best = chosen.topk(self._successors.shape[1], dim=-1).indices.cpu().numpy()
        for owner, successors in zip(owners, best, strict=True):
            self._successors[owner] = successors

    def _draft(
        self, root: int, limit: int, num_ranks: int
    ) -> tuple[Int64Array, Int64Array, Float64Array]:
        """Tokens, parents and chances of the likeliest tree below a token."""
        ids = np.empty(limit, dtype=np.int64)
        parents = np.empty(limit, dtype=np.int64)
        chances = np.empty(limit)
        size = _grow(
            root,
            self._successors,
            self._trials,
            self._hits,
            self.config.max_depth,
            num_ranks,
            ids,
            parents,
            chances,
        )
        return ids[:size], parents[:size], chances[:size]


@numba.njit(cache=True)
def _rows_to_learn(
    row_offsets: Int64Array,
    offsets: Int64Array,
    token_ids: Int64Array,
    path_offsets: Int64Array,
    path: Int64Array,
    roots: Int64Array,
    vocab_size: int,
) -> tuple[Int64Array, Int64Array]:
    """Rows of the logits and the token at each; what was accepted comes last, and so prevails."""
    rows = np.empty(row_offsets[-1], dtype=np.int64)
    owners = np.empty(row_offsets[-1], dtype=np.int64)
    count = 0
    for is_sure in (False, True):
        for segment in range(roots.size):
            first = row_offsets[segment]
            size = row_offsets[segment + 1] - first
            if size == 0:
                continue
            is_right = np.zeros(size, dtype=np.bool_)
            is_right[0] = True
            for place in range(path_offsets[segment], path_offsets[segment + 1]):
                is_right[path[place]] = True
            for row in range(size):
                owner = roots[segment] if row == 0 else token_ids[offsets[segment] + row - 1]
                if is_right[row] == is_sure and owner < vocab_size:
                    rows[count], owners[count] = first + row, owner
                    count += 1
    begin = max(0, count - _MAX_ROWS)
    return rows[begin:count], owners[begin:count]


@numba.njit(cache=True, fastmath={"nnan", "nsz", "reassoc"})
def _most(row: NDArray[np.float32], begin: int, end: int) -> np.float32:
    """The largest of a stretch; compiled to vector instructions."""
    most = row[begin]
    for index in range(begin + 1, end):
        most = max(most, row[index])
    return most


@numba.njit(cache=True)
def _keep_best(
    logits: NDArray[np.float32], rows: Int64Array, owners: Int64Array, successors: Int32Array
) -> None:
    """Write the best tokens of each row, best first, to its owner's place.

    They lie in the stretches whose largest are the largest, so that only these are searched.
    """
    num_kept, vocab_size = successors.shape[1], logits.shape[1]
    num_stretches = (vocab_size + _STRETCH - 1) // _STRETCH
    peaks = np.empty(num_stretches, dtype=np.float32)
    best = np.empty(num_kept, dtype=np.float32)
    ids = np.empty(num_kept, dtype=np.int32)
    for index in range(rows.size):
        row = logits[rows[index]]
        for stretch in range(num_stretches):
            begin = stretch * _STRETCH
            peaks[stretch] = _most(row, begin, min(begin + _STRETCH, vocab_size))
        wanted = min(num_kept, num_stretches)
        least_peak = np.partition(peaks, num_stretches - wanted)[num_stretches - wanted]
        size = 0
        for stretch in range(num_stretches):
            if peaks[stretch] < least_peak:
                continue
            begin = stretch * _STRETCH
            for token_id in range(begin, min(begin + _STRETCH, vocab_size)):
                value = row[token_id]
                if (size == num_kept and not value > best[size - 1]) or value != value:
                    continue
                place = size if size < num_kept else num_kept - 1
                while place > 0 and best[place - 1] < value:
                    best[place], ids[place] = best[place - 1], ids[place - 1]
                    place -= 1
                best[place], ids[place] = value, token_id
                size = min(size + 1, num_kept)
        for place in range(size):
            successors[owners[index], place] = ids[place]


@numba.njit(cache=True)
def _chance(depth: int, rank: int, trials: Float64Array, hits: Float64Array) -> float:
    """How often a place was right once its parent was, few trials leaning on a guess."""
    guess = 0.5 * _PRIOR_DECAY**rank
    place = min(depth, trials.shape[0] - 1)
    seen = trials[place, rank]
    return min((hits[place, rank] + guess * _PRIOR_TRIALS) / (seen + _PRIOR_TRIALS), 0.999)


@numba.njit(cache=True)
def _grow(
    root: int,
    successors: Int32Array,
    trials: Float64Array,
    hits: Float64Array,
    max_depth: int,
    num_ranks: int,
    out_ids: Int64Array,
    out_parents: Int64Array,
    out_chances: Float64Array,
) -> int:
    """Write the likeliest nodes, best first; a node offers its next sibling and its first child."""
    limit = out_ids.size
    room = 2 * limit + 2
    where = np.empty((room, 4), dtype=np.int64)  # parent's token, rank, parent's place, depth
    chances = np.empty(room)
    survivals = np.empty(room)
    above = np.empty(room)
    size = 0
    if successors[root, 0] != _NONE:
        where[0, 0], where[0, 1], where[0, 2], where[0, 3] = root, 0, 0, 0
        above[0] = 1.0
        chances[0] = survivals[0] = _chance(0, 0, trials, hits)
        size = 1
    count = 0
    while count < limit and size > 0:
        best = 0
        for index in range(1, size):
            if survivals[index] > survivals[best]:
                best = index
        owner, rank, parent, depth = where[best]
        chance, survival, before = chances[best], survivals[best], above[best]
        token_id = successors[owner, rank]
        out_ids[count], out_parents[count], out_chances[count] = token_id, parent, chance
        count += 1
        if rank + 1 < num_ranks and successors[owner, rank + 1] != _NONE:
            where[best, 1] = rank + 1
            chances[best] = _chance(depth, rank + 1, trials, hits)
            survivals[best] = before * chances[best]
        else:
            size -= 1
            where[best], chances[best] = where[size], chances[size]
            survivals[best], above[best] = survivals[size], above[size]
        if depth + 1 < max_depth and successors[token_id, 0] != _NONE:
            where[size, 0], where[size, 1] = token_id, 0
            where[size, 2], where[size, 3] = count, depth + 1
            above[size] = survival
            chances[size] = _chance(depth + 1, 0, trials, hits)
            survivals[size] = survival * chances[size]
            size += 1
    return count


@numba.njit(cache=True)
def _count(
    offsets: Int64Array,
    token_ids: Int64Array,
    parents: Int64Array,
    path_offsets: Int64Array,
    path: Int64Array,
    roots: Int64Array,
    successors: Int32Array,
    trials: Float64Array,
    hits: Float64Array,
) -> None:
    """Count the nodes whose parent was accepted; nodes that another drafter added do not count."""
    keep = 1 - 1 / _MEMORY
    for segment in range(roots.size):
        first = offsets[segment]
        size = offsets[segment + 1] - first
        if size == 0:
            continue
        is_right = np.zeros(size + 1, dtype=np.bool_)
        is_right[0] = True
        for place in range(path_offsets[segment], path_offsets[segment + 1]):
            is_right[path[place]] = True
        depths = np.zeros(size + 1, dtype=np.int64)
        for node in range(size):
            parent = parents[first + node]
            depths[node + 1] = depths[parent] + 1
            owner = roots[segment] if parent == 0 else token_ids[first + parent - 1]
            if not is_right[parent] or owner >= successors.shape[0]:
                continue
            depth = min(depths[parent], trials.shape[0] - 1)
            for rank in range(successors.shape[1]):
                if successors[owner, rank] == token_ids[first + node]:
                    trials[depth, rank] = trials[depth, rank] * keep + 1.0
                    hits[depth, rank] = hits[depth, rank] * keep + is_right[node + 1]
                    break
