"""GGUF files: converted once to a Hugging Face folder in the user's cache, checked at every load.

The copy is written beside its final place and renamed there, so it is whole or absent; a manifest
holds the SHA-256 of each of its files, and a copy that does not match is made again. The copy holds
the weights in the dtype asked for, under a name that depends on the file's own SHA-256. One process
at a time makes a copy, under a lock; the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from foredraft.cache import cache_folder
from foredraft.errors import ModelLoadError
from foredraft.model.diagnosis import counted, squeezed

_MANIFEST = "foredraft-manifest.json"
_FORMAT = 1
_STAGING_SUFFIX = ".part"
_MOST_STEM = 100


def converted_folder(file: Path, dtype: torch.dtype, notify: Callable[[str], None]) -> Path:
    """Return the folder with the converted copy of a GGUF file, making it if need be.

    Args:
        file: The ``.gguf`` file.
        dtype: Of the copy's weights.
        notify: Told, in a sentence, what takes long.

    Raises:
        ModelLoadError: The file is not a GGUF file that Transformers can convert, or the cache
            folder cannot be written.
    """
    digest = _gguf_digest(file)
    name = f"{file.stem[:_MOST_STEM]}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"
    folder = cache_folder() / "models" / name
    if folder.is_dir() and _damage(folder) is None:
        _tell_note(folder, notify)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(
            folder, lambda: notify(f"Another process converts {file.name}; waiting for it.")
        ):
            _make_copy(file, dtype, folder, notify)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(
            f"the converted copy of {file.name} cannot be kept in {folder.parent} ({reason}); free "
            "some space there, or set FOREDRAFT_CACHE to a folder that can be written."
        ) from error
    _tell_note(folder, notify)
    return folder


def _gguf_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelLoadError(
                    f"{file} is not a GGUF file (it does not begin with 'GGUF'); download it again "
                    "or pass another file."
                )
            stream.seek(0)
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(
            f"{file} cannot be read ({error.strerror or error}); check its permissions."
        ) from error


def _staging(folder: Path) -> Path:
    """Where a copy is made before it is renamed to ``folder``."""
    return folder.parent / f".{folder.name}{_STAGING_SUFFIX}"


@contextmanager
def _lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a copy; the system gives it back when a process dies."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_copy(file: Path, dtype: torch.dtype, folder: Path, notify: Callable[[str], None]) -> None:
    """Convert ``file`` to ``folder``, unless that is whole by now. The lock is held."""
    if folder.is_dir():
        problem = _damage(folder)
        if problem is None:  # another process made it in the meantime
            return
        notify(f"The converted copy of {file.name} is damaged ({problem}); converting it again.")
    else:
        notify(f"Converting {file.name} once; the copy is kept in {folder.parent}.")
    _remove_leftovers(folder)
    staging = _staging(folder)
    staging.mkdir()
    try:
        _convert(file, dtype, staging)
        _write_manifest(staging, _lost_scaling(file))
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what conversions left behind that were killed; those still running are locked."""
    for path in folder.parent.iterdir():
        name = path.name.removeprefix(".").removesuffix(_STAGING_SUFFIX)
        if path != _staging(folder.parent / name):
            continue
        if path == _staging(folder):  # locked by us
            shutil.rmtree(path)
            continue
        try:
            with FileLock(folder.parent / f".{name}.lock", timeout=0):
                shutil.rmtree(path, ignore_errors=True)
        except Timeout:
            continue


@contextmanager
def _no_bar() -> Iterator[None]:
    """Hide the bar of Transformers' GGUF reader, which no switch of Transformers turns off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)
    if bar is None:
        yield
        return
    reader.tqdm = lambda tensors, **options: tensors
    try:
        yield
    finally:
        reader.tqdm = bar


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with _no_bar():
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **location)
            model, report = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=torch.float32, output_loading_info=True, **location
            )
    except ImportError as error:
        raise ModelLoadError(
            f"{file} cannot be converted without a package that is not installed "
            f"({squeezed(error)}); install it, or pass the model's Hugging Face folder."
        ) from error
    except Exception as error:  # readers of broken files raise every kind there is
        raise ModelLoadError(
            f"{file} cannot be converted ({type(error).__name__}: {squeezed(error)}); it is "
            "damaged or cut short, or of an architecture that Transformers does not read from "
            "GGUF. Download it again, or pass the model's Hugging Face folder."
        ) from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelLoadError(
            f"{file} lacks {counted(missing, 'tensor')} of its model (the first is {missing[0]}); "
            "download it again, or pass the model's Hugging Face folder."
        )
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
    for key in ("gguf_file", "is_local", "local_files_only"):  # how it was loaded, not what it is
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)
    # safetensors writes for the owner alone; a cache may be shared.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _lost_scaling(file: Path) -> str | None:
    """Say which rotary scaling Transformers' reader leaves out (it keeps that of gpt-oss alone)."""
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    kind = value(f"{architecture}.rope.scaling.type")
    has_factors = any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    if architecture == "gpt-oss" or not (has_factors or kind not in (None, "", "none")):
        return None
    return (
        f"{file.name} scales its rotary positions ({kind or 'by a table'}), which Transformers "
        "does not read from GGUF: texts will differ from the original model's. Its Hugging Face "
        "folder has the scaling."
    )


def _tell_note(folder: Path, notify: Callable[[str], None]) -> None:
    note = json.loads((folder / _MANIFEST).read_text(encoding="utf-8")).get("note")
    if note:
        notify(note)


def _write_manifest(folder: Path, note: str | None) -> None:
    files = {p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.is_file()}
    text = json.dumps({"format": _FORMAT, "files": files, "note": note}, indent=1)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a converted copy, or ``None`` if it is whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = dict(manifest["files"])
        if manifest["format"] != _FORMAT:
            return "it is of another version"
    except (OSError, ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    if not {"config.json", "model.safetensors"} <= files.keys():
        return "its manifest is incomplete"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            is_whole = _sha256(path) == digest
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if not is_whole:
            return f"{name} does not match its checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
