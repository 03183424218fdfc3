"""Greedy losslessness in bfloat16: every emitted token is the plain argmax, or a near tie with it.

A pass over N + 1 rows and N + 1 passes over one row multiply the same numbers in another order. In
bfloat16 the logits then differ in their last bits, and where the two best are that close, the
argmax may differ: not an error of verification, and not to be confused with one. So the emitted
tokens are forced, one by one, through the plain path (one row a pass), and each must be the argmax
there or within a few units in the last place of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.engine.engine import Engine
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import DraftBatch, Request, Segment, StepPlan

DEFAULT_MAX_ULPS = {
    torch.bfloat16: 4.0,
    torch.float16: 8.0,
    torch.float32: 256.0,
    torch.float64: 256.0,
}
"""Allowed distance from the argmax, in units in the last place of the logits' scale (the largest
or the median magnitude, whichever is more): a few roundings of the final product in half precision;
in float32 and float64 the rounding of all layers adds up."""


@dataclass(frozen=True, slots=True)
class NearTieReport:
    """What forcing a text through the plain path showed.

    Attributes:
        num_tokens: Tokens checked.
        num_argmax: Tokens that are the plain argmax.
        max_ulps: Allowed distance from the argmax.
        worst_ulps: Largest distance seen.
        near_ties: (index, distance in ulps) of every token that is not the plain argmax.
    """

    num_tokens: int
    num_argmax: int
    max_ulps: float
    worst_ulps: float
    near_ties: tuple[tuple[int, float], ...]

    @property
    def is_lossless(self) -> bool:
        """Whether every token is the argmax or within ``max_ulps`` of it."""
        return self.worst_ulps <= self.max_ulps


def check_greedy(
    engine: Engine,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    max_ulps: float | None = None,
) -> NearTieReport:
    """Force a greedy text through the plain path and measure how far each token is from its argmax.

    Args:
        engine: An engine without work; its model and cache are used.
        prompt_ids: The prompt.
        token_ids: What was generated at temperature 0.
        max_ulps: Allowed distance; ``None`` takes the default for the model's dtype.

    Returns:
        The report.

    Raises:
        ValueError: The engine is busy, or the text is none that it can have made.
    """
    if engine.has_work:
        raise ValueError("the engine has requests to run; check its texts when it is idle")
    target, cache = engine.target, engine.cache
    _check_text(prompt_ids, token_ids, target.vocab_size, target.max_model_len)
    allowed = DEFAULT_MAX_ULPS[target.dtype] if max_ulps is None else max_ulps
    all_ids = np.array([*prompt_ids, *token_ids], dtype=np.int64)
    first = len(prompt_ids)
    request = Request(
        "near-tie-check",
        all_ids[:first],
        SamplingParams(),
        SpeculationParams(method="none"),
        0,
        len(token_ids),
        frozenset(),
    )
    slot = cache.allocate()
    near_ties: list[tuple[int, float]] = []
    worst = 0.0
    try:
        for index, token_id in enumerate(token_ids):
            known = all_ids[: first + index]
            logits = _next_logits(engine, request, known, slot, 0 if index == 0 else len(known) - 1)
            ulps = _ulps_behind(logits, int(token_id), target.dtype)
            if ulps > 0:
                near_ties.append((index, ulps))
                worst = max(worst, ulps)
    finally:
        cache.free(slot)
    return NearTieReport(
        len(token_ids), len(token_ids) - len(near_ties), allowed, worst, tuple(near_ties)
    )


def _check_text(
    prompt_ids: Sequence[int], token_ids: Sequence[int], vocab_size: int, max_model_len: int
) -> None:
    num_tokens = len(prompt_ids) + len(token_ids)
    if not len(prompt_ids) or num_tokens > max_model_len:
        raise ValueError(
            f"prompt and text have {len(prompt_ids)} and {len(token_ids)} tokens; allowed is a "
            f"prompt of one or more, and {max_model_len} together"
        )
    for token_id in (*prompt_ids, *token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside of the vocabulary of {vocab_size}")


def _next_logits(
    engine: Engine, request: Request, known: np.ndarray, slot: int, start: int
) -> torch.Tensor:
    """Logits after ``known``, float32 [V]: the prompt in the engine's chunks, then row by row."""
    chunk = engine.config.max_num_batched_tokens
    while True:
        num_rows = min(chunk, len(known) - start)
        is_decode = start >= len(request.prompt_ids)  # as the engine has it, to the last bit
        segment = Segment(request, known, slot, start, num_rows, is_decode)
        output = engine.runner.forward(StepPlan((segment,)), DraftBatch.empty(1))
        start += num_rows
        if start == len(known):
            return output.logits[-1]


def _ulps_behind(logits: torch.Tensor, token_id: int, dtype: torch.dtype) -> float:
    best = float(logits.max())
    gap = best - float(logits[token_id])
    if not math.isfinite(gap):
        return math.inf  # no argmax to be near to
    if gap == 0:
        return 0.0
    # Not the scale of `best` alone: a logit near 0 is a sum of products that are as large, and
    # whose rounding is as coarse, as those of its neighbours. The median is not moved by the few
    # huge values that stand for forbidden tokens.
    typical = float(logits[logits.isfinite()].abs().median())
    scale = max(abs(best), typical, 1e-30)
    # eps is the spacing of numbers just above 1; the spacing at `scale` goes by its exponent.
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale))
    return gap / ulp
