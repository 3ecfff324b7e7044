"""What a decoding state keeps of finished blocks: their slots, or running sums of them.

Axes: b batch, g key/value heads, n positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from linformers.nn.memory import Memory, memory_of_blocks
from linformers.ops.seen import block_owners
from linformers.projections.base import Projection
from linformers.projections.content import Content, add_up, means_of


class Past(Protocol):
    """The finished blocks of each row: all but the last two that it has entered."""

    def columns(self) -> int:
        """The number of slots that :meth:`memory` returns."""
        ...

    def shares(self, features: Tensor) -> Tensor | None:
        """The shares ``(b, g or 1, n, k)`` that :meth:`retire` needs, from ``features`` ``(b, n, ch)``; None if it needs none."""
        ...

    def retire(
        self, rows: Tensor, block: Tensor, keys: Tensor, values: Tensor, real: Tensor, shares: Tensor | None
    ) -> None:
        """Compress a finished block of some rows.

        Args:
            rows: ``(r,)``, indices in the batch.
            block: ``(r,)``, which block it is.
            keys: ``(r, g, c, d)``.
            values: ``(r, g, c, d)``.
            real: ``(r, c)``, True where a token is real.
            shares: ``(r, g or 1, c, k)``, what :meth:`shares` returned for it.
        """
        ...

    def prefill(
        self, keys: Tensor, values: Tensor, finished: Tensor, keep: Tensor | None, shares: Tensor | None
    ) -> None:
        """Compress the finished blocks of a whole prompt ``(b, g, n, d)``: the first ``finished`` ``(b,)`` positions of each row."""
        ...

    def memory(self, blocks: Tensor) -> Memory:
        """The slots of the first ``blocks`` ``(b,)`` blocks of each row, which are all that it has finished."""
        ...

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was."""
        ...


@dataclass
class FinishedSlots:
    """Slots of each finished block, made by a projection of c x r that all blocks share.

    Attributes:
        slots: r, how many a block has.
        keys: ``(b, g, (m - 2) r, d)``: of all m blocks of the longest input but the last two.
        values: the same.
        real: ``(b, (m - 2) r)``, False where a slot holds no real token.
        count: ``(b, (m - 2) r)``, how many it holds.
    """

    projection: Projection
    slots: int
    keys: Tensor
    values: Tensor
    real: Tensor
    count: Tensor

    def columns(self) -> int:
        return self.keys.shape[2]

    def shares(self, features: Tensor) -> None:
        return None

    def retire(
        self, rows: Tensor, block: Tensor, keys: Tensor, values: Tensor, real: Tensor, shares: Tensor | None
    ) -> None:
        r, room = self.slots, self.keys.shape[2]
        if r == 0:
            return
        if int(block.max() + 1) * r > room:
            c = self.projection.max_len
            raise ValueError(
                f"got a token past position {int(block.max() + 2) * c}, but this state holds {room // r + 2} blocks of {c}; "
                "build the model with a longer maximum length"
            )
        slot = (block * r)[:, None] + torch.arange(r, device=rows.device)  # (rows, r)
        new = memory_of_blocks(keys, values, self.projection, r, None if real.all() else real)
        self.keys[rows[:, None], :, slot] = new.keys.transpose(1, 2).to(self.keys.dtype)  # autocast may differ
        self.values[rows[:, None], :, slot] = new.values.transpose(1, 2).to(self.values.dtype)
        self.real[rows[:, None], slot] = True if new.keep is None else new.keep
        self.count[rows[:, None], slot] = tokens_of_blocks(real, self.projection.max_len, r)

    def prefill(
        self, keys: Tensor, values: Tensor, finished: Tensor, keep: Tensor | None, shares: Tensor | None
    ) -> None:
        c = self.projection.max_len
        # Of the longest row; other rows do not see the blocks that they have not finished.
        most = max(0, -(-keys.shape[2] // c) - 2) * c
        if not most or not self.slots:
            return
        kept = None if keep is None else keep[:, :most]
        new = memory_of_blocks(keys[:, :, :most], values[:, :, :most], self.projection, self.slots, kept)
        if new.keep is not None:
            self.real[:, : new.keep.shape[1]] = new.keep
        self.keys[:, :, : new.keys.shape[2]] = new.keys
        self.values[:, :, : new.values.shape[2]] = new.values
        real = torch.ones(len(keys), most, dtype=torch.bool, device=keys.device) if kept is None else kept
        self.count[:, : new.keys.shape[2]] = tokens_of_blocks(real, c, self.slots)

    def memory(self, blocks: Tensor) -> Memory:
        owner = torch.arange(self.keys.shape[2], device=self.keys.device) // max(1, self.slots)
        return Memory(self.keys, self.values, self.real & (owner < blocks[:, None]))

    def reorder(self, index: Tensor) -> None:
        self.keys, self.values, self.real, self.count = (
            x.index_select(0, index) for x in (self.keys, self.values, self.real, self.count)
        )


@dataclass
class FinishedSums:
    """Running sums of content slots over the finished blocks: constant in size, whatever the length.

    Attributes:
        keys: ``(b, g, k, d)``, keys weighted by their shares, added up in float32.
        values: the same.
        count: ``(b, g or 1, k)``, the sum of the shares.
        dtype: that of the slots.
    """

    projection: Content
    keys: Tensor
    values: Tensor
    count: Tensor
    dtype: torch.dtype

    def columns(self) -> int:
        return self.keys.shape[2]

    def shares(self, features: Tensor) -> Tensor:
        return self.projection.for_input(features, None, self.keys.shape[2]).shares

    def retire(
        self, rows: Tensor, block: Tensor, keys: Tensor, values: Tensor, real: Tensor, shares: Tensor | None
    ) -> None:
        if shares is None:
            raise TypeError("content slots need the shares of a finished block")
        shares = shares.masked_fill(~real[:, None, :, None], 0.0)
        self.keys = self.keys.index_add(0, rows, add_up(shares, keys))
        self.values = self.values.index_add(0, rows, add_up(shares, values))
        self.count = self.count.index_add(0, rows, shares.sum(2))

    def prefill(
        self, keys: Tensor, values: Tensor, finished: Tensor, keep: Tensor | None, shares: Tensor | None
    ) -> None:
        if shares is None:
            raise TypeError("content slots need the shares of a prompt")
        counted = torch.arange(keys.shape[2], device=keys.device) < finished[:, None]  # (b, n)
        counted = counted if keep is None else counted & keep
        shares = shares.masked_fill(~counted[:, None, :, None], 0.0)
        self.keys, self.values, self.count = add_up(shares, keys), add_up(shares, values), shares.sum(2)

    def memory(self, blocks: Tensor) -> Memory:
        slots, values = (means_of(x, self.count, self.dtype) for x in (self.keys, self.values))
        return Memory(slots.content, values.content, slots.keep, slots.log_count)

    def reorder(self, index: Tensor) -> None:
        self.keys, self.values, self.count = (x.index_select(0, index) for x in (self.keys, self.values, self.count))


def tokens_of_blocks(real: Tensor, block: int, slots: int) -> Tensor:
    """The number of real tokens in the segment of each slot, ``(b, m r)``, for ``real`` ``(b, n)`` of whole blocks."""
    b, n = real.shape
    owner = block_owners(n, block, slots, None, real.device).expand(b, n)
    count = torch.zeros(b, n // block * slots, dtype=torch.long, device=real.device)
    return count.scatter_add(1, owner, real.long())
