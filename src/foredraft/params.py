"""What one request may ask for: how tokens are picked, how it speculates. Checked here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

from foredraft.errors import InvalidRequestError
from foredraft.grammar import Grammar
from foredraft.registry import PLAIN

MAX_SPECULATIVE_TOKENS = 128
"""Most draft nodes one request may have in one step."""

AUTO = "auto"
"""As a number of draft tokens: as many as pay, decided at every step."""

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax: dividing by them would only lose precision."""

MOST_LOGPROBS = 128
"""Most tokens of a position whose log-probabilities can be asked for."""

MOST_STOPS, LONGEST_STOP = 64, 1024
"""Most stop strings of a request, and most characters of one."""

MOST_SAMPLES = 128
"""Most texts of one prompt."""

LOGPROBS_KINDS = ("raw", "processed")
"""Log-probabilities of the model itself, or of what tokens are picked by."""

PREFERENCES = ("throughput", "latency")
"""What a request would have speculation do for it: serve the batch, or itself first."""

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
class _Range:
    """Numbers that a field may have, and how to say so."""

    allowed: str
    advice: str
    holds: Callable[[float], bool]
    is_integer: bool = False

    def check(self, name: str, value: Any) -> float:
        read = _integer if self.is_integer else _number
        number = read(name, value, self.allowed, self.advice)
        if not self.holds(number):
            raise InvalidRequestError(
                f"{name} is {value}; allowed is {self.allowed}. {self.advice}"
            )
        return number


def _up_to(most: int) -> _Range:
    return _Range(
        f"an integer from 0 to {most}", "Leave it out for none.", lambda n: 0 <= n <= most, True
    )


