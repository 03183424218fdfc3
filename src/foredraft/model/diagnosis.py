"""What is wrong with a model that Transformers did not load, in a sentence that names the file."""

from __future__ import annotations

import json
import threading
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HUB_PATIENCE_S = 5


def why_offline() -> str | None:
    """Say why the model hub cannot be asked, or ``None`` if it answers.

    One request decides: Transformers itself would repeat each of many requests for half a minute.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome = [f"no answer within {_HUB_PATIENCE_S} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_HUB_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - a proxy, DNS, TLS: each has errors of its own
            outcome[0] = f"{type(error).__name__}: {squeezed(error)}"
        else:
            outcome.clear()

    # In a thread, for looking up the name is under no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_PATIENCE_S)
    return f"{constants.ENDPOINT} does not answer ({outcome[0]})" if outcome else None


def cached_file(source: str, file_name: str) -> Path | None:
    """Return a file of a model, in its folder or in the hub's cache, or ``None``."""
    if Path(source).is_dir():
        path = Path(source) / file_name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(source, file_name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def hub_error(source: str, offline: str | None, error: Exception) -> ModelLoadError:
    """Say why a hub name gave nothing: it cannot be asked (``offline``), or it refused."""
    otherwise = "pass a folder, a .gguf file, or 'default' for the embedded model"
    if offline is not None:
        return ModelLoadError(
            f"{source!r} is no local path and not in the model hub's cache, and {offline}; check "
            f"the spelling and the network, or {otherwise}."
        )
    return ModelLoadError(
        f"{source!r} is no local path, and the model hub did not give it ({squeezed(error)}); "
        f"check the spelling and whether your account may read it, or {otherwise}."
    )


def config_error(file: Path, error: Exception) -> ModelLoadError:
    """Say what is wrong with a ``config.json`` that Transformers cannot use."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        return ModelLoadError(f"{file} is no valid JSON ({problem}); download the model again.")
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(model_type, str):
        return ModelLoadError(
            f"{file} names no model_type, so it is not a model's; check that the folder is one."
        )
    if model_type not in CONFIG_MAPPING and "auto_map" in content:
        return ModelLoadError(
            f"{file} asks to run code that comes with the model (model type {model_type!r}); "
            "foredraft runs Transformers' own classes only. Choose a model that Transformers knows."
        )
    if model_type not in CONFIG_MAPPING:
        return ModelLoadError(
            f"{file} is of model type {model_type!r}, which Transformers "
            f"{transformers.__version__} does not know; install a newer one, or choose another "
            "model."
        )
    return ModelLoadError(
        f"{file} cannot be used ({type(error).__name__}: {squeezed(error)}); download the model "
        "again."
    )


def weights_error(
    name: str, source: str, config: PretrainedConfig, error: Exception
) -> ModelLoadError:
    """Say what is wrong with weights that Transformers cannot load, and with which file."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ModelLoadError(
            f"{name} ({config.model_type}) is no causal language model, or none that Transformers "
            "has a class for; choose another."
        )
    index = cached_file(source, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if index is not None:
        try:
            files = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ModelLoadError(f"{index} cannot be read; download the model again.")
    missing = [f for f in files if cached_file(source, f) is None]
    has_others = any(Path(source).glob("pytorch_model*"))
    if missing and Path(source).is_dir() and not has_others:
        return ModelLoadError(
            f"the weights of {name} lack {len(missing)} of {counted(files, 'file')} (the first is "
            f"{missing[0]}); download the model again."
        )
    from safetensors import SafetensorError, safe_open

    for file_name in files:
        file = cached_file(source, file_name)
        if file is None:
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as problem:
            return ModelLoadError(
                f"{file} is damaged or cut short ({squeezed(problem)}); download the model again."
            )
    return ModelLoadError(
        f"{name} cannot be loaded ({type(error).__name__}: {squeezed(error)}); it may not be a "
        "causal language model, or a file of it is damaged."
    )


def counted(things: Sized, noun: str) -> str:
    """Return how many there are: ``1 tensor``, ``2 tensors``."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def squeezed(error: BaseException) -> str:
    """An error's message on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
