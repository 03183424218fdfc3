"""Features that were read once, kept on disk for the next time that a text is learnt from.

Reading a text costs a pass of the whole target; reading it again from disk costs nothing beside
that. What is kept is rounded to bfloat16, and so is what is not kept, so that it makes no
difference to a run whether there was room. Texts of a batch are kept together or not at all: a run
that was killed and goes on reads what it would have computed. One process writes; others that use
the same folder meanwhile read what it had when they began.
"""

from __future__ import annotations

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
        folder: Where they lie; made if need be.
        width: Numbers of a row.
        most_bytes: The bound.
        owner: What they were computed by. What another owner has left is dropped.

    Raises:
        DataError: It cannot be written to, or the disk has less room than the bound.
    """

    def __init__(self, folder: str | Path, width: int, most_bytes: int, owner: str) -> None:
        """Take over what lies there."""
        self._folder, self._row_bytes = Path(folder), _WIDTH * width
        self._most_bytes = most_bytes
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("a")
            self._is_writing = _is_first(self._lock)
            self._take_over(f"{owner} {width}")
            self._rows: BinaryIO = (self._folder / "rows").open("r+b")
            self._index = (self._folder / "index").open("a", encoding="utf-8")
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise DataError(
                f"features cannot be kept in {self._folder} ({said(error)})."
            ) from error
        if self._is_writing and self._end + free < most_bytes:
            self.close()
            raise DataError(
                f"{most_bytes / 1e9:.3f} GB of features are to be kept in {self._folder}, and "
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
        self._rows.seek(begin)
        if self._rows.readinto(rows) != len(rows):  # type: ignore[attr-defined]
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
                self._rows.write(part.contiguous().view(torch.uint8).numpy().tobytes())
                line[_name(text)] = begin, len(part)
                begin += len(part) * self._row_bytes
            self._rows.flush()
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
        self._rows.close()
        self._index.close()
        self._lock.close()

    def remove(self) -> None:
        """Close it, and give the disk back."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_over(self, owner: str) -> None:
        """Read the index of what the same owner left; begin anew where it is another's."""
        mark, index, rows = (self._folder / name for name in ("owner", "index", "rows"))
        if not mark.is_file() or mark.read_text(encoding="utf-8") != owner:
            if not self._is_writing:
                raise OSError("another run that reads other features is writing there")
            mark.unlink(missing_ok=True)
            index.unlink(missing_ok=True)
            rows.write_bytes(b"")
            mark.write_text(owner, encoding="utf-8")
            return
        size = rows.stat().st_size
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
    except OSError:
        return False
    return True


def _name(text: Text) -> str:
    return hashlib.sha256(text.token_ids.tobytes()).hexdigest()[:32]
