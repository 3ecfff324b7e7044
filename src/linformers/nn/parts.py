"""Memories of sequences that come in parts: chunks, one after the other, or the positions of several processes.

Axes: b batch, g key/value heads, n positions of this process, m blocks, c positions of a block, r slots of a block, k slots, d channels, p
processes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.nn.maps import ChannelMap, map_slots, shortens_first
from linformers.nn.memory import Memory, map_positions, memory_of_blocks, slot_keep, sums_of_blocks
from linformers.nn.positions import Rotate
from linformers.ops.heads import join_heads, split_heads
from linformers.ops.span import Span
from linformers.projections.base import KEY, VALUE, Projection, Sums
from linformers.projections.content import Content, means_of


class MemoryInChunks:
    """:func:`linformers.nn.memory.make_memory` for self-attention over a sequence that comes in parts.

    Either in chunks, without gradients (:meth:`add`), or as the positions of several processes, with gradients (:meth:`add_up`).

    Args:
        length: of the whole sequence.
        rotary: whether chunks come with a ``rotate``.
        longest: the length that decides what is cheaper; None for ``length``.
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
        longest: int | None = None,
    ) -> None:
        self.maps, self.projection, self.heads, self.length, self.k = (to_key, to_value), projection, heads, length, k
        self.first = [shortens_first(projection, longest or length, to) for to in self.maps]
        self.first[KEY] &= not rotary
        self.parts = [KEY] if all(self.first) and projection.parts == 1 and projection.heads == 1 else [KEY, VALUE]
        self.sums: dict[int, Sums] = {}

    def add(self, x: Tensor, offset: int, keep: Tensor | None = None, rotate: Rotate | None = None) -> None:
        """Add the positions from ``offset`` on: ``(b, c, d)``, with ``keep`` ``(b, c)``."""
        shortens = self.projection.for_input(x, keep, self.k)
        for part in self.parts:
            y = self._input(x, part, keep, rotate)
            if part not in self.sums:
                self.sums[part] = self.projection.begin(y, self.length, self.k)
            shortens.add_chunk(self.sums[part], y, offset, keep, part, self.k)

    def add_up(self, x: Tensor, span: Span, keep: Tensor | None = None, rotate: Rotate | None = None) -> None:
        """Add the positions of all processes, of which this one has ``x`` ``(b, n, d)``, with gradients."""
        shortens, some = self.projection.for_input(x, keep, self.k), (span.offset, self.length, keep)
        sums = [shortens.partial(self._input(x, part, keep, rotate), *some, part, self.k) for part in self.parts]
        self.sums = dict(zip(self.parts, self.projection.total(sums, span), strict=True))

    def _input(self, x: Tensor, part: int, keep: Tensor | None, rotate: Rotate | None) -> Tensor:
        """What is shortened: ``x`` itself, or its keys or values."""
        if self.first[part]:
            return x[:, None]
        turn = rotate if part == KEY else None
        return map_positions(x, self.maps[part], self.projection, self.heads, keep, turn)

    def finish(self) -> Memory:
        """The memory of the whole sequence."""
        slots = {part: self.projection.finish(sums) for part, sums in self.sums.items()}
        keys, values = (
            map_slots(found, self.maps[part], self.heads)
            if self.first[part]
            else split_heads(found.content, self.heads)
            for part, found in ((part, slots.get(part, slots[KEY])) for part in (KEY, VALUE))
        )
        return Memory(keys, values, slot_keep(slots[KEY], keys), slots[KEY].log_count)


def memory_across(
    k: Tensor,
    v: Tensor,
    projection: Projection,
    span: Span,
    *,
    keep: Tensor | None = None,
    slots: int | None = None,
    block: int = 0,
    causal: bool = False,
    features: Tensor | None = None,
) -> Memory:
    """The memory of keys and values of heads, ``(b, g, n, d)`` in this process; the arguments of :func:`linformers.nn.core.attend_heads`."""
    if isinstance(projection, Content) and block:
        return sets_across(
            k, v, projection, span, block=block, causal=causal, keep=keep, slots=slots, features=features
        )
    if causal:
        return finished_across(k, v, projection, span, slots, keep)
    heads = k.shape[1]
    shortens = projection.for_input(join_heads(k) if features is None else features, keep, slots)
    if projection.heads == 1:
        k, v = join_heads(k)[:, None], join_heads(v)[:, None]
    pairs = ((KEY, k), (VALUE, v))
    sums = [shortens.partial(x, span.offset, span.total, keep, part, slots) for part, x in pairs]
    short, other = (projection.finish(one) for one in projection.total(sums, span))
    content = split_heads(short.content, heads), split_heads(other.content, heads)
    return Memory(*content, slot_keep(short, k), short.log_count)


