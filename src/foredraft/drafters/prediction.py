"""Predicted output: draft the text that the user expects, realigned after every divergence.

An edit, a refactoring or a form that is filled in gives back most of a text that is known before.
The request brings that text (``SpeculationParams.prediction``; the field of this name in OpenAI's
chat completions), and it is the draft for as long as the output follows it.

Where the output leaves it, the draft goes on at the place whose text before it agrees with the end
of the output the longest, of equal ones the nearest to where the output was. Right after a
divergence nothing agrees yet, and three places are drafted side by side: after the token that was
replaced, at it (the output put something in), and one further (it left something out).

The cost is once for each draft. A prediction is chosen before anything is drawn, so it is a point
mass under the classical rules, and exact under every rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.errors import ConfigError
from foredraft.types import Budgets, DraftBatch, Int64Array, Segment, StepPlan

Float64Array = NDArray[np.float64]

_MAX_MATCH_LEN = 64
"""Agreement is measured up to this many tokens."""

_NUM_PLACES = 4
"""Places of the prediction that are drafted side by side."""

_BEGIN = (0, 0)


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """Options of predicted output. None of them can change a text, only how fast it comes.

    Attributes:
        num_branches: Most places of the prediction that are drafted side by side, 1 to 4.

    Raises:
        ConfigError: A value outside what is stated above.
    """

    num_branches: int = 3

    def __post_init__(self) -> None:
        """Check the field."""
        value = self.num_branches
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _NUM_PLACES:
            raise ConfigError(
                f"num_branches is {value!r}; allowed is an integer from 1 to {_NUM_PLACES}. Leave "
                "it out for 3."
            )


class PredictionDrafter(Drafter):
    """Drafts the prediction that a request brings (module docstring); without one, nothing."""

    Config = PredictionConfig

    def __init__(self, config: PredictionConfig, context: DrafterContext) -> None:
        """Make a drafter that follows no text yet."""
        self.config = config
        self.context = context
        # Where each output left off in its prediction, and how many output tokens that was after;
        # and the same from before, so that who asks twice gets the same.
        self._places: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._predictions: dict[str, Int64Array] = {}
        none = np.empty(0, dtype=np.int64)
        _follow(none, none, 0, 0, 1, 1, none, none, np.empty(0))

    @property
    def num_state_bytes(self) -> int:
        """Bytes held: the predictions of all requests."""
        return sum(prediction.nbytes for prediction in self._predictions.values())

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose for each segment what its prediction says comes next."""
        trees: list[Any] = [None] * len(plan.segments)
        for index, (segment, limit) in enumerate(
            zip(plan.segments, budgets.max_nodes.tolist(), strict=True)
        ):
            is_due = limit > 0 and segment.is_decode and segment.wants_pick
            if is_due and segment.request.speculation.prediction:
                trees[index] = self._draft(segment, limit)
        return DraftBatch.of_trees(trees)

    def forget(self, request_id: str) -> None:
        """Drop where a request was."""
        self._places.pop(request_id, None)
        self._predictions.pop(request_id, None)

    def _draft(self, segment: Segment, limit: int) -> tuple[Int64Array, Int64Array, Float64Array]:
        request = segment.request
        prediction = self._predictions.get(request.request_id)
        if prediction is None:
            prediction = np.array(request.speculation.prediction, dtype=np.int64)
            self._predictions[request.request_id] = prediction
        output = segment.token_ids[len(request.prompt_ids) :]
        now, before = self._places.get(request.request_id, (_BEGIN, _BEGIN))
        place, num_before = before if now[1] == len(output) else now
        if num_before > len(output):
            place, num_before = 0, 0
        ids = np.empty(limit, dtype=np.int64)
        parents = np.empty(limit, dtype=np.int64)
        chances = np.empty(limit)
        num_branches = self.config.num_branches if request.speculation.allows_trees else 1
        before = place, num_before
        size, place = _follow(
            output,
            prediction,
            place,
            len(output) - num_before,
            num_branches,
            self.context.vocab_size,
            ids,
            parents,
            chances,
        )
        self._places[request.request_id] = (int(place), len(output)), before
        return ids[:size], parents[:size], chances[:size]


@numba.njit(cache=True)
def _agreement(output: Int64Array, prediction: Int64Array, place: int) -> int:
    """How many tokens before a place of the prediction are those at the end of the output."""
    size = 0
    most = min(_MAX_MATCH_LEN, output.size, place)
    while size < most and output[output.size - 1 - size] == prediction[place - 1 - size]:
        size += 1
    return size


@numba.njit(cache=True)
def _follow(
    output: Int64Array,
    prediction: Int64Array,
    place: int,
    num_new: int,
    num_branches: int,
    vocab_size: int,
    out_ids: Int64Array,
    out_parents: Int64Array,
    out_chances: Float64Array,
) -> tuple[int, int]:
    """Write the draft; return its size, and the place where the output is taken to be.

    ``place`` is where it was, ``num_new`` how many tokens came since.
    """
    here = min(place + num_new, prediction.size)
    best, best_len = here, _agreement(output, prediction, here)
    if output.size == 0:
        best_len = _MAX_MATCH_LEN
    elif best_len < num_new or best_len == 0:
        # It left the prediction: look for where it is now.
        last = output[output.size - 1]
        for other in range(1, prediction.size + 1):
            if prediction[other - 1] != last:
                continue
            length = _agreement(output, prediction, other)
            if length > best_len or (length == best_len and abs(other - here) < abs(best - here)):
                best, best_len = other, length
    places = np.empty(_NUM_PLACES, dtype=np.int64)
    lens = np.empty(_NUM_PLACES, dtype=np.int64)
    count = 0
    if best_len > 0:
        places[0], lens[0] = best, best_len
        count = 1
    if best_len < 4:
        # Replaced, put in, left out; a weak agreement elsewhere competes with these.
        for step in (0, -1, 1):
            other = here + step
            if (
                count < _NUM_PLACES
                and 0 <= other < prediction.size
                and (count == 0 or other != places[0])
            ):
                places[count], lens[count] = other, 1 if step == 0 else 0
                count += 1
    size = 0
    limit = out_ids.size
    shared = min(count, num_branches)
    for number in range(shared):
        # What is left is shared evenly, but for the first, which takes what it can be sure of.
        left = limit - size
        room = left if number == shared - 1 else max(1, left - left // 3 * (shared - 1 - number))
        if lens[number] >= 4:
            room = left
        parent, is_path = 0, True
        for depth in range(min(room, prediction.size - places[number])):
            token_id = prediction[places[number] + depth]
            if token_id < 0 or token_id >= vocab_size:
                break
            child = -1
            if is_path:
                for node in range(size):
                    if out_parents[node] == parent and out_ids[node] == token_id:
                        child = node
                        break
            if child < 0:
                if size == limit:
                    break
                is_path = False
                out_ids[size], out_parents[size] = token_id, parent
                out_chances[size] = 1 - 1 / (2.0 + lens[number] + depth)
                child = size
                size += 1
            parent = child + 1
    return size, best if best_len > 0 else here
