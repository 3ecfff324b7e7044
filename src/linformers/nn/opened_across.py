"""Opened slots of a sequence that is split over processes: each fetches the exact keys of the segments that its queries open.

A process sends 2 b g d numbers for each of its positions whose segment another process opens: at most 2 (p - 1) n b g d, where all segments
are opened, however many slots there are. With a mask it is b numbers more for each position. Which segments are opened is k bytes.

Axes: b batch, h heads, g key/value heads, n positions of this process, s exact keys that it has in the end, k slots, l positions of a segment, m blocks,
c positions of a block, o opened slots, d channels, p processes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformers.nn.memory import Memory, OpenableAcross, OpenableAt
from linformers.ops.blocks import cut, neighbours
from linformers.ops.gathered import choose_slots
from linformers.ops.seen import (
    ExactKeys,
    Seen,
    Segments,
    candidates_of_blocks,
    find_segments,
    segment_rows,
    touched_by_windows,
)
from linformers.ops.span import Span


def open_across(q: Tensor, memory: Memory, own: OpenableAcross, choice: Tensor | None) -> tuple[Memory, Tensor]:
    """The memory of slots with the exact keys that the queries ``(b, h, n, d)`` of this process open, and the choice.

    Args:
        memory: the slots of the whole sequence.
        own: the exact keys of this process.
        choice: open these slots ``(b, g, n, o)``.
    """
    span, block, count = own.span, own.block, memory.keys.shape[2]
    bounds = segment_bounds(own, count)  # (k,) twice
    tokens = tokens_across(*bounds, own.keep, span)
    windows: Windows | None = None
    if own.causal:
        first = span.offset // block
        blocks = torch.arange(first, first + -(-q.shape[2] // block), device=q.device)[None]
        none = torch.zeros(1, count, 0, dtype=torch.long, device=q.device)
        some = Segments(none, none.bool(), tokens)
        candidates, openable = candidates_of_blocks(blocks, some, block, own.slots, own.opens.reach)
    elif block:
        windows = windows_across(own, *bounds, tokens, q.shape[2])
        candidates = openable = windows.candidates
    else:
        candidates = openable = (tokens > 0)[:, None]
    if choice is None:
        choice = choose_slots(q, memory.keys, tokens, openable, own.opens.slots, block)
    wanted = choice if windows is None else torch.cat([choice.flatten(), windows.ends.flatten()])
    keys, values, owner, position = fetched(own, wanted, *bounds)
    segments = find_segments(owner, count, -(-own.max_len // own.slots))._replace(tokens=tokens)
    seen = Seen(block, candidates, openable, None if own.near is None or not block else near_of(own))
    if windows is not None:
        rest, columns = rest_of_windows(own, windows, keys, values, segments, position)
        seen = seen._replace(rest=rest, rest_slots=columns)
    return memory._replace(exact=OpenableAt(keys, values, segments, seen, own.opens.slots)), choice


class Windows(NamedTuple):
    """The segments that overlap the window of each block.

    Attributes:
        ends: ``(b or 1, m, 2)``, the first and the last of them; -1 for none.
        candidates: ``(b or 1, m, k)``, the other segments that have tokens.
    """

    ends: Tensor
    candidates: Tensor


def windows_across(own: OpenableAcross, starts: Tensor, stops: Tensor, tokens: Tensor, n: int) -> Windows:
    """What the windows of this process overlap."""
    keys, _, keep = own.near  # type: ignore[misc]
    begin = max(0, own.span.offset - own.block)
    owner = slots_at(torch.arange(begin, begin + keys.shape[2], device=keys.device), starts, stops)[None]
    owner = owner if keep is None else owner.masked_fill(~keep, -1)
    none = torch.zeros(1, tokens.shape[1], 0, dtype=torch.long, device=keys.device)
    first, last, candidates = touched_by_windows(owner, Segments(none, none.bool(), tokens), own.block)
    inner = slice(min(1, own.span.offset), min(1, own.span.offset) + -(-n // own.block))
    first, last, candidates = first[:, inner], last[:, inner], candidates[:, inner]
    ends = torch.stack([first, last], -1)
    return Windows(ends.masked_fill((first > last)[..., None], -1), candidates)


def rest_of_windows(
    own: OpenableAcross, windows: Windows, keys: Tensor, values: Tensor, segments: Segments, position: Tensor
) -> tuple[ExactKeys, Tensor]:
    """The exact keys outside the window of each block that belong to the first or the last segment overlapping it, and their slots.

    Args:
        keys: ``(b, g, s, d)``.
        values: the same.
        segments: of these keys.
        position: of each of them in the sequence, ``(s,)``.
    """
    ends = windows.ends
    b, m, _ = ends.shape
    width = segments.places.shape[2]
    rows = ends.clamp(min=0).flatten(1)[..., None].expand(b, 2 * m, width)
    places, member = (x.expand(b, -1, -1).gather(1, rows).view(b, m, 2, width) for x in segments[:2])
    begin = own.span.offset + (torch.arange(m, device=keys.device) * own.block - own.block)[:, None]
    at = position[places]
    outside = torch.stack([at[:, :, 0] < begin, at[:, :, 1] >= begin + 3 * own.block], 2)
    outside = (outside & member & (ends >= 0)[..., None]).flatten(2)
    index = Segments(places.flatten(2), outside, segments.tokens)
    columns = ends.clamp(min=0)[..., None].expand(b, m, 2, width).flatten(2)
    return ExactKeys(segment_rows(keys, index), segment_rows(values, index), outside[:, :, None]), columns


def segment_bounds(own: OpenableAcross, count: int) -> tuple[Tensor, Tensor]:
    """The first position of each of ``count`` segments, and the one after its last: ``(k,)``.

    Segment j of ``slots`` begins at ``floor(j max_len / slots)``; in causal attention every block of ``max_len`` positions has that many.
    """
    each = torch.arange(count, device=own.keys.device)
    blocks, within = (each // own.slots, each % own.slots) if own.causal else (torch.zeros_like(each), each)
    starts, stops = (blocks * own.max_len + (within + i) * own.max_len // own.slots for i in (0, 1))
    return starts.clamp(max=own.span.total), stops.clamp(max=own.span.total)


def tokens_across(starts: Tensor, stops: Tensor, keep: Tensor | None, span: Span) -> Tensor:
    """How many real tokens each segment has, ``(b or 1, k)``."""
    if keep is None:
        return (stops - starts)[None]
    before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # (b, n + 1)
    ends = ((x - span.offset).clamp(0, keep.shape[1]) for x in (starts, stops))
    first, last = (before[:, x] for x in ends)
    return span.sum((last - first).float())[0].long()


def fetched(
    own: OpenableAcross, wanted: Tensor, starts: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The exact keys and values of this process, with those of the ``wanted`` segments that others have: ``(b, g, s, d)``, in order.

    Returns:
        Keys, values, the slot of each, ``(b or 1, s)``, -1 where it is not real or its segment is not wanted, and their positions, ``(s,)``.
    """
    k, v, keep, span = own[:4]
    count, n = len(starts), k.shape[2]
    opened = torch.zeros(count + 1, dtype=torch.uint8, device=k.device)
    opened[wanted.flatten()] = 1  # -1 is the last place
    opened[count] = 0
    of_all = span.gather(opened)  # (p, k + 1)
    owner = slots_at(torch.arange(span.offset, span.offset + n, device=k.device), starts, stops)
    rank = 0 if span.exchange is None else span.exchange.rank
    given = of_all[:, owner].bool()  # (p, n); -1 is the last place
    given[rank] = False
    parts = [(starts.clamp(first, last), stops.clamp(first, last)) for first, last in span.bounds()]
    received = [int(((stop - start) * opened[:count]).sum()) for start, stop in parts]
    received[rank] = 0
    rows = torch.cat([k, v], 1).movedim(2, 0)  # (n, b, 2 g, d)
    rows = rows.flatten(1) if keep is None else torch.cat([rows.flatten(1), keep.mT.to(k.dtype)], 1)
    places = given.nonzero()[:, 1]
    exchange = span.exchange
    found = rows[:0] if exchange is None else exchange.swap(rows[places], given.sum(1).tolist(), received)
    before = sum(received[:rank])
    rows = torch.cat([found[:before], rows, found[before:]])
    position = torch.cat([torch.arange(*ends, device=k.device) for ends in pieces(parts, opened, received, rank, span)])
    of_keys = 2 * k.shape[1] * k.shape[3] * len(k)
    both = rows[:, :of_keys].unflatten(1, (len(k), 2 * k.shape[1], k.shape[3])).movedim(0, 2)
    owner = slots_at(position, starts, stops)
    owner = owner.masked_fill(~opened[owner].bool(), -1)[None]
    if keep is not None:
        owner = owner.masked_fill(rows[:, of_keys:].mT == 0, -1)
    keys, values = both.chunk(2, 1)
    return keys, values, owner, position


def pieces(
    parts: list[tuple[Tensor, Tensor]], opened: Tensor, received: list[int], rank: int, span: Span
) -> list[tuple[int, int]]:
    """The first position, and the one after the last, of each run of positions that this process has in the end, in order."""
    found: list[tuple[int, int]] = []
    for other, (starts, stops) in enumerate(parts):
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


def near_of(own: OpenableAcross) -> ExactKeys:
    """The exact keys that the queries of each block see: the previous block and their own up to themselves, or both neighbouring blocks too."""
    k, v, keep = own.near  # type: ignore[misc]
    block, shifts = own.block, (1, 0) if own.causal else (1, 0, -1)
    inner = slice(min(1, own.span.offset), min(1, own.span.offset) + -(-own.keys.shape[2] // block))
    keys, values = (neighbours(cut(x, block), shifts)[:, :, inner] for x in (k, v))  # (b, g, m, w, d)
    real = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if keep is None else keep
    mask = neighbours(cut(real[..., None].to(k.dtype), block), shifts).squeeze(-1)[:, inner, None] > 0
    if own.causal:
        place = torch.arange(block, device=k.device)
        mask = mask & (torch.arange(2 * block, device=k.device) <= block + place[:, None])
    return ExactKeys(keys, values, mask)
