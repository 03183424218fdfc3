"""Where foredraft keeps what it can make again: converted models, measured profiles."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$FOREDRAFT_CACHE``, else ``foredraft`` in the user's cache folder."""
    if explicit := os.environ.get("FOREDRAFT_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "foredraft"
