"""Features that were read once, kept on disk for the next time that a text is learnt from.

Reading a text costs a pass of the whole target; reading it again from disk costs nothing beside
that. What is kept is rounded to bfloat16, and so is what is not kept, so that it makes no
difference to a run whether there was room. Texts of a batch are kept together or not at all: a run
that was killed and goes on reads what it would have computed. One process writes; others that use
the same folder meanwhile read what it had when they began.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import torch

from foredraft.errors import DataError, said
from foredraft.train.texts import Text

_LOG = logging.getLogger("foredraft")

_WIDTH = 2
"""Bytes of a number."""


class FeatureStore:
    """Rows of texts, in a file that grows up to a bound.

    Args:
        folder: Where they lie, of all owners; made if need be.
        width: Numbers of a row.
        most_bytes: The bound.
        new_bytes: What this run would keep; no more than that is asked of the disk.
        owner: What they are computed by; each has a folder of its own within.

    Raises:
        DataError: It cannot be written to, or the disk has less room than the bound.
    """

    def __init__(
        self, folder: str | Path, width: int, most_bytes: int, new_bytes: int, owner: str
    ) -> None:
        """Take over what lies there."""
        self._all, self._row_bytes = Path(folder), _WIDTH * width
        self._folder = self._all / hashlib.sha256(f"{owner} {width}".encode()).hexdigest()[:16]
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("a")
            self._is_writing = _is_first(self._lock)
            (self._folder / "rows").touch()
            self._take_over()
            self._rows: BinaryIO = (self._folder / "rows").open("r+b", buffering=0)
            self._index = (self._folder / "index").open("a", encoding="utf-8")
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise DataError(
                f"features cannot be kept in {self._folder} ({said(error)})."
            ) from error
        self._most_bytes = min(most_bytes, self._end + new_bytes)
        if self._is_writing and self._end + free < self._most_bytes:
            self.close()
            raise DataError(
                f"{(self._most_bytes - self._end) / 1e9:.3f} GB of features are to be kept in "
                f"{self._all}, and "
                f"{free / 1e9:.3f} GB are free there; allow fewer, or 0 to compute them each time."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._end

    def get(self, text: Text) -> torch.Tensor | None:
        """The rows of a text, bfloat16 [num_tokens, width], if they are kept."""
        place = self._places.get(_name(text))
        if place is None:
            return None
        begin, num_rows = place
        rows = bytearray(num_rows * self._row_bytes)
        try:
            self._rows.seek(begin)
            if self._rows.readinto(rows) != len(rows):  # type: ignore[attr-defined]
                return None
        except OSError:
            return None
        return torch.frombuffer(rows, dtype=torch.bfloat16).view(num_rows, -1)

    def put(self, texts: Sequence[Text], rows: Sequence[torch.Tensor]) -> None:
        """Keep the rows of texts, bfloat16 [num_tokens, width] each: all of them, or none."""
        size = sum(len(part) for part in rows) * self._row_bytes
        if not size or not self._is_writing or self._end + size > self._most_bytes:
            return
        line: dict[str, tuple[int, int]] = {}
        try:
            self._rows.seek(self._end)
            begin = self._end
            for text, part in zip(texts, rows, strict=True):
                data = part.contiguous().view(torch.uint8).numpy().tobytes()
                if self._rows.write(data) != len(data):
                    raise OSError("the disk is full")
                line[_name(text)] = begin, len(part)
                begin += len(part) * self._row_bytes
            self._index.write(json.dumps(line) + "\n")
            self._index.flush()
        except OSError as error:
            _LOG.warning(
                "no more features can be kept in %s (%s); they are computed each time from here on",
                self._folder,
                said(error),
            )
            self._most_bytes = 0
            return
        self._places |= line
        self._end = begin

    def close(self) -> None:
        """Close the files."""
        for file in (self._rows, self._index, self._lock):
            with contextlib.suppress(OSError):  # what could not be written is not kept
                file.close()

    def remove(self) -> None:
        """Close it, and give the disk back."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others keep theirs there
            self._all.rmdir()

    def _take_over(self) -> None:
        """Read the index of what is there."""
        index, size = self._folder / "index", (self._folder / "rows").stat().st_size
        text = index.read_text(encoding="utf-8") if index.is_file() else ""
        whole = []
        for line in text.splitlines():
            try:
                found = {name: (int(a), int(b)) for name, (a, b) in json.loads(line).items()}
            except (ValueError, TypeError, AttributeError):
                break
            end = max((a + b * self._row_bytes for a, b in found.values()), default=0)
            if end > size:
                break
            self._places |= found
            self._end = max(self._end, end)
            whole.append(line)
        if self._is_writing:
            index.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")


def _is_first(lock: TextIO) -> bool:
    """Whether nobody else holds a lock, which is held from here on."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: one process at a time
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has none
        return True
    return True


def _name(text: Text) -> str:
    return hashlib.sha256(text.token_ids.tobytes()).hexdigest()[:32]
