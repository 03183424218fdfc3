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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.control.allocate import Allocation, allocate
from foredraft.control.cost_table import CostTable
from foredraft.control.estimator import NUM_DEPTHS, AcceptanceTable, bins_of, survival_of
from foredraft.params import SamplingParams
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

_NEGLIGIBLE = 0.005
"""A draft that costs less than this share of a step is free."""

_LEAST_GAIN = 0.01
"""What drafting must promise for a request that has not been drafting: no flutter around zero."""

_FIRST_PROBE, _LAST_PROBE = 8, 128
"""Steps without a draft before one token is tried again; doubled while probes fail."""

_YOUNG = 24
"""Verify steps during which the target's own probabilities are worth computing."""

_DEAD_AFTER = 48
_DEAD_BELOW = 0.02
"""A method with less than this acceptance over so many trials is dead."""

_RETRY_AFTER = 256
"""Steps after which a dead method is tried again."""

_COST_MEMORY = 1 / 16


@dataclass(frozen=True, slots=True)
class MethodTraits:
    """What the controller must know of a drafter.

    Attributes:
        cost: What its time is counted by: ``once``, ``per_token`` or ``per_level``.
        sees_noise: Whether its drafts depend on the target's noise, so that the target's
            probability of a token is not the chance that it is picked.
    """

    cost: str = "once"
    sees_noise: bool = False


@dataclass(slots=True)
class _Request:
    """What is kept of a request: when it last drafted, and how long it has been watched."""

    num_verify_steps: int = 0
    num_idle: int = 0
    probe_after: int = _FIRST_PROBE
    is_probe: bool = False


