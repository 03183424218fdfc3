"""The portfolio (``auto``): several drafters for every request, their drafts joined into one tree.

Under the default rule a draft may be anything, so nothing has to be chosen before it is seen: the
members that cost next to nothing all draft, what they agree on is one node, and the likeliest nodes
of the joined tree fill the budget. Who proposed which node, and how sure of it, goes along
(``DraftBatch.votes``): the controller learns what each member's word is worth, per request, takes
the mean of them for a node, and keeps the nodes that pay.

A member whose drafts take time (a draft model) drafts as much as it was given a budget for: the
controller asks it where its draft is expected to pay beside the free ones. The free drafts are
grafted onto its tree, one node where both agree.

Under a classical rule the first free member that serves it drafts alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from foredraft.config import make_config
from foredraft.drafters.base import Drafter, DrafterContext, Needs, close_all
from foredraft.errors import ConfigError
from foredraft.heads.trained import shipped_head, survival_of
from foredraft.registry import PLAIN, PORTFOLIO, PORTFOLIO_MEMBERS, drafter_class
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Request,
    StepPlan,
    TargetOutput,
    Verdict,
)

Float64Array = NDArray[np.float64]

_LOG = logging.getLogger("foredraft")

SHIPPED_MEMBER = "eagle3"
"""The method that drafts along where a good head ships for the target."""

_LEAST_SURVIVAL = 0.6
"""Share of a head's first drafts that are right, by its record, from which it drafts along. One of
0.45 was measured to bring nothing beside the free drafts, and to cost a twentieth at batch 8."""

_UNSAID = 0.3
"""Chance of a node whose drafter cannot say, to order the joined tree by."""


@dataclass(frozen=True, slots=True)
class PortfolioConfig:
    """Options of the portfolio. None of them can change a text, only how fast it comes.

    Attributes:
        members: Methods that draft together. For a classical rule the first that serves it counts.
            ``None`` takes those that cost next to nothing, and ``eagle3`` where a good head
            ships for the target.
        options: Options of the members, by method.

    Raises:
        ConfigError: No member, one that is named twice, or options of none.
    """

    members: tuple[str, ...] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        members = PORTFOLIO_MEMBERS if self.members is None else self.members
        if not isinstance(members, (tuple, list)) or not members:
            raise ConfigError(f"members is {members!r}; allowed are one method or more.")
        names = [name for name in members if isinstance(name, str)]
        if len(set(names)) < len(members) or {PORTFOLIO, PLAIN} & set(names):
            raise ConfigError(
                f"members is {members!r}; allowed are names of methods other than {PORTFOLIO!r} "
                f"and {PLAIN!r}, each once."
            )
        if self.members is not None:
            object.__setattr__(self, "members", tuple(members))
        may = {*members} if self.members else {*members, SHIPPED_MEMBER}
        if not isinstance(self.options, Mapping) or set(self.options) - may:
            raise ConfigError(
                f"options is {self.options!r}; allowed is a mapping of members to their options."
            )
        for name, options in self.options.items():
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"options of {name} is {options!r}; allowed is a mapping of option to value."
                )


class PortfolioDrafter(Drafter):
    """Joins the drafts of several drafters (module docstring). Exact, like every drafter."""

    Config = PortfolioConfig

    def __init__(self, config: PortfolioConfig, context: DrafterContext) -> None:
        """Make the members."""
        self.config = config
        self.context = context
        self._is_warned: set[str] = set()
        members = config.members or (*PORTFOLIO_MEMBERS, *_shipped(context))
        strange = sorted(set(config.options) - set(members))
        if strange:
            raise ConfigError(
                f"options are given for {', '.join(strange)}, and no such head ships for the "
                f"target; name it among members, as in members=({', '.join(map(repr, members))}, "
                f"{strange[0]!r})."
            )
        self.members = {method: self._make(method) for method in members}
        needs = [member.needs for member in self.members.values()]
        costly = {
            method: member.needs.cost
            for method, member in self.members.items()
            if member.needs.cost != "once"
        }
        unfit = [
            method
            for method, member in self.members.items()
            if member.needs.is_whole
            or (method not in costly and (member.needs.sees_noise or member.needs.draft_probs))
        ]
        if unfit:
            raise ConfigError(
                f"members holds {', '.join(unfit)}, whose drafts cannot be joined with others or "
                "trimmed; use it as a method of its own."
            )
        if len(costly) == len(self.members):
            raise ConfigError(
                f"members holds {', '.join(costly)} alone, whose drafts take time; add a method "
                "that drafts for free, or use it as a method of its own."
            )
        self._free = [method for method in self.members if method not in costly]
        free = [self.members[method].needs for method in self._free]
        self.needs = Needs(
            hidden_layers=tuple(sorted({layer for one in needs for layer in one.hidden_layers})),
            rules=tuple(dict.fromkeys(rule for one in free for rule in one.rules)),
            sees_noise=any(one.sees_noise for one in needs),
            members=costly,
        )
        self.member_seconds: dict[str, float] = {}
        _load_kernels()

    @property
    def num_state_bytes(self) -> int:
        """Bytes held by all members."""
        return sum(member.num_state_bytes for member in self.members.values())

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Propose for each segment the likeliest nodes of all members' drafts."""
        rules = [segment.request.speculation.verification for segment in plan.segments]
        alone: dict[str, str] = {}
        for rule in set(rules) - {"walk"}:
            serving = [m for m in self._free if rule in self.members[m].needs.rules]
            alone[rule] = serving[0]
        batches, voters = [], []
        self.member_seconds = {}
        nothing = np.zeros_like(budgets.max_nodes)
        for method, member in self.members.items():
            if method in self.needs.members:
                may = np.array([rule == "walk" for rule in rules])
                limits = budgets.member_nodes.get(method, nothing)
                if not limits.any():
                    continue
            else:
                may = np.array([rule == "walk" or alone[rule] == method for rule in rules])
                limits = budgets.max_nodes
            started = time.perf_counter()
            try:
                batch = member.propose(plan, Budgets(np.where(may, limits, 0)))
                if method in self.needs.members:
                    self.member_seconds[method] = time.perf_counter() - started
            except Exception as error:
                if method in alone.values():
                    raise  # under a classical rule nothing may be dropped unsaid
                self._warn(method, error)
                continue
            if len(batch.token_ids):
                batches.append(batch)
                voters.append(method)
        if not batches:
            return DraftBatch.empty(len(plan.segments))
        return _join(batches, voters, budgets.max_nodes)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Show every member what a step brought."""
        self._each(lambda member: member.observe(plan, drafts, target, verdict))

    def finish(self, request: Request, token_ids: Int64Array) -> None:
        """Show every member a text that has ended."""
        self._each(lambda member: member.finish(request, token_ids))

    def forget(self, request_id: str) -> None:
        """Let every member forget a request."""
        self._each(lambda member: member.forget(request_id))

    def renew(self) -> bool:
        """Make those members anew that have learnt something."""
        for method, member in self.members.items():
            if not member.renew():
                self.members[method] = self._make(method)
        return True

    def close(self) -> None:
        """Close every member."""
        close_all(self.members.values())

    def _make(self, method: str) -> Drafter:
        cls = drafter_class(method)
        options = make_config(cls.Config, self.config.options.get(method, {}), f"method {method!r}")
        drafter: Drafter = cls(options, self.context)
        return drafter

    def _each(self, call: Callable[[Drafter], None]) -> None:
        """Call every member; one that raises hurts no other."""
        for method, member in self.members.items():
            try:
                call(member)
            except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
                self._warn(method, error)

    def _warn(self, method: str, error: Exception) -> None:
        """Say once of a member that it failed."""
        if method not in self._is_warned:
            self._is_warned.add(method)
            _LOG.warning(
                "member %r of the portfolio failed (%s: %s); the others go on without it",
                method,
                type(error).__name__,
                error,
                exc_info=error,
            )


def _shipped(context: DrafterContext) -> tuple[str, ...]:
    """The member whose head ships for the target, if one does."""
    target = context.target
    if target is None or target.num_ranks > 1:
        return ()
    folder = shipped_head(SHIPPED_MEMBER, target.model.config)
    is_good = folder is not None and survival_of(folder) >= _LEAST_SURVIVAL
    return (SHIPPED_MEMBER,) if is_good else ()


def _join(batches: list[DraftBatch], voters: list[str], limits: Int64Array) -> DraftBatch:
    """One tree a segment, of at most ``limits`` nodes, with everybody's vote on each node."""
    most = sum(len(batch.token_ids) for batch in batches)
    ids = np.empty(most, dtype=np.int64)
    parents = np.empty(most, dtype=np.int64)
    votes = np.empty((len(batches), most))
    starts = np.zeros(len(limits) + 1, dtype=np.int64)
    for segment in range(len(limits)):
        begin = end = int(starts[segment])
        for number, batch in enumerate(batches):
            nodes = slice(int(batch.offsets[segment]), int(batch.offsets[segment + 1]))
            if nodes.start == nodes.stop:
                continue
            sure = batch.confidence
            unsaid = np.full(nodes.stop - nodes.start, np.nan)
            end = _add(
                batch.token_ids[nodes],
                batch.parents[nodes],
                unsaid if sure is None else sure[nodes],
                number,
                begin,
                end,
                ids,
                parents,
                votes,
            )
        starts[segment + 1] = _keep_likeliest(begin, end, int(limits[segment]), ids, parents, votes)
    size = int(starts[-1])
    return DraftBatch(
        ids[:size], parents[:size], starts, votes=votes[:, :size].copy(), voters=tuple(voters)
    )


