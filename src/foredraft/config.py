"""Options of an engine, frozen and strict: a bad one raises before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ConfigError
from foredraft.registry import PLAIN

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

KV_LAYOUTS = ("auto", "contiguous", "blocks")
ATTENTIONS = ("auto", "sdpa", "flex")
CUDA_GRAPHS = ("auto", "on", "off")

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine.

    Attributes:
        model: ``default`` (the embedded model), a Hugging Face folder or hub name, or a ``.gguf``.
        dtype: ``auto`` takes bfloat16 where the machine computes in it, else float32.
        device: ``auto`` takes CUDA where there is one, else the CPU; or ``cpu``, ``cuda``,
        ``cuda:1``.
        max_num_requests: Most requests that run at once; the rest wait.
        max_model_len: Most tokens of prompt and output together; ``None`` takes the model's own.
        max_num_batched_tokens: Most prompt tokens computed in one step.
        kv_cache_gb: Most memory for keys and values; ``None`` takes a share of what is free.
        kv_layout: ``contiguous`` keeps each request's keys and values in one stretch, and copies
            what texts have in common; ``blocks`` keeps them in blocks that are shared. ``auto``
            takes contiguous ones, but where ``attention`` is ``flex``.
        attention: ``sdpa``, the reference; or ``flex``, FlexAttention, which reads blocks in place
            and is made for CUDA. ``auto`` takes ``sdpa``.
        cuda_graphs: Whether decode passes are recorded and played again: ``on`` needs ``attention``
            to be ``flex``; ``auto`` is on with it on CUDA. Elsewhere than on CUDA ``on`` fills
            passes up alike and runs them, which saves nothing: it is for tests.
        reuse_prefixes: Keep the keys and values of ended texts, within that memory, for requests
            that begin alike.
        tensor_parallel_size: Over how many processes, started by torchrun, the model's layers are
            split.
        drafter_options: Options by method name, e.g. ``{"ngram": {"max_ngram_len": 3}}``.
    """

    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"
    max_num_requests: int = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    kv_cache_gb: float | None = None
    kv_layout: str = "auto"
    attention: str = "auto"
    cuda_graphs: str = "auto"
    reuse_prefixes: bool = True
    tensor_parallel_size: int = 1
    drafter_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {self.model!r}; allowed is 'default', a folder, a hub name or a .gguf "
                "file."
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed is one of {', '.join(DTYPES)}.")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device is {self.device!r}; allowed is 'auto', 'cpu' or 'cuda[:index]'. Leave it "
                "out for 'auto'."
            )
        for name in (
            "max_num_requests",
            "max_num_batched_tokens",
            "max_model_len",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer of 1 or more.")
        gigabytes = self.kv_cache_gb
        if gigabytes is not None and (
            isinstance(gigabytes, bool)
            or not isinstance(gigabytes, (int, float))
            or not math.isfinite(gigabytes)
            or gigabytes <= 0
        ):
            raise ConfigError(
                f"kv_cache_gb is {gigabytes!r}; allowed is a number above 0, or None for a share "
                "of the free memory."
            )
        for name, allowed in (
            ("kv_layout", KV_LAYOUTS),
            ("attention", ATTENTIONS),
            ("cuda_graphs", CUDA_GRAPHS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; allowed is one of {', '.join(allowed)}.")
        if self.attention == "flex" and self.kv_layout == "contiguous":
            raise ConfigError(
                "attention is 'flex', which reads blocks, and kv_layout is 'contiguous'; leave one "
                "of them out."
            )
        if self.cuda_graphs == "on" and (self.attention != "flex" or self.tensor_parallel_size > 1):
            raise ConfigError(
                "cuda_graphs is 'on', which records passes that read blocks in place on one "
                "device; set attention='flex' and leave tensor_parallel_size out, or leave "
                "cuda_graphs out."
            )
        if not isinstance(self.reuse_prefixes, bool):
            raise ConfigError(
                f"reuse_prefixes is {self.reuse_prefixes!r}; allowed is True or False."
            )
        if not isinstance(self.drafter_options, Mapping):
            raise ConfigError(
                f"drafter_options is {self.drafter_options!r}; allowed is a mapping of method to "
                "options."
            )
        if PLAIN in self.drafter_options:
            raise ConfigError(
                f"drafter_options holds {PLAIN!r}, which is plain decoding and takes no options; "
                "remove it."
            )


def make_config(cls: type[Any], options: Mapping[str, Any], owner: str) -> Any:
    """Build the config ``cls`` from ``options``; an unknown key raises ``ConfigError``."""
    known = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"{owner} has no option {', '.join(map(repr, unknown))}; allowed are "
            f"{', '.join(known)}."
        )
    return cls(**options)
