"""Engine options: strict, frozen, and refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from foredraft.config import DTYPES, EngineConfig, make_config
from foredraft.errors import ConfigError, ForedraftError, InvalidRequestError
from foredraft.registry import check_method, drafter_class, method_names

BAD: list[tuple[str, Any]] = [
    *(("model", value) for value in ("", None, 5, b"x", ["x"])),
    *(("dtype", value) for value in ("", "fp16", "Float32", "torch.float32", None, 32)),
    *(
        ("device", value)
        for value in ("", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0,1", None, 0)
    ),
    *(("max_num_requests", value) for value in (0, -1, 1.5, "4", True, None)),
    *(("max_num_batched_tokens", value) for value in (0, -1, 1.5, "4", True, None)),
    *(("max_model_len", value) for value in (0, -1, 1.5, "4", True)),
    *(("kv_cache_gb", value) for value in (0, -1, 0.0, float("nan"), float("inf"), "4", True, 1j)),
    *(("drafter_options", value) for value in (None, [], "ngram", 5)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} is ") and "allowed is" in text and "\n" not in text
    assert isinstance(caught.value, ForedraftError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"dtype": dtype} for dtype in DTYPES),
        *({"device": device} for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:12")),
        {"max_model_len": 1, "max_num_requests": 1, "max_num_batched_tokens": 1},
        {"kv_cache_gb": 0.001},
        {"kv_cache_gb": 4},
        {"drafter_options": {"ngram": {"max_ngram_len": 3}}},
    ],
)
def test_good_values_are_kept(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    for name, value in options.items():
        assert getattr(config, name) == value


def test_it_is_frozen() -> None:
    config = EngineConfig()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


def test_an_unknown_key_names_all_that_are_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(EngineConfig, {"modle": "x", "dtpye": "y", "dtype": "auto"}, "the engine")
    assert str(caught.value).startswith("the engine has no option 'dtpye', 'modle'; allowed are ")
    for field in dataclasses.fields(EngineConfig):
        assert field.name in str(caught.value)
    assert make_config(EngineConfig, {"dtype": "float64"}, "x") == EngineConfig(dtype="float64")


def test_plain_decoding_takes_no_options() -> None:
    for options in ({}, {"max_ngram_len": 3}):
        with pytest.raises(ConfigError, match="'none', which is plain decoding and takes no opt"):
            EngineConfig(drafter_options={"ngram": {}, "none": options})


def test_methods_are_known_by_name_and_otherwise_refused() -> None:
    assert method_names()[0] == "none" and "ngram" in method_names()
    for name in (*method_names(), "package.module:Class"):
        check_method(name)
    for name in ("", "ngrams", "NGRAM", "module:", ":Class", "a b:C", "module:Class:x", "a..b:C"):
        with pytest.raises(InvalidRequestError, match="allowed is one of none, auto, draft-model"):
            check_method(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_module_here:Class", "no module 'no_such_module_here'"),
        ("json:NoSuchClass", "has no 'NoSuchClass'"),
        ("json:dumps", "is no drafter"),
        ("json:JSONDecoder", "is no drafter"),
    ],
)
def test_a_method_of_your_own_must_be_a_drafter(name: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        drafter_class(name)


def test_options_and_names_are_checked_without_pytorch() -> None:
    """So that the command line can refuse a wrong one at once."""
    code = (
        "import sys\n"
        "import foredraft, foredraft.config, foredraft.params, foredraft.registry\n"
        "import foredraft.model.source, foredraft.cli.main\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
