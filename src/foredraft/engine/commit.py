"""The one place where a step becomes part of a request: tokens, KV, counters and stop rules.

A stop rule may end a request in the middle of an accepted span. Then everything behind the stop is
dropped here, at once, from all of them: nothing else ever trims.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foredraft.engine.request_state import RequestState
from foredraft.model.kv_cache import KVCache
from foredraft.types import Delta, DraftBatch, Int64Array, StepPlan, Verdict

_NON_FINITE = (
    "the target gave logits that are not finite, so no token can be picked; check the model's "
    "weights, or load it in float32"
)


def commit(
    plan: StepPlan,
    drafts: DraftBatch,
    verdict: Verdict,
    states: Mapping[str, RequestState],
    cache: KVCache,
    failures: Mapping[str, str],
    is_cut: NDArray[np.bool_],
    problems: Mapping[int, str] = MappingProxyType({}),
) -> list[Delta]:
    """Apply a verdict to the requests of a step.

    Args:
        plan: The step.
        drafts: What was proposed.
        verdict: What verification decided.
        states: The running requests by id.
        cache: Where their KV lies.
        failures: Requests that must end without a token, and why, by id.
        is_cut: bool [num_segments], whether a draft was as long as it was allowed to be, or
            trimmed; else the drafter had no more.
        problems: Why nothing could be picked where a segment's verdict is not finite, by segment;
            for others it is the target's logits.

    Returns:
        For each segment that emitted or ended, in plan order, what it did.
    """
    deltas = []
    num_drafted = drafts.num_nodes
    for index, segment in enumerate(plan.segments):
        state = states[segment.request.request_id]
        state.num_cached = segment.start + segment.num_rows
        if not segment.wants_pick:
            continue
        failure = failures.get(segment.request.request_id)
        if failure is not None:
            if state.text is not None:
                state.text.end()
            pieces = () if state.text is None else state.text.take()
            deltas.append(
                Delta(segment.request.request_id, (), 0, "error", error=failure, pieces=pieces)
            )
            continue
        token_ids = verdict.token_ids[
            verdict.token_offsets[index] : verdict.token_offsets[index + 1]
        ]
        path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
        num_kept, reason, stop_string = _stop(state, token_ids, len(path))
        error = None
        if reason is None and not verdict.is_finite[index]:
            reason, error = "error", problems.get(index, _NON_FINITE)
        token_ids, path = token_ids[:num_kept], path[:num_kept]
        _keep_path(cache, segment.slot, segment.root_position, path)
        state.num_cached += len(path)
        state.append(token_ids)
        if state.form is not None:
            state.form.accept(token_ids.tolist())
        if state.text is not None and reason is not None:
            state.text.end(is_stopped=stop_string is not None)
        if segment.is_decode:
            state.stats.record_verify(
                int(num_drafted[index]), len(path), len(token_ids), bool(is_cut[index])
            )
            if drafts.votes is not None:
                first = int(drafts.offsets[index])
                votes = drafts.votes[:, first : int(drafts.offsets[index + 1])]
                for voter, is_proposed in zip(drafts.voters, votes != -1, strict=True):
                    if is_proposed.any():
                        state.stats.record_member(
                            voter, int(is_proposed.sum()), int(is_proposed[path - 1].sum())
                        )
        else:
            state.stats.record_prefill(len(token_ids))
        ids = tuple(token_ids.tolist())
        deltas.append(
            Delta(
                segment.request.request_id,
                ids,
                len(path),
                reason,
                stop_token_id=ids[-1] if reason == "stop" and stop_string is None else None,
                stop_string=stop_string,
                error=error,
                pieces=() if state.text is None else state.text.take(),
            )
        )
    return deltas


def _stop(
    state: RequestState, token_ids: Int64Array, num_accepted: int
) -> tuple[int, str | None, str | None]:
    """How many tokens are kept, why the request ends, if it does, and the string that ended it.

    The tokens that are kept become part of the text, a stopping one apart.
    """
    room = state.request.max_tokens - len(state.output_ids)
    ids = token_ids[:room].tolist()
    num_before = next((i for i, one in enumerate(ids) if one in state.request.stop_ids), len(ids))
    if state.text is not None:
        added = state.text.add(ids[:num_before], num_accepted)
        if added.stop is not None:
            return added.num_tokens, "stop", added.stop
    if num_before < len(ids):
        return num_before + 1, "stop", None
    if len(token_ids) >= room:
        return room, "length", None
    return len(token_ids), None, None


def _keep_path(cache: KVCache, slot: int, root_position: int, path: Int64Array) -> None:
    """Bring the rows of an accepted path into place behind the root."""
    places = np.arange(1, len(path) + 1)
    is_moved = path != places
    if is_moved.any():
        first = int(np.argmax(is_moved))
        cache.move_rows(slot, root_position + path[first:], root_position + 1 + first)
