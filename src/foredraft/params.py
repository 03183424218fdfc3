"""What one request may ask for: how tokens are picked, how it speculates. Checked here, once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from foredraft.errors import InvalidRequestError
from foredraft.registry import PLAIN

MAX_SPECULATIVE_TOKENS = 128
"""Most draft nodes one request may have in one step."""

AUTO = "auto"
"""As a number of draft tokens: as many as pay, decided at every step."""

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax: dividing by them would only lose precision."""

VERIFICATIONS = ("walk", "rejection", "block", "traversal")
"""Verification rules by name; ``walk`` is the default, the other three are the classical ones."""


def _number(name: str, value: Any, allowed: str, advice: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(f"{name} is {value!r}; allowed is {allowed}. {advice}")
    try:
        return float(value)
    except OverflowError as error:
        size = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "too large"
        raise InvalidRequestError(f"{name} is {size}; allowed is {allowed}. {advice}") from error


def _integer(name: str, value: Any, allowed: str, advice: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} is {value!r}; allowed is {allowed}. {advice}")
    return int(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target picks its tokens. Filters apply in the order temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 (argmax, the default) or above; below 1e-5 counts as 0.
        top_k: Keep the ``top_k`` likeliest tokens (ties with the last are kept too); 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose mass, among those ``top_k`` kept,
            reaches ``top_p``; in (0, 1], 1 keeps all.
        min_p: Keep tokens at least ``min_p`` times as likely as the likeliest; in [0, 1], 0 keeps
            all.
        seed: Fixes the text, whatever is drafted and whatever else is in the batch. ``None`` draws
            a random seed, which the result reports.
        max_tokens: Most tokens to generate; ``None`` means up to the context length.
        stop_token_ids: Token ids that end the text, besides the model's own end-of-sequence ids.
        ignore_eos: Go on past the model's end-of-sequence ids.

    Raises:
        InvalidRequestError: A value outside what is stated above.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every field; numbers become Python's own, sequences tuples."""
        temperature = _number(
            "temperature", self.temperature, "a finite number of 0 or more", "Use 0 for argmax."
        )
        if not math.isfinite(temperature) or temperature < 0:
            raise InvalidRequestError(
                f"temperature is {self.temperature}; allowed is a finite number of 0 or more. "
                "Use 0 for argmax."
            )
        top_p = _number("top_p", self.top_p, "a number in (0, 1]", "Use 1 to keep every token.")
        if not 0 < top_p <= 1:
            raise InvalidRequestError(
                f"top_p is {self.top_p}; allowed is a number in (0, 1]. Use 1 to keep every token."
            )
        min_p = _number("min_p", self.min_p, "a number in [0, 1]", "Use 0 to keep every token.")
        if not 0 <= min_p <= 1:
            raise InvalidRequestError(
                f"min_p is {self.min_p}; allowed is a number in [0, 1]. Use 0 to keep every token."
            )
        top_k = _integer("top_k", self.top_k, "an integer of 0 or more", "Use 0 to keep all.")
        if top_k < 0:
            raise InvalidRequestError(
                f"top_k is {self.top_k}; allowed is an integer of 0 or more. Use 0 to keep all."
            )
        for name, value in (
            ("temperature", temperature),
            ("top_p", top_p),
            ("min_p", min_p),
            ("top_k", top_k),
        ):
            object.__setattr__(self, name, value)
        if self.seed is not None:
            seed = _integer(
                "seed", self.seed, "an integer in [0, 2**63)", "Leave it out for a random one."
            )
            if not 0 <= seed < 2**63:
                raise InvalidRequestError(
                    f"seed is {seed}; allowed is an integer in [0, 2**63). Leave it out for a "
                    "random one."
                )
            object.__setattr__(self, "seed", seed)
        if self.max_tokens is not None:
            allowed = "an integer of 1 or more"
            advice = "A large number goes up to the context length."
            max_tokens = _integer("max_tokens", self.max_tokens, allowed, advice)
            if max_tokens < 1:
                raise InvalidRequestError(
                    f"max_tokens is {self.max_tokens}; allowed is {allowed}. {advice}"
                )
            object.__setattr__(self, "max_tokens", max_tokens)
        if isinstance(self.stop_token_ids, (str, bytes)) or not hasattr(
            self.stop_token_ids, "__iter__"
        ):
            raise InvalidRequestError(
                f"stop_token_ids is {self.stop_token_ids!r}; allowed is a sequence of token ids."
            )
        allowed = "token ids of 0 or more"
        stop_ids = tuple(
            _integer("stop_token_ids", token_id, allowed, "Remove it.")
            for token_id in self.stop_token_ids
        )
        for token_id in stop_ids:
            if token_id < 0:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}; allowed are {allowed}. Remove it."
                )
        object.__setattr__(self, "stop_token_ids", stop_ids)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"ignore_eos is {self.ignore_eos!r}; allowed is True or False."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the pick is the argmax of the logits."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How one request speculates. Nothing here can change its text under the default rule.

    Attributes:
        method: ``none`` (plain decoding), a registered method such as ``ngram``, or
            ``module:Class`` for a drafter of your own.
        num_speculative_tokens: Most draft tokens (tree nodes) in a step; 0 is plain decoding.
            ``auto`` (the default) decides at every step how many pay, or none.
        verification: ``walk`` (the default: token-identical to plain decoding), or one of the
            classical rules ``rejection``, ``block`` (chains only) and ``traversal``: exact in law.
        suffix_scope: Whose past responses may be drafted from, and who may draft from this one: a
            name for a tenant, say. Requests that name none share a scope.
        prediction: The text that is expected, or its token ids, for the method ``prediction``.

    Raises:
        InvalidRequestError: A value outside what is stated above.
    """

    method: str = "ngram"
    num_speculative_tokens: int | str = AUTO
    verification: str = "walk"
    suffix_scope: str = ""
    prediction: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check every field; whether the method exists is checked where the registry is known."""
        if not isinstance(self.method, str) or not self.method:
            raise InvalidRequestError(
                f"method is {self.method!r}; allowed is the name of a method, or 'none'."
            )
        if self.num_speculative_tokens != AUTO:
            allowed = f"an integer from 0 to {MAX_SPECULATIVE_TOKENS}, or 'auto'"
            advice = "Use 0 for plain decoding."
            num = _integer("num_speculative_tokens", self.num_speculative_tokens, allowed, advice)
            if not 0 <= num <= MAX_SPECULATIVE_TOKENS:
                raise InvalidRequestError(
                    f"num_speculative_tokens is {num}; allowed is {allowed}. {advice}"
                )
            object.__setattr__(self, "num_speculative_tokens", num)
        if self.verification not in VERIFICATIONS:
            raise InvalidRequestError(
                f"verification is {self.verification!r}; allowed is one of "
                f"{', '.join(VERIFICATIONS)}. "
                "Leave it out for 'walk'."
            )
        if not isinstance(self.suffix_scope, str):
            raise InvalidRequestError(
                f"suffix_scope is {self.suffix_scope!r}; allowed is a string. Leave it out to "
                "share."
            )
        if self.prediction is not None and not isinstance(self.prediction, str):
            allowed = "a text, or token ids of 0 or more"
            if isinstance(self.prediction, bytes) or not hasattr(self.prediction, "__iter__"):
                raise InvalidRequestError(
                    f"prediction is {self.prediction!r}; allowed is {allowed}. Leave it out."
                )
            ids = tuple(_integer("prediction", t, allowed, "Remove it.") for t in self.prediction)
            if any(token_id < 0 for token_id in ids):
                raise InvalidRequestError(
                    f"prediction holds {min(ids)}; allowed is {allowed}. Remove it."
                )
            object.__setattr__(self, "prediction", ids)

    @property
    def is_auto(self) -> bool:
        """Whether the number of draft tokens is decided at every step."""
        return self.num_speculative_tokens == AUTO

    @property
    def is_plain(self) -> bool:
        """Whether nothing is ever drafted."""
        return self.method == PLAIN or self.num_speculative_tokens == 0

    @property
    def allows_trees(self) -> bool:
        """Whether a draft may branch under this rule (block verification knows chains only)."""
        return self.verification != "block"
