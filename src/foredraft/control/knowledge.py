"""What the controller has learnt, and what follows from it for a method as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable

from foredraft.control.allocate import Padding
from foredraft.control.cost_table import CostTable
from foredraft.control.view import MethodNote, MethodTraits, RequestNote, View
from foredraft.registry import PLAIN
from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array

_LOG = logging.getLogger("foredraft")

_PROBE_SHARE = 0.005
"""Of a step: what probes may cost in the long run."""

_PLAIN_AFTER, _PLAIN_GAIN = 48, 1.2
"""After so many steps with drafts, where drafting promises less than this factor, a step goes
without: the price of plain decoding, which every promise is measured by, must not grow stale."""

_RETRY_AFTER = 256
"""Steps after which a dead method is tried again."""

_DEAD_AFTER = 96
_DEAD_BELOW = 0.01
"""A method with less than this acceptance over so many trials is dead."""


class Knowledge:
    """Costs, methods and the price of probing.

    Args:
        traits: Says of a method what :class:`MethodTraits` holds.

    Attributes:
        cost_table: What a step costs; ``None`` before a request with ``auto`` came.
        methods: What is kept of each method, and of each member of one that is costed by itself.
    """

    def __init__(self, traits: Callable[[str], MethodTraits]) -> None:
        """Know nothing yet."""
        self.cost_table: CostTable | None = None
        self.traits = traits
        self.methods: dict[str, MethodNote] = {}
        self._probe_debt = 0.0

    def begin_step(self) -> None:
        """Pay off a step's share of what probes have cost."""
        self._probe_debt = max(0.0, self._probe_debt - _PROBE_SHARE)

    def owe(self, share: float) -> None:
        """Add what probes cost beyond what they bring, as a share of a step."""
        self._probe_debt += max(0.0, share)

    def seconds(self, view: View, rows: Float64Array) -> Float64Array:
        """Expected seconds of passes of so many rows over the requests of a step."""
        assert self.cost_table is not None
        return self.cost_table.seconds(len(view.methods), rows, view.context)

    def cost_of(self, view: View, method: str) -> str:
        """What the time of a method, or of a member of one, is counted by."""
        for name in view.names:
            if name != PLAIN and method in (members := self.traits(name).members):
                return members[method]
        return self.traits(method).cost

    def method(self, method: str) -> MethodNote:
        """What is kept of a method, or of a member of one; made where it is new."""
        found = self.methods.get(method)
        if found is None:
            found = self.methods[method] = MethodNote()
        return found

    def is_on(self, method: str) -> bool:
        """Whether a method may draft in this step: not dead, or due for another try."""
        found = self.method(method)
        if found.off_until and found.num_steps >= found.off_until:
            found.off_until, found.is_retrying = 0, True
            found.acceptance.num_trials = found.acceptance.num_hits = 0.0
            _LOG.info("method %r is tried again", method)
        return not found.off_until

    def is_free(self, method: str) -> bool:
        """Whether drafting for all its requests cost next to nothing beside the last step."""
        is_free = self.method(method).is_free
        return self.traits(method).cost == "once" if is_free is None else is_free

    def check_health(self, method: str) -> None:
        """Switch a dead method off for a while; say so, and say when it is back."""
        found = self.method(method)
        table = found.acceptance
        if found.off_until or table.num_trials < (
            _DEAD_AFTER / 4 if found.is_retrying else _DEAD_AFTER
        ):
            return
        if table.num_hits < _DEAD_BELOW * table.num_trials:
            found.off_until = found.num_steps + _RETRY_AFTER
            _LOG.warning(
                "method %r had %.1f %% of its last draft tokens accepted; it is off for %d steps, "
                "then tried again",
                method,
                100 * table.num_hits / table.num_trials,
                _RETRY_AFTER,
            )
        elif found.is_retrying:
            found.is_retrying = False
            _LOG.info("method %r is accepted again", method)

    def choose_probes(self, notes: list[RequestNote]) -> None:
        """Make probes of those that are due or will be soon, where one is due and it is time.

        The first node of a step costs most, so that probes are made together. What they cost beyond
        what they bring is paid off a small share of a step at a time before others are made.
        """
        if self._probe_debt > 0 or all(note.num_idle < note.probe_after for note in notes):
            return
        for note in notes:
            if 2 * note.num_idle >= note.probe_after:
                note.num_idle, note.is_probe = 0, True

    def is_plain_due(self, view: View, gain: float) -> bool:
        """Whether to go without the drafts of a step, to see what plain decoding costs by now."""
        assert self.cost_table is not None
        return (
            gain < _PLAIN_GAIN
            and self.cost_table.steps_since_plain(len(view.methods)) >= _PLAIN_AFTER
        )

    def padding(self, view: View, owners: Int64Array, most_before: int, num_before: int) -> Padding:
        """What unequal drafts cost in this step."""
        assert self.cost_table is not None
        row_seconds = self.cost_table.padding_seconds(view.context)
        return Padding(owners, len(view.notes), row_seconds, most_before, num_before)
