"""Log-probabilities of committed tokens, from the very rows that they were picked at."""

from __future__ import annotations

import numpy as np
import torch

from foredraft.params import SamplingParams
from foredraft.sampling.processors import RowParams, filtered
from foredraft.types import Int64Array, TokenLogprob
from foredraft.upload import upload


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities by the model itself, float32 [R, V]."""
    return torch.log_softmax(logits.float(), dim=-1)


def processed_logprobs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities of what is picked from, float32 [R, V].

    Args:
        logits: float32 [R, V], shaped already.
        sampling: Its temperature and filters apply; at temperature 0 neither does.
    """
    if sampling.is_greedy:
        return raw_logprobs(logits)
    params = RowParams.of([sampling], np.array([len(logits)], dtype=np.int64))
    kept, cut = filtered(logits, params)
    scaled = kept.double() / sampling.temperature
    return torch.log_softmax(scaled.masked_fill(kept < cut[:, None], -torch.inf), -1).float()


def of_tokens(
    logprobs: torch.Tensor, token_ids: Int64Array, num_top: int
) -> tuple[TokenLogprob, ...]:
    """Read the log-probabilities of tokens, and the likeliest beside each.

    Args:
        logprobs: float32 [R, V].
        token_ids: int64 [R].
        num_top: How many of the likeliest.
    """
    if not len(token_ids):
        return ()
    ids = upload(np.asarray(token_ids), logprobs.device)
    own = logprobs.gather(1, ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, order = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return tuple(
        TokenLogprob(token, value, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token, value, rank, top_ids, top_values in zip(
            token_ids.tolist(),
            own[:, 0].tolist(),
            ranks.tolist(),
            order.tolist(),
            values.tolist(),
            strict=True,
        )
    )