def finished_across(
    k: Tensor, v: Tensor, projection: Projection, span: Span, slots: int | None = None, keep: Tensor | None = None
) -> Memory:
    """:func:`linformers.nn.memory.memory_of_finished` of all processes: each puts the slots of its blocks in their places among zeros."""
    c, r = projection.max_len, projection.k if slots is None else slots
    finished, first = max(0, -(-span.total // c) - 2), span.offset // c
    own = min(max(0, finished - first), -(-k.shape[2] // c))
    before = min(first, finished)
    kept = None if keep is None else keep[:, : own * c]
    made = memory_of_blocks(k[:, :, : own * c], v[:, :, : own * c], projection, r, kept)
    places = (before * r, (finished - before - own) * r)
    keys, values = (F.pad(x, (0, 0, *places)) for x in (made.keys, made.values))
    real = torch.ones(len(k), own * r, device=k.device) if made.keep is None else made.keep.float()
    keys, values, real = span.sum(keys, values, F.pad(real, places))
    return Memory(keys, values, real > 0 if keep is not None else None)


def sets_across(
    k: Tensor,
    v: Tensor,
    projection: Content,
    span: Span,
    *,
    block: int,
    causal: bool,
    keep: Tensor | None = None,
    slots: int | None = None,
    features: Tensor | None = None,
) -> Memory:
    """:func:`linformers.nn.memory.memory_of_sets` of all processes, with a set for each block of this one.

    Each process sends the sums of its blocks without the last, and those of the last, which the next block sees exactly; for the blocks before
    this process's, these are added up. If not causal, the same from the other end.
    """
    shares = projection.for_input(join_heads(k) if features is None else features, keep, slots).shares
    sums = sums_of_blocks(k, v, shares, block)  # (b, g, m, k, d) twice, and (b, g or 1, m, k)
    rank = 0 if span.exchange is None else span.exchange.rank
    ends = [(x[:, :, :-1].sum(2), x[:, :, -1]) for x in sums]
    if not causal:
        ends += [(x[:, :, 1:].sum(2), x[:, :, 0]) for x in sums]
    sent = [x for pair in ends for x in pair]
    found = span.gather(torch.cat([x.flatten() for x in sent])).split([x.numel() for x in sent], 1)
    # (p, b, g, k, d), and (p, b, g or 1, k) for the shares
    gathered = [y.unflatten(1, x.shape) for x, y in zip(sent, found, strict=True)]
    sets = []
    for i, x in enumerate(sums):
        m = x.shape[2]
        others, edges = gathered[2 * i], gathered[2 * i + 1]
        total = earlier(others[:rank], edges[:rank], x).cumsum(2)[:, :, :m]
        if not causal:
            others, edges = (gathered[2 * (len(sums) + i) + j].flip(0) for j in (0, 1))
            after = len(edges) - 1 - rank
            total = total + earlier(others[:after], edges[:after], x.flip(2)).cumsum(2)[:, :, :m].flip(2)
        sets.append(total)
    short, other = (means_of(x, sets[2], k.dtype) for x in sets[:2])
    return Memory(short.content, other.content, short.keep, short.log_count)


def earlier(others: Tensor, edges: Tensor, own: Tensor) -> Tensor:
    """Sums of blocks ``(b, g, m, ...)``, preceded by two more: of all blocks of earlier processes but the last, and of that one.

    Args:
        others: ``(p, b, g, ...)``, of each earlier process all but its last block.
        edges: the last block of each.
    """
    none = torch.zeros_like(own[:, :, 0])
    last = edges[-1] if len(edges) else none
    return torch.cat([(others.sum(0) + edges[:-1].sum(0)).unsqueeze(2), last.unsqueeze(2), own], 2)


def near_across(
    k: Tensor, v: Tensor, keep: Tensor | None, span: Span, block: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values ``(b, g, n, d)`` and their ``keep`` ``(b, n)``, with one block of the processes before and, if not causal, after this one."""
    after = 0 if causal else block
    k, v = span.halo(torch.cat([k, v], 1), block, after, axis=2, pad=False).chunk(2, 1)
    if keep is not None:
        keep = span.halo(keep.float(), block, after, pad=False) > 0
    return k, v, keep
