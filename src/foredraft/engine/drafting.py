"""Drafters by method: made on first use, asked each for its own requests, their drafts checked."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.config import make_config
from foredraft.drafters.base import DrafterContext, close_all
from foredraft.errors import InvalidRequestError, said
from foredraft.registry import PLAIN, drafter_class
from foredraft.tree import tree
from foredraft.types import (
    Budgets,
    DraftBatch,
    Int64Array,
    Request,
    StepPlan,
    TargetOutput,
    Verdict,
)

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter, Needs
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")


class Drafting:
    """All drafters of an engine behind one ``propose`` and one ``observe``.

    Args:
        options: Options by method name.
        target: The target, for what a drafter must know of it.
        drafters: Drafters that exist already, by method name.
        max_num_requests: Most requests that run at once.
    """

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        target: Target,
        drafters: Mapping[str, Drafter],
        max_num_requests: int = 16,
    ) -> None:
        """Check the options of every method that has some; other drafters are made on first use."""
        self._options = options
        self.context = DrafterContext(
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            tokenizer=target.tokenizer,
            max_num_requests=max_num_requests,
            device=str(target.device),
            weight_bytes=target.weight_bytes,
            target=target,
        )
        self._given = dict(drafters)
        self._drafters: dict[str, Drafter] = dict(drafters)
        self._is_warned: set[str] = set()
        self._failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        for method in options:
            self._drafter(method)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Every hidden layer that some drafter needs."""
        layers = {layer for d in self._drafters.values() for layer in d.needs.hidden_layers}
        return tuple(sorted(layers))

    def prepare(self, request: Request) -> None:
        """Make sure that the request's method can draft.

        Raises:
            InvalidRequestError: There is no such method, or it cannot serve the request's rule.
        """
        speculation = request.speculation
        if speculation.method == PLAIN:
            return
        rules = self._drafter(speculation.method).needs.rules
        if speculation.verification not in rules:
            raise InvalidRequestError(
                f"verification is {speculation.verification!r}, which method "
                f"{speculation.method!r} cannot serve; allowed is {', '.join(rules)}."
            )

    def needs(self, method: str) -> Needs:
        """What a method that has drafted before needs."""
        return self._drafters[method].needs

    def num_state_bytes(self, method: str) -> int:
        """Bytes that a method's drafter holds on the host; 0 where it has not drafted."""
        drafter = self._drafters.get(method)
        return 0 if drafter is None else drafter.num_state_bytes

    def take_failures(self) -> dict[str, str]:
        """Return what went wrong with whose draft in the last ``propose``, by request id.

        Only requests under a classical rule are named, and they must end: there nothing that was
        drawn may be dropped. Under the default rule a failed draft is no draft.
        """
        failures, self._failures = self._failures, {}
        return failures

    def propose(self, plan: StepPlan, budgets: Budgets) -> DraftBatch:
        """Ask each method for the drafts of its own requests; it sees no other budget.

        A drafter that raises, or breaks its contract, hurts nobody else; see ``take_failures``.
        """
        self.seconds = {}
        num_segments = len(plan.segments)
        methods = np.array([s.request.speculation.method for s in plan.segments])
        wanted = sorted(set(methods[budgets.max_nodes > 0].tolist()))
        if not wanted:
            return DraftBatch.empty(num_segments)
        batches = []
        for method in wanted:
            started = time.perf_counter()
            is_own = methods == method
            own = Budgets(
                np.where(is_own, budgets.max_nodes, 0),
                {
                    name: np.where(is_own, nodes, 0)
                    for name, nodes in budgets.member_nodes.items()
                    if name in self._drafters[method].needs.members
                },
            )
            try:
                batch = self._drafters[method].propose(plan, own)
            except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
                problem = f"could not be made ({said(error)})"
                drafted = np.nonzero(own.max_nodes)[0].tolist()
                self._fail(method, dict.fromkeys(drafted, problem), plan, error)
                continue
            batches.append(self._checked(method, batch, own, plan))
            taken = time.perf_counter() - started
            members = self._drafters[method].member_seconds
            self.seconds[method] = taken - sum(members.values())
            self.seconds.update(members)
        if not batches:
            return DraftBatch.empty(num_segments)
        return batches[0] if len(batches) == 1 else _merge(batches, num_segments)

    def observe(
        self, plan: StepPlan, drafts: DraftBatch, target: TargetOutput, verdict: Verdict
    ) -> None:
        """Show every drafter what came of the step; one that raises misses it."""
        for method, drafter in self._drafters.items():
            try:
                drafter.observe(plan, drafts, target, verdict)
            except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
                problem = f"may be worse, since it did not observe a step ({said(error)})"
                self._warn(method, problem, error)

    def finish(self, request: Request, token_ids: Int64Array) -> None:
        """Show every drafter a text that has ended by itself; one that raises misses it."""
        for method, drafter in self._drafters.items():
            try:
                drafter.finish(request, token_ids)
            except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
                problem = f"may be worse, since it did not see how a text ended ({said(error)})"
                self._warn(method, problem, error)

    def renew(self) -> None:
        """Make the drafters of the registry anew, without what they learnt; nothing may run."""
        kept = {name: d for name, d in self._drafters.items() if d.renew()}
        self._drafters = {**kept, **self._given}

    def close(self) -> None:
        """Let every drafter save what it keeps."""
        close_all(self._drafters.values())

    def forget(self, request: Request) -> None:
        """Let the request's drafter drop what it keeps of it."""
        method = request.speculation.method
        if method == PLAIN:
            return
        try:
            self._drafters[method].forget(request.request_id)
        except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
            problem = f"may take more memory, since a request was not forgotten ({said(error)})"
            self._warn(method, problem, error)

    def _drafter(self, method: str) -> Drafter:
        if method not in self._drafters:
            cls = drafter_class(method)
            config = make_config(cls.Config, self._options.get(method, {}), f"method {method!r}")
            context = dataclasses.replace(self.context, method=method)
            self._drafters[method] = cls(config, context)
        return self._drafters[method]

    def _checked(
        self, method: str, batch: DraftBatch, budgets: Budgets, plan: StepPlan
    ) -> DraftBatch:
        """Return the batch without the drafts that break the contract."""
        num_segments = len(plan.segments)
        problem = _shape_problem(batch, num_segments)
        if problem is not None:
            problems = dict.fromkeys(np.nonzero(budgets.max_nodes)[0].tolist(), problem)
            batch = DraftBatch.empty(num_segments)
        else:
            problems = _problems(
                batch,
                budgets,
                plan,
                self.context.vocab_size,
                self._drafters[method].needs.draft_probs,
            )
        if not problems:
            return batch
        self._fail(method, problems, plan)
        return _select(batch, np.array([i not in problems for i in range(num_segments)]))

    def _fail(
        self,
        method: str,
        problems: Mapping[int, str],
        plan: StepPlan,
        error: Exception | None = None,
    ) -> None:
        """Note what is wrong, by segment: for a classical rule as a failure, else as a warning."""
        for index, problem in problems.items():
            request = plan.segments[index].request
            if request.speculation.verification == "walk":
                self._warn(method, problem, error)
                continue
            self._failures[request.request_id] = (
                f"method {method!r} proposed a draft that {problem}, and under the rule "
                f"{request.speculation.verification!r} no draft may be dropped; mend the drafter, "
                "or use the rule 'walk'"
            )

    def _warn(self, method: str, problem: str, error: Exception | None = None) -> None:
        """Say once a method that its drafts are not what they should be."""
        if method not in self._is_warned:
            self._is_warned.add(method)
            _LOG.warning(
                "method %r proposed a draft that %s; such drafts are dropped, the text is not "
                "affected",
                method,
                problem,
                exc_info=error,
            )


