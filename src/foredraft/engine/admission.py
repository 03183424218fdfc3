"""What a user asked for, checked against the model: a request, or a sentence why there is none."""

from __future__ import annotations

import dataclasses
import math
import numbers
import secrets
from collections.abc import Sequence

import numpy as np

from foredraft.errors import InvalidRequestError
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Request


def make_request(
    name: str,
    prompt_ids: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    target: Target,
) -> Request:
    """Return the request that the engine runs.

    Raises:
        InvalidRequestError: The model cannot honour it.
    """
    speculation = _with_prediction_ids(speculation, target)
    prompt_ids = _check_prompt(prompt_ids, target)
    room = target.max_model_len - len(prompt_ids)
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {len(prompt_ids)} tokens; allowed are "
            f"{target.max_model_len - 1}, one less "
            f"than the context of {target.max_model_len}. Shorten the prompt."
        )
    _check_ids(sampling, target.vocab_size)
    if sampling.num_samples > 1:
        raise InvalidRequestError(
            f"a request of the engine is one text, and {sampling.num_samples} were asked for; "
            "use LLM.generate, or add one request for each."
        )
    if sampling.grammar is not None and sampling.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos is True beside a grammar, whose text could then not end; leave one of "
            "them out."
        )
    eos_ids = frozenset() if sampling.ignore_eos else target.eos_ids
    return Request(
        request_id=name,
        prompt_ids=prompt_ids,
        sampling=sampling,
        speculation=speculation,
        seed=secrets.randbits(53) if sampling.seed is None else sampling.seed,
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
    )


def check_priority(priority: int) -> int:
    """Return a priority; ``InvalidRequestError`` unless it is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise InvalidRequestError(f"priority is {priority!r}; allowed is an integer.")
    return int(priority)


def check_deadline(seconds: float) -> float:
    """Return a number of seconds; ``InvalidRequestError`` unless it is above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not seconds > 0:
        raise InvalidRequestError(
            f"deadline_s is {seconds!r}; allowed is a number of seconds above 0, or None."
        )
    try:
        return float(seconds)
    except OverflowError:
        return math.inf


def _with_prediction_ids(speculation: SpeculationParams, target: Target) -> SpeculationParams:
    """The params with the prediction as token ids, which must fit into the context."""
    prediction = speculation.prediction
    if prediction is None:
        return speculation
    if isinstance(prediction, str):
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "prediction is a text, but this model's folder holds no tokenizer; give it as "
                "token ids."
            )
        try:
            prediction.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "prediction is not valid Unicode text (half a character at position "
                f"{error.start}); mend it."
            ) from error
        prediction = tokenizer(prediction, add_special_tokens=False, verbose=False)["input_ids"]
    if len(prediction) > target.max_model_len:
        raise InvalidRequestError(
            f"the prediction has {len(prediction)} tokens; allowed are "
            f"{target.max_model_len}, the context. Shorten it."
        )
    return dataclasses.replace(speculation, prediction=tuple(prediction))


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    bad: list[tuple[int, ...]] = [
        one if isinstance(one, tuple) else (one,) for one in sampling.bad_token_ids
    ]
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_token_ids", [token_id for one in bad for token_id in one]),
        ("logit_bias", [token_id for token_id, _ in sampling.biases]),
    ):
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {token_id}; allowed are ids below the vocabulary size of "
                    f"{vocab_size}. Remove it."
                )


def _check_prompt(prompt_ids: Sequence[int] | np.ndarray, target: Target) -> np.ndarray:
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the prompt is no sequence of token ids ({error}).") from error
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InvalidRequestError(
            f"the prompt is an array of shape {ids.shape} and kind {ids.dtype}; allowed is a flat "
            "sequence of integer token ids."
        )
    if ids.size == 0:
        raise InvalidRequestError(
            "the prompt is empty; allowed is one token or more. Give it some text."
        )
    is_outside = (ids < 0) | (ids >= target.vocab_size)
    if is_outside.any():
        place = int(np.argmax(is_outside))
        raise InvalidRequestError(
            f"the prompt holds token id {int(ids[place])} at position {place}; allowed are ids "
            f"from 0 to {target.vocab_size - 1}. Check that the tokenizer is this model's."
        )
    return ids.astype(np.int64)
