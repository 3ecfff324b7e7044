"""Memories: the keys and values that queries look up, made from inputs, from heads, from finished blocks or in chunks.

Axes: b batch, g key/value heads, s key positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformers.nn.maps import ChannelMap, map_slots, map_to_both, shortens_first
from linformers.nn.positions import Rotate
from linformers.ops.blocks import cut
from linformers.ops.heads import join_heads, split_heads, to_heads
from linformers.ops.masks import blank
from linformers.projections.base import KEY, VALUE, Projection, Slots, Sums


class Memory(NamedTuple):
    """What queries look up: slots, or every position.

    Attributes:
        keys: ``(b, g, k, d)``.
        values: ``(b, g, k, d)``.
        keep: ``(b, k)``, False where a slot or a position takes no part; None if all do.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None = None

    def select(self, rows: Tensor) -> "Memory":
        """The memory of some rows of the batch, by index."""
        return Memory(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


def make_memory(
    key: Tensor,
    value: Tensor,
    to_key: ChannelMap,
    to_value: ChannelMap,
    projection: Projection,
    *,
    heads: int,
    keep: Tensor | None = None,
    k: int | None = None,
    rotate: Rotate | None = None,
) -> Memory:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence, in the cheaper order.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps d to the channels of all heads.
        to_value: maps d' to them.
        projection: what shortens.
        heads: the number of key/value heads g.
        keep: ``(b, s)``, True where the token is real; nothing else has any influence.
        k: use this many slots instead of all of the projection's.
        rotate: applied to the keys of the heads before they are shortened (rotary positions).
    """
    first = shortens_first(projection, key, to_key, heads) and rotate is None
    value_first = shortens_first(projection, value, to_value, heads)
    if first and value_first and key is value and projection.parts == 1 and projection.heads == 1:
        slots = projection(key[:, None], keep, KEY, k)
        return Memory(*map_to_both(slots, to_key, to_value, heads), slot_keep(slots, key))

    key_slots, value_slots = projection.both(
        key[:, None] if first else map_positions(key, to_key, projection, heads, keep, rotate),
        value[:, None] if value_first else map_positions(value, to_value, projection, heads, keep, None),
        keep,
        k,
    )
    keys = map_slots(key_slots, to_key, heads) if first else split_heads(key_slots.content, heads)
    values = map_slots(value_slots, to_value, heads) if value_first else split_heads(value_slots.content, heads)
    return Memory(keys, values, slot_keep(key_slots, key))


def memory_of_heads(
    keys: Tensor, values: Tensor, projection: Projection, keep: Tensor | None = None, k: int | None = None
) -> Memory:
    """Shorten keys and values of heads, each ``(b, g, s, d)``, that are needed exactly too, or that are all there is."""
    heads = keys.shape[1]
    if projection.heads == 1:
        keys, values = join_heads(keys)[:, None], join_heads(values)[:, None]
    short, other = projection.both(keys, values, keep, k)
    return Memory(split_heads(short.content, heads), split_heads(other.content, heads), slot_keep(short, keys))


def memory_of_blocks(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> Memory:
    """Compress whole blocks, each to slots of its own.

    Args:
        keys: ``(b, g, n, d)`` with n a multiple of the block size ``projection.max_len``.
        values: ``(b, g, n, d)``.
        projection: c x r.
        slots: use this many of its r slots.
        keep: ``(b, n)``, True where a token is real.

    Returns:
        ``m r`` slots, of which those take part that hold a real token.
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
    return Memory(unfold(short.content), unfold(compress(values, VALUE).content), kept)


def memory_of_finished(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> Memory:
    """:func:`memory_of_blocks` of those blocks of a sequence of any length that a later query sees as slots: all but the last two."""
    c, n = projection.max_len, keys.shape[2]
    if torch.compiler.is_exporting() and slots != 0:  # all blocks: how many are finished depends on the length
        keys, values = (cut(x, c).flatten(-3, -2) for x in (keys, values))
        kept = None if keep is None else cut(keep[..., None].to(keys.dtype), c).flatten(1) > 0
        return memory_of_blocks(keys, values, projection, slots, kept)
    finished = max(0, -(-n // c) - 2) * c
    # Zero blocks are compressed too while training: with every parameter in the graph of every batch, DDP waits for none in vain.
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in projection.parameters())
    if slots == 0 or (finished == 0 and not trained):
        return Memory(keys[:, :, :0], values[:, :, :0])
    kept = None if keep is None else keep[:, :finished]
    return memory_of_blocks(keys[:, :, :finished], values[:, :, :finished], projection, slots, kept)


class MemoryInChunks:
    """:func:`make_memory` for self-attention over a sequence that comes in chunks, without gradients.

    Args:
        length: of the whole sequence.
        rotary: whether chunks come with a ``rotate``.
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

    def add(self, x: Tensor, offset: int, keep: Tensor | None = None, rotate: Rotate | None = None) -> None:
        """Add the positions from ``offset`` on: ``(b, c, d)``, with ``keep`` ``(b, c)``."""
        for part in self.parts:
            turn = rotate if part == KEY else None
            y = x[:, None]
            if not self.first[part]:
                y = map_positions(x, self.maps[part], self.projection, self.heads, keep, turn)
            if part not in self.sums:
                self.sums[part] = self.projection.begin(y, self.length, self.k)
            self.projection.add_chunk(self.sums[part], y, offset, keep, part, self.k)

    def finish(self) -> Memory:
        """What :func:`make_memory` makes of all chunks at once."""
        slots = {part: self.projection.finish(sums) for part, sums in self.sums.items()}
        keys, values = (
            map_slots(found, self.maps[part], self.heads)
            if self.first[part]
            else split_heads(found.content, self.heads)
            for part, found in ((part, slots.get(part, slots[KEY])) for part in (KEY, VALUE))
        )
        return Memory(keys, values, slots[KEY].keep)


def map_positions(
    x: Tensor, to: ChannelMap, projection: Projection, heads: int, keep: Tensor | None, rotate: Rotate | None
) -> Tensor:
    """Map positions ``(b, s, d)`` before they are shortened: ``(b, g, s, e / g)``, or ``(b, 1, s, e)`` if the heads share E."""
    x = to(blank(x, keep))  # blank here too: NaN in padding times a gradient of zero is NaN in that of the map
    if rotate is not None:
        x = rotate(to_heads(x, heads))
        return x if projection.heads > 1 else join_heads(x)[:, None]
    return to_heads(x, heads) if projection.heads > 1 else x[:, None]


def slot_keep(slots: Slots, key: Tensor) -> Tensor | None:
    """Which slots take part, for every sample: ``(b, k)``."""
    return None if slots.keep is None else slots.keep.expand(key.shape[0], -1)