def _shape_problem(batch: DraftBatch, num_segments: int) -> str | None:
    """What keeps a batch from being read at all, or ``None``."""
    num_nodes, offsets = len(batch.token_ids), batch.offsets
    if len(offsets) != num_segments + 1 or (np.diff(offsets) < 0).any():
        return "does not have one tree a segment"
    if offsets[0] != 0 or offsets[-1] != num_nodes:
        return f"has {num_nodes} tokens where its offsets lead from {offsets[0]} to {offsets[-1]}"
    if len(batch.parents) != num_nodes:
        return f"has {num_nodes} tokens and {len(batch.parents)} parents"
    if batch.dist_ids is not None and len(batch.dist_ids) != num_nodes:
        return f"has {num_nodes} tokens and {len(batch.dist_ids)} dist_ids"
    if batch.confidence is not None and len(batch.confidence) != num_nodes:
        return f"has {num_nodes} tokens and {len(batch.confidence)} confidences"
    shape = (len(batch.voters), num_nodes)
    found = (0, num_nodes) if batch.votes is None else batch.votes.shape
    if found != shape:
        return f"has votes of shape {found}, where {shape} are due"
    return None


def _problems(
    batch: DraftBatch, budgets: Budgets, plan: StepPlan, vocab_size: int, is_drawn: bool
) -> dict[int, str]:
    """What breaks the contract, by segment."""
    problems: dict[int, str] = {}
    num_nodes = batch.num_nodes
    for index in np.nonzero(num_nodes > budgets.max_nodes)[0].tolist():
        problems[index] = f"has {num_nodes[index]} nodes on a budget of {budgets.max_nodes[index]}"
    is_outside = (batch.token_ids < 0) | (batch.token_ids >= vocab_size)
    for node in np.nonzero(is_outside)[0]:
        index = int(np.searchsorted(batch.offsets, node, side="right")) - 1
        problems[index] = f"holds token id {batch.token_ids[node]}, outside the vocabulary"
    for index in np.nonzero(num_nodes)[0].tolist():
        parents = batch.parents[batch.offsets[index] : batch.offsets[index + 1]]
        try:
            tree.check(parents)
        except ValueError as error:
            problems[index] = f"is no tree ({error})"
            continue
        if not plan.segments[index].request.speculation.allows_trees and not tree.is_chain(parents):
            problems[index] = "branches under a rule that knows chains only"
        is_classical = plan.segments[index].request.speculation.verification != "walk"
        if is_drawn and is_classical and (batch.draft_probs is None or batch.dist_ids is None):
            problems[index] = "was drawn, and comes without the distributions it was drawn from"
    return problems


