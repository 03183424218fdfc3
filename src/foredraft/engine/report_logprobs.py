"""Log-probabilities of exactly the tokens that a step committed, and of the prompt's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from foredraft.engine.request_state import RequestState
from foredraft.params import SamplingParams
from foredraft.sampling.logprobs import of_tokens, processed_logprobs, raw_logprobs
from foredraft.types import Delta, StepPlan, TargetOutput, Verdict
from foredraft.upload import upload


def with_logprobs(
    deltas: Sequence[Delta],
    plan: StepPlan,
    target: TargetOutput,
    shaped: torch.Tensor,
    verdict: Verdict,
    states: Mapping[str, RequestState],
) -> list[Delta]:
    """Return the deltas with the log-probabilities that were asked for; states keep them, too.

    Args:
        deltas: What each request did, after every stop rule.
        plan: The step.
        target: What the target said.
        shaped: float32 [num_logit_rows, V], the logits that tokens were picked by.
        verdict: Which rows they were picked at.
        states: The running requests by id.
    """
    by_request = {delta.request_id: delta for delta in deltas}
    for index, segment in enumerate(plan.segments):
        sampling, name = segment.request.sampling, segment.request.request_id
        state = states[name]
        if index in target.prompt_logits:
            # A row tells of the token behind it; the last of the prompt is followed by the output.
            # What a request that was put out has reported already is computed again, and not said
            # again.
            again = max(0, len(state.prompt_logprobs) - segment.start)
            end = segment.start + 1 + segment.num_rows
            ids = segment.request.prompt_ids[segment.start + 1 + again : end]
            rows = target.prompt_logits[index][again : again + len(ids)]
            logprobs = _logprobs(rows, rows, sampling)
            state.prompt_logprobs += of_tokens(logprobs, ids, sampling.prompt_logprobs or 0)
        delta = by_request.get(name)
        if sampling.logprobs is None or delta is None or not delta.token_ids:
            continue
        path = verdict.path[verdict.path_offsets[index] : verdict.path_offsets[index + 1]]
        rows = target.offsets[index] + np.append(0, path)[: len(delta.token_ids)]
        where = upload(rows, target.logits.device)
        found = of_tokens(
            _logprobs(target.logits[where], shaped[where], sampling),
            np.array(delta.token_ids, dtype=np.int64),
            sampling.logprobs,
        )
        state.logprobs += found
        by_request[name] = dataclasses.replace(delta, logprobs=found)
    return list(by_request.values())


def _logprobs(raw: torch.Tensor, shaped: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    if sampling.logprobs_kind == "raw":
        return raw_logprobs(raw)
    return processed_logprobs(shaped, sampling)
