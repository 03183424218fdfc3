"""What figures were measured on: the machine, and the model."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch

from foredraft.environment import cpu_name

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_SAMPLE = 4096


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "num_cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def model_hash(target: Target) -> str:
    """SHA-256 of a model's configuration and of a sample of its embedding's weights.

    What a step costs depends on shapes; the sample tells models of one shape apart.
    """
    config = target.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weight = target.model.get_input_embeddings().weight.detach().flatten()
    sample = weight[:: max(1, len(weight) // _SAMPLE)][:_SAMPLE]
    digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def identity(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of :func:`machine` that a measured time depends on."""
    return {key: described.get(key) for key in ("cpu", "num_cores", "num_threads", "gpu")}