@numba.njit(cache=True)
def _add(
    token_ids: Int64Array,
    above: Int64Array,
    sure: Float64Array,
    voter: int,
    begin: int,
    end: int,
    ids: Int64Array,
    parents: Int64Array,
    votes: Float64Array,
) -> int:
    """Add a draft to the tree at ``begin:end``, one node where both agree; return its new end."""
    places = np.zeros(token_ids.size + 1, dtype=np.int64)
    for node in range(token_ids.size):
        parent = places[above[node]]
        place = begin
        while place < end and (parents[place] != parent or ids[place] != token_ids[node]):
            place += 1
        if place == end:
            ids[place], parents[place] = token_ids[node], parent
            votes[:, place] = -1.0
            end += 1
        votes[voter, place] = sure[node]
        places[node + 1] = place - begin + 1
    return end


@numba.njit(cache=True)
def _keep_likeliest(
    begin: int, end: int, limit: int, ids: Int64Array, parents: Int64Array, votes: Float64Array
) -> int:
    """Keep the likeliest nodes of the tree at ``begin:end``; return its new end."""
    size = end - begin
    if size <= limit:
        return end
    survival = np.ones(size + 1)
    for node in range(size):
        best = 0.0
        for voter in range(votes.shape[0]):
            vote = votes[voter, begin + node]
            best = max(best, _UNSAID if np.isnan(vote) else vote)
        # A hair less than its parent, so that a parent is always kept with its child.
        survival[node + 1] = survival[parents[begin + node]] * min(best, 1 - 1e-9)
    order = np.argsort(-survival[1:], kind="mergesort")
    is_kept = np.zeros(size, dtype=np.bool_)
    is_kept[order[:limit]] = True
    rows = np.zeros(size + 1, dtype=np.int64)
    count = 0
    for node in range(size):
        if not is_kept[node]:
            continue
        place = begin + count
        ids[place] = ids[begin + node]
        parents[place] = rows[parents[begin + node]]
        votes[:, place] = votes[:, begin + node]
        count += 1
        rows[node + 1] = count
    return begin + count


def _load_kernels() -> None:
    """Compile or load what joining runs, so that no step pays for it."""
    ids, parents = np.array([1, 2]), np.array([0, 1])
    batch = DraftBatch(ids, parents, np.array([0, 2]), confidence=np.array([0.5, np.nan]))
    _join([batch, batch], ["a", "b"], np.array([1]))
