"""How much each request drafts in a step, or whether it drafts at all.

A request with a fixed number gets it. For the others (``auto``) the controller asks, before every
target pass: which of the nodes on offer, over all requests of the batch, make the step worth most
expected tokens per second (``allocate``), with acceptance as learnt (``estimator``) and cost as
measured (``cost_table``)?

Under the default rule a draft that costs next to nothing is asked for at full length and trimmed
once it is seen, right before the target pass: whatever may be known of it by then may be used, for
the target's pick never looks at a draft. A draft that costs time is asked for only as far as its
forecast pays. Under a classical rule the length is decided before a token is drawn, from the past,
and nothing is trimmed.

Zero is among the choices, and where it is chosen nothing is paid for it but, now and then, a probe
of one token, so that better times are noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from foredraft.control.allocate import Allocation, Padding, allocate
from foredraft.control.chances import chances, is_unfiltered
from foredraft.control.cost_table import CostTable
from foredraft.control.estimator import (
    AcceptanceTable,
    bins_of,
    read_nodes,
    survival_of,
)
from foredraft.control.view import (
    FIRST_PROBE,
    NO_CONFIDENCE,
    MethodNote,
    MethodTraits,
    RequestNote,
    View,
    kept,
    outcomes,
    read,
    renumber,
)
from foredraft.plan.profile import PassTime
from foredraft.registry import PLAIN
from foredraft.sampling.processors import Float64Array
from foredraft.tree import tree
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

MAX_AUTO_NODES = 31
"""Most draft nodes that ``auto`` gives a request: with the root, 32 rows, up to which bfloat16
products were seen to give each row the same bits in any company."""

_NEGLIGIBLE = 0.02
"""A draft that costs less than this share of a step is free."""

_LEAST_GAIN = 0.01
"""What drafting must promise for a request that has not been drafting: no flutter around zero."""

_LAST_PROBE = 128
"""Most steps without a draft before one token is tried again; they double while probes bring no
news."""

_PROBE_SHARE = 0.005
"""Of a step: what probes may cost in the long run."""

_CHEAP = 0.05
"""A probe that is expected to cost less than this share of a step may come again soon."""

_PLAIN_AFTER, _PLAIN_GAIN = 48, 1.2
"""After so many steps with drafts, where drafting promises less than this factor, a step goes
without: the price of plain decoding, which every promise is measured by, must not grow stale."""

_SURPRISE = 0.3
"""A probe that is accepted is news where less than this was expected of it. Where drafts are good
and yet do not pay, as in a full batch, probes must not go on every few steps."""

_YOUNG = 24
"""Verify steps during which the target's own probabilities are worth computing."""

_DEAD_AFTER = 96
_DEAD_BELOW = 0.01
"""A method with less than this acceptance over so many trials is dead."""

_RETRY_AFTER = 256
"""Steps after which a dead method is tried again."""

_COST_MEMORY = 1 / 16


