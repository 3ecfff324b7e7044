"""What a query sees when slots can be opened: the segments that slots stand for, the slots it may open, and its exact neighbours.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, l positions of a segment, m blocks, c positions of
a block, w exact keys near a block, e exact keys that every query sees, d channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformers.ops.blocks import block_count, cut, neighbours
from linformers.ops.masks import readable
from linformers.ops.precision import single


class Segments(NamedTuple):
    """The exact keys that each slot stands for.

    Attributes:
        places: ``(b or 1, k, l)``, where they are among the exact keys.
        member: ``(b or 1, k, l)``, False where a segment has fewer.
        tokens: ``(b or 1, k)``, how many real tokens the slot stands for: those of ``member``, or more where exact keys were dropped.
    """

    places: Tensor
    member: Tensor
    tokens: Tensor


class ExactKeys(NamedTuple):
    """Exact keys that the queries of each block see.

    Attributes:
        keys: ``(b, g, m, w, d)``.
        values: ``(b, g, m, w, d)``.
        mask: ``(b or 1, m, 1 or c, w)``, True where a query sees a key.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class Seen(NamedTuple):
    """What the queries of each block see, besides the keys of the slots that they open.

    Attributes:
        block: positions of a block; 0 if all queries are in one.
        candidates: ``(b or 1, m, k)``, True where a slot is seen, as itself or opened.
        openable: the same, True where it may be opened too.
        near: exact keys with columns of their own in the weights; None if there are none.
        rest: keys of the first and the last segment that overlap the window, and that lie outside it; their weights count in the columns of their slots.
        rest_slots: ``(b or 1, m, w)``, the slots of these keys.
    """

    block: int
    candidates: Tensor
    openable: Tensor
    near: ExactKeys | None = None
    rest: ExactKeys | None = None
    rest_slots: Tensor | None = None


