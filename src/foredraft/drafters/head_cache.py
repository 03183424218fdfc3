"""What a head keeps of each request: keys and values of its layer, and features not yet read.

Row ``r`` of a slot is the pair of token ``first + r``'s feature and the token after it. Rows made
from the target's own features stay; rows of a draft, made from the head's own outputs, lie behind
them and are written over.

Texts that have ended are kept for a while, for requests that begin alike: the target's features of
a beginning that it did not compute again are nowhere to be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from foredraft.heads.recurrent import RecurrentHead
from foredraft.model.kv_cache import ContiguousKVCache, LayerShape
from foredraft.types import Int64Array
from foredraft.upload import upload

_NONE = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class HeadState:
    """What is kept of a request.

    Attributes:
        slot: Of the cache.
        first: Position of the pair in row 0.
        num_rows: Rows made from true features.
        features: [n, num_features] each, of the positions that come next.
        num_pending: How many these are together.
        token_ids: int64, the text up to the last pair that was read, and the token after it.
        last: [hidden_size], what the last true row gave.
    """

    slot: int
    first: int = 0
    num_rows: int = 0
    features: list[torch.Tensor] = field(default_factory=list)
    num_pending: int = 0
    token_ids: Int64Array = field(default_factory=lambda: _NONE)
    last: torch.Tensor | None = None

    @property
    def next_position(self) -> int:
        """The position whose feature comes next."""
        return self.first + self.num_rows + self.num_pending

    def begin(self, position: int) -> None:
        """Begin anew at a position."""
        self.first, self.num_rows, self.num_pending = position, 0, 0
        self.features.clear()
        self.token_ids, self.last = _NONE, None

    def keep(self, num_rows: int) -> None:
        """Go back to the first rows; what was not read yet is dropped."""
        self.num_rows = num_rows
        self.num_pending = 0
        self.features.clear()
        self.token_ids = self.token_ids[: self.first + num_rows + 1]
        self.last = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one request to run.

    Attributes:
        state: Whose.
        hidden: [n, hidden_size].
        token_ids: int64 [n], the tokens beside them.
        positions: int64 [n], rotary.
        first: Row of the slot where the first of them is written.
        seen: bool [n, num_rows of the draft so far], which rows from ``base`` on each of them sees,
            itself too; ``None`` where they are a chain that sees all before it.
        base: Rows before this one are seen by all.
    """

    state: HeadState
    hidden: torch.Tensor
    token_ids: Int64Array
    positions: Int64Array
    first: int
    base: int
    seen: np.ndarray | None = None


class HeadCache:
    """Runs a head's layer over rows of many requests.

    Args:
        head: The head, on its device.
        embed: The target's embedding.
        num_slots: Most requests and ended texts together.
        capacity: Rows of a slot.
    """

    def __init__(
        self, head: RecurrentHead, embed: torch.nn.Module, num_slots: int, capacity: int
    ) -> None:
        """Reserve the slots; on a CPU no memory is taken yet."""
        weight = next(head.parameters())
        self.head = head
        self.embed = embed
        self.dtype, self.device = weight.dtype, weight.device
        layer = LayerShape(*head.kv_shape)
        self._cache = ContiguousKVCache([layer], num_slots, capacity, self.dtype, self.device)
        self.capacity = capacity

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values in use."""
        return self._cache.bytes_in_use

    @property
    def num_free_slots(self) -> int:
        """Slots not taken."""
        return self._cache.num_free_slots

    def allocate(self) -> HeadState:
        """A state with a slot of its own."""
        return HeadState(self._cache.allocate())

    def free(self, state: HeadState) -> None:
        """Give its slot back."""
        self._cache.free(state.slot)

    def copy(self, source: HeadState, target: HeadState, num_rows: int) -> None:
        """Let a state that is empty begin with the first rows of another."""
        self._cache.copy_rows(source.slot, target.slot, num_rows)
        target.first, target.num_rows = source.first, num_rows
        target.token_ids = source.token_ids[: source.first + num_rows + 1]

    @torch.inference_mode()
    def run(self, parts: Sequence[Rows]) -> list[torch.Tensor]:
        """Run the layer once over all rows; return what it gave, [n, hidden_size] each."""
        sizes = [len(part.token_ids) for part in parts]
        most = max(sizes)
        ends = [part.first + size for part, size in zip(parts, sizes, strict=True)]
        num_keys = max(ends)
        batch = len(parts)
        ids = np.zeros((batch, most), dtype=np.int64)
        positions = np.zeros((batch, most), dtype=np.int64)
        seen = np.zeros((batch, most, num_keys), dtype=np.bool_)
        for index, (part, size, end) in enumerate(zip(parts, sizes, ends, strict=True)):
            self._cache.reserve(part.state.slot, part.first, end)
            ids[index, :size], positions[index, :size] = part.token_ids, part.positions
            own = seen[index]
            own[:, : part.base] = True
            if part.seen is None:
                own[:size, part.first : end] = np.tri(size, dtype=np.bool_)
            else:
                own[:size, part.base : part.base + part.seen.shape[1]] = part.seen
            own[size:] = own[size - 1]  # a row that sees nothing would be NaN
        hidden = parts[0].hidden.new_zeros(batch, most, parts[0].hidden.shape[-1])
        for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            hidden[index, :size] = part.hidden
        embeds = self.embed(upload(ids, self.device)).to(self.dtype)
        mask = upload(seen, self.device)[:, None]

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None = None,
        ) -> torch.Tensor:
            keys, values = self._cache.keys(0), self._cache.values(0)
            for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                place = slice(part.first, part.first + size)
                keys[part.state.slot, place] = key[index, :, :size].transpose(0, 1)
                values[part.state.slot, place] = value[index, :, :size].transpose(0, 1)
            if batch == 1:
                slots: slice | list[int] = slice(parts[0].state.slot, parts[0].state.slot + 1)
            else:
                slots = [part.state.slot for part in parts]
            out = functional.scaled_dot_product_attention(
                query,
                keys[slots, :num_keys].transpose(1, 2),
                values[slots, :num_keys].transpose(1, 2),
                attn_mask=mask,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return out.transpose(1, 2).flatten(2)

        rotation = self.head.rotate(upload(positions, self.device))
        out = self.head.level(hidden, embeds, rotation, attend)
        return [out[index, :size] for index, size in enumerate(sizes)]