class Controller:
    """Budgets before drafting, trimming after it, and what is learnt from every step.

    Args:
        traits: Says of a method what :class:`MethodTraits` holds.
    """

    def __init__(self, traits: Callable[[str], MethodTraits]) -> None:
        """Know nothing yet; the first request with ``auto`` brings the cost table."""
        self.cost_table: CostTable | None = None
        self.last: Allocation | None = None
        self._traits = traits
        self._methods: dict[str, MethodNote] = {}
        self._requests: dict[str, RequestNote] = {}
        self._view: View | None = None
        self._probe_debt = 0.0

    def budget(self, plan: StepPlan) -> Budgets:
        """Return the most draft nodes of each segment, and note what plain decoding would cost.

        A step emits at most one token more than it drafts, so a request with ``r`` tokens left
        drafts at most ``r - 1``. Prompt chunks and plain requests draft nothing.
        """
        self.last = None
        self._probe_debt = max(0.0, self._probe_debt - _PROBE_SHARE)
        view = self._view_of(plan)
        for method in view.names:
            self._method(method).num_steps += 1
        nodes = np.zeros(len(plan.segments), dtype=np.int64)
        is_on = {method: self._is_on(method) for method in view.names if method != PLAIN}
        forecast: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for index, segment in enumerate(plan.segments):
            room = _room(segment)
            if room < 1:
                continue
            speculation = segment.request.speculation
            if not speculation.is_auto:
                nodes[index] = min(int(speculation.num_speculative_tokens), room)
            elif self.cost_table is not None and is_on[speculation.method]:
                nodes[index] = min(room, MAX_AUTO_NODES)
                if self._traits(speculation.method).is_whole:
                    whole.setdefault(speculation.method, []).append(index)
                elif not (view.is_walk[index] and self._is_free(speculation.method)):
                    forecast.setdefault(speculation.method, []).append(index)
        for method, indices in forecast.items():
            self._forecast(view, method, indices, nodes)
        for method, indices in whole.items():
            self._forecast_whole(view, method, indices, nodes)
        return Budgets(nodes)

    def trim(self, plan: StepPlan, drafts: DraftBatch) -> DraftBatch:
        """Keep of the drafts of ``auto`` requests what pays, right before the target pass.

        Drafts of a fixed number, and drafts under a classical rule, are kept as they are.
        """
        if self.cost_table is None:
            return drafts
        view = self._view_of(plan)
        view.asked = drafts
        owners, above, bins = read(view, drafts)
        survival = survival_of(above, self._acceptance(view, drafts, owners, bins))
        if not len(owners):
            self.last = self._without_drafts(view)
            return drafts
        on_offer = view.may_trim[owners]
        num_kept = int((~on_offer).sum())
        offered = survival[on_offer]
        first = view.num_rows + num_kept
        rows = np.concatenate([[view.num_rows], first + np.arange(len(offered) + 1.0)])
        seconds = self.cost_table.seconds(len(plan.segments), rows, view.context)
        is_idle = len(offered) > 0 and all(view.notes[i].num_idle for i in set(owners[on_offer]))
        sure_tokens = view.num_picks + float(survival[~on_offer].sum())
        counts = np.bincount(owners[~on_offer], minlength=len(view.notes))
        padding = self._padding(view, owners[on_offer], int(counts.max()), num_kept)
        least_gain = _LEAST_GAIN if is_idle else 0.0
        chosen = allocate(offered, seconds[1:], sure_tokens, least_gain, padding)
        keep = np.ones(len(owners), dtype=np.bool_)
        rate = chosen.expected_tokens / chosen.seconds
        gain = rate * seconds[0] / sure_tokens if num_kept == 0 and chosen.is_kept.any() else np.inf
        if self._is_plain_due(view, gain):
            chosen = Allocation(np.zeros_like(chosen.is_kept), sure_tokens, seconds[0], seconds[0])
        keep[on_offer] = chosen.is_kept
        probed = self._probe(view, drafts, survival, keep, seconds[1:])
        self.last = Allocation(
            keep, chosen.expected_tokens + probed, chosen.seconds, float(seconds[0])
        )
        return drafts if keep.all() else kept(drafts, keep)

    def observe(
        self,
        plan: StepPlan,
        drafts: DraftBatch,
        target: TargetOutput,
        verdict: Verdict,
        step_seconds: float,
        draft_seconds: Mapping[str, float],
    ) -> None:
        """Learn from a step: what was accepted, what it cost.

        Args:
            plan: Who ran.
            drafts: What was verified.
            target: What the target said.
            verdict: What was accepted.
            step_seconds: Wall time of the step without drafting.
            draft_seconds: Wall time of each method that was asked to draft.
        """
        if self.cost_table is None:
            return
        view = self._view_of(plan)
        if view.is_decoding:
            num_nodes = drafts.num_nodes
            self.cost_table.observe(
                len(plan.segments),
                int(target.row_offsets[-1]),
                view.context,
                step_seconds,
                int(len(num_nodes) * num_nodes.max() - num_nodes.sum()),
            )
        self._learn_draft_costs(view, drafts, draft_seconds)
        owners, above, bins = read(view, drafts)
        values, weights = outcomes(drafts.offsets, above, verdict.path, verdict.path_offsets)
        is_probing = any(note.is_probe for note in view.notes)
        expected = self._acceptance(view, drafts, owners, bins) if is_probing else values
        for index, note in enumerate(view.notes):
            segment = plan.segments[index]
            if not segment.is_decode or view.methods[index] == PLAIN:
                continue
            note.num_verify_steps += 1
            nodes = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
            if nodes.start == nodes.stop:
                continue
            if self._traits(view.methods[index]).is_whole:
                gain = float(verdict.path_offsets[index + 1] - verdict.path_offsets[index])
                note.is_cheap = gain > note.gain  # more than was thought: try again soon
                note.learn_gain(gain, self._method(view.methods[index]))
            if note.is_probe:
                is_news = values[nodes].any() and expected[nodes.start] < _SURPRISE
                may_go_on = is_news or note.is_cheap
                note.probe_after = (
                    FIRST_PROBE if may_go_on else min(2 * note.probe_after, _LAST_PROBE)
                )
            if self._says_more(view, index):
                first = int(target.offsets[index])
                values[nodes] = chances(
                    target.logits[first : first + nodes.stop - nodes.start + 1],
                    drafts.token_ids[nodes],
                    drafts.parents[nodes],
                    segment.request.sampling.temperature,
                )
                own = above[nodes]
                reached = survival_of(np.where(own < 0, -1, own - nodes.start), values[nodes])
                weights[nodes] = np.where(own < 0, 1.0, reached[np.maximum(own - nodes.start, 0)])
        if len(owners):
            rows = view.rows[owners]
            for table, chosen in self._by_method(view, owners):
                table.observe_of(rows[chosen], bins[chosen], values[chosen], weights[chosen])
            for table, chosen, kinds, voter_rows in self._by_voter(view, drafts, owners):
                table.observe_of(voter_rows, kinds, values[chosen], weights[chosen])
        for method in draft_seconds:
            self._check_health(method)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._requests.pop(request_id, None)
        for method in self._methods.values():
            method.acceptance.forget(request_id)

    def _view_of(self, plan: StepPlan) -> View:
        if self._view is None or self._view.plan is not plan:
            self._view = View(plan, self._requests, self._method)
            for number, method in enumerate(self._view.names):
                if method != PLAIN and self._traits(method).is_whole:
                    self._view.may_trim[self._view.which == number] = False
        return self._view

    def _method(self, method: str) -> MethodNote:
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = MethodNote()
        return found

    def _by_method(
        self, view: View, owners: Int64Array
    ) -> Iterator[tuple[AcceptanceTable, Int64Array | slice]]:
        """Each method's table, and which nodes are its own."""
        if len(view.names) == 1:
            yield self._method(view.names[0]).acceptance, slice(None)
            return
        which = view.which[owners]
        for number, method in enumerate(view.names):
            chosen = np.nonzero(which == number)[0]
            if len(chosen):
                yield self._method(method).acceptance, chosen

    def _by_voter(
        self, view: View, drafts: DraftBatch, owners: Int64Array
    ) -> Iterator[tuple[AcceptanceTable, Int64Array, Int64Array, Int64Array]]:
        """Of each voter its table, the nodes it proposed, their kinds and rows in its table."""
        if drafts.votes is None:
            return
        segments = view.plan.segments
        drafting = np.unique(owners).tolist()
        for voter, votes in zip(drafts.voters, drafts.votes, strict=True):
            chosen = np.nonzero(votes != -1)[0]
            if not len(chosen):
                continue
            table = self._method(voter).acceptance
            rows = np.zeros(len(segments), dtype=np.int64)
            for index in drafting:
                rows[index] = table.row(segments[index].request.request_id)
            _, _, kinds = read_nodes(drafts.parents, drafts.offsets, votes, view.is_walk)
            yield table, chosen, kinds[chosen], rows[owners[chosen]]

    def _acceptance(
        self, view: View, drafts: DraftBatch, owners: Int64Array, bins: Int64Array
    ) -> Float64Array:
        """Estimated acceptance of every node once its parent is accepted, float64 [num_nodes].

        Where several proposed a node, it is the best that any of them makes it.
        """
        out = np.zeros(len(owners))
        rows = view.rows[owners]
        for table, chosen in self._by_method(view, owners):
            out[chosen] = table.acceptance_of(bins[chosen], rows[chosen])
        if drafts.votes is not None:
            out[(drafts.votes != -1).any(axis=0)] = 0.0
        for table, chosen, kinds, voter_rows in self._by_voter(view, drafts, owners):
            out[chosen] = np.maximum(out[chosen], table.acceptance_of(kinds, voter_rows))
        return out

    def _without_drafts(self, view: View) -> Allocation:
        """What a step costs and brings that holds no draft."""
        assert self.cost_table is not None
        rows = np.array([float(view.num_rows)])
        plain = float(self.cost_table.seconds(len(view.methods), rows, view.context)[0])
        return Allocation(np.zeros(0, dtype=np.bool_), float(view.num_picks), plain, plain)

    def _padding(
        self, view: View, owners: Int64Array, most_before: int, num_before: int
    ) -> Padding:
        """What unequal drafts cost in this step."""
        assert self.cost_table is not None
        row_seconds = self.cost_table.padding_seconds(view.context)
        return Padding(owners, len(view.notes), row_seconds, most_before, num_before)

    def _says_more(self, view: View, index: int) -> bool:
        """Whether the target's probabilities are worth computing for a request's draft.

        They are while it is young, if its draft was fixed before the noise, and where they are at
        hand without filtering again.
        """
        return (
            view.notes[index].num_verify_steps <= _YOUNG
            and bool(view.is_walk[index])
            and is_unfiltered(view.plan.segments[index].request.sampling)
            and not self._traits(view.methods[index]).sees_noise
        )

    def _is_on(self, method: str) -> bool:
        """Whether a method may draft in this step: not dead, or due for another try."""
        found = self._method(method)
        if found.off_until and found.num_steps >= found.off_until:
            found.off_until, found.is_retrying = 0, True
            found.acceptance.num_trials = found.acceptance.num_hits = 0.0
            _LOG.info("method %r is tried again", method)
        return not found.off_until

    def _is_free(self, method: str) -> bool:
        """Whether drafting for all its requests cost next to nothing beside the last step."""
        is_free = self._method(method).is_free
        return self._traits(method).cost == "once" if is_free is None else is_free

    def _check_health(self, method: str) -> None:
        """Switch a dead method off for a while; say so, and say when it is back."""
        found = self._method(method)
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

    def _forecast(self, view: View, method: str, indices: list[int], nodes: Int64Array) -> None:
        """Cut the budgets of one method's requests to what is expected to pay, before drafting.

        Chains of expected survival by depth stand in for drafts that do not exist yet. Drafting
        costs by the level, so each deepest level is priced with its drafting; the best one wins.
        """
        found, traits = self._method(method), self._traits(method)
        deepest = int(nodes[indices].max())
        depths = np.arange(1, deepest + 1)
        bins = bins_of(depths, np.zeros_like(depths), None)
        survival = np.empty((len(indices), deepest))
        names = [segment.request.request_id for segment in view.plan.segments]
        for row, index in enumerate(indices):
            survival[row] = np.cumprod(found.acceptance.acceptance(bins, names[index]))
            survival[row, nodes[index] :] = 0.0
        unit = found.unit_seconds or 0.0
        assert self.cost_table is not None
        rows = view.num_rows + np.arange(survival.size + 1.0)
        step = self.cost_table.seconds(len(names), rows, view.context)
        best_rate, best = view.num_picks / step[0], None
        is_idle = all(view.notes[index].num_idle for index in indices)
        least = best_rate * (1 + (_LEAST_GAIN if is_idle else 0.0))
        for level in range(1, deepest + 1):
            offered = survival[:, :level].ravel()
            draft = unit * (1 if traits.cost == "once" else level)
            padding = self._padding(view, np.repeat(indices, level), 0, 0)
            costs = step[: len(offered) + 1] + draft
            chosen = allocate(offered, costs, view.num_picks, 0.0, padding)
            rate = chosen.expected_tokens / chosen.seconds
            if chosen.is_kept.any() and rate > max(best_rate, least):
                best_rate, best = rate, chosen.is_kept.reshape(len(indices), level).sum(axis=1)
        if best is not None and self._is_plain_due(view, best_rate * step[0] / view.num_picks):
            best = None
        idle = []
        for row, index in enumerate(indices):
            note = view.notes[index]
            wanted = 0 if best is None else int(best[row])
            nodes[index] = min(int(nodes[index]), wanted)
            if wanted:
                note.num_idle = 0
                continue
            found.acceptance.age(names[index])
            note.num_idle += 1
            idle.append(index)
        self._choose_probes([view.notes[index] for index in idle])
        probes = [index for index in idle if view.notes[index].is_probe]
        nodes[probes] = 1
        if probes and best is None:
            self._probe_debt += unit / float(step[0])

    def _forecast_whole(
        self, view: View, method: str, indices: list[int], nodes: Int64Array
    ) -> None:
        """Give each request of a method the whole of its budget or nothing, before drafting.

        What a whole draft brings is what it brought before; those that it brought most come first.
        """
        found = self._method(method)
        assert self.cost_table is not None
        notes = view.notes
        for index in indices:
            notes[index].begin_gain(found)
        order = sorted(indices, key=lambda index: -notes[index].gain)
        sizes = np.concatenate([[0.0], np.cumsum(nodes[order])])
        gains = np.concatenate([[0.0], np.cumsum([notes[index].gain for index in order])])
        seconds = self.cost_table.seconds(len(notes), view.num_rows + sizes, view.context)
        padded = len(notes) * float(nodes[order].max()) - sizes[1:]
        seconds[1:] += (found.unit_seconds or 0.0) + padded * self.cost_table.padding_seconds(
            view.context
        )
        rates = (view.num_picks + gains) / seconds
        best = int(np.argmax(rates))
        if all(notes[index].num_idle for index in indices) and (
            rates[best] < rates[0] * (1 + _LEAST_GAIN)
        ):
            best = 0
        idle = order[best:]
        for index in order[:best]:
            notes[index].num_idle = 0
        for index in idle:
            notes[index].num_idle += 1
        self._choose_probes([notes[index] for index in idle])
        probes = [index for index in idle if notes[index].is_probe]
        nodes[[index for index in idle if not notes[index].is_probe]] = 0
        if probes:
            self._probe_debt += max(0.0, rates[best] / rates[best + len(probes)] - 1)

    def _probe(
        self,
        view: View,
        drafts: DraftBatch,
        survival: Float64Array,
        keep: NDArray[np.bool_],
        seconds: Float64Array,
    ) -> float:
        """Keep the first token of drafts now and then where none was kept; return their worth.

        Args:
            view: The step.
            drafts: Before trimming.
            survival: float64 [num_nodes].
            keep: bool [num_nodes]; the probes are added to it.
            seconds: Of the step, with so many of the nodes on offer.
        """
        owners = read(view, drafts)[0]
        kept = np.bincount(owners[keep], minlength=len(view.notes))
        idle = []
        for index in np.nonzero(view.may_trim & (drafts.num_nodes > 0))[0].tolist():
            note = view.notes[index]
            if kept[index]:
                note.num_idle = 0
                continue
            idle.append(index)
            if not note.is_probe:  # else the forecast made it one, and saw to the rest
                request_id = view.plan.segments[index].request.request_id
                self._method(view.methods[index]).acceptance.age(request_id)
                note.num_idle += 1
        self._choose_probes([view.notes[index] for index in idle])
        num_kept = int(keep[view.may_trim[owners]].sum())
        first = [int(drafts.offsets[index]) for index in idle if view.notes[index].is_probe]
        if not first:
            return 0.0
        keep[first] = True
        worth = float(survival[first].sum())
        rise = seconds[num_kept + len(first)] / seconds[num_kept] - 1
        loss = rise - worth / max(1, view.num_picks)
        self._probe_debt += max(0.0, loss)
        for index in idle:
            view.notes[index].is_cheap = loss < _CHEAP
        return worth

    def _choose_probes(self, notes: list[RequestNote]) -> None:
        """Make probes of those that are due or will be soon, where one is due and it is time.

        The first node of a step costs most, so that probes are made together. What they cost beyond
        what they bring is paid off a small share of a step at a time before others are made.
        """
        if self._probe_debt > 0 or all(note.num_idle < note.probe_after for note in notes):
            return
        for note in notes:
            if 2 * note.num_idle >= note.probe_after:
                note.num_idle, note.is_probe = 0, True

    def _is_plain_due(self, view: View, gain: float) -> bool:
        """Whether to go without the drafts of a step, to see what plain decoding costs by now."""
        assert self.cost_table is not None
        return (
            gain < _PLAIN_GAIN
            and self.cost_table.steps_since_plain(len(view.methods)) >= _PLAIN_AFTER
        )

    def _learn_draft_costs(
        self, view: View, drafts: DraftBatch, draft_seconds: Mapping[str, float]
    ) -> None:
        drafts = view.asked or drafts
        for method, seconds in draft_seconds.items():
            found = self._method(method)
            units = 1
            if self._traits(method).cost != "once":
                for index, name in enumerate(view.methods):
                    parents = drafts.parents[drafts.offsets[index] : drafts.offsets[index + 1]]
                    if name == method and len(parents):
                        units = max(units, int(tree.depths(parents).max()))
            unit = seconds / units
            old = found.unit_seconds
            found.unit_seconds = (
                unit if old is None else old + _COST_MEMORY * (min(unit, 4 * old) - old)
            )
            if self.last is not None:
                found.is_free = found.unit_seconds < _NEGLIGIBLE * self.last.plain_seconds


