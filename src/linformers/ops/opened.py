"""Attention that opens slots: every query replaces its best slots by the exact keys they stand for, in one softmax.

A slot is the mean of the real tokens of its segment and counts for all of them: the logarithm of their number is added to its logit. Each
query opens the slots with the largest logits; with all slots open, or one token in each, this is full attention. A query of zeros
gives the mean of the values, whatever is open. No key counts twice. The cost is O(n (k + m l + c)), with l = n / k.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, l positions of a segment, m opened slots, c positions of
a block, w exact keys near a block, e exact keys that every query sees, d channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linformers.ops.gathered import attend_gathered
from linformers.ops.masks import readable
from linformers.ops.opened_cpu import OpenedSlots, What
from linformers.ops.opened_short import attend_short
from linformers.ops.precision import autocast_type
from linformers.ops.seen import Seen, Segments, find_segments, see_all, see_causally, see_window
from linformers.ops.views import View
from linformers.private import are_functorch_transforms_active

# Below this length all keys are multiplied and masked; from it on, sorting is faster.
SHORT = 512

MASKED, TILES, GATHERED = "masked", "tiles", "gathered"


class Opening(NamedTuple):
    """Which slots can be opened, and what a query sees beside them.

    Attributes:
        owner: ``(b or 1, s)``, the slot of every position, never decreasing along a row; -1 where a token is not real. In causal attention the
            slots of the last blocks may be missing.
        width: l, the most positions that a slot can have.
        open_slots: m, how many slots each query opens for each key/value head; fewer where it sees fewer.
        block: positions of a block of exact neighbours; 0 for none.
        slots_per_block: the slots of each block, for causal attention; None for bidirectional attention.
        reach: in causal attention, a segment can be opened if it starts at most this many positions before the end of the query's block, so
            that decoding needs the exact keys of no more positions than these. None sets no bound.
        keys: ``(b, g, e, d)``, exact keys that are in no slot and that every query sees; None if there are none. Not with blocks.
        values: ``(b, g, e, d)``.
    """

    owner: Tensor
    width: int
    open_slots: int
    block: int = 0
    slots_per_block: int | None = None
    reach: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


def attend_opened(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    opening: Opening,
    *,
    dropout: float = 0.0,
    choice: Tensor | None = None,
    need_weights: bool = False,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attend to slots, to the exact keys of opened ones, and to exact neighbours.

    Args:
        q: ``(b, h, n, d)``; with blocks, at the positions of the keys.
        k: ``(b, g, s, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, s, d)``.
        slot_keys: ``(b, g, k, d)``, the means of their segments.
        slot_values: ``(b, g, k, d)``.
        opening: which slots can be opened.
        dropout: probability of dropping a weight after the softmax.
        choice: open these slots, as returned by an earlier call: rounding could change the choice in a recomputed pass.
        need_weights: also return the weights.
        views: applied to the returned weights; see :func:`linformers.ops.views.seen_through`.

    Returns:
        The output ``(b, h, n, d)``, zeros where a query sees nothing; the weights or None; and the choice ``(b, g, n, m)``, -1 where nothing was
        opened. The choice is made in float32, without a gradient, by the largest logit of the query heads that share the keys; ties go to the
        earlier slot. The weights are ``(b, h, n, k + e)``, ``(b, h, n, k + 2 c)`` in causal attention, ``(b, h, n, k + 3 c)`` with a window:
        first those of the slots, then those of exact keys. The column of an opened slot is the sum of the weights of its keys; for a segment
        that overlaps a window, of its keys outside the window.
    """
    form = GATHERED if need_weights else _form(q, k, v, slot_keys, slot_values, opening, dropout)
    if form != GATHERED:
        owner, m, block, per_block, reach = opening.owner, *opening[2:6]
        segments = find_segments(owner, slot_keys.shape[2], opening.width)
        if form == TILES:
            what = What(owner, segments, m, block, per_block, reach)
            out, chosen = OpenedSlots.apply(q, k, v, slot_keys, slot_values, what, choice)
            return out, None, chosen
        out, chosen = attend_short(
            q,
            k,
            v,
            slot_keys,
            slot_values,
            owner,
            segments,
            open_slots=m,
            block=block,
            slots_per_block=per_block,
            reach=reach,
            extra=None if opening.keys is None or opening.values is None else (opening.keys, opening.values),
            dropout=dropout,
            choice=choice,
        )
        return out, None, chosen
    segments, seen = look_around(k, v, slot_keys.shape[2], opening)
    return attend_gathered(
        q,
        k,
        v,
        slot_keys,
        slot_values,
        segments,
        seen,
        open_slots=opening.open_slots,
        dropout=dropout,
        choice=choice,
        need_weights=need_weights,
        views=views,
    )


def look_around(k: Tensor, v: Tensor, slots: int, opening: Opening) -> tuple[Segments, Seen]:
    """The segments of ``slots`` slots of the keys and values ``(b, g, s, d)``, and what the queries of each block see."""
    owner, block = opening.owner, opening.block
    segments = find_segments(owner, slots, opening.width)
    if opening.slots_per_block is not None:
        seen = see_causally(
            k,
            v,
            segments,
            block=block,
            slots_per_block=opening.slots_per_block,
            keep=owner >= 0,
            reach=opening.reach,
        )
    elif block:
        seen = see_window(k, v, owner, segments, block=block)
    else:
        seen = see_all(segments, opening.keys, opening.values)
    return segments, seen


def _form(
    q: Tensor, k: Tensor, v: Tensor, slot_keys: Tensor, slot_values: Tensor, opening: Opening, dropout: float
) -> str:
    """The fastest implementation: all keys with a mask for short inputs, tiles for long ones on the CPU."""
    if not readable(q) or not q.numel():
        return GATHERED
    if k.shape[2] < SHORT:
        return MASKED
    tensors = (q, k, v, slot_keys, slot_values)
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and x.dtype == q.dtype for x in tensors)
    if (
        not plain
        or dropout
        or opening.keys is not None
        or q.device.type != "cpu"
        or q.dtype not in (torch.float32, torch.float64)  # a smaller type would round the sums of gradients
        or autocast_type(q) is not None
        or not torch.backends.cuda.flash_sdp_enabled()  # applies to the CPU too: the caller wants another kernel
        or are_functorch_transforms_active()  # they cannot transform a custom autograd function
    ):
        return GATHERED
    return TILES