class _Method:
    """What is kept of a method."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceTable()
        self.unit_seconds: float | None = None
        self.num_steps = 0
        self.off_until = 0
        self.is_retrying = False


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
        self._methods: dict[str, _Method] = {}
        self._requests: dict[str, _Request] = {}

    def budget(self, plan: StepPlan) -> Budgets:
        """Return the most draft nodes of each segment, and note what plain decoding would cost.

        A step emits at most one token more than it drafts, so a request with ``r`` tokens left
        drafts at most ``r - 1``. Prompt chunks and plain requests draft nothing.
        """
        self.last = None
        for method in {s.request.speculation.method for s in plan.segments}:
            self._method(method).num_steps += 1
        nodes = np.zeros(len(plan.segments), dtype=np.int64)
        forecast: dict[str, list[int]] = {}
        for index, segment in enumerate(plan.segments):
            room = _room(segment)
            if room < 1:
                continue
            speculation = segment.request.speculation
            if not speculation.is_auto:
                nodes[index] = min(int(speculation.num_speculative_tokens), room)
            elif self.cost_table is not None and self._is_on(speculation.method):
                nodes[index] = min(room, MAX_AUTO_NODES)
                if not _is_walk(segment) or not self._is_free(speculation.method):
                    forecast.setdefault(speculation.method, []).append(index)
        for method, indices in forecast.items():
            self._forecast(plan, method, indices, nodes)
        return Budgets(nodes)

    def trim(self, plan: StepPlan, drafts: DraftBatch) -> DraftBatch:
        """Keep of the drafts of ``auto`` requests what pays, right before the target pass.

        Drafts of a fixed number, and drafts under a classical rule, are kept as they are.
        """
        table = self.cost_table
        if table is None:
            return drafts
        segments = plan.segments
        num_segments = len(segments)
        owners = np.repeat(np.arange(num_segments), drafts.num_nodes)
        survival = self._survival(plan, drafts)
        is_free = np.array([s.request.speculation.is_auto and _is_walk(s) for s in segments])
        may_trim = is_free[owners]
        num_fixed = int((~may_trim).sum())
        first_row = sum(s.num_rows for s in segments) + num_fixed
        num_requests = sum(s.wants_pick for s in segments)
        is_idle = np.array([self._note(s).num_idle > 0 for s in segments])
        offered = survival[may_trim]
        seconds = self._seconds(plan, first_row + np.arange(len(offered) + 1.0))
        gain = _LEAST_GAIN if len(offered) and is_idle[owners[may_trim]].all() else 0.0
        base = num_requests + float(survival[~may_trim].sum())
        chosen = allocate(offered, seconds, base, gain)
        plain_rows = np.array([float(first_row - num_fixed)])
        plain_seconds = float(self._seconds(plan, plain_rows)[0])
        keep = np.ones(len(owners), dtype=np.bool_)
        keep[may_trim] = chosen.is_kept
        probed = self._probe(plan, drafts, survival, owners, keep, is_free)
        self.last = Allocation(keep, chosen.expected_tokens + probed, chosen.seconds, plain_seconds)
        return drafts if keep.all() else _kept(drafts, owners, keep)

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
        num_rows = int(target.row_offsets[-1])
        if all(segment.is_decode for segment in plan.segments):
            self.cost_table.observe(len(plan.segments), num_rows, _mean_context(plan), step_seconds)
        self._learn_draft_costs(plan, drafts, draft_seconds)
        for index, segment in enumerate(plan.segments):
            if not segment.is_decode or segment.request.speculation.method == PLAIN:
                continue
            begin, end = int(drafts.offsets[index]), int(drafts.offsets[index + 1])
            note = self._note(segment)
            note.num_verify_steps += 1
            if begin == end:
                continue
            method = segment.request.speculation.method
            path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
            is_hit = np.zeros(end - begin, dtype=np.bool_)
            is_hit[path - 1] = True
            if note.is_probe:
                note.probe_after = (
                    _FIRST_PROBE if len(path) else min(2 * note.probe_after, _LAST_PROBE)
                )
                note.is_probe = False
            self._learn(segment, method, drafts, slice(begin, end), is_hit, target, index)
        for method in draft_seconds:
            self._check_health(method)

    def forget(self, request_id: str, method: str) -> None:
        """Drop what is kept of a request."""
        self._requests.pop(request_id, None)
        if method in self._methods:
            self._methods[method].acceptance.forget(request_id)

    def num_now(self, method: str) -> float | None:
        """Discounted share of a method's trials that were accepted; ``None`` before the first."""
        found = self._methods.get(method)
        if found is None or not found.acceptance.num_trials:
            return None
        return found.acceptance.num_hits / found.acceptance.num_trials

    def _note(self, segment: Segment) -> _Request:
        return self._requests.setdefault(segment.request.request_id, _Request())

    def _method(self, method: str) -> _Method:
        return self._methods.setdefault(method, _Method())

    def _is_on(self, method: str) -> bool:
        """Whether a method may draft in this step: not dead, or due for another try."""
        found = self._method(method)
        if found.off_until and found.num_steps >= found.off_until:
            found.off_until, found.is_retrying = 0, True
            found.acceptance.num_trials = found.acceptance.num_hits = 0.0
            _LOG.info("method %r is tried again", method)
        return not found.off_until

    def _is_free(self, method: str) -> bool:
        """Whether drafting costs next to nothing beside a step."""
        found = self._method(method)
        assert self.cost_table is not None
        if found.unit_seconds is None:
            return self._traits(method).cost == "once"
        step = float(self.cost_table.seconds(1, np.ones(1), 0.0)[0])
        return found.unit_seconds < _NEGLIGIBLE * step

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

    def _seconds(self, plan: StepPlan, num_rows: Float64Array) -> Float64Array:
        assert self.cost_table is not None
        return self.cost_table.seconds(len(plan.segments), num_rows, _mean_context(plan))

    def _forecast(self, plan: StepPlan, method: str, indices: list[int], nodes: Int64Array) -> None:
        """Cut the budgets of one method's requests to what is expected to pay, before drafting.

        Chains of expected survival by depth stand in for drafts that do not exist yet. Drafting
        costs by the level, so each deepest level is priced with its drafting; the best one wins.
        """
        found, traits = self._method(method), self._traits(method)
        deepest = int(nodes[indices].max())
        depths = np.arange(1, deepest + 1)
        bins = bins_of(depths, np.zeros_like(depths), None)
        survival = np.empty((len(indices), deepest))
        for row, index in enumerate(indices):
            request_id = plan.segments[index].request.request_id
            survival[row] = np.cumprod(found.acceptance.acceptance(bins, request_id))
            survival[row, nodes[index] :] = 0.0
        unit = found.unit_seconds or 0.0
        base = sum(s.num_rows for s in plan.segments)
        num_requests = sum(s.wants_pick for s in plan.segments)
        step = self._seconds(plan, base + np.arange(survival.size + 1.0))
        best_rate, best = num_requests / step[0], None
        is_idle = all(self._note(plan.segments[i]).num_idle for i in indices)
        least = best_rate * (1 + (_LEAST_GAIN if is_idle else 0.0))
        for level in range(1, deepest + 1):
            offered = survival[:, :level].ravel()
            draft = unit * (1 if traits.cost == "once" else level)
            chosen = allocate(offered, step[: len(offered) + 1] + draft, num_requests, 0.0)
            rate = chosen.expected_tokens / chosen.seconds
            if chosen.is_kept.any() and rate > max(best_rate, least):
                best_rate, best = rate, chosen.is_kept.reshape(len(indices), level).sum(axis=1)
        for row, index in enumerate(indices):
            note = self._note(plan.segments[index])
            wanted = 0 if best is None else int(best[row])
            if wanted == 0:
                note.num_idle += 1
                found.acceptance.age(plan.segments[index].request.request_id)
                if note.num_idle >= note.probe_after:
                    wanted, note.is_probe, note.num_idle = 1, True, 0
            else:
                note.num_idle = 0
            nodes[index] = min(int(nodes[index]), wanted)

    def _survival(self, plan: StepPlan, drafts: DraftBatch) -> Float64Array:
        """Estimated survival of every node, float64 [num_nodes]."""
        parts = []
        for index, segment in enumerate(plan.segments):
            begin, end = int(drafts.offsets[index]), int(drafts.offsets[index + 1])
            if begin == end:
                continue
            parents = drafts.parents[begin:end]
            acceptance = self._method(segment.request.speculation.method).acceptance.acceptance(
                _bins(drafts, slice(begin, end), _is_walk(segment)), segment.request.request_id
            )
            parts.append(survival_of(parents, acceptance))
        return np.concatenate(parts) if parts else np.empty(0)

    def _probe(
        self,
        plan: StepPlan,
        drafts: DraftBatch,
        survival: Float64Array,
        owners: Int64Array,
        keep: NDArray[np.bool_],
        is_free: NDArray[np.bool_],
    ) -> float:
        """Keep the first token of a draft now and then where none was kept; return its worth."""
        probed = 0.0
        kept = np.bincount(owners[keep], minlength=len(plan.segments))
        for index in np.nonzero(is_free & (drafts.num_nodes > 0))[0]:
            note = self._note(plan.segments[index])
            if kept[index]:
                note.num_idle = 0
                continue
            note.num_idle += 1
            segment = plan.segments[index]
            self._method(segment.request.speculation.method).acceptance.age(
                segment.request.request_id
            )
            if note.num_idle >= note.probe_after:
                first = int(drafts.offsets[index])
                keep[first] = True
                probed += float(survival[first])
                note.num_idle, note.is_probe = 0, True
        return probed

    def _learn(
        self,
        segment: Segment,
        method: str,
        drafts: DraftBatch,
        nodes: slice,
        is_hit: NDArray[np.bool_],
        target: TargetOutput,
        index: int,
    ) -> None:
        """Learn what became of one request's draft."""
        parents = drafts.parents[nodes]
        table = self._method(method).acceptance
        was_reached = np.concatenate([[True], is_hit])[parents]
        values, weights = is_hit.astype(np.float64), was_reached.astype(np.float64)
        request = segment.request
        if (
            self._note(segment).num_verify_steps <= _YOUNG
            and _is_walk(segment)
            and not self._traits(method).sees_noise
            and _is_unfiltered(request.sampling)
        ):
            first = int(target.offsets[index])
            values = _chances(
                target.logits[first : first + len(parents) + 1],
                drafts.token_ids[nodes],
                parents,
                request.sampling.temperature,
            )
            weights = np.concatenate([[1.0], survival_of(parents, values)])[parents]
        kinds = _bins(drafts, nodes, _is_walk(segment))
        table.observe(request.request_id, kinds, values, weights)

    def _learn_draft_costs(
        self, plan: StepPlan, drafts: DraftBatch, draft_seconds: Mapping[str, float]
    ) -> None:
        for method, seconds in draft_seconds.items():
            found = self._method(method)
            units = 1
            if self._traits(method).cost != "once":
                units = max(
                    (
                        int(tree.depths(drafts.parents[begin:end]).max())
                        for segment, begin, end in zip(
                            plan.segments, drafts.offsets, drafts.offsets[1:], strict=False
                        )
                        if segment.request.speculation.method == method and end > begin
                    ),
                    default=1,
                )
            unit = seconds / units
            old = found.unit_seconds
            found.unit_seconds = (
                unit if old is None else old + _COST_MEMORY * (min(unit, 4 * old) - old)
            )


