"""Opened slots by gathering: the exact keys of the slots that a query opens are copied for every query.

For any device, for graphs (``torch.compile``, export), for dropout and for callers that request the weights.

Axes: b batch, h heads, g key/value heads, r query heads of a key/value head, n query positions, s key positions, k slots, l positions of a
segment, o opened slots, m blocks, c positions of a block, w exact keys near a block, d channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from linformers.ops.blocks import cut, first_places
from linformers.ops.cpu import drop
from linformers.ops.precision import single, without_autocast
from linformers.ops.seen import ExactKeys, Seen, Segments, segment_rows
from linformers.ops.views import View, seen_through


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    segments: Segments,
    seen: Seen,
    *,
    open_slots: int,
    dropout: float = 0.0,
    choice: Tensor | None = None,
    need_weights: bool = False,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attend to slots, to the exact keys of opened ones, and to exact neighbours.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, s, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, s, d)``.
        slot_keys: ``(b, g, k, d)``, the means of their segments.
        slot_values: ``(b, g, k, d)``.
        segments: which exact keys each slot stands for.
        seen: which slots and exact neighbours each query sees.
        open_slots: how many slots each query opens for each key/value head; fewer where it sees fewer.
        dropout: probability of dropping a weight after the softmax.
        choice: open these slots, as returned by an earlier call: rounding could change the choice in a recomputed pass.
        need_weights: also return the weights.
        views: applied to the returned weights; see :func:`linformers.ops.views.seen_through`.

    Returns:
        The output ``(b, h, n, d)``, zeros where a query sees nothing; the weights ``(b, h, n, k + w)``, first of the slots, then of the exact
        neighbours, or None; and the choice ``(b, g, n, o)``, -1 where nothing was opened. The column of an opened slot is the sum of the
        weights of its keys; for a segment that overlaps a window, of its keys outside the window.
    """
    with without_autocast(q):  # the choice is made in float32
        dtype, n, slots = single(q.dtype), q.shape[2], slot_keys.shape[2]
        queries, keys, values, means, mean_values = (x.to(dtype) for x in (q, k, v, slot_keys, slot_values))
        rows = _to_blocks(queries, means.shape[1], seen.block)  # (b, g, m, r, c, d)
        logits = slot_logits(rows.flatten(2, 4), means, segments.tokens).view(*rows.shape[:-1], slots)
        if choice is None:
            chosen = _choose(logits, seen.openable, open_slots)
        else:
            chosen = _to_blocks(choice, means.shape[1], seen.block, fill=-1).squeeze(3)
        opened, opened_mask = _gather(keys, values, segments, chosen)
        scores, masks = [logits], [_closed(seen, chosen, slots)[:, :, :, None]]
        if chosen.shape[-1]:
            scores.append((_scaled(rows).movedim(3, 4) @ opened[0].mT).movedim(4, 3))
            masks.append(opened_mask[:, :, :, None])
        for part in _exact(seen):
            scored = _scaled(rows).flatten(3, 4) @ part.keys.to(dtype).mT
            scores.append(scored.view(*rows.shape[:-1], scored.shape[-1]))
            masks.append(part.mask[:, None, :, None])
        scored = torch.cat(scores, -1)
        mask = torch.cat([x.expand(*scored.shape[:3], 1, scored.shape[4], -1) for x in masks], -1)
        # The smallest number instead of -inf, and zeros afterwards: a row that sees nothing then gives 0, not NaN.
        weights = scored.masked_fill(~mask, torch.finfo(dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        if dropout:
            weights = drop(weights, dropout)
        shown: Tensor | None = None
        if need_weights:
            shown, weights = seen_through(weights, (_columns(weights, chosen, seen, slots), _in_rows(n, rows), *views))
        parts = [x.contiguous() for x in weights.split([x.shape[-1] for x in scores], -1)]
        out = (parts[0].flatten(2, 4) @ mean_values).view(rows.shape[:-1] + mean_values.shape[-1:])
        if chosen.shape[-1]:
            out = out + (parts[1].movedim(3, 4) @ opened[1]).movedim(4, 3)
        for weight, part in zip(parts[len(scores) - len(_exact(seen)) :], _exact(seen), strict=True):
            out = out + (weight.flatten(3, 4) @ part.values.to(dtype)).view(out.shape)
        shown = None if shown is None else shown.to(q.dtype)
        return _to_rows(out, n).to(q.dtype), shown, _to_rows(chosen[:, :, :, None], n)


def choose_slots(q: Tensor, slot_keys: Tensor, tokens: Tensor, openable: Tensor, open_slots: int, block: int) -> Tensor:
    """The choice of :func:`attend_gathered` alone, ``(b, g, n, o)``.

    Args:
        q: ``(b, h, n, d)``.
        slot_keys: ``(b, g, k, d)``.
        tokens: ``(b or 1, k)``, how many each slot stands for.
        openable: ``(b or 1, m, k)``, which slots the queries of each block may open.
        block: positions of a block; 0 if all queries are in one.
    """
    with torch.no_grad(), without_autocast(q):
        dtype = single(q.dtype)
        rows = _to_blocks(q.to(dtype), slot_keys.shape[1], block)
        logits = slot_logits(rows.flatten(2, 4), slot_keys.to(dtype), tokens).view(*rows.shape[:-1], -1)
        return _to_rows(_choose(logits, openable, open_slots)[:, :, :, None], q.shape[2])


def _choose(logits: Tensor, openable: Tensor, open_slots: int) -> Tensor:
    """The slots to open by logits ``(b, g, m, r, c, k)``: ``(b, g, m, c, o)``."""
    return choose(logits.detach().amax(3).masked_fill(~openable[:, None, :, None], -torch.inf), open_slots)


def slot_logits(q: Tensor, slot_keys: Tensor, count: Tensor) -> Tensor:
    """The logits of slots ``(b, g, k, d)`` that stand for ``count`` ``(b or 1, k)`` tokens each: ``(b, g, n, k)`` for ``q`` ``(b, g, n, d)``."""
    scale: float = q.shape[-1] ** -0.5
    return (q * scale) @ slot_keys.mT + count.clamp(min=1).to(q.dtype).log()[:, None, None]


def choose(logits: Tensor, open_slots: int) -> Tensor:
    """The slots with the largest logits ``(..., k)``, the largest first, ties by the earlier slot: ``(..., o)``, -1 where the logit is -inf.

    On the CPU, a few passes with ``max`` are faster than ``topk``, and they define which of equal logits comes first.
    """
    slots, chosen = logits.shape[-1], []
    # In a graph the number of slots may depend on the length of the input; passes beyond it choose nothing.
    for _ in range(open_slots if torch.compiler.is_compiling() and slots else min(open_slots, slots)):
        value, slot = logits.max(-1, keepdim=True)
        chosen.append(slot.masked_fill(value == -torch.inf, -1))
        logits = logits.scatter(-1, slot, -torch.inf)
    return torch.cat(chosen, -1) if chosen else logits.new_zeros(*logits.shape[:-1], 0, dtype=torch.long)


def _to_blocks(x: Tensor, groups: int, block: int, fill: int = 0) -> Tensor:
    """``(b, h, n, d)`` to ``(b, g, m, r, c, d)``: queries that share keys side by side, padded with ``fill`` at the end."""
    blocks = cut(x - fill, block) + fill if block else x[:, :, None]  # (b, h, m, c, d)
    return blocks.unflatten(1, (groups, -1)).movedim(2, 3)


def _to_rows(x: Tensor, n: int) -> Tensor:
    """``(b, g, m, r, c, d)`` back to ``(b, h, n, d)``."""
    return first_places(x.movedim(3, 2).flatten(1, 2).flatten(2, 3), n)


def _scaled(rows: Tensor) -> Tensor:
    return rows * rows.shape[-1] ** -0.5


def _exact(seen: Seen) -> list[ExactKeys]:
    return [x for x in (seen.near, seen.rest) if x is not None]


def _closed(seen: Seen, chosen: Tensor, slots: int) -> Tensor:
    """Which slots the queries see unopened: candidates that they did not choose, ``(b, g, m, c, k)``."""
    opened = torch.zeros(*chosen.shape[:-1], slots + 1, dtype=torch.bool, device=chosen.device)
    opened = opened.scatter(-1, chosen.masked_fill(chosen < 0, slots), 1)  # -1 goes to a column that is dropped
    return seen.candidates[:, None, :, None] & ~opened[..., :slots]


def _gather(keys: Tensor, values: Tensor, segments: Segments, chosen: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The exact keys and values of chosen slots ``(b, g, m, c, o)``, each ``(b, g, m, c, o l, d)``, and which are seen: ``(b, g, m, c, o l)``.

    Whole segments are gathered by index: keys expanded to all queries first would have a gradient of that size.
    """
    b, g = chosen.shape[:2]
    slots, width = segments.places.shape[1:]
    lead = chosen.shape[:-1]
    at = chosen.clamp(min=0)
    heads = torch.arange(b * g, device=chosen.device).view(b, g, 1, 1, 1)
    index = (at + heads * slots).flatten()
    found = [
        segment_rows(x, segments).reshape(b * g * slots, width * x.shape[-1]).index_select(0, index)
        for x in (keys, values)
    ]
    length = chosen.shape[-1] * width  # by its number: -1 has no meaning for an empty batch
    found = [rows.view(*lead, length, x.shape[-1]) for rows, x in zip(found, (keys, values), strict=True)]
    samples = torch.arange(b, device=chosen.device).view(b, 1, 1, 1, 1) * (segments.member.shape[0] > 1)
    member = segments.member.flatten(0, 1).index_select(0, (at + samples * slots).flatten())
    member = member.view(*chosen.shape, width) & (chosen >= 0)[..., None]
    return (found[0], found[1]), member.flatten(-2)


def _columns(weights: Tensor, chosen: Tensor, seen: Seen, slots: int) -> View:
    """Show weights ``(b, g, m, r, c, k + o l + w + 2 l)`` with one column for each slot, opened or not: ``(b, g, m, r, c, k + w)``."""
    lead = (*weights.shape[:3], 1, weights.shape[4])
    near = 0 if seen.near is None else seen.near.keys.shape[3]
    rest = 0 if seen.rest_slots is None else seen.rest_slots.shape[2]
    width = (weights.shape[-1] - slots - near - rest) // max(1, chosen.shape[-1])
    own = torch.arange(slots + near, device=weights.device)
    of_chosen = chosen.clamp(min=0)[..., None].expand(*chosen.shape, width).flatten(-2)[:, :, :, None]
    parts = [own[:slots].expand(*lead, -1), of_chosen, own[slots:].expand(*lead, -1)]
    if seen.rest_slots is not None:
        parts.append(seen.rest_slots[:, None, :, None, None].expand(*lead, -1))
    index = torch.cat(parts, -1).expand(weights.shape)

    def there(x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], slots + near).scatter_add(-1, index, x)

    def back(shown: Tensor) -> Tensor:
        total = there(weights)  # each key keeps its share of the column
        least = torch.finfo(total.dtype).tiny  # the gradient of a quotient of smaller numbers is not finite
        return weights * (shown / total.clamp(min=least)).gather(-1, index)

    return View(there, back)


def _in_rows(n: int, rows: Tensor) -> View:
    """Show weights ``(b, g, m, r, c, k + w)`` as ``(b, h, n, k + w)``."""
    return View(lambda x: _to_rows(x, n), lambda x: _to_blocks(x, rows.shape[1], rows.shape[4]))