_PENALTY = _Range("a number from -2 to 2", "Use 0 for none.", lambda x: -2 <= x <= 2)
_RANGES = {
    "temperature": _Range(
        "a finite number of 0 or more", "Use 0 for argmax.", lambda x: 0 <= x < math.inf
    ),
    "top_k": _Range("an integer of 0 or more", "Use 0 to keep all.", lambda n: n >= 0, True),
    "top_p": _Range("a number in (0, 1]", "Use 1 to keep every token.", lambda x: 0 < x <= 1),
    "min_p": _Range("a number in [0, 1]", "Use 0 to keep every token.", lambda x: 0 <= x <= 1),
    "typical_p": _Range("a number in (0, 1]", "Use 1 to keep every token.", lambda x: 0 < x <= 1),
    "top_n_sigma": _Range(
        "a finite number of 0 or more", "Use 0 to keep every token.", lambda x: 0 <= x < math.inf
    ),
    "repetition_penalty": _Range(
        "a finite number above 0", "Use 1 for none.", lambda x: 0 < x < math.inf
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_tokens": _Range("an integer of 0 or more", "Use 0 for none.", lambda n: n >= 0, True),
}
_OPTIONAL_RANGES = {
    "seed": _Range(
        "an integer in [0, 2**63)",
        "Leave it out for a random one.",
        lambda n: 0 <= n < 2**63,
        True,
    ),
    "max_tokens": _Range(
        "an integer of 1 or more",
        "A large number goes up to the context length.",
        lambda n: n >= 1,
        True,
    ),
    "logprobs": _up_to(MOST_LOGPROBS),
    "prompt_logprobs": _up_to(MOST_LOGPROBS),
}
_BIAS = _Range(
    "a number from -100 to 100", "Leave the token out for none.", lambda x: abs(x) <= 100
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target picks its tokens, and where the text ends.

    At every position, from the history of its own text: ``logit_bias`` is added; the penalties are
    applied; ``logits_processors`` run; what ``allowed_token_ids``, ``bad_token_ids``,
    ``min_tokens`` and ``grammar`` forbid is taken out. Then, at a temperature above 0, the filters
    apply in the order temperature, top-k, top-p, min-p, top-n-sigma, typical-p. All of it is exact
    under every method of drafting: a draft never changes what is picked.

    Attributes:
        temperature: 0 (argmax, the default) or above; below 1e-5 counts as 0.
        top_k: Keep the ``top_k`` likeliest tokens (ties with the last are kept too); 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose mass, among those ``top_k`` kept,
            reaches ``top_p``; in (0, 1], 1 keeps all.
        min_p: Keep tokens at least ``min_p`` times as likely as the likeliest; in [0, 1], 0 keeps
            all.
        typical_p: Keep the smallest set of the tokens whose surprise is closest to the mean
            surprise, of a mass that reaches ``typical_p``, among those that the other filters kept
            (Meister et al., arXiv 2202.00666); in (0, 1], 1 keeps all.
        top_n_sigma: Keep tokens whose logit is within so many standard deviations of all logits
            from the largest (Tang et al., arXiv 2411.07641); 0 keeps all.
        repetition_penalty: Logits of tokens in prompt or output are divided by it where above 0,
            else multiplied (Keskar et al., arXiv 1909.05858); above 0, 1 is none.
        presence_penalty: Subtracted from logits of tokens in the output; from -2 to 2.
        frequency_penalty: The same, for every time they are in it.
        logit_bias: Added to logits, by token id; from -100 to 100 each.
        allowed_token_ids: The only tokens that may be picked; ``None`` allows all.
        bad_token_ids: Tokens, or sequences of them, that may not be picked; of a sequence, its last
            token where the text ends with the others.
        min_tokens: Tokens before which neither a stopping token is picked nor a stop string ends
            the text.
        logits_processors: Functions of ``(input_ids, scores)``, int64 [1, length] and float32
            [1, V], that return the scores, as for Transformers' ``generate``. They run for tokens
            that may be dropped again, so they must depend on nothing but their arguments.
        grammar: The form that the text must have.
        seed: Fixes the text, whatever is drafted and whatever else is in the batch. ``None`` draws
            a random seed, which the result reports.
        max_tokens: Most tokens to generate; ``None`` means up to the context length.
        stop: Strings that end the text, which then ends before them. Tokens count up to the one
            that completes the string.
        include_stop: Whether the string stays in the text.
        stop_token_ids: Token ids that end the text, besides the model's own end-of-sequence ids.
        ignore_eos: Go on past the model's end-of-sequence ids.
        logprobs: Report the log-probability of every token, and of so many of the likeliest beside
            it; ``None`` reports none.
        prompt_logprobs: The same for the prompt's tokens but the first.
        logprobs_kind: ``raw``, of the model's own logits, or ``processed``, of what the pick is
            drawn from (at temperature 0, the logits after penalties and the like).
        reuse_prefix: Begin from what is kept of texts that begin alike, and let others begin from
            this one. It saves time and, in float32, changes nothing.
        n: Texts of the prompt, each with a seed of its own: the given one, then those after it.
        best_of: Texts that are made, of which the ``n`` likeliest by mean log-probability of a
            token are kept; ``None`` makes ``n``.

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
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[Callable[[Any, Any], Any], ...] = ()
    grammar: Grammar | None = None
    stop: str | tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_kind: str = "raw"
    reuse_prefix: bool = True
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        """Check every field; numbers become Python's own, sequences tuples."""
        for name, allowed in _RANGES.items():
            object.__setattr__(self, name, allowed.check(name, getattr(self, name)))
        for name, allowed in _OPTIONAL_RANGES.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, allowed.check(name, value))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so that no token could be picked; allowed is one "
                    "id or more. Leave it out to allow all."
                )
            object.__setattr__(self, "allowed_token_ids", ids)
        object.__setattr__(self, "bad_token_ids", _bad_ids(self.bad_token_ids))
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        for name in ("ignore_eos", "include_stop", "reuse_prefix"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}; allowed is True or False."
                )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(
                f"grammar is of type {type(self.grammar).__name__}; allowed is a Grammar, such as "
                "Grammar.json_schema({...})."
            )
        if self.logprobs_kind not in LOGPROBS_KINDS:
            raise InvalidRequestError(
                f"logprobs_kind is {self.logprobs_kind!r}; allowed is one of "
                f"{', '.join(LOGPROBS_KINDS)}."
            )
        self._check_samples()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; allowed is at most max_tokens, "
                f"{self.max_tokens}. Lower it."
            )

    def _check_samples(self) -> None:
        samples = _Range(
            f"an integer from 1 to {MOST_SAMPLES}",
            "Use 1 for a single text.",
            lambda n: 1 <= n <= MOST_SAMPLES,
            is_integer=True,
        )
        object.__setattr__(self, "n", samples.check("n", self.n))
        if self.best_of is None:
            return
        object.__setattr__(self, "best_of", samples.check("best_of", self.best_of))
        if self.best_of < self.n:
            raise InvalidRequestError(
                f"best_of is {self.best_of}; allowed is n, {self.n}, or more. Raise it."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the pick is the argmax of the logits."""
        return self.temperature < GREEDY_BELOW

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and number."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def num_samples(self) -> int:
        """Texts that are made of the prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_shaped(self) -> bool:
        """Whether the logits that tokens are picked by are others than the model's own."""
        return bool(self.min_tokens) or self.is_shaped_throughout

    @property
    def is_shaped_throughout(self) -> bool:
        """Whether they are so to the end of the text, for more than ``min_tokens``."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_token_ids
            or self.logits_processors
            or self.grammar is not None
        )


def _items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise InvalidRequestError(f"{name} is {value!r}; allowed is {allowed}.")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    allowed = "token ids of 0 or more"
    ids = tuple(
        _integer(name, token_id, allowed, "Remove it.")
        for token_id in _items(name, value, "a sequence of token ids")
    )
    for token_id in ids:
        if token_id < 0:
            raise InvalidRequestError(f"{name} holds {token_id}; allowed are {allowed}. Remove it.")
    return ids


def _bad_ids(value: Any) -> tuple[int | tuple[int, ...], ...]:
    name = "bad_token_ids"
    found: list[int | tuple[int, ...]] = []
    for item in _items(name, value, "a sequence of token ids, or of sequences of them"):
        if isinstance(item, Iterable):
            ids = _token_ids(name, item)
            if not ids:
                raise InvalidRequestError(f"{name} holds an empty sequence. Remove it.")
            found.append(ids[0] if len(ids) == 1 else ids)
        else:
            found += _token_ids(name, (item,))
    return tuple(found)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"logit_bias is {value!r:.80}; allowed is a mapping of token ids to numbers."
        ) from error
    ids = _token_ids("logit_bias", tuple(pairs))
    return tuple(
        (token_id, _BIAS.check(f"logit_bias of token {token_id}", bias))
        for token_id, bias in zip(ids, pairs.values(), strict=True)
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _items("stop", value, "a string or several")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP:
            raise InvalidRequestError(
                f"stop holds {stop!r:.40}; allowed are strings of 1 to {LONGEST_STOP} characters. "
                "Remove it."
            )
    if len(stops) > MOST_STOPS:
        raise InvalidRequestError(
            f"stop holds {len(stops)} strings; allowed are {MOST_STOPS}. Remove some."
        )
    return tuple(stops)


def _processors(value: Any) -> tuple[Callable[[Any, Any], Any], ...]:
    allowed = "a sequence of functions of (input_ids, scores)"
    processors = _items("logits_processors", value, allowed)
    for processor in processors:
        if not callable(processor):
            raise InvalidRequestError(
                f"logits_processors holds {processor!r:.60}, which cannot be called; allowed is "
                f"{allowed}."
            )
    return processors


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
        preference: ``throughput`` (the default) drafts what raises the tokens per second of the
            whole batch; ``latency`` counts this request's tokens above those of others, so that it
            drafts more where others would rather have the time. Where all ask alike, both are one.
        suffix_scope: Whose past responses may be drafted from, and who may draft from this one: a
            name for a tenant, say. Requests that name none share a scope.
        prediction: The text that is expected, or its token ids, for the method ``prediction``.

    Raises:
        InvalidRequestError: A value outside what is stated above.
    """

    method: str = "ngram"
    num_speculative_tokens: int | str = AUTO
    verification: str = "walk"
    preference: str = "throughput"
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
        if self.preference not in PREFERENCES:
            raise InvalidRequestError(
                f"preference is {self.preference!r}; allowed is one of {', '.join(PREFERENCES)}."
            )
        if not isinstance(self.suffix_scope, str):
            raise InvalidRequestError(
                f"suffix_scope is {self.suffix_scope!r}; allowed is a string. Leave it out to "
                "share."
            )
        if self.prediction is not None and not isinstance(self.prediction, str):
            allowed = "a text, or token ids of 0 or more"
            try:
                given = None if isinstance(self.prediction, bytes | Mapping) else [*self.prediction]
            except TypeError:  # nothing to go through, or a tensor of one number
                given = None
            if given is None:
                raise InvalidRequestError(
                    f"prediction is {self.prediction!r}; allowed is {allowed}. Leave it out."
                )
            ids = tuple(_integer("prediction", t, allowed, "Remove it.") for t in given)
            for token_id in ids:
                if not 0 <= token_id < 2**63:
                    raise InvalidRequestError(
                        f"prediction holds {token_id}; allowed is {allowed}. Remove it."
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
