"""Opened slots of a sequence that is split over processes: each fetches the exact keys of the segments that its queries open.

A process sends 2 b g d numbers for each of its positions whose segment another process opens: at most 2 (p - 1) n b g d, where all segments
are opened, however many slots there are. With a mask it is b numbers more for each position. Which segments are opened is k bytes.

Axes: b batch, h heads, g key/value heads, n positions of this process, s exact keys that it has in the end, k slots, l positions of a segment, m blocks,
c positions of a block, o opened slots, d channels, p processes.
"""

import torch
from torch import Tensor

from linformers.nn.memory import Memory, OpenableAt, Opens
from linformers.ops.blocks import cut, neighbours
from linformers.ops.gathered import choose_slots
from linformers.ops.seen import Near, Seen, Segments, candidates_of_blocks, find_segments
from linformers.ops.span import Span


def opened_across(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    near: tuple[Tensor, Tensor, Tensor | None],
    opens: Opens,
    span: Span,
    *,
    keep: Tensor | None,
    max_len: int,
    slots: int,
    block: int = 0,
    causal: bool = False,
    choice: Tensor | None = None,
) -> tuple[Memory, Tensor]:
    """The memory of slots with the exact keys that the queries of this process open, and the choice.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``.
        v: ``(b, g, n, d)``.
        memory: the slots of the whole sequence.
        near: keys, values and keep of exact neighbours, from :func:`linformers.nn.parts.near_across`; without blocks they are not used.
        keep: ``(b, n)``, True where a token is real.
        max_len: the positions of which ``slots`` segments are made: of a block, in causal attention.
        slots: the segments of so many positions.
        choice: open these slots ``(b, g, n, o)``.
    """
    count = memory.keys.shape[2]
    bounds = segment_bounds(count, max_len, slots, span.total, k.device, causal)  # (k,) twice
    tokens = tokens_across(*bounds, keep, span)
    first = span.offset // block if block else 0
    blocks = torch.arange(first, first + (-(-k.shape[2] // block) if block else 1), device=k.device)[None]
    none = torch.zeros(1, count, 0, dtype=torch.long, device=k.device)
    if causal:
        some = Segments(none, none.bool(), tokens)
        candidates, openable = candidates_of_blocks(blocks, some, block, slots, opens.reach)
    else:
        candidates = openable = (tokens > 0)[:, None]
    if choice is None:
        choice = choose_slots(q, memory.keys, tokens, openable, opens.slots, block)
    keys, values, owner = fetched(k, v, keep, choice, *bounds, span)
    width = -(-max_len // slots)
    segments = find_segments(owner, count, width)._replace(tokens=tokens)
    seen = Seen(block, candidates, openable, near_of(near, block, first) if causal else None)
    return memory._replace(exact=OpenableAt(keys, values, segments, seen, opens.slots)), choice


def segment_bounds(
    count: int, max_len: int, slots: int, total: int, device: torch.device, causal: bool
) -> tuple[Tensor, Tensor]:
    """The first position of each of ``count`` segments, and the one after its last: ``(k,)``.

    Segment j of ``slots`` begins at ``floor(j max_len / slots)``; in causal attention every block of ``max_len`` positions has that many.
    """
    each = torch.arange(count, device=device)
    blocks, within = (each // slots, each % slots) if causal else (torch.zeros_like(each), each)
    starts, stops = (blocks * max_len + (within + i) * max_len // slots for i in (0, 1))
    return starts.clamp(max=total), stops.clamp(max=total)


def tokens_across(starts: Tensor, stops: Tensor, keep: Tensor | None, span: Span) -> Tensor:
    """How many real tokens each segment has, ``(b or 1, k)``."""
    if keep is None:
        return (stops - starts)[None]
    before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # (b, n + 1)
    ends = ((x - span.offset).clamp(0, keep.shape[1]) for x in (starts, stops))
    first, last = (before[:, x] for x in ends)
    return span.sum((last - first).float())[0].long()


def fetched(
    k: Tensor, v: Tensor, keep: Tensor | None, choice: Tensor, starts: Tensor, stops: Tensor, span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    """The exact keys and values of this process, with those of the segments in ``choice`` that others have: ``(b, g, s, d)``, in order.

    Returns:
        Keys, values, and the slot of each, ``(b or 1, s)``, -1 where it is not real or its segment is not opened.
    """
    count, n = len(starts), k.shape[2]
    opened = torch.zeros(count + 1, dtype=torch.uint8, device=k.device)
    opened[choice.flatten()] = 1  # -1 is the last place
    opened[count] = 0
    wanted = span.gather(opened)  # (p, k + 1)
    owner = slots_at(torch.arange(span.offset, span.offset + n, device=k.device), starts, stops)
    rank = 0 if span.exchange is None else span.exchange.rank
    given = wanted[:, owner].bool()  # (p, n); -1 is the last place
    given[rank] = False
    own = [(starts.clamp(first, last), stops.clamp(first, last)) for first, last in span.bounds()]
    received = [int(((stop - start) * opened[:count]).sum()) for start, stop in own]
    received[rank] = 0
    rows = torch.cat([k, v], 1).movedim(2, 0)  # (n, b, 2 g, d)
    rows = rows.flatten(1) if keep is None else torch.cat([rows.flatten(1), keep.mT.to(k.dtype)], 1)
    places = given.nonzero()[:, 1]
    exchange = span.exchange
    found = rows[:0] if exchange is None else exchange.swap(rows[places], given.sum(1).tolist(), received)
    before = sum(received[:rank])
    rows = torch.cat([found[:before], rows, found[before:]])
    position = torch.cat([torch.arange(*ends, device=k.device) for ends in pieces(own, opened, received, rank, span)])
    of_keys = 2 * k.shape[1] * k.shape[3] * len(k)
    both = rows[:, :of_keys].unflatten(1, (len(k), 2 * k.shape[1], k.shape[3])).movedim(0, 2)
    owner = slots_at(position, starts, stops)
    owner = owner.masked_fill(~opened[owner].bool(), -1)[None]
    if keep is not None:
        owner = owner.masked_fill(rows[:, of_keys:].mT == 0, -1)
    keys, values = both.chunk(2, 1)
    return keys, values, owner


def pieces(
    own: list[tuple[Tensor, Tensor]], opened: Tensor, received: list[int], rank: int, span: Span
) -> list[tuple[int, int]]:
    """The first position, and the one after the last, of each run of positions that this process has in the end, in order."""
    found: list[tuple[int, int]] = []
    for other, (starts, stops) in enumerate(own):
        if other == rank:
            found.append(span.bounds()[rank])
        elif received[other]:
            each = zip(starts.tolist(), stops.tolist(), opened.tolist(), strict=False)
            found += [(start, stop) for start, stop, wanted in each if wanted and stop > start]
    return found


def slots_at(position: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """The segment of each position ``(s,)``; -1 where there is none."""
    slot = torch.searchsorted(starts, position, right=True) - 1
    return slot.masked_fill(position >= stops[slot.clamp(min=0)], -1) if len(starts) else torch.full_like(position, -1)


def near_of(near: tuple[Tensor, Tensor, Tensor | None], block: int, first: int) -> Near:
    """The exact keys that the queries of each block see in causal attention: those of the previous block and of their own, up to themselves.

    Args:
        first: the first block of this process; the keys begin one block before it, if there is one.
    """
    k, v, keep = near
    skip = min(first, 1)
    keys, values = (neighbours(cut(x, block), (1, 0))[:, :, skip:] for x in (k, v))  # (b, g, m, 2 c, d)
    real = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if keep is None else keep
    there = neighbours(cut(real[..., None].to(k.dtype), block), (1, 0)).squeeze(-1)[:, skip:, None] > 0
    place = torch.arange(block, device=k.device)
    return Near(keys, values, there & (torch.arange(2 * block, device=k.device) <= block + place[:, None]))
