"""Verify one step: each request's draft under the rule that the request asked for.

Pure: the verdict is a function of the plan (with each request's parameters and seed), the drafts
and the target's logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.params import SamplingParams
from foredraft.sampling.noise import Stream, units
from foredraft.sampling.pick import Picks, pick
from foredraft.sampling.processors import RowParams, probs
from foredraft.tree.tree import ancestors, depths
from foredraft.types import DraftBatch, Int64Array, StepPlan, TargetOutput, Verdict
from foredraft.upload import upload
from foredraft.verify.block import block
from foredraft.verify.coins import Coins
from foredraft.verify.rejection import rejection
from foredraft.verify.traversal import traversal
from foredraft.verify.walk import walk

_CLASSICAL: dict[str, Callable[..., tuple[tuple[int, ...], int]]] = {
    "rejection": rejection,
    "block": block,
    "traversal": traversal,
}

_MANY_TOKENS = 1 << 15
"""A vocabulary that makes picking use all threads."""


def verify(plan: StepPlan, drafts: DraftBatch, target: TargetOutput) -> Verdict:
    """Decide what each segment of a step emits.

    Args:
        plan: Who runs.
        drafts: What was proposed.
        target: The target's logits at every root and draft node.

    Returns:
        The verdict; prompt chunks that do not end their prompt emit nothing.
    """
    segments = plan.segments
    num_rows = np.diff(target.offsets)
    params = RowParams.of([s.request.sampling for s in segments], num_rows)
    seeds = np.repeat(np.array([s.request.seed for s in segments], dtype=np.int64), num_rows)
    picks = pick(target.logits, params, seeds, _pick_positions(plan, drafts, num_rows))
    verdict = walk(drafts, picks, target.offsets)
    is_classical = np.array([s.request.speculation.verification != "walk" for s in segments])
    if is_classical.any():
        verdict = _verify_classical(plan, drafts, target, params, picks, verdict, is_classical)
    return dataclasses.replace(verdict, picks=picks.token_ids)


def load_kernels() -> None:
    """Compile or load what verifying runs, so that no request's first step pays for it."""
    logits = torch.linspace(-10, 10, 4 * _MANY_TOKENS).reshape(4, -1)
    filtered = SamplingParams(1.0, top_k=50, top_p=0.9, min_p=0.01)
    for sampling in (SamplingParams(), filtered):
        params = RowParams.of([sampling], np.array([4]))
        for tokens in (_MANY_TOKENS, 8):  # by all threads, and by one
            rows = logits[:, :tokens].contiguous()
            picks = pick(rows, params, np.zeros(4, dtype=np.int64), np.arange(4))
    draft = DraftBatch(np.array([1, 2, 3]), np.array([0, 1, 1]), np.array([0, 3]))
    walk(draft, picks, np.array([0, 4]))
    depths(draft.parents)
    ancestors(draft.parents)


def _pick_positions(plan: StepPlan, drafts: DraftBatch, num_rows: Int64Array) -> Int64Array:
    """Absolute position of the token that each logit row picks."""
    parts = [
        segment.root_position
        + 1
        + depths(drafts.parents[drafts.offsets[i] : drafts.offsets[i + 1]])
        for i, segment in enumerate(plan.segments)
        if num_rows[i]
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _verify_classical(
    plan: StepPlan,
    drafts: DraftBatch,
    target: TargetOutput,
    params: RowParams,
    picks: Picks,
    verdict: Verdict,
    is_classical: NDArray[np.bool_],
) -> Verdict:
    """Replace the walk's verdict for segments under a classical rule."""
    paths, tokens = [], []
    is_finite = verdict.is_finite.copy()
    for index, segment in enumerate(plan.segments):
        rows = slice(int(target.offsets[index]), int(target.offsets[index + 1]))
        if not is_classical[index] or rows.start == rows.stop:
            paths.append(
                verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
            )
            tokens.append(
                verdict.token_ids[verdict.token_offsets[index] : verdict.token_offsets[index + 1]]
            )
            continue
        is_dead = ~picks.is_finite[rows]
        nodes = slice(int(drafts.offsets[index]), int(drafts.offsets[index + 1]))
        draft_ids = drafts.token_ids[nodes]
        dist_ids = None if drafts.dist_ids is None else drafts.dist_ids[nodes]
        rule = _CLASSICAL[segment.request.speculation.verification]
        if drafts.is_with_replacement is not None and rule is not block:
            rule = functools.partial(rule, with_replacement=bool(drafts.is_with_replacement[index]))
        nodes_path, token = rule(
            draft_ids,
            drafts.parents[nodes],
            probs(_with_any_law(target.logits[rows], is_dead), params.rows(rows)),
            drafts.draft_probs,
            dist_ids,
            _coins(segment.request.seed, segment.root_position + 1, 1 + len(draft_ids)),
        )
        path = np.asarray(nodes_path, dtype=np.int64)
        # The text ends at the first row where nothing can be picked.
        dead = np.flatnonzero(is_dead[np.append(0, path)])
        is_finite[index] = not len(dead)
        if len(dead):
            paths.append(path[: dead[0]])
            tokens.append(draft_ids[path[: dead[0]] - 1])
            continue
        paths.append(path)
        tokens.append(np.append(draft_ids[path - 1], token))
    return Verdict(
        np.concatenate(paths),
        _offsets(paths),
        np.concatenate(tokens),
        _offsets(tokens),
        is_finite,
    )


def _with_any_law(logits: torch.Tensor, is_dead: NDArray[np.bool_]) -> torch.Tensor:
    """Logits with some law where there is none.

    A rule that is exact for every target is exact for this one, and a text that gets to such a row
    ends there, whatever the law was that it would have gone on by.
    """
    if not is_dead.any():
        return logits
    return logits.masked_fill(upload(is_dead, logits.device)[:, None], 0.0)


def _offsets(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _coins(seed: int, position: int, num_rows: int) -> Coins:
    """Coins of one request in one step: functions of seed, stream, position and row."""
    at = np.array([position], dtype=np.int64)
    first = np.zeros(1, dtype=np.int64)
    return Coins(
        accept=units(seed, Stream.ACCEPT, at, np.arange(num_rows, dtype=np.int64))[0],
        recover=float(units(seed, Stream.RECOVER, at, first)[0, 0]),
        bonus=float(units(seed, Stream.BONUS, at, first)[0, 0]),
    )