def _room(segment: Segment) -> int:
    """Most draft nodes that can be of use to a segment."""
    request = segment.request
    if not segment.is_decode or request.speculation.method == PLAIN:
        return 0
    return request.max_tokens - segment.num_output_tokens - 1


def load_kernels() -> None:
    """Compile or load what deciding runs, so that no step pays for it."""
    parents, offsets = np.array([0, 1]), np.array([0, 2])
    yes = np.ones(1, dtype=np.bool_)
    _, above, bins = read_nodes(parents, offsets, NO_CONFIDENCE, yes)
    table = AcceptanceTable()
    table.observe("", bins, np.ones(2), np.ones(2))
    survival = survival_of(above, table.acceptance(bins, ""))
    costs = CostTable([PassTime(1, rows, 0, 1.0, 0.0) for rows in (1, 2)])
    padding = Padding(np.zeros(2, dtype=np.int64), 1, 0.0)
    chosen = allocate(survival, costs.seconds(1, np.arange(1.0, 4.0), 0.0), 1.0, 0.0, padding)
    costs.observe(1, 2, 0.0, 1.0)
    costs.steps_since_plain(1)
    outcomes(offsets, above, np.array([1, 2]), offsets)
    renumber(parents, offsets, chosen.is_kept)


__all__ = ["MAX_AUTO_NODES", "Controller", "MethodTraits", "load_kernels"]
