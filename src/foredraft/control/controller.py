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

from foredraft.control.allocate import Allocation, allocate
from foredraft.control.chances import chances, is_unfiltered, may_read
from foredraft.control.cost_table import CostTable
from foredraft.control.estimator import (
    AcceptanceTable,
    read_nodes,
    survival_of,
)
from foredraft.control.forecast import LEAST_GAIN, forecast, forecast_whole, member_nodes
from foredraft.control.knowledge import Knowledge
from foredraft.control.view import (
    FIRST_PROBE,
    NO_CONFIDENCE,
    MethodTraits,
    RequestNote,
    View,
    kept,
    outcomes,
    read,
)
from foredraft.params import MAX_SPECULATIVE_TOKENS
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

MAX_AUTO_NODES = MAX_SPECULATIVE_TOKENS - 1
"""Most draft nodes that ``auto`` gives a request, wherever the engine sets no lower bound."""

_NEGLIGIBLE = 0.02
"""A draft that costs less than this share of a step is free."""

_LAST_PROBE = 128
"""Most steps without a draft before one token is tried again; they double while probes bring no
news."""

_CHEAP = 0.05
"""A probe that is expected to cost less than this share of a step may come again soon."""

_NEARLY_FREE, _SOON = 0.02, 2
"""And one that costs less than this after so many steps: where drafts are just not worth it, as far
as is known, a few refusals more than usual must not be the last word. What probes cost in the long
run stays bounded."""

_SURPRISE = 0.3
"""A probe that is accepted is news where less than this was expected of it. Where drafts are good
and yet do not pay, as in a full batch, probes must not go on every few steps."""

_YOUNG = 24
"""Verify steps during which the target's own probabilities are worth computing."""

_COST_MEMORY = 1 / 16
_FIRST_COSTS = 4
"""Drafts of which the least time counts, before a mean is taken."""


