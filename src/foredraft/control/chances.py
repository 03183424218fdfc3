"""What the target's own probabilities say of a draft: the chance of each token to be picked."""

from __future__ import annotations

import numpy as np
import torch

from foredraft.params import SamplingParams
from foredraft.sampling.processors import Float64Array
from foredraft.types import Int64Array, TargetOutput
from foredraft.upload import upload


def is_unfiltered(sampling: SamplingParams) -> bool:
    """Whether the law of a pick is the softmax of the logits, over all tokens."""
    return (
        not sampling.is_greedy
        and sampling.top_k == 0
        and sampling.top_p == 1
        and sampling.min_p == 0
        and sampling.top_n_sigma == 0
        and sampling.typical_p == 1
    )


def may_read(target: TargetOutput) -> bool:
    """Whether logits can be read without waiting for a device."""
    return target.logits.device.type == "cpu"


def chances(
    logits: torch.Tensor, token_ids: Int64Array, parents: Int64Array, temperature: float
) -> Float64Array:
    """The target's probability of each drafted token at its parent's row, float64 [num_nodes]."""
    rows = upload(np.unique(parents), logits.device)
    place = np.searchsorted(np.unique(parents), parents)
    scaled = logits[rows] / temperature
    norms = torch.logsumexp(scaled, dim=-1)
    where = upload(place, logits.device)
    tokens = upload(token_ids, logits.device)
    found = torch.exp(scaled[where, tokens] - norms[where]).double().cpu().numpy()
    out: Float64Array = np.nan_to_num(found, nan=0.0)
    return out
