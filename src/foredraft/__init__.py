"""foredraft: lossless speculative decoding. Draft, verify, and know when it pays.

Public names are imported on first use, so that ``import foredraft`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.config import EngineConfig
    from foredraft.engine.async_engine import AsyncEngine
    from foredraft.engine.engine import Engine
    from foredraft.engine.llm import LLM
    from foredraft.engine.outputs import RequestOutput, StreamChunk
    from foredraft.errors import ForedraftError
    from foredraft.grammar import Grammar
    from foredraft.params import SamplingParams, SpeculationParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "foredraft.engine.llm",
    "Engine": "foredraft.engine.engine",
    "EngineConfig": "foredraft.config",
    "ForedraftError": "foredraft.errors",
    "AsyncEngine": "foredraft.engine.async_engine",
    "Grammar": "foredraft.grammar",
    "RequestOutput": "foredraft.engine.outputs",
    "SamplingParams": "foredraft.params",
    "SpeculationParams": "foredraft.params",
    "StreamChunk": "foredraft.engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "ForedraftError",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "SpeculationParams",
    "StreamChunk",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
