"""The memory of keys and values: slots of a whole sequence, of a sequence in chunks, or of finished blocks.

Axes: b batch, g key/value heads, s key positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linformers.nn.maps import ChannelMap, map_slots, map_to_both, shortens_first
from linformers.ops.blocks import cut
from linformers.ops.heads import split_heads
from linformers.ops.masks import blank
from linformers.projections.base import KEY, VALUE, Projection, Slots, Sums


class Memory(NamedTuple):
    """A context that is ready to be attended to."""

    keys: Tensor  # (b, g, k, d), with full attention (b, g, s, d)
    values: Tensor  # the same
    keep: Tensor | None  # (b, k), or (b, s)


def shorten(
    key: Tensor,
    value: Tensor,
    to_key: ChannelMap,
    to_value: ChannelMap,
    projection: Projection,
    *,
    heads: int,
    keep: Tensor | None = None,
    k: int | None = None,
    rotate: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps d to e channels.
        to_value: maps d' to e channels.
        projection: what shortens.
        heads: the number of key/value heads g.
        keep: ``(b, s)``, True where the token is real; nothing else has any influence.
        k: use this many slots instead of all of the projection's.
        rotate: applied to the keys, ``(b, g, s, e / g)``, before they are shortened (rotary positions).

    Returns:
        Keys and values, each ``(b, g, k, e / g)``, and which slots take part, ``(b, k)``, or None for all.
    """
    first = shortens_first(projection, key, to_key, heads) and rotate is None
    if first and key is value and projection.parts == 1 and projection.heads == 1:
        slots = projection(key[:, None], keep, KEY, k)
        return *map_to_both(slots, to_key, to_value, heads), slot_keep(slots, key)
    value_first = shortens_first(projection, value, to_value, heads)
    key_slots, value_slots = projection.both(
        key[:, None] if first else mapped(key, to_key, projection, heads, keep, rotate),
        value[:, None] if value_first else mapped(value, to_value, projection, heads, keep, None),
        keep,
        k,
    )
    keys = map_slots(key_slots, to_key, heads) if first else split_heads(key_slots.content, heads)
    values = map_slots(value_slots, to_value, heads) if value_first else split_heads(value_slots.content, heads)
    return keys, values, slot_keep(key_slots, key)


class Shortener:
    """:func:`shorten` for self-attention over a sequence that comes in pieces, without gradients.

    Args:
        length: of the whole sequence.
        rotary: whether pieces come with a ``rotate``.
    """

    def __init__(
        self,
        to_key: ChannelMap,
        to_value: ChannelMap,
        projection: Projection,
        *,
        heads: int,
        length: int,
        k: int | None = None,
        rotary: bool = False,
    ) -> None:
        self.maps, self.projection, self.heads, self.length, self.k = (to_key, to_value), projection, heads, length, k
        shape = torch.empty(1, length, 0)
        self.first = [shortens_first(projection, shape, to, heads) for to in self.maps]
        self.first[KEY] &= not rotary
        self.parts = [KEY] if all(self.first) and projection.parts == 1 and projection.heads == 1 else [KEY, VALUE]
        self.sums: dict[int, Sums] = {}

    def add(
        self, x: Tensor, offset: int, keep: Tensor | None = None, rotate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add the positions from ``offset`` on: ``(b, c, d)``, with ``keep`` ``(b, c)``."""
        for part in self.parts:
            turn = rotate if part == KEY else None
            y = x[:, None] if self.first[part] else mapped(x, self.maps[part], self.projection, self.heads, keep, turn)
            if part not in self.sums:
                self.sums[part] = self.projection.begin(y, self.length, self.k)
            self.projection.add_piece(self.sums[part], y, offset, keep, part, self.k)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What :func:`shorten` returns."""
        slots = {part: self.projection.finish(sums) for part, sums in self.sums.items()}
        keys, values = (
            map_slots(found, self.maps[part], self.heads)
            if self.first[part]
            else split_heads(found.content, self.heads)
            for part, found in ((part, slots.get(part, slots[KEY])) for part in (KEY, VALUE))
        )
        return keys, values, slots[KEY].keep


def mapped(
    x: Tensor,
    linear: ChannelMap,
    projection: Projection,
    heads: int,
    keep: Tensor | None,
    rotate: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Map positions ``(b, s, d)`` before they are shortened: ``(b, g, s, e / g)``, or ``(b, 1, s, e)`` if the heads share E."""
    x = linear(blank(x, keep))  # blank here too: NaN in padding times a gradient of zero is NaN in that of the map
    if rotate is not None:
        x = rotate(x.unflatten(-1, (heads, -1)).transpose(1, 2))
        return x if projection.heads > 1 else x.transpose(1, 2).flatten(2)[:, None]
    return x.unflatten(-1, (heads, -1)).transpose(1, 2) if projection.heads > 1 else x[:, None]


def slot_keep(slots: Slots, key: Tensor) -> Tensor | None:
    """Which slots take part, for every sample: ``(b, k)``."""
    return None if slots.keep is None else slots.keep.expand(key.shape[0], -1)


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
    # Zero blocks are compressed too while training: with every parameter in the graph of every batch, DDP waits for none in vain.
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in projection.parameters())
    if slots == 0 or (finished == 0 and not trained):
        return keys[:, :, :0], values[:, :, :0], None
    kept = None if keep is None else keep[:, :finished]
    return compress_blocks(keys[:, :, :finished], values[:, :, :finished], projection, slots, kept)
