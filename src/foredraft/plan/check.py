"""The arithmetic against the clock: what recorded steps should have taken, and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.plan.cost import draft_time
from foredraft.plan.profile import Profile
from foredraft.plan.terms import MeasuredTerms
from foredraft.plan.trace import RequestTrace


@dataclass(frozen=True, slots=True)
class Check:
    """Speedup over plain decoding of one recorded request.

    Attributes:
        num_requests: Requests in its batch.
        predicted: From its steps' draft tokens and accepted ones, by the profile's costs.
        measured: By the clock, against the plain step measured beside it, or else the profile's.
    """

    num_requests: int
    predicted: float
    measured: float


def check_traces(
    requests: Sequence[RequestTrace], profile: Profile, context: int | None = None
) -> list[Check]:
    """Compare every request that was timed, and whose batch the profile covers.

    Args:
        requests: As recorded.
        profile: What passes and drafts cost.
        context: Tokens of each request in the cache; the nearest measured one counts.
    """
    found = []
    batches = profile.batches()
    for request in requests:
        size = request.num_requests
        is_timed = request.decode_s is not None and request.steps
        if not is_timed or not batches[0] <= size <= batches[-1]:
            continue
        if request.method not in profile.drafts:
            continue
        terms = MeasuredTerms(profile, request.method, context)
        num_tokens = sum(accepted + 1 for _, accepted, _ in request.steps)
        predicted_steps = sum(
            terms.verify_cost(drafted, size)
            + draft_time(terms.t_draft(size), terms.draft_cost, drafted)
            for drafted, _, _ in request.steps
        )
        plain_step_s = request.plain_step_s
        if plain_step_s is None:
            plain_step_s = profile.t_decode(min(batches, key=lambda batch: abs(batch - size)))
        assert request.decode_s is not None
        found.append(
            Check(size, num_tokens / predicted_steps, num_tokens * plain_step_s / request.decode_s)
        )
    return found
