"""Decoding states: what causal layers and stacks keep of the past, constant in size.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.

A dense n x k projection mixes every position into every slot, so nothing behind it can be causal. Here each block of c positions
is compressed on its own, to r slots, by a projection of c x r that all blocks share; k = n r / c. See ``ops/blocks.py`` for what a
query sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformers.nn.memory import Memory, memory_of_blocks
from linformers.ops.views import View
from linformers.projections.base import Projection


@dataclass
class CausalState:
    """What one layer remembers of the past: at most k slots and two blocks of exact keys, whatever the length.

    Position p is written to place ``p mod 2c`` of the exact keys. When a row enters block B, the block B - 2, whose place it is about to
    take, is compressed to slots first. Rows of a batch may be at different positions.

    Attributes:
        slot_keys: ``(b, g, (m - 2) r, d)``: of all m blocks of the longest input but the last two.
        slot_values: the same.
        exact_keys: ``(b, g, 2 c, d)``, or those of the longest input if that is shorter.
        exact_values: the same.
        slot_real: ``(b, (m - 2) r)``, False where a slot holds no real token.
        exact_real: ``(b, 2 c)``, False where the token is not real: a hole in the prompt.
        length: ``(b,)``, how many positions each row has seen.
    """

    projection: Projection
    slots_per_block: int
    slot_keys: Tensor
    slot_values: Tensor
    exact_keys: Tensor
    exact_values: Tensor
    slot_real: Tensor
    exact_real: Tensor
    length: Tensor

    @classmethod
    def empty(
        cls,
        projection: Projection,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        max_len: int,
        slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "CausalState":
        """A state that has seen nothing, for ``batch`` rows and ``heads`` key/value heads."""
        c, r = projection.max_len, projection.k if slots is None else slots
        sizes = (max(0, -(-max_len // c) - 2) * r, min(2 * c, max_len))
        slot, exact = (torch.zeros(batch, heads, size, head_dim, device=device, dtype=dtype) for size in sizes)
        slot_real, exact_real = (torch.ones(batch, size, dtype=torch.bool, device=device) for size in sizes)
        length = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(projection, r, slot, slot.clone(), exact, exact.clone(), slot_real, exact_real, length)

    def append(self, k: Tensor, v: Tensor, keep: Tensor | None = None) -> None:
        """Take the keys and values of one token a row, ``(b, g, 1, d)``; rows whose ``keep`` ``(b,)`` is False do not change."""
        self._retire(keep)
        rows = torch.arange(len(self.length), device=k.device)
        place = self.length % self.exact_keys.shape[2]
        new_k, new_v = k[:, :, 0].to(self.exact_keys.dtype), v[:, :, 0].to(self.exact_values.dtype)
        self.exact_real[rows, place] = True if keep is None else keep | self.exact_real[rows, place]
        if keep is not None:
            new_k = torch.where(keep[:, None, None], new_k, self.exact_keys[rows, :, place])
            new_v = torch.where(keep[:, None, None], new_v, self.exact_values[rows, :, place])
        self.exact_keys[rows, :, place] = new_k
        self.exact_values[rows, :, place] = new_v
        self.length = self.length + (1 if keep is None else keep.long())

    def seen(self) -> Memory:
        """What the last token of each row sees: ``(m - 2) r`` slots, then ``2 c`` exact keys in the order of their places."""
        return Memory(
            torch.cat([self.slot_keys, self.exact_keys], 2),
            torch.cat([self.slot_values, self.exact_values], 2),
            torch.cat([self._slot_keep(), self._exact_keep()], 1),
        )

    def by_position(self, heads: int) -> View:
        """Shows weights of what :meth:`seen` returned, ``(b, h, 1, k + 2 c)``, for the slots, the previous block and the own one."""
        c, slots, places = self.projection.max_len, self.slot_keys.shape[2], self.exact_keys.shape[2]
        last = self.length[:, None] - 1
        position = (last // c - 1) * c + torch.arange(2 * c, device=last.device)  # (b, 2 c)
        place = (position % places)[:, None, None].expand(-1, heads, 1, -1)
        unread = ~((position >= 0) & (position <= last))[:, None, None]

        def there(weights: Tensor) -> Tensor:
            near = weights[..., slots:].gather(-1, place).masked_fill(unread, 0.0)
            return torch.cat([weights[..., :slots], near], -1)

        def back(weights: Tensor) -> Tensor:
            near = weights[..., slots:].masked_fill(unread, 0.0)
            empty = near.new_zeros(*near.shape[:-1], places)
            return torch.cat([weights[..., :slots], empty.scatter_add(-1, place, near)], -1)

        return View(there, back)

    def prefill(self, k: Tensor, v: Tensor, length: Tensor, keep: Tensor | None = None) -> None:
        """Take a whole prompt, ``(b, g, n, d)``, that ends after ``length`` tokens; ``keep`` ``(b, n)`` if it has holes."""
        c, n = self.projection.max_len, k.shape[2]
        finished = max(0, -(-n // c) - 2) * c
        if finished and self.slots_per_block:
            slot_k, slot_v, real = memory_of_blocks(
                k[:, :, :finished],
                v[:, :, :finished],
                self.projection,
                self.slots_per_block,
                None if keep is None else keep[:, :finished],
            )
            if real is not None:
                self.slot_real[:, : real.shape[1]] = real
            self.slot_keys[:, :, : slot_k.shape[2]] = slot_k
            self.slot_values[:, :, : slot_v.shape[2]] = slot_v
        self.length = length.clone()
        source = self._position_of_place().clamp(min=0)  # (b, 2 c)
        index = source[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        self.exact_keys = k.gather(2, index).to(self.exact_keys.dtype)
        self.exact_values = v.gather(2, index).to(self.exact_values.dtype)
        if keep is not None:
            self.exact_real = keep.gather(1, source)

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was."""
        for name in ("slot_keys", "slot_values", "exact_keys", "exact_values", "slot_real", "exact_real", "length"):
            setattr(self, name, getattr(self, name).index_select(0, index))

    def _retire(self, keep: Tensor | None) -> None:
        """Compress the block whose place the next token takes, in the rows that enter a new block."""
        c, r = self.projection.max_len, self.slots_per_block
        if r == 0:
            return
        entering = (self.length % c == 0) & (self.length >= 2 * c)
        if keep is not None:
            entering = entering & keep
        rows = entering.nonzero()[:, 0]
        if not len(rows):
            return
        block = self.length[rows] // c - 2
        if int(block.max() + 1) * r > self.slot_keys.shape[2]:
            raise ValueError(
                f"got a token past position {int(self.length.max())}, but this state has room for "
                f"{self.slot_keys.shape[2] // r + 2} blocks of {c}; build the model with a longer maximum length"
            )
        within = torch.arange(c, device=rows.device)
        place = (block % 2 * c)[:, None] + within  # (rows, c)
        slot = (block * r)[:, None] + torch.arange(r, device=rows.device)  # (rows, r)
        old_k = self.exact_keys[rows[:, None], :, place].transpose(1, 2)  # (rows, g, c, d)
        old_v = self.exact_values[rows[:, None], :, place].transpose(1, 2)
        real = self.exact_real[rows[:, None], place]  # (rows, c)
        new_k, new_v, kept = memory_of_blocks(old_k, old_v, self.projection, r, None if real.all() else real)
        self.slot_keys[rows[:, None], :, slot] = new_k.transpose(1, 2).to(self.slot_keys.dtype)  # autocast may differ
        self.slot_values[rows[:, None], :, slot] = new_v.transpose(1, 2).to(self.slot_values.dtype)
        self.slot_real[rows[:, None], slot] = True if kept is None else kept

    def _position_of_place(self) -> Tensor:
        """The newest position written to each place of the exact keys, ``(b, 2 c)``; negative where there is none."""
        places = torch.arange(self.exact_keys.shape[2], device=self.length.device)
        last = self.length[:, None] - 1
        return last - (last - places) % self.exact_keys.shape[2]

    def _exact_keep(self) -> Tensor:
        c, position = self.projection.max_len, self._position_of_place()
        return self.exact_real & (position >= 0) & (position // c >= (self.length[:, None] - 1) // c - 1)

    def _slot_keep(self) -> Tensor:
        slots = torch.arange(self.slot_keys.shape[2], device=self.length.device)
        c = self.projection.max_len
        return self.slot_real & (slots // max(1, self.slots_per_block) < ((self.length - 1) // c - 1)[:, None])


@dataclass
class LayerState:
    """What one layer remembers while decoding."""

    attention: CausalState | None = None
    past: Tensor | None = None  # (b, local_kernel - 1, ch), the last inputs of the local mixing
    memory: Memory | None = None


@dataclass
class DecodingState:
    """What a causal stack remembers while decoding: constant in size, whatever the length.

    Attributes:
        layers: one state a layer.
        length: ``(b,)``, how many tokens each row has seen.
        source: ``(b,)``, equal for rows whose memories are; None if that has not been looked at.
    """

    layers: list[LayerState]
    length: Tensor
    source: Tensor | None = None

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was.

        The beams of a sample have one memory, and where rows move among them only, it stays where it is.
        """
        self.length = self.length.index_select(0, index)
        memories = [layer.memory for layer in self.layers if layer.memory is not None]
        moved = False
        if memories:
            before = equal_rows(memories) if self.source is None else self.source
            self.source = before.index_select(0, index)
            moved = not torch.equal(self.source, before)
        for layer in self.layers:
            if layer.attention is not None:
                layer.attention.reorder(index)
            if layer.past is not None:
                layer.past = layer.past.index_select(0, index)
            if layer.memory is not None and moved:
                layer.memory = layer.memory.select(index)


def equal_rows(memories: Sequence[Memory]) -> Tensor:
    """A number for each row, ``(b,)``: the one of the row before it if they have the same memory in every layer."""
    tensors = [t for memory in memories for t in memory if t is not None]
    new = torch.ones(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
    if len(new) > 1:
        new[1:] = torch.stack([(t[1:] != t[:-1]).flatten(1).any(1) for t in tensors]).any(0)
    return new.cumsum(0)
