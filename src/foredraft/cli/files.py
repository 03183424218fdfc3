"""What a command will write when its work is done: checked before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from foredraft.errors import InvalidRequestError


def check_output(option: str, path: Path | None) -> None:
    """Raise ``InvalidRequestError`` unless a file can be written there; ``None`` is no file.

    Args:
        option: Its name, for the sentence.
        path: Where it is to be written.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        problem = "that is a folder; name a file in it"
    elif not folder.is_dir():
        problem = f"but there is no folder {folder}; make it, or choose another file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "but it may not be written; choose another file"
    else:
        return
    raise InvalidRequestError(f"{option} is {path}, {problem}.")


def check_folder(option: str, path: Path) -> None:
    """Make a folder that a command will write to; ``InvalidRequestError`` where that cannot be.

    Args:
        option: Its name, for the sentence.
        path: The folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"{option} is {path}, which cannot be made ({error.strerror}); name a folder that can."
        ) from error
    if not os.access(path, os.W_OK):
        raise InvalidRequestError(
            f"{option} is {path}, but it may not be written; choose another folder."
        )