class Controller:
    """Budgets before drafting, trimming after it, and what is learnt from every step.

    Args:
        traits: Says of a method what :class:`MethodTraits` holds.
        max_auto_nodes: Most draft nodes that ``auto`` gives a request; an attribute, too.
    """

    def __init__(
        self, traits: Callable[[str], MethodTraits], max_auto_nodes: int = MAX_AUTO_NODES
    ) -> None:
        """Know nothing yet; the first request with ``auto`` brings the cost table."""
        self.max_auto_nodes = max_auto_nodes
        self.last: Allocation | None = None
        self._known = Knowledge(traits)
        self._requests: dict[str, RequestNote] = {}
        self._view: View | None = None

    @property
    def cost_table(self) -> CostTable | None:
        """What a step costs; ``None`` until a request with ``auto`` brings it."""
        return self._known.cost_table

    @cost_table.setter
    def cost_table(self, table: CostTable) -> None:
        self._known.cost_table = table

    def budget(self, plan: StepPlan) -> Budgets:
        """Return the most draft nodes of each segment, and note what plain decoding would cost.

        A step emits at most one token more than it drafts, so a request with ``r`` tokens left
        drafts at most ``r - 1``. Prompt chunks and plain requests draft nothing.
        """
        self.last = None
        self._known.begin_step()
        view = self._view_of(plan)
        for method in view.names:
            self._known.method(method).num_steps += 1
        nodes = np.zeros(len(plan.segments), dtype=np.int64)
        is_on = {method: self._known.is_on(method) for method in view.names if method != PLAIN}
        costly: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for index, segment in enumerate(plan.segments):
            room = _room(segment)
            if room < 1:
                continue
            speculation = segment.request.speculation
            if not speculation.is_auto:
                nodes[index] = min(int(speculation.num_speculative_tokens), room)
            elif self.cost_table is not None and is_on[speculation.method]:
                nodes[index] = min(room, self.max_auto_nodes)
                if self._known.traits(speculation.method).is_whole:
                    whole.setdefault(speculation.method, []).append(index)
                elif not (view.is_walk[index] and self._known.is_free(speculation.method)):
                    costly.setdefault(speculation.method, []).append(index)
        limits = nodes.copy()
        for method, indices in costly.items():
            forecast(self._known, view, method, indices, nodes)
        for method, indices in whole.items():
            forecast_whole(self._known, view, method, indices, nodes)
        return Budgets(nodes, member_nodes(self._known, view, limits, nodes))

    def trim(self, plan: StepPlan, drafts: DraftBatch) -> DraftBatch:
        """Keep of the drafts of ``auto`` requests what pays, right before the target pass.

        Drafts of a fixed number, and drafts under a classical rule, are kept as they are.
        """
        if self.cost_table is None:
            return drafts
        view = self._view_of(plan)
        view.asked = drafts
        owners, above, bins = read(view, drafts)
        view.acceptance = self._acceptance(view, drafts, owners, bins)
        survival = survival_of(above, view.acceptance)
        if not len(owners):
            self.last = self._without_drafts(view)
            return drafts
        on_offer = view.may_trim[owners]
        num_kept = int((~on_offer).sum())
        offered = survival[on_offer] * view.weights[owners[on_offer]]
        first = view.num_rows + num_kept
        rows = np.concatenate([[view.num_rows], first + np.arange(len(offered) + 1.0)])
        seconds = self._known.seconds(view, rows)
        is_idle = len(offered) > 0 and all(view.notes[i].num_idle for i in set(owners[on_offer]))
        fixed = ~on_offer
        sure_tokens = view.sure_worth + float((survival * view.weights[owners])[fixed].sum())
        counts = np.bincount(owners[~on_offer], minlength=len(view.notes))
        padding = self._known.padding(view, owners[on_offer], int(counts.max()), num_kept)
        least_gain = LEAST_GAIN if is_idle else 0.0
        chosen = allocate(offered, seconds[1:], sure_tokens, least_gain, padding)
        keep = np.ones(len(owners), dtype=np.bool_)
        rate = chosen.expected_tokens / chosen.seconds
        gain = rate * seconds[0] / sure_tokens if num_kept == 0 and chosen.is_kept.any() else np.inf
        if self._known.is_plain_due(view, gain):
            chosen = Allocation(np.zeros_like(chosen.is_kept), sure_tokens, seconds[0], seconds[0])
        keep[on_offer] = chosen.is_kept
        expected_tokens = view.num_picks + float(survival[keep].sum())
        probed = self._probe(view, drafts, survival, keep, seconds[1:])
        self.last = Allocation(keep, expected_tokens + probed, chosen.seconds, float(seconds[0]))
        view.keep = keep
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
            num_accepted = int(verdict.path_offsets[index + 1] - verdict.path_offsets[index])
            if note.members:
                self._learn_members(view, index, note, drafts, values[nodes], num_accepted)
            if nodes.start == nodes.stop:
                continue
            if self._known.traits(view.methods[index]).is_whole:
                note.is_cheap = num_accepted > note.gain  # more than was thought: try again soon
                whole = self._known.method(view.methods[index])
                whole.whole_size = max(whole.whole_size, nodes.stop - nodes.start)
                note.learn_gain(num_accepted, whole)
            if note.is_probe:
                is_news = values[nodes].any() and expected[nodes.start] < _SURPRISE
                may_go_on = is_news or note.is_cheap
                note.probe_after = (
                    FIRST_PROBE if may_go_on else min(2 * note.probe_after, _LAST_PROBE)
                )
                if note.is_nearly_free:
                    note.probe_after = _SOON
            if self._says_more(view, index) and may_read(target):
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
        self._learn_by_depth(view, drafts, values)
        for method in draft_seconds:
            self._known.check_health(method)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._requests.pop(request_id, None)
        for method in self._known.methods.values():
            method.acceptance.forget(request_id)
            method.by_depth.forget(request_id)

    def _view_of(self, plan: StepPlan) -> View:
        if self._view is None or self._view.plan is not plan:
            self._view = View(plan, self._requests, self._known.method)
            for number, method in enumerate(self._view.names):
                if method != PLAIN and self._known.traits(method).is_whole:
                    self._view.may_trim[self._view.which == number] = False
        return self._view

    def _by_method(
        self, view: View, owners: Int64Array
    ) -> Iterator[tuple[AcceptanceTable, Int64Array | slice]]:
        """Each method's table, and which nodes are its own."""
        if len(view.names) == 1:
            yield self._known.method(view.names[0]).acceptance, slice(None)
            return
        which = view.which[owners]
        for number, method in enumerate(view.names):
            chosen = np.nonzero(which == number)[0]
            if len(chosen):
                yield self._known.method(method).acceptance, chosen

    def _by_voter(
        self, view: View, drafts: DraftBatch, owners: Int64Array
    ) -> Iterator[tuple[AcceptanceTable, Int64Array, Int64Array, Int64Array]]:
        """Of each voter its table, the nodes it proposed, their kinds and rows in its table.

        What several propose is likelier than what one proposes alone: of the latter a voter has a
        table of its own, or its word would be worth what its agreement is.
        """
        if drafts.votes is None:
            return
        segments = view.plan.segments
        drafting = np.unique(owners).tolist()
        has_voted = drafts.votes != -1
        is_shared = has_voted.sum(axis=0) > 1
        for voter, votes, own in zip(drafts.voters, drafts.votes, has_voted, strict=True):
            if not own.any():
                continue
            _, _, kinds = read_nodes(drafts.parents, drafts.offsets, votes, view.is_walk)
            for name, nodes in ((voter, own & is_shared), (f"{voter}, alone", own & ~is_shared)):
                chosen = np.nonzero(nodes)[0]
                if not len(chosen):
                    continue
                table = self._known.method(name).acceptance
                rows = np.zeros(len(segments), dtype=np.int64)
                for index in drafting:
                    rows[index] = table.row(segments[index].request.request_id)
                yield table, chosen, kinds[chosen], rows[owners[chosen]]

    def _acceptance(
        self, view: View, drafts: DraftBatch, owners: Int64Array, bins: Int64Array
    ) -> Float64Array:
        """Estimated acceptance of every node once its parent is accepted, float64 [num_nodes].

        Where several proposed a node, it is the mean of what each of them makes it: the largest of
        several guesses is too often one that is too large.
        """
        out = np.zeros(len(owners))
        rows = view.rows[owners]
        for table, chosen in self._by_method(view, owners):
            out[chosen] = table.acceptance_of(bins[chosen], rows[chosen])
        if drafts.votes is None:
            return out
        num_votes = (drafts.votes != -1).sum(axis=0)
        out[num_votes > 0] = 0.0
        for table, chosen, kinds, voter_rows in self._by_voter(view, drafts, owners):
            out[chosen] += table.acceptance_of(kinds, voter_rows) / num_votes[chosen]
        return out

    def _without_drafts(self, view: View) -> Allocation:
        """What a step costs and brings that holds no draft."""
        assert self.cost_table is not None
        rows = np.array([float(view.num_rows)])
        plain = float(self._known.seconds(view, rows)[0])
        return Allocation(np.zeros(0, dtype=np.bool_), float(view.num_picks), plain, plain)

    def _says_more(self, view: View, index: int) -> bool:
        """Whether the target's probabilities are worth computing for a request's draft.

        They are while it is young, if its draft was fixed before the noise, and where they are at
        hand without filtering again.
        """
        return (
            view.notes[index].num_verify_steps <= _YOUNG
            and bool(view.is_walk[index])
            and is_unfiltered(view.plan.segments[index].request.sampling)
            and not self._known.traits(view.methods[index]).sees_noise
        )

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
                self._known.method(view.methods[index]).acceptance.age(request_id)
                note.num_idle += 1
        self._known.choose_probes([view.notes[index] for index in idle])
        num_kept = int(keep[view.may_trim[owners]].sum())
        first = [int(drafts.offsets[index]) for index in idle if view.notes[index].is_probe]
        if not first:
            return 0.0
        keep[first] = True
        worth = float(survival[first].sum())
        rise = seconds[num_kept + len(first)] / seconds[num_kept] - 1
        loss = rise - worth / max(1, view.num_picks)
        self._known.owe(loss)
        for index in idle:
            view.notes[index].is_cheap = loss < _CHEAP
            view.notes[index].is_nearly_free = loss < _NEARLY_FREE
        return worth

    def _learn_by_depth(self, view: View, drafts: DraftBatch, values: Float64Array) -> None:
        """Learn what forecasts need of drafts that take time: acceptance by depth, untrimmed.

        Of nodes that were trimmed what was expected of them is taken, or those that were kept for
        being likely would stand for all.
        """
        asked = view.asked or drafts
        if not len(asked.token_ids):
            return
        owners = read(view, asked)[0]
        chosen = []
        for number, method in enumerate(view.names):
            if method == PLAIN:
                continue
            traits, own = self._known.traits(method), view.which == number
            if not (self._known.is_free(method) and view.is_walk[own].all()):
                chosen.append((method, own[owners]))
            for member in traits.members:
                if asked.votes is not None and member in asked.voters:
                    chosen.append((member, asked.votes[asked.voters.index(member)] != -1))
        if not chosen:
            return
        if view.keep is not None and view.acceptance is not None:
            every = view.acceptance.copy()
            every[view.keep] = values
            values = every
        _, above, depths = read_nodes(asked.parents, asked.offsets, NO_CONFIDENCE, view.is_walk)
        weights = np.where(above < 0, 1.0, survival_of(above, values)[above])
        names = [segment.request.request_id for segment in view.plan.segments]
        for method, nodes in chosen:
            table = self._known.method(method).by_depth
            rows = np.array([table.row(name) for name in names])
            table.observe_of(rows[owners[nodes]], depths[nodes], values[nodes], weights[nodes])

    def _learn_members(
        self,
        view: View,
        index: int,
        note: RequestNote,
        drafts: DraftBatch,
        values: Float64Array,
        num_accepted: int,
    ) -> None:
        """Learn of one request what its free drafts bring, and what its probes of costly ones."""
        asked = view.asked or drafts
        nodes = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
        first = slice(int(asked.offsets[index]), int(asked.offsets[index + 1]))
        is_free = True
        for member, own in note.members.items():
            if asked.votes is None or member not in asked.voters:
                continue
            row = asked.voters.index(member)
            is_free &= not (asked.votes[row, first] != -1).any()
            if own.is_probe and drafts.votes is not None:
                is_news = bool(values[drafts.votes[row, nodes] != -1].any())
                own.probe_after = FIRST_PROBE if is_news else min(2 * own.probe_after, _LAST_PROBE)
        if is_free:
            note.learn_free(num_accepted, nodes.stop - nodes.start)

    def _learn_draft_costs(
        self, view: View, drafts: DraftBatch, draft_seconds: Mapping[str, float]
    ) -> None:
        drafts = view.asked or drafts
        for method, seconds in draft_seconds.items():
            found = self._known.method(method)
            units = 1
            if self._known.cost_of(view, method) != "once":
                units = 0
                row = drafts.voters.index(method) if method in drafts.voters else None
                for index, name in enumerate(view.methods):
                    own = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
                    depths = tree.depths(drafts.parents[own])[1:]
                    if row is not None and drafts.votes is not None:
                        depths = depths[drafts.votes[row, own] != -1]
                    elif name != method:
                        continue
                    units = max(units, int(depths.max(initial=0)))
                if not units:
                    continue  # it had nothing to draft
            unit = seconds / units
            old = found.unit_seconds
            found.num_costs += 1
            if old is None:
                found.unit_seconds = unit
            elif found.num_costs <= _FIRST_COSTS:  # the first one may have loaded something
                found.unit_seconds = min(old, unit)
            else:
                found.unit_seconds = old + _COST_MEMORY * (min(unit, 4 * old) - old)
            if self.last is not None:
                found.is_free = found.unit_seconds < _NEGLIGIBLE * self.last.plain_seconds


def _room(segment: Segment) -> int:
    """Most draft nodes that can be of use to a segment."""
    request = segment.request
    if not segment.is_decode or request.speculation.method == PLAIN:
        return 0
    return min(request.max_tokens - segment.num_output_tokens - 1, segment.room)


__all__ = ["MAX_AUTO_NODES", "Controller", "MethodTraits"]
