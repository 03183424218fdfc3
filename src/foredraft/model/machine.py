"""What figures were measured on: the machine, and the versions of what decides them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from foredraft.model.loader import Target

_SAMPLE = 4096


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "num_cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    found = {"python": platform.python_version()}
    for package in ("foredraft", "torch", "transformers", "numba", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


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
    return {key: described[key] for key in ("cpu", "num_cores", "num_threads", "gpu")}
