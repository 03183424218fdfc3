"""Past responses, kept apart by scope, for suffix drafting across requests; saved and loaded whole.

Each scope has two trees, a young one that grows and an old one. When the store is full, the scope
that was used least recently drops its old tree, and its young one becomes the old: eviction costs
nothing while text is generated, and what goes is always the oldest.

A saved store is one safetensors file: the sequences, and a description that names the tokenizer
they belong to. It is written beside its place, brought to the disk and moved there, so that a file
is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np

from foredraft.drafters.suffix_tree import SEPARATOR, SuffixTree
from foredraft.errors import ConfigError, StoreError
from foredraft.types import Int64Array

_KIND = "foredraft suffix store"
_FORMAT = f"{_KIND} 2"
_HEAD = 1 << 16
"""Bytes of a file that are looked at to tell whether it was ever a store."""

_SCOPE_TOKENS = 64
"""What a scope counts for beside its tokens."""

_END = np.array([SEPARATOR], dtype=np.int64)


class _Scope:
    """The trees of one scope, the young one first."""

    def __init__(self, max_depth: int) -> None:
        self.young = SuffixTree(max_depth)
        self.old: SuffixTree | None = None

    @property
    def num_tokens(self) -> int:
        return _SCOPE_TOKENS + self.young.num_tokens + (self.old.num_tokens if self.old else 0)


class SuffixStore:
    """Trees of past responses by scope.

    Args:
        max_depth: Longest match that is looked for.
        max_tokens: Most tokens over all scopes; at 0 nothing is kept.
    """

    def __init__(self, max_depth: int, max_tokens: int) -> None:
        """Make an empty store."""
        self._max_depth = max_depth
        self._max_tokens = max_tokens
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens and separators held, and 64 for each scope."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tree.num_bytes for name in self._scopes for tree in self._trees(name))

    def add(self, scope: str, token_ids: Int64Array) -> None:
        """Keep a response, int64 [n]; one longer than half the store is cut to its end."""
        half = self._max_tokens // 2 - _SCOPE_TOKENS
        if half < 2 or len(token_ids) == 0:
            return
        before = self._scopes[scope].num_tokens if scope in self._scopes else 0
        found = self._scopes.setdefault(scope, _Scope(self._max_depth))
        self._scopes.move_to_end(scope)
        token_ids = token_ids[-(half - 1) :]
        if found.young.num_tokens + len(token_ids) + 1 > half:
            found.old, found.young = found.young, SuffixTree(self._max_depth)
        found.young.extend(np.concatenate([token_ids, _END]))
        self._num_tokens += found.num_tokens - before
        while self.num_tokens > self._max_tokens:
            self._evict()

    @property
    def longest(self) -> int:
        """Tokens of a response that can be kept; of a longer one its end is."""
        return max(0, self._max_tokens // 2 - _SCOPE_TOKENS - 1)

    def add_once(self, scope: str, token_ids: Int64Array) -> None:
        """Keep a text as a response, unless all of it is there already."""
        token_ids = token_ids[-max(1, self.longest) :]
        if not any(tree.holds(token_ids) for tree in self.trees(scope)):
            self.add(scope, token_ids)

    def trees(self, scope: str) -> list[SuffixTree]:
        """The trees of a scope, the young one first; none where nothing is known."""
        if scope not in self._scopes:
            return []
        self._scopes.move_to_end(scope)
        return self._trees(scope)

    def save(self, path: Path, tokenizer_id: str) -> None:
        """Write the store whole, or leave what is there.

        Args:
            path: The file.
            tokenizer_id: Names the tokenizer that the ids belong to.

        Raises:
            StoreError: It cannot be written.
        """
        from safetensors.numpy import save

        texts = {
            f"{number}.{age}": tree.token_ids.astype(np.int32)
            for number, name in enumerate(self._scopes)
            for age, tree in enumerate(reversed(self._trees(name)))
        }
        scopes = json.dumps(list(self._scopes))
        description = {
            "format": _FORMAT,
            "tokenizer": tokenizer_id,
            "scopes": scopes,
            "sha256": _digest(texts, tokenizer_id, scopes),
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as opened:
                opened.write(save(texts, metadata=description))
                opened.flush()
                os.fsync(opened.fileno())
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise StoreError(f"the suffix store {path} cannot be written ({error}).") from error

    def load(self, path: Path, tokenizer_id: str) -> None:
        """Add what a saved store holds.

        Raises:
            ConfigError: It belongs to another tokenizer, or is no store at all.
            StoreError: It is damaged.
            OSError: It cannot be opened.
        """
        from safetensors import SafetensorError, safe_open

        if path.is_dir():
            raise OSError("it is a folder")
        with path.open("rb") as opened:  # what cannot be opened is not damaged
            head = opened.read(_HEAD)
        if not _was_ours(head):
            raise _other_kind(path)
        try:
            with safe_open(str(path), "numpy") as file:
                description = file.metadata() or {}
                if description.get("format") != _FORMAT:
                    raise ValueError(f"it is {description.get('format')!r}, not {_FORMAT!r}")
                texts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            owner, scopes = description["tokenizer"], description["scopes"]
            if description["sha256"] != _digest(texts, owner, scopes):
                raise ValueError("its checksum does not match")
            names = json.loads(scopes)
        except (SafetensorError, ValueError, KeyError) as error:
            raise StoreError(f"the suffix store {path} is damaged ({error}).") from error
        if owner != tokenizer_id:
            raise ConfigError(
                f"the suffix store {path} was made with another tokenizer than this model's; its "
                "token ids mean other words here. Name another file, or remove it."
            )
        for number, name in enumerate(names):
            for age in range(2):
                ids = texts.get(f"{number}.{age}", np.empty(0)).astype(np.int64)
                for response in np.split(ids, np.nonzero(ids == SEPARATOR)[0] + 1):
                    self.add(name, response[:-1])

    def _trees(self, name: str) -> list[SuffixTree]:
        scope = self._scopes[name]
        return [tree for tree in (scope.young, scope.old) if tree is not None and tree.num_tokens]

    def _evict(self) -> None:
        """Drop the oldest half of the scope that was used least recently."""
        name, scope = next(iter(self._scopes.items()))
        before = scope.num_tokens
        if scope.old is None and len(self._scopes) > 1:
            del self._scopes[name]
            self._num_tokens -= before
        else:
            scope.old = None
            self._num_tokens -= before - scope.num_tokens


def _other_kind(path: Path) -> ConfigError:
    return ConfigError(
        f"the suffix store {path} is a file of another kind; name another file, or one that is not "
        "there yet."
    )


def _was_ours(head: bytes) -> bool:
    """Whether a file begins as one of ours, be it damaged: then it is set aside, and no other is.

    An empty file, or one of zeros, is what a machine leaves that stopped while it wrote.
    """
    if len(head) <= 8:  # a piece of the length that a store begins with
        return len(head) < 3 or b"\0" in head
    begin = b'{"__metadata__":'
    length = int.from_bytes(head[:8], "little")
    if (head[8:].startswith(begin) or begin.startswith(head[8:])) and (
        length == 0 or len(head) < min(8 + length, _HEAD)
    ):
        return True  # cut off within its description
    marks = (b'"sha256"', b'"tokenizer"', b'"scopes"')
    has_kind = _KIND.encode() in head
    return has_kind or not head.strip(b"\0") or sum(mark in head for mark in marks) >= 2


def _digest(texts: dict[str, np.ndarray], tokenizer_id: str, scopes: str) -> str:
    digest = hashlib.sha256(f"{tokenizer_id}\0{scopes}\0".encode())
    for name in sorted(texts):
        digest.update(name.encode() + b"\0" + texts[name].tobytes())
    return digest.hexdigest()
