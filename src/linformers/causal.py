"""Block-causal attention: what a finished block compresses to, and the constant-size state that decoding needs.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.

A dense n x k projection mixes every position into every slot, so nothing behind it can be causal. Here each block of c positions
is compressed on its own, to r slots, by a projection of c x r that all blocks share; k = n r / c. See ``blocks.py`` for what a
query sees.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linformers.blocks import cut
from linformers.functional import attend, attend_with_weights
from linformers.projections import KEY, VALUE, Projection, Slots


def block_sizes(max_len: int, k: int, block_size: int | None = None) -> tuple[int, int]:
    """The positions c and the slots r of a block, such that ``r = k c / max_len`` is whole and ``1 <= r <= c``.

    Args:
        block_size: c; None takes the smallest that fits and is at least 64, or ``max_len`` if that is shorter.

    Raises:
        ValueError: if no such r exists; it names the nearest sizes that would do.
    """
    if not 1 <= k <= max_len:
        raise ValueError(f"causal attention needs 1 <= k <= {max_len} (the maximum length), got k = {k}")
    unit = max_len // math.gcd(k, max_len)  # the sizes that fit are its multiples
    if block_size is None:
        block_size = min(max_len, unit * -(-64 // unit))
    if block_size % unit or not 1 <= block_size <= max_len:
        below = min(max(unit, block_size // unit * unit), max_len)
        near = sorted({below, min(below + unit, max_len)})
        raise ValueError(
            f"block_size = {block_size} would give {k} * {block_size} / {max_len} = {k * block_size / max_len:g} slots a "
            f"block, which must be a whole number from 1 on; with k = {k} and a maximum length of {max_len} the nearest "
            f"block sizes are {' and '.join(map(str, near))}"
        )
    return block_size, k * block_size // max_len


def compress_blocks(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compress whole blocks.

    Args:
        keys: ``(b, g, n, d)`` with n a multiple of the block size ``projection.max_len``.
        values: ``(b, g, n, d)``.
        projection: c x r.
        slots: use this many of its r slots.
        keep: ``(b, n)``, True where a token is real.

    Returns:
        The slots' keys and values, ``(b, g, m r, d)``, and which take part, ``(b, m r)`` or None: those that hold a real token.
    """
    b, g, n, d = keys.shape
    c = projection.max_len
    m, r = n // c, projection.k if slots is None else slots
    block_keep = None if keep is None else keep.reshape(b * m, c)

    def compress(x: Tensor, part: int) -> Slots:
        blocks = x.unflatten(2, (m, c)).transpose(1, 2)  # (b, m, g, c, d)
        if projection.heads == 1:
            blocks = blocks.transpose(2, 3).reshape(b * m, 1, c, g * d)
        else:
            blocks = blocks.reshape(b * m, g, c, d)
        return projection(blocks, block_keep, part, r)

    def unfold(x: Tensor) -> Tensor:  # (b m, 1, r, g d) or (b m, g, r, d) -> (b, g, m r, d)
        if projection.heads == 1:
            return x.view(b, m * r, g, d).transpose(1, 2)
        return x.view(b, m, g, r, d).transpose(1, 2).reshape(b, g, m * r, d)

    short = compress(keys, KEY)
    kept = short.keep
    if kept is not None:
        kept = kept.expand(b * m, r).reshape(b, m * r)
    elif block_keep is not None:  # a dense slot mixes its whole block: it takes part if any of it is real
        kept = block_keep.any(-1, keepdim=True).expand(b * m, r).reshape(b, m * r)
    return unfold(short.content), unfold(compress(values, VALUE).content), kept


def compress_finished(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compress those blocks of a whole sequence that a later query sees as slots: all but the last two.

    Takes and returns what :func:`compress_blocks` does, for any length.
    """
    c, n = projection.max_len, keys.shape[2]
    if torch.compiler.is_exporting() and slots != 0:  # all blocks: how many are finished depends on the length
        keys, values = (cut(x, c).flatten(-3, -2) for x in (keys, values))
        kept = None if keep is None else cut(keep[..., None].to(keys.dtype), c).flatten(1) > 0
        return compress_blocks(keys, values, projection, slots, kept)
    finished = max(0, -(-n // c) - 2) * c
    if slots == 0 or finished == 0:
        return keys[:, :, :0], values[:, :, :0], None
    kept = None if keep is None else keep[:, :finished]
    return compress_blocks(keys[:, :, :finished], values[:, :, :finished], projection, slots, kept)


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

    def step(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
        """Take one token a row and attend: ``(b, h, 1, d)`` to ``(b, h, 1, d)``.

        Args:
            keep: ``(b,)``, False for rows that pause: their state does not change, and their output means nothing.
        """
        self._take(k, v, keep)
        return attend(q, *self.seen())

    def step_with_weights(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`step`, also with the weights: of the slots, then of the previous block and the own one, ``(b, h, 1, k + 2 c)``."""
        self._take(k, v, keep)
        out, weights = attend_with_weights(q, *self.seen())
        c, slots = self.projection.max_len, self.slot_keys.shape[2]
        last = self.length[:, None] - 1
        position = (last // c - 1) * c + torch.arange(2 * c, device=q.device)  # (b, 2 c)
        place = (position % self.exact_keys.shape[2])[:, None, None].expand(-1, q.shape[1], 1, -1)
        near = weights[..., slots:].gather(-1, place)
        near = near.masked_fill(~((position >= 0) & (position <= last))[:, None, None], 0.0)
        return out, torch.cat([weights[..., :slots], near], -1)

    def _take(self, k: Tensor, v: Tensor, keep: Tensor | None) -> None:
        """Write the keys and values of one token a row."""
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

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """All keys and values, ``(b, g, (m - 2) r + 2 c, d)``, and which of them the last token sees, ``(b, (m - 2) r + 2 c)``."""
        return (
            torch.cat([self.slot_keys, self.exact_keys], 2),
            torch.cat([self.slot_values, self.exact_values], 2),
            torch.cat([self._slot_keep(), self._exact_keep()], 1),
        )

    def prefill(self, k: Tensor, v: Tensor, length: Tensor, keep: Tensor | None = None) -> None:
        """Take a whole prompt, ``(b, g, n, d)``, that ends after ``length`` tokens; ``keep`` ``(b, n)`` if it has holes."""
        c, n = self.projection.max_len, k.shape[2]
        finished = max(0, -(-n // c) - 2) * c
        if finished and self.slots_per_block:
            slot_k, slot_v, real = compress_blocks(
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
        new_k, new_v, kept = compress_blocks(old_k, old_v, self.projection, r, None if real.all() else real)
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