def _select(batch: DraftBatch, keep: np.ndarray) -> DraftBatch:
    """Keep the drafts of some segments."""
    is_kept = np.repeat(keep, batch.num_nodes)
    offsets = np.concatenate([[0], np.cumsum(np.where(keep, batch.num_nodes, 0))])
    return DraftBatch(
        batch.token_ids[is_kept],
        batch.parents[is_kept],
        offsets.astype(np.int64),
        batch.draft_probs,
        None if batch.dist_ids is None else batch.dist_ids[is_kept],
        batch.is_with_replacement,
        None if batch.confidence is None else batch.confidence[is_kept],
        None if batch.votes is None else batch.votes[:, is_kept],
        batch.voters,
    )


def _merge(batches: list[DraftBatch], num_segments: int) -> DraftBatch:
    """Join the drafts of several methods; no segment has drafts of two batches."""
    import torch

    tables = [b.draft_probs for b in batches if b.draft_probs is not None]
    token_ids: list[Int64Array] = []
    parents: list[Int64Array] = []
    dist_ids: list[Int64Array] = []
    offsets = [0]
    confidence: list[np.ndarray] = []
    votes: list[np.ndarray] = []
    voters = tuple(dict.fromkeys(voter for batch in batches for voter in batch.voters))
    has_confidence = any(batch.confidence is not None for batch in batches)
    is_with_replacement = np.zeros(num_segments, dtype=np.bool_)
    for batch in batches:
        if batch.is_with_replacement is not None:
            is_with_replacement |= batch.is_with_replacement & (batch.num_nodes > 0)
    for segment in range(num_segments):
        first_dist = 0
        for batch in batches:
            nodes = slice(batch.offsets[segment], batch.offsets[segment + 1])
            token_ids.append(batch.token_ids[nodes])
            parents.append(batch.parents[nodes])
            own = batch.dist_ids[nodes] if batch.dist_ids is not None else None
            chosen = np.full(len(token_ids[-1]), -1, dtype=np.int64)
            sure = batch.confidence
            confidence.append(np.full(len(chosen), np.nan) if sure is None else sure[nodes])
            dist_ids.append(chosen if own is None else np.where(own < 0, -1, own + first_dist))
            votes.append(np.full((len(voters), len(chosen)), -1.0))
            for row, voter in enumerate(batch.voters):
                assert batch.votes is not None
                votes[-1][voters.index(voter)] = batch.votes[row, nodes]
            if batch.draft_probs is not None:
                first_dist += len(batch.draft_probs)
        offsets.append(offsets[-1] + sum(len(t) for t in token_ids[-len(batches) :]))
    return DraftBatch(
        np.concatenate(token_ids),
        np.concatenate(parents),
        np.array(offsets, dtype=np.int64),
        torch.cat(tables) if tables else None,
        np.concatenate(dist_ids) if tables else None,
        is_with_replacement if is_with_replacement.any() else None,
        np.concatenate(confidence) if has_confidence else None,
        np.concatenate(votes, axis=1) if voters else None,
        voters,
    )
