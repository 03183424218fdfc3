"""What a request may ask for: bad values are refused in the user's words."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from foredraft.config import EngineConfig, make_config
from foredraft.errors import ConfigError, ForedraftError, InvalidRequestError
from foredraft.params import (
    GREEDY_BELOW,
    MAX_SPECULATIVE_TOKENS,
    VERIFICATIONS,
    SamplingParams,
    SpeculationParams,
)
from foredraft.registry import METHODS, check_method, drafter_class, method_names

NAN, INF = math.nan, math.inf

# field, bad value, how the value is written in the message, what is allowed
BAD_SAMPLING = [
    ("temperature", -0.1, "-0.1", "a finite number of 0 or more"),
    ("temperature", -1e-300, "-1e-300", "a finite number of 0 or more"),
    ("temperature", NAN, "nan", "a finite number of 0 or more"),
    ("temperature", INF, "inf", "a finite number of 0 or more"),
    ("temperature", -INF, "-inf", "a finite number of 0 or more"),
    ("temperature", "1", "'1'", "a finite number of 0 or more"),
    ("temperature", None, "None", "a finite number of 0 or more"),
    ("temperature", True, "True", "a finite number of 0 or more"),
    ("temperature", 10**400, "1329 bits", "a finite number of 0 or more"),
    ("top_k", -1, "-1", "an integer of 0 or more"),
    ("top_k", 2.0, "2.0", "an integer of 0 or more"),
    ("top_k", "5", "'5'", "an integer of 0 or more"),
    ("top_k", None, "None", "an integer of 0 or more"),
    ("top_k", False, "False", "an integer of 0 or more"),
    ("top_p", 0, "0", "a number in (0, 1]"),
    ("top_p", 0.0, "0.0", "a number in (0, 1]"),
    ("top_p", -0.5, "-0.5", "a number in (0, 1]"),
    ("top_p", 1.0000001, "1.0000001", "a number in (0, 1]"),
    ("top_p", NAN, "nan", "a number in (0, 1]"),
    ("top_p", INF, "inf", "a number in (0, 1]"),
    ("top_p", "0.9", "'0.9'", "a number in (0, 1]"),
    ("top_p", None, "None", "a number in (0, 1]"),
    ("top_p", 10**400, "1329 bits", "a number in (0, 1]"),
    ("min_p", -0.01, "-0.01", "a number in [0, 1]"),
    ("min_p", 1.5, "1.5", "a number in [0, 1]"),
    ("min_p", NAN, "nan", "a number in [0, 1]"),
    ("min_p", "0", "'0'", "a number in [0, 1]"),
    ("min_p", None, "None", "a number in [0, 1]"),
    ("min_p", -(10**400), "1329 bits", "a number in [0, 1]"),
    ("seed", -1, "-1", "an integer in [0, 2**63)"),
    ("seed", 2**63, str(2**63), "an integer in [0, 2**63)"),
    ("seed", 1.0, "1.0", "an integer in [0, 2**63)"),
    ("seed", "7", "'7'", "an integer in [0, 2**63)"),
    ("seed", True, "True", "an integer in [0, 2**63)"),
    ("max_tokens", 0, "0", "an integer of 1 or more"),
    ("max_tokens", -5, "-5", "an integer of 1 or more"),
    ("max_tokens", 1.5, "1.5", "an integer of 1 or more"),
    ("max_tokens", "9", "'9'", "an integer of 1 or more"),
    ("max_tokens", True, "True", "an integer of 1 or more"),
    ("stop_token_ids", None, "None", "token ids"),
    ("stop_token_ids", 5, "5", "token ids"),
    ("stop_token_ids", "12", "'12'", "token ids"),
    ("stop_token_ids", b"12", "b'12'", "token ids"),
    ("stop_token_ids", {3: 4.0}.values(), "4.0", "token ids of 0 or more"),
    ("stop_token_ids", (1, -2), "-2", "token ids of 0 or more"),
    ("stop_token_ids", (1, 2.0), "2.0", "token ids of 0 or more"),
    ("stop_token_ids", [[1]], "[1]", "token ids of 0 or more"),
    ("stop_token_ids", (1, True), "True", "token ids of 0 or more"),
    ("ignore_eos", 1, "1", "True or False"),
    ("ignore_eos", None, "None", "True or False"),
    ("ignore_eos", "no", "'no'", "True or False"),
    ("typical_p", 0, "0", "a number in (0, 1]"),
    ("typical_p", 1.5, "1.5", "a number in (0, 1]"),
    ("typical_p", NAN, "nan", "a number in (0, 1]"),
    ("top_n_sigma", -1, "-1", "a finite number of 0 or more"),
    ("top_n_sigma", INF, "inf", "a finite number of 0 or more"),
    ("repetition_penalty", 0, "0", "a finite number above 0"),
    ("repetition_penalty", INF, "inf", "a finite number above 0"),
    ("repetition_penalty", NAN, "nan", "a finite number above 0"),
    ("presence_penalty", 2.1, "2.1", "a number from -2 to 2"),
    ("presence_penalty", NAN, "nan", "a number from -2 to 2"),
    ("frequency_penalty", -2.5, "-2.5", "a number from -2 to 2"),
    ("frequency_penalty", "1", "'1'", "a number from -2 to 2"),
    ("logit_bias", 5, "5", "a mapping of token ids to numbers"),
    ("logit_bias", {"a": 1.0}, "'a'", "token ids of 0 or more"),
    ("logit_bias", {-1: 1.0}, "-1", "token ids of 0 or more"),
    ("logit_bias", {3: 101}, "101", "a number from -100 to 100"),
    ("logit_bias", {3: NAN}, "nan", "a number from -100 to 100"),
    ("logit_bias", {3: None}, "None", "a number from -100 to 100"),
    ("allowed_token_ids", (), "empty", "one id or more"),
    ("allowed_token_ids", "12", "'12'", "token ids"),
    ("allowed_token_ids", (-1,), "-1", "token ids of 0 or more"),
    ("bad_token_ids", 4, "4", "token ids"),
    ("bad_token_ids", [[3, -4]], "-4", "token ids of 0 or more"),
    ("bad_token_ids", ["ab"], "'ab'", "token ids"),
    ("bad_token_ids", [1.5], "1.5", "token ids of 0 or more"),
    ("min_tokens", -1, "-1", "an integer of 0 or more"),
    ("min_tokens", 1.0, "1.0", "an integer of 0 or more"),
    ("min_tokens", 129, "129", "at most max_tokens"),
    ("logits_processors", 3, "3", "functions of (input_ids, scores)"),
    ("logits_processors", [7], "7", "functions of (input_ids, scores)"),
    ("grammar", "[a-z]+", "str", "a Grammar"),
    ("stop", 3, "3", "a string or several"),
    ("stop", [""], "''", "strings of 1 to 1024 characters"),
    ("stop", [3], "3", "strings of 1 to 1024 characters"),
    ("stop", ["x"] * 65, "65", "64"),
    ("include_stop", 1, "1", "True or False"),
    ("logprobs", -1, "-1", "an integer from 0 to 128"),
    ("logprobs", 129, "129", "an integer from 0 to 128"),
    ("logprobs", True, "True", "an integer from 0 to 128"),
    ("prompt_logprobs", 1.0, "1.0", "an integer from 0 to 128"),
    ("logprobs_kind", "both", "'both'", "raw, processed"),
    ("reuse_prefix", None, "None", "True or False"),
    ("n", 0, "0", "an integer from 1 to 128"),
    ("n", 129, "129", "an integer from 1 to 128"),
    ("best_of", 0, "0", "an integer from 1 to 128"),
    ("best_of", "2", "'2'", "an integer from 1 to 128"),
]

BAD_SPECULATION = [
    ("method", "", "''", "the name of a method"),
    ("method", None, "None", "the name of a method"),
    ("method", 3, "3", "the name of a method"),
    ("num_speculative_tokens", -1, "-1", "an integer from 0 to 128"),
    ("num_speculative_tokens", 129, "129", "an integer from 0 to 128"),
    ("num_speculative_tokens", 2.0, "2.0", "an integer from 0 to 128"),
    ("num_speculative_tokens", "8", "'8'", "an integer from 0 to 128"),
    ("num_speculative_tokens", None, "None", "an integer from 0 to 128"),
    ("num_speculative_tokens", True, "True", "an integer from 0 to 128"),
    ("verification", "typical", "'typical'", "walk, rejection, block, traversal"),
    ("verification", "", "''", "walk, rejection, block, traversal"),
    ("verification", None, "None", "walk, rejection, block, traversal"),
    ("verification", ["walk"], "['walk']", "walk, rejection, block, traversal"),
    ("preference", "speed", "'speed'", "throughput, latency"),
    ("suffix_scope", 7, "7", "a string"),
    ("prediction", 7, "7", "a text, or token ids"),
    ("prediction", [1, -2], "-2", "a text, or token ids"),
    ("prediction", [2**63], str(2**63), "a text, or token ids"),
    ("prediction", {1: 2}, "{1: 2}", "a text, or token ids"),
    ("prediction", np.array(0.5), "0.5", "a text, or token ids"),
]

BAD_CONFIG = [
    ("model", "", "''", "a folder"),
    ("model", None, "None", "a folder"),
    ("dtype", "int8", "'int8'", "auto, float32, bfloat16, float16, float64"),
    ("dtype", None, "None", "auto, float32, bfloat16, float16, float64"),
    ("device", "", "''", "'cpu'"),
    ("max_num_requests", 0, "0", "an integer of 1 or more"),
    ("max_num_requests", None, "None", "an integer of 1 or more"),
    ("max_num_requests", 2.0, "2.0", "an integer of 1 or more"),
    ("max_num_requests", True, "True", "an integer of 1 or more"),
    ("max_model_len", 0, "0", "an integer of 1 or more"),
    ("max_model_len", "64", "'64'", "an integer of 1 or more"),
    ("max_num_batched_tokens", 0, "0", "an integer of 1 or more"),
    ("kv_cache_gb", 0, "0", "a number above 0"),
    ("kv_cache_gb", -1.0, "-1.0", "a number above 0"),
    ("kv_cache_gb", NAN, "nan", "a number above 0"),
    ("kv_cache_gb", INF, "inf", "a number above 0"),
    ("kv_cache_gb", "1", "'1'", "a number above 0"),
    ("kv_cache_gb", True, "True", "a number above 0"),
    ("reuse_prefixes", 1, "1", "True or False"),
    ("kv_layout", "paged", "'paged'", "auto, contiguous, blocks"),
    ("attention", "flash", "'flash'", "auto, sdpa, flex"),
    ("cuda_graphs", True, "True", "auto, on, off"),
    ("cuda_graphs", "on", "'on'", "attention='flex'"),
    ("tensor_parallel_size", 0, "0", "1 or more"),
    ("drafter_options", None, "None", "a mapping"),
    ("drafter_options", [("ngram", {})], "[('ngram', {})]", "a mapping"),
]


def _name(value: object) -> str:
    return repr(value)[:30]


def assert_refused(cls: type, kind: type, field: str, value: object, shown: str, allowed: str):
    with pytest.raises(kind) as caught:
        cls(**{field: value})
    message = str(caught.value)
    assert isinstance(caught.value, ForedraftError) and isinstance(caught.value, ValueError)
    assert field in message and shown in message and allowed in message, message
    assert len(message) < 1000


@pytest.mark.parametrize(("field", "value", "shown", "allowed"), BAD_SAMPLING, ids=_name)
def test_bad_sampling(field: str, value: object, shown: str, allowed: str) -> None:
    assert_refused(SamplingParams, InvalidRequestError, field, value, shown, allowed)


@pytest.mark.parametrize(("field", "value", "shown", "allowed"), BAD_SPECULATION, ids=_name)
def test_bad_speculation(field: str, value: object, shown: str, allowed: str) -> None:
    assert_refused(SpeculationParams, InvalidRequestError, field, value, shown, allowed)


@pytest.mark.parametrize(("field", "value", "shown", "allowed"), BAD_CONFIG, ids=_name)
def test_bad_config(field: str, value: object, shown: str, allowed: str) -> None:
    assert_refused(EngineConfig, ConfigError, field, value, shown, allowed)


def test_advice_fits_python_and_the_command_line() -> None:
    for value in (0, -1, "many"):
        with pytest.raises(InvalidRequestError, match=r"A large number goes up to the context"):
            SamplingParams(max_tokens=value)  # type: ignore[arg-type]


def test_every_field_has_a_bad_value() -> None:
    """A new field needs a check, and a line above."""
    for cls, bad in (
        (SamplingParams, BAD_SAMPLING),
        (SpeculationParams, BAD_SPECULATION),
        (EngineConfig, BAD_CONFIG),
    ):
        assert {f.name for f in dataclasses.fields(cls)} == {field for field, *_ in bad}


def test_the_edges_are_allowed() -> None:
    for options in (
        {"temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 1e308},
        {"top_k": 0},
        {"top_k": 2**70},
        {"top_p": 1},
        {"top_p": 1e-300},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"seed": None},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": 2**70},
        {"stop_token_ids": ()},
    ):
        SamplingParams(**options)
    for num in (0, 1, MAX_SPECULATIVE_TOKENS):
        SpeculationParams(num_speculative_tokens=num)
    for verification in VERIFICATIONS:
        allows_trees = SpeculationParams(verification=verification).allows_trees
        assert allows_trees == (verification != "block")


@pytest.mark.parametrize(
    "ids",
    [[5, 3], (5, 3), range(3, 6, 2), iter([5, 3]), (i for i in (5, 3)), {5: 0, 3: 0}],
    ids=lambda ids: type(ids).__name__,
)
def test_stop_ids_of_any_kind_are_kept(ids: object) -> None:
    kept = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert isinstance(kept, tuple) and sorted(kept) == [3, 5]


def test_greedy_below() -> None:
    assert SamplingParams().is_greedy
    for temperature in (0, 1e-8, 1e-6, GREEDY_BELOW * 0.999):
        assert SamplingParams(temperature=temperature).is_greedy
    for temperature in (GREEDY_BELOW, 1e-4, 1, 100):
        assert not SamplingParams(temperature=temperature).is_greedy


def test_params_are_frozen_and_strict() -> None:
    for params in (SamplingParams(), SpeculationParams(), EngineConfig()):
        field = dataclasses.fields(params)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field, getattr(params, field))
        with pytest.raises(TypeError):
            type(params)(no_such_option=1)
    with pytest.raises(ConfigError, match=r"'no_such', 'other'.*allowed are model, dtype"):
        make_config(EngineConfig, {"no_such": 1, "other": 2, "dtype": "float32"}, "the engine")


def test_numpy_numbers_become_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.75),
        min_p=np.float16(0),
        top_k=np.int32(3),
        seed=np.int64(4),
        max_tokens=np.uint8(5),
        stop_token_ids=np.array([6, 7]),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(0.5, 3, 0.75, 0.0, 4, 5, (6, 7))
    for value in (*dataclasses.astuple(params)[:6], *params.stop_token_ids):
        assert type(value) in (int, float)
    assert type(SpeculationParams("ngram", np.int64(3)).num_speculative_tokens) is int  # type: ignore[arg-type]
    for field in ("temperature", "top_k", "seed", "max_tokens"):
        for value in (np.bool_(True), np.float64(np.nan), np.array([1, 2]), np.complex64(1)):
            with pytest.raises(InvalidRequestError, match=field):
                SamplingParams(**{field: value})


@pytest.mark.parametrize("name", ["nosuch", "a b:C", ":C", "module:", "module:1x", "mod.:C", ""])
def test_unknown_methods_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_method(name)
    assert repr(name) in str(caught.value)
    assert all(method in str(caught.value) for method in method_names())


def test_methods_of_ones_own() -> None:
    check_method("package.module:Class")
    assert drafter_class("foredraft.drafters.ngram:NgramDrafter") is drafter_class("ngram")
    with pytest.raises(InvalidRequestError, match="no module 'no_such_module'"):
        drafter_class("no_such_module:Class")
    with pytest.raises(InvalidRequestError, match="has no 'NoSuch'"):
        drafter_class("foredraft.drafters.ngram:NoSuch")
    for method in METHODS:
        assert drafter_class(method)