def _room(segment: Segment) -> int:
    """Most draft nodes that can be of use to a segment."""
    request = segment.request
    if not segment.is_decode or request.speculation.method == PLAIN:
        return 0
    return request.max_tokens - segment.num_output_tokens - 1


def _is_walk(segment: Segment) -> bool:
    return segment.request.speculation.verification == "walk"


def _mean_context(plan: StepPlan) -> float:
    return sum(segment.start for segment in plan.segments) / len(plan.segments)


def _is_unfiltered(sampling: SamplingParams) -> bool:
    return (
        not sampling.is_greedy
        and sampling.top_k == 0
        and sampling.top_p == 1
        and sampling.min_p == 0
    )


def _bins(drafts: DraftBatch, nodes: slice, is_walk: bool) -> Int64Array:
    """Kinds of one request's nodes; under a classical rule by depth alone, as forecasts are."""
    parents = drafts.parents[nodes]
    confidence = None if drafts.confidence is None else drafts.confidence[nodes]
    return bins_of(tree.depths(parents)[1:], tree.ranks(parents), confidence if is_walk else None)


def _chances(
    logits: torch.Tensor, token_ids: Int64Array, parents: Int64Array, temperature: float
) -> Float64Array:
    """The target's probability of each drafted token at its parent's row, float64 [num_nodes]."""
    rows = torch.from_numpy(np.unique(parents)).to(logits.device)
    place = np.searchsorted(np.unique(parents), parents)
    scaled = logits[rows] / temperature
    norms = torch.logsumexp(scaled, dim=-1)
    where = torch.from_numpy(place).to(logits.device)
    tokens = torch.from_numpy(token_ids).to(logits.device)
    chances = torch.exp(scaled[where, tokens] - norms[where]).double().cpu().numpy()
    out: Float64Array = np.nan_to_num(chances, nan=0.0)
    return out


def _kept(drafts: DraftBatch, owners: Int64Array, keep: NDArray[np.bool_]) -> DraftBatch:
    """The batch without the nodes that are not kept; what is kept is closed under parents."""
    num_segments = len(drafts.offsets) - 1
    counts = np.bincount(owners[keep], minlength=num_segments)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    # Row of each node among the kept ones of its segment; row 0 is the root.
    rows = np.cumsum(keep) - offsets[owners]
    first = drafts.offsets[owners]
    parents = np.where(drafts.parents == 0, 0, rows[np.maximum(first + drafts.parents - 1, 0)])
    return DraftBatch(
        drafts.token_ids[keep],
        parents[keep],
        offsets,
        drafts.draft_probs,
        None if drafts.dist_ids is None else drafts.dist_ids[keep],
        drafts.is_with_replacement,
        None if drafts.confidence is None else drafts.confidence[keep],
    )


__all__ = ["MAX_AUTO_NODES", "NUM_DEPTHS", "Controller", "MethodTraits"]
