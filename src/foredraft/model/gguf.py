"""GGUF files: converted once to a Hugging Face folder in the user's cache, checked at every load.

The copy is written beside its final place and renamed there, so it is whole or absent; a manifest
holds the SHA-256 of each of its files, and a copy that does not match is made again. The copy holds
the weights in the dtype asked for, under a name that depends on the file's own SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ModelLoadError

_MANIFEST = "foredraft-manifest.json"
_FORMAT = 1


def cache_folder() -> Path:
    """Where converted copies lie: ``$FOREDRAFT_CACHE``, else ``foredraft`` in the user's cache."""
    if explicit := os.environ.get("FOREDRAFT_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "foredraft"


def converted_folder(file: Path, dtype: torch.dtype, notify: Callable[[str], None]) -> Path:
    """Return the folder with the converted copy of a GGUF file, making it if need be.

    Args:
        file: The ``.gguf`` file.
        dtype: Of the copy's weights.
        notify: Told, in a sentence, what takes long.

    Raises:
        ModelLoadError: The file is not a GGUF file that Transformers can convert, or the cache folder
            cannot be written.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelLoadError(
                f"{file} is not a GGUF file (it does not begin with 'GGUF'); download it again or pass "
                "another file."
            )
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    name = f"{file.stem}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        problem = _damage(folder)
        if problem is None:
            return folder
        notify(f"The converted copy of {file.name} is damaged ({problem}); converting it again.")
    else:
        notify(f"Converting {file.name} once; the copy is kept in {folder.parent}.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError as error:
        raise ModelLoadError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}); set FOREDRAFT_CACHE "
            "to a folder that can."
        ) from error
    try:
        _convert(file, dtype, staging)
        _write_manifest(staging)
        _put_in_place(staging, folder)
    except OSError as error:
        raise ModelLoadError(
            f"the converted copy of {file.name} cannot be written to {folder.parent} ({error}); free some "
            "space, or set FOREDRAFT_CACHE to another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location: dict[str, Any] = {"gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **location)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), dtype=torch.float32, **location
        )
    except Exception as error:  # noqa: BLE001 - readers of broken files raise every kind there is
        raise ModelLoadError(
            f"{file} cannot be converted ({type(error).__name__}: {_first_line(error)}); it is damaged, or of "
            "an architecture that Transformers does not read from GGUF. Pass its Hugging Face folder."
        ) from error
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    kept: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:  # tied weights are stored once, and tied again at load
            continue
        seen.add(tensor.data_ptr())
        kept[name] = tensor.to(dtype).contiguous()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


def _write_manifest(folder: Path) -> None:
    files = {p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.is_file()}
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a converted copy, or ``None`` if it is whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        if manifest["format"] != _FORMAT:
            return "it is of another version"
    except (OSError, ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != digest:
            return f"{name} does not match its checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _put_in_place(staging: Path, folder: Path) -> None:
    """Rename ``staging`` to ``folder``; whoever comes second to a whole copy leaves it alone."""
    if folder.exists():
        if _damage(folder) is None:
            return
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
        folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        staging.rename(folder)
    except OSError:
        if not folder.is_dir() or _damage(folder) is not None:
            raise