def segment_owners(length: int, max_len: int, k: int, keep: Tensor | None, device: torch.device) -> Tensor:
    """The slot of every position, ``(b or 1, s)``, if segment j of k starts at ``floor(j max_len / k)``; -1 where a token is not real."""
    owner = ((torch.arange(1, length + 1, device=device) * k - 1) // max_len)[None]
    return owner if keep is None else owner.masked_fill(~keep, -1)


def block_owners(length: int, block: int, slots: int, keep: Tensor | None, device: torch.device) -> Tensor:
    """:func:`segment_owners` if every block has this many slots of its own."""
    position = torch.arange(length, device=device)
    owner = (position // block * slots + ((position % block + 1) * slots - 1) // block)[None]
    return owner if keep is None else owner.masked_fill(~keep, -1)


def find_segments(owner: Tensor, k: int, width: int) -> Segments:
    """Collect the positions of each slot.

    Args:
        owner: ``(b or 1, s)``, the slot of every position, never decreasing along a row. Negative where a token is not real; ``k`` or
            more where the slot does not exist (yet).
        k: how many slots there are.
        width: l, the most positions that a slot can have.
    """
    b, s = owner.shape
    inside = (owner >= 0) & (owner < k)
    slot = owner.masked_fill(~inside, k)
    count = torch.zeros(b, k + 1, dtype=torch.long, device=owner.device)
    count = count.scatter_add(1, slot, torch.ones_like(slot))
    start = count.cumsum(1) - count  # how many tokens are in earlier slots
    if readable(owner) and owner.device.type == "cpu" and count[:, :k].numel() and int(count[:, :k].max()) > width:
        raise ValueError(
            f"got a segment of {int(count[:, :k].max())} positions, but width={width} is the largest allowed"
        )
    within = inside.cumsum(1) - 1 - start.gather(1, slot)
    index = (slot * width + within).masked_fill(~inside, k * width)  # others go to a place that is dropped
    position = torch.arange(s, device=owner.device).expand(b, s)
    places = torch.zeros(b, k * width + 1, dtype=torch.long, device=owner.device).scatter(1, index, position)
    count = count[:, :k]
    member = torch.arange(width, device=owner.device) < count[..., None]
    return Segments(places[:, : k * width].view(b, k, width), member, count)


def segment_rows(x: Tensor, segments: Segments) -> Tensor:
    """The exact keys or values ``(b, g, s, d)`` of every segment, ``(b, g, k, l, d)``, with zeros where a segment has fewer."""
    places, member, _ = segments
    b, g, _, d = x.shape
    if places.shape[0] == 1:
        rows = x.index_select(2, places.flatten())
    else:
        rows = x.gather(2, places.flatten(1)[:, None, :, None].expand(b, g, -1, d))
    return rows.view(b, g, *places.shape[1:], d).masked_fill(~member[:, None, ..., None], 0.0)


def segment_means(x: Tensor, segments: Segments) -> Tensor:
    """The slots of exact keys or values ``(b, g, s, d)``: the mean of the real tokens of each segment, ``(b, g, k, d)``."""
    total = segment_rows(x, segments).sum(3, dtype=single(x.dtype))
    return (total / segments.tokens.clamp(min=1)[:, None, :, None]).to(x.dtype)


def see_all(segments: Segments, keys: Tensor | None = None, values: Tensor | None = None) -> Seen:
    """See every slot, and exact keys and values ``(b, g, e, d)`` that are in no slot, such as a learned one."""
    near = None
    if keys is not None and values is not None:
        mask = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
        near = ExactKeys(keys[:, :, None], values[:, :, None], mask)
    filled = (segments.tokens > 0)[:, None]
    return Seen(0, filled, filled, near)


def see_causally(
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    block: int,
    slots_per_block: int,
    keep: Tensor | None = None,
    reach: int | None = None,
) -> Seen:
    """See the slots of the blocks before the previous one, the previous block, and the query's own block up to itself.

    Args:
        k: ``(b, g, n, d)``.
        v: ``(b, g, n, d)``.
        segments: of slots that lie in blocks; those of the last blocks may be missing.
        keep: ``(b, n)``, True where a token is real.
        reach: a segment can be opened if it starts at most this many positions before the end of the query's block, so that decoding
            needs the exact keys of no more positions than these. None sets no bound.
    """
    blocks = torch.arange(block_count(k.shape[2], block), device=k.device)[None]
    candidates, openable = candidates_of_blocks(blocks, segments, block, slots_per_block, reach)
    near_keys, near_values = (neighbours(cut(x, block), (1, 0)) for x in (k, v))  # (b, g, m, 2 c, d)
    place = torch.arange(block, device=k.device)
    in_time = torch.arange(2 * block, device=k.device) <= block + place[:, None]  # (c, 2 c)
    mask = _real(k, keep, block, (1, 0)) & in_time
    return Seen(block, candidates, openable, ExactKeys(near_keys, near_values, mask))


def candidates_of_blocks(
    blocks: Tensor, segments: Segments, block: int, slots_per_block: int, reach: int | None
) -> tuple[Tensor, Tensor]:
    """The slots that queries of the ``blocks`` ``(b or 1, m)`` see in causal attention, and those they may open: ``(b or 1, m, k)``."""
    slots = torch.arange(segments.tokens.shape[1], device=blocks.device)
    each = max(1, slots_per_block)
    candidates = (slots // each < blocks[..., None] - 1) & (segments.tokens > 0)[:, None]
    if reach is None:
        return candidates, candidates
    starts = slots // each * block + slots % each * block // each
    return candidates, candidates & (starts >= (blocks[..., None] + 1) * block - reach)


def see_window(k: Tensor, v: Tensor, owner: Tensor, segments: Segments, *, block: int) -> Seen:
    """See the previous, the own and the next block (the window), all of every segment that overlaps them, and the other slots.

    Args:
        k: ``(b, g, n, d)``.
        v: ``(b, g, n, d)``.
        owner: ``(b or 1, n)``, the slot of every position; -1 where a token is not real.
        segments: of the same slots.
        block: positions of a block.
    """
    shifts = (1, 0, -1)
    near_keys, near_values = (neighbours(cut(x, block), shifts) for x in (k, v))  # (b, g, m, 3 c, d)
    first, last, candidates = touched_by_windows(owner, segments, block)
    rest_places, outside, columns = rest_of_segments(first, last, segments, block)
    index = Segments(rest_places, outside, segments.tokens)
    rest = ExactKeys(segment_rows(k, index), segment_rows(v, index), outside[:, :, None])
    near = ExactKeys(near_keys, near_values, _real(k, owner >= 0, block, shifts))
    return Seen(block, candidates, candidates, near, rest, columns)


def touched_by_windows(owner: Tensor, segments: Segments, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last slot in the window of each block, ``(b or 1, m)``, and the other slots with tokens, ``(b or 1, m, k)``."""
    slots = segments.tokens.shape[1]
    around = neighbours(cut(owner[..., None] + 1, block), (1, 0, -1)).squeeze(-1)  # (b or 1, m, 3 c); 0 is none
    last = around.amax(-1) - 1
    first = around.masked_fill(around == 0, slots + 1).amin(-1) - 1
    each = torch.arange(slots, device=owner.device)
    touching = (each >= first[..., None]) & (each <= last[..., None])
    return first, last, ~touching & (segments.tokens > 0)[:, None]


def rest_of_segments(first: Tensor, last: Tensor, segments: Segments, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positions outside the window of each block that belong to the first or the last segment overlapping it.

    Returns:
        Places among the exact keys, which of them are outside and real, and their slots, each ``(b or 1, m, 2 l)``.
    """
    slots, width = segments.places.shape[1:]
    ends = torch.stack([first, last], -1).clamp(0, max(0, slots - 1))  # (b or 1, m, 2)
    b, m, _ = ends.shape
    rows = ends.flatten(1)[..., None].expand(b, 2 * m, width)
    places, member = (x.expand(b, -1, -1).gather(1, rows).view(b, m, 2, width) for x in segments[:2])
    begin = (torch.arange(m, device=first.device) * block - block)[:, None]  # of the window
    outside = torch.stack([places[:, :, 0] < begin, places[:, :, 1] >= begin + 3 * block], 2)
    outside = outside & member & (first <= last)[..., None, None]
    columns = ends[..., None].expand(b, m, 2, width)
    return places.flatten(2), outside.flatten(2), columns.flatten(2)


def see_at(
    k: Tensor,
    v: Tensor,
    real: Tensor,
    position: Tensor,
    segments: Segments,
    *,
    block: int,
    slots_per_block: int,
    reach: int | None = None,
) -> Seen:
    """What :func:`see_causally` gives for one query a row, when exact keys are in a ring buffer: position p at place ``p mod s``.

    Args:
        k: ``(b, g, s, d)``; at least the last two blocks, and what may be opened.
        v: ``(b, g, s, d)``.
        real: ``(b, s)``, True where a token is real.
        position: ``(b,)``, of the query.
        segments: see :func:`kept_segments`.
    """
    own = (position // block)[:, None]
    candidates, openable = candidates_of_blocks(own, segments, block, slots_per_block, reach)
    near = (own - 1) * block + torch.arange(2 * block, device=k.device)  # (b, 2 c)
    index = Segments((near % k.shape[2])[:, None], torch.ones_like(near, dtype=torch.bool)[:, None], segments.tokens)
    mask = (near >= 0) & (near <= position[:, None]) & real.gather(1, near % k.shape[2])
    near_keys = ExactKeys(segment_rows(k, index), segment_rows(v, index), mask[:, None, None])
    return Seen(0, candidates, openable, near_keys)


def kept_segments(real: Tensor, count: Tensor, *, block: int, slots_per_block: int) -> Segments:
    """The segments of slots that lie in blocks, when position p is kept at place ``p mod s``.

    Args:
        real: ``(b, s)``, True where a token is real.
        count: ``(b, k)``, how many real tokens each slot stands for; the exact keys of older slots may be gone.
    """
    slots, r = torch.arange(count.shape[1], device=real.device), max(1, slots_per_block)
    starts, stops = (slots // r * block + (slots % r + i) * block // r for i in (0, 1))
    position = starts[:, None] + torch.arange(-(-block // r), device=real.device)  # (k, l)
    places = (position % real.shape[1])[None]
    member = real[:, places[0]] & (position < stops[:, None])
    return Segments(places, member, count)


def _real(k: Tensor, keep: Tensor | None, block: int, shifts: tuple[int, ...]) -> Tensor:
    """Which of the keys around a block are real tokens: ``(b or 1, m, 1, w)``."""
    if keep is None:
        keep = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
    return neighbours(cut(keep[..., None].to(k.dtype), block), shifts).squeeze(-1)[:, :, None] > 0
